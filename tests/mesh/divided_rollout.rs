//! Rollouts in chunks on several engines: the outputs of one engine that decodes each in one piece, in the order that
//! the scheduler promises, beside interactive requests, and through the loss of a worker and of the scheduler.

mod replay;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::ensure;
use e2e::{
    Answer, Chat, Client, HttpMesh, SchedulingEvent, Service, UpMesh, varied_prompts, wait_until,
};
use futures_util::future::try_join_all;
use tokio::sync::OnceCell;
use tokio::task::JoinHandle;

use self::replay::{Replay, Seen, undisturbed};

const GROUPS: usize = 32;
const SAMPLES: usize = 8;
const TOKENS_MAX: u32 = 48;
const CHUNK_TOKENS: u32 = 12;
/// Chunks that a worker runs at once.
const SLOTS: usize = 2;
/// Interactive requests that differ from each other.
const INTERACTIVE: usize = 8;

/// The samples of all groups. Their outputs end by themselves, or at the limit.
fn rollouts() -> Vec<Chat> {
    let prompts = varied_prompts(GROUPS);
    let samples = prompts.iter().enumerate().flat_map(|(group, prompt)| {
        (0..SAMPLES).map(move |sample| {
            Chat::new(prompt)
                .sampled(1.0, (group * SAMPLES + sample) as u64)
                .max_tokens(TOKENS_MAX)
        })
    });
    samples.collect()
}

/// The same in chunks, with the groups named. The groups come one after the other, as from a trainer.
fn in_chunks(rollouts: &[Chat]) -> Vec<Chat> {
    let numbered = rollouts.iter().cloned().enumerate();
    let named = numbered.map(|(number, chat)| {
        chat.set("group", format!("group {}", number / SAMPLES))
            .set("chunk_tokens", CHUNK_TOKENS)
    });
    named.collect()
}

fn interactive() -> Vec<Chat> {
    let prompts = varied_prompts(GROUPS + INTERACTIVE).split_off(GROUPS);
    let chats = prompts.iter().map(|prompt| Chat::new(prompt).max_tokens(8));
    chats.collect()
}

/// Texts of one engine that decodes each output in one piece and without drafts.
#[derive(Debug)]
struct Alone {
    rollouts: Vec<String>,
    interactive: Vec<String>,
    /// Chunks that the rollouts have, if no chunk is cut short.
    chunks: u64,
}

/// The outputs of one engine, which all tests of this file compare with.
async fn alone() -> anyhow::Result<&'static Alone> {
    static ALONE: OnceCell<Alone> = OnceCell::const_new();
    let decode = || async {
        let mesh = UpMesh::start().await?;
        let client = mesh.client();
        let rollouts = client.chat_all(&rollouts(), "off", 16).await?;
        let interactive = client.chat_all(&interactive(), "off", 4).await?;
        mesh.stop().await;
        let text = |answers: Vec<Answer>| answers.into_iter().map(|answer| answer.text).collect();
        let chunks = rollouts.iter().map(chunks_of).sum();
        anyhow::Ok(Alone {
            rollouts: text(rollouts),
            interactive: text(interactive),
            chunks,
        })
    };
    ALONE.get_or_try_init(decode).await
}

/// Chunks of an output, the last of which may be short.
fn chunks_of(answer: &Answer) -> u64 {
    answer
        .completion_tokens()
        .div_ceil(u64::from(CHUNK_TOKENS))
        .max(1)
}

/// A lost worker that is not forgotten soon gets chunks again and again, and their retries empty the budget.
const LOSES_A_WORKER: &str = "worker_ttl_ms = 5_000\nlease_ttl_ms = 10_000\n";

/// A mesh whose workers have all reported.
async fn mesh_of(engines: usize, scheduler: &str) -> anyhow::Result<HttpMesh> {
    let settings = format!(
        "[telemetry]\nlog = \"warn,scheduling=debug\"\n\
         [scheduler]\norder = \"context\"\n{scheduler}\
         [worker]\nrunning_max = {SLOTS}\n"
    );
    let mesh = HttpMesh::start_children(engines, &settings, &[]).await?;
    mesh.workers_report(engines).await;
    Ok(mesh)
}

