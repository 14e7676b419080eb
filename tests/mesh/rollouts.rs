//! Rollouts and interactive requests share a mesh: neither waits for all of the other, and no output changes.

use anyhow::ensure;
use e2e::{Answer, Chat, HttpMesh, Service, UpMesh, long_task, wait_until};
use futures_util::future::join_all;

const SLOTS: usize = 2;
const GROUPS: usize = 3;
const SAMPLES: u64 = 4;
const TOKENS: u32 = 160;

/// A sample of a group. It has many chunks, and its output reaches its limit.
fn rollout(group: usize, sample: u64) -> Chat {
    Chat::new(&long_task(group))
        .sampled(1.0, sample)
        .max_tokens(TOKENS)
        .endless()
        .set("chunk_tokens", 16)
}

fn interactive() -> Chat {
    Chat::new(&long_task(7)).max_tokens(12).endless()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interactive_request_runs_beside_many_rollouts() -> anyhow::Result<()> {
    let settings =
        format!("[gateway]\ntenant_requests_in_flight_max = 2\n[worker]\nrunning_max = {SLOTS}\n");
    let mesh = UpMesh::start_with(&settings).await?;
    let client = mesh.client();
    let samples: Vec<(usize, u64)> = (0..GROUPS)
        .flat_map(|group| (0..SAMPLES).map(move |sample| (group, sample)))
        .collect();
    // One at a time, in one chunk, and without drafts.
    let mut alone = Vec::new();
    for (group, sample) in &samples {
        let chat = rollout(*group, *sample)
            .set("chunk_tokens", 0)
            .speculation("off");
        alone.push(client.chat(&chat).await?.text);
    }
    let interactive_alone = client.chat(&interactive().speculation("off")).await?.text;

    let running: Vec<_> = samples
        .iter()
        .map(|(group, sample)| {
            // Without drafts, the last ones wait long enough to be seen.
            let chat = rollout(*group, *sample).speculation("off");
            let chat = chat.set("group", format!("group {group}"));
            let client = client.clone();
            tokio::spawn(async move { client.chat(&chat).await })
        })
        .collect();
    wait_until("rollouts wait for slots", async || {
        let scrape = client.scrape().await.ok()?;
        let in_flight = scrape.sum("refrain_gateway_rollouts_in_flight", &[]);
        (in_flight > SLOTS as f64).then_some(())
    })
    .await;
    let answer = client.chat(&interactive()).await?;
    ensure!(
        answer.text == interactive_alone,
        "the interactive output differs beside rollouts"
    );
    // Each of them needs ten chunks, and the interactive request only one.
    let unfinished = running.iter().filter(|task| !task.is_finished()).count();
    ensure!(unfinished > 0, "it came after all rollouts");

    let mut answers: Vec<Answer> = Vec::new();
    for task in running {
        answers.push(task.await??);
    }
    for (answer, expected) in answers.iter().zip(&alone) {
        ensure!(
            answer.text == *expected,
            "chunks beside others changed an output"
        );
        ensure!(answer.number("/metrics/timings/chunks") >= 10);
    }
    let scrape = client.scrape().await?;
    ensure!(scrape.sum("refrain_gateway_rollouts_in_flight", &[]) == 0.0);
    ensure!(scrape.sum("refrain_gateway_rejections_total", &[]) == 0.0);
    mesh.stop().await;
    Ok(())
}

/// Sums a metric over the workers that answer.
async fn over_workers(mesh: &HttpMesh, workers: &[usize], metric: &str) -> f64 {
    let mut sum = 0.0;
    for number in workers {
        if let Ok(scrape) = mesh.scrape(Service::Worker(*number)).await {
            sum += scrape.sum(metric, &[]);
        }
    }
    sum
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollouts_outlive_a_worker_and_the_scheduler() -> anyhow::Result<()> {
    let settings = format!("[worker]\nrunning_max = {SLOTS}\n");
    let mut mesh = HttpMesh::start_children(2, &settings, &[]).await?;
    mesh.workers_report(2).await;
    let client = mesh.client();
    let samples = || (0..GROUPS).flat_map(|group| (0..SAMPLES).map(move |sample| (group, sample)));
    let alone = samples().map(|(group, sample)| {
        let chat = rollout(group, sample).set("chunk_tokens", 0);
        let (client, chat) = (client.clone(), chat.speculation("off"));
        async move { client.chat(&chat).await }
    });
    let alone = join_all(alone).await;
    // All of it once more: in chunks, without drafts, so that the faults come in the middle.
    let running = samples().map(|(group, sample)| {
        let chat = rollout(group, sample).set("group", format!("group {group}"));
        let (client, chat) = (client.clone(), chat.speculation("off"));
        async move { client.chat(&chat).await }
    });
    let running = tokio::spawn(join_all(running.collect::<Vec<_>>()));
    let full = 2.0 * SLOTS as f64;
    wait_until("all slots are taken", async || {
        let chunks = over_workers(&mesh, &[0, 1], "refrain_worker_chunks_running").await;
        (chunks == full).then_some(())
    })
    .await;
    mesh.kill(Service::Worker(1)).await?;
    mesh.kill(Service::Scheduler).await?;
    ensure!(!running.is_finished(), "the faults came after all rollouts");
    mesh.start_child(Service::Scheduler).await?;
    for (answer, expected) in running.await?.into_iter().zip(alone) {
        let (answer, expected) = (answer?, expected?);
        ensure!(
            answer.text == expected.text,
            "faults between chunks changed an output"
        );
        ensure!(answer.completion_tokens() == u64::from(TOKENS));
    }
    mesh.stop().await
}