/// Waits until as many chunks have ended whose requests go on.
async fn wait_for_chunks(mesh: &HttpMesh, chunks: u64) {
    wait_until("rollouts progress", async || {
        let scrape = mesh.scrape(Service::Scheduler).await.ok()?;
        let ended = scrape.sum(
            "refrain_scheduler_leases_total",
            &[("outcome", "continues")],
        );
        (ended >= chunks as f64).then_some(())
    })
    .await;
}

/// Sends all rollouts at once.
fn send(client: &Client, chats: Vec<Chat>) -> JoinHandle<anyhow::Result<Vec<Answer>>> {
    let answers = chats.into_iter().map(|chat| {
        let client = client.clone();
        async move { client.chat(&chat).await }
    });
    tokio::spawn(try_join_all(answers.collect::<Vec<_>>()))
}

/// The answers to one client: numbers of interactive requests, and texts.
type Said = Vec<(usize, String)>;

/// Clients who send one interactive request after the other.
struct InteractiveLoad {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<anyhow::Result<Said>>>,
}

impl InteractiveLoad {
    fn start(client: &Client, clients: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let of_client = |first: usize| {
            let (client, stop) = (client.clone(), stop.clone());
            tokio::spawn(async move {
                let chats = interactive();
                let mut said = Said::new();
                while !stop.load(Ordering::Relaxed) {
                    let number = (first + said.len()) % chats.len();
                    said.push((number, client.chat(&chats[number]).await?.text));
                }
                Ok(said)
            })
        };
        InteractiveLoad {
            clients: (0..clients).map(of_client).collect(),
            stop,
        }
    }

    /// Waits for the last answers. Returns how many there were, after a look at each.
    async fn stop(self, alone: &Alone) -> anyhow::Result<usize> {
        self.stop.store(true, Ordering::Relaxed);
        let mut answers = 0;
        for client in self.clients {
            for (number, text) in client.await?? {
                ensure!(
                    text == alone.interactive[number],
                    "the interactive output {number} differs: {text:?}"
                );
                answers += 1;
            }
        }
        Ok(answers)
    }
}

/// Compares all rollouts with those of one engine.
fn ensure_same(answers: &[Answer], alone: &Alone) -> anyhow::Result<()> {
    ensure!(
        answers.len() == alone.rollouts.len(),
        "{} answers",
        answers.len()
    );
    for (number, (answer, alone)) in answers.iter().zip(&alone.rollouts).enumerate() {
        ensure!(
            answer.text == *alone,
            "rollout {number} is {:?} instead of {alone:?}",
            answer.text
        );
    }
    // The last step of a chunk may bring more tokens than the chunk has left, so some outputs need fewer chunks.
    let chunks = answers
        .iter()
        .map(|answer| answer.number("/metrics/timings/chunks"));
    let chunks: u64 = chunks.sum();
    ensure!(
        2 * chunks > alone.chunks,
        "{chunks} chunks instead of about {}",
        alone.chunks
    );
    Ok(())
}

/// The gateway answered as many requests as were sent, and refused none.
async fn ensure_none_lost(mesh: &HttpMesh, sent: usize) -> anyhow::Result<()> {
    let scrape = mesh.scrape(Service::Gateway).await?;
    let answered = scrape.sum("refrain_gateway_requests_total", &[("status", "200")]);
    let all = scrape.sum("refrain_gateway_requests_total", &[]);
    let refused = scrape.sum("refrain_gateway_rejections_total", &[]);
    ensure!(
        (answered, all, refused) == (sent as f64, sent as f64, 0.0),
        "of {sent} requests, {answered} of {all} were answered, and {refused} refused"
    );
    for in_flight in [
        "refrain_gateway_requests_in_flight",
        "refrain_gateway_rollouts_in_flight",
    ] {
        ensure!(scrape.sum(in_flight, &[]) == 0.0, "{in_flight} is not 0");
    }
    Ok(())
}

/// Compares what the scheduler has done so far with what it promises. Returns also how many events a busy machine has
/// kept out of the comparison.
fn replay_events(mesh: &HttpMesh, engines: usize) -> anyhow::Result<(Seen, usize)> {
    let events = SchedulingEvent::read(&mesh.output(Service::Scheduler)?);
    let compared = undisturbed(&events);
    let mut replay = Replay::new(engines * SLOTS);
    for event in &events[..compared] {
        replay.apply(event)?;
    }
    Ok((replay.seen, events.len() - compared))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_follow_the_order_of_lengths_and_let_interactive_requests_in() -> anyhow::Result<()>
{
    let alone = alone().await?;
    let mesh = mesh_of(2, "").await?;
    let client = mesh.client();
    // One client, so that no interactive request waits behind another one.
    let load = InteractiveLoad::start(&client, 1);
    let answers = send(&client, in_chunks(&rollouts())).await??;
    let interactive = load.stop(alone).await?;
    ensure_same(&answers, alone)?;
    ensure_none_lost(&mesh, answers.len() + interactive).await?;

    let (seen, disturbed) = replay_events(&mesh, 2)?;
    ensure!(
        disturbed == 0,
        "{disturbed} events are of a mesh with faults"
    );
    ensure!(seen.probes >= GROUPS, "{seen:?}");
    // With more requests than slots, nearly every grant is a choice.
    ensure!(
        seen.choices as u64 > alone.chunks / 2 && seen.by_estimate > GROUPS,
        "{seen:?} of {} chunks",
        alone.chunks
    );
    // Rollouts have more than their share, so the next free slot goes to the interactive request. A late heartbeat
    // may name a chunk that has ended, and then that slot is free only after the next heartbeat. Heartbeats of a busy
    // machine are often late.
    ensure!(
        seen.interactive == interactive
            && seen.interactive_waited > 0
            && 2 * seen.interactive_waited_longer <= interactive,
        "{seen:?} of {interactive} interactive requests"
    );
    mesh.stop().await
}

/// Runs all rollouts and interactive requests, while a worker is killed, then the scheduler, and both come back.
async fn through_faults(engines: usize) -> anyhow::Result<()> {
    let alone = alone().await?;
    let mut mesh = mesh_of(engines, LOSES_A_WORKER).await?;
    let client = mesh.client();
    let load = InteractiveLoad::start(&client, 3);
    let running = send(&client, in_chunks(&rollouts()));
    let lost = Service::Worker(engines - 1);
    wait_for_chunks(&mesh, alone.chunks / 6).await;
    // Until here the order is the promised one. Faults change what is known about lengths.
    let (seen, disturbed) = replay_events(&mesh, engines)?;
    ensure!(
        disturbed > 0 || seen.choices as u64 > alone.chunks / 12 && seen.interactive > 0,
        "{seen:?}"
    );
    mesh.kill(lost).await?;
    wait_for_chunks(&mesh, alone.chunks / 3).await;
    mesh.kill(Service::Scheduler).await?;
    ensure!(!running.is_finished(), "the faults came after all rollouts");
    mesh.start_child(Service::Scheduler).await?;
    mesh.start_child(lost).await?;
    wait_until("the worker that was lost runs chunks again", async || {
        let scrape = mesh.scrape(lost).await.ok()?;
        (scrape.sum("refrain_worker_chunks_total", &[]) > 0.0).then_some(())
    })
    .await;
    let answers = running.await??;
    let interactive = load.stop(alone).await?;
    ensure_same(&answers, alone)?;
    ensure_none_lost(&mesh, answers.len() + interactive).await?;
    let continued = mesh.scrape(Service::Gateway).await?;
    let continued = continued.sum("refrain_gateway_continuations_total", &[]);
    ensure!(continued >= 1.0, "no request had to go on elsewhere");
    mesh.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_engines_lose_no_request_with_a_worker_and_the_scheduler() -> anyhow::Result<()> {
    through_faults(2).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn four_engines_lose_no_request_with_a_worker_and_the_scheduler() -> anyhow::Result<()> {
    through_faults(4).await
}
