//! Measures the tokens that eight sessions of coding agents make four workers read again, with and without the names
//! of the sessions.
//!
//! Each session has 20 turns, with a tool's result between two of them. Two sessions write another date into the
//! heads of their prompts after ten turns. In the first part four sessions have one head, as agents of one program
//! have. Two have another, as its subagents have, and two have heads of their own. In the second part all have one
//! head.
//!
//! Usage: `cargo run -p e2e --example sessions_across_workers -- [head lines] [pause ms]`

use std::time::{Duration, Instant};

use e2e::{Chat, Client, HttpMesh, Service, TINY_MODEL, wait_until};
use futures_util::future::try_join_all;
use serde_json::{Value, json};

const WORKERS: usize = 4;
const SESSIONS: usize = 8;
const TURNS: usize = 20;
/// The heads of the sessions in each part, by number.
const HEADS: [[usize; SESSIONS]; 2] = [[0, 0, 0, 0, 1, 1, 2, 3], [0; SESSIONS]];
/// The sessions whose heads change, and the turn before which they do.
const CHANGED: ([usize; 2], usize) = ([0, 6], 10);

/// The heads of the sessions, their length, and the longest time that a tool takes.
#[derive(Clone, Copy)]
struct Shape {
    heads: [usize; SESSIONS],
    head_lines: usize,
    pause_ms: u64,
}

fn lines(first: usize, count: usize) -> String {
    let line = |number: usize| {
        let (shelf, boxes) = (number % 7, number % 23);
        format!("{number}: shelf {shelf} has {boxes} boxes.\n")
    };
    (first..first + count).map(line).collect()
}

/// Runs a session, and returns the tokens of its prompts.
async fn converse(
    client: Client,
    session: usize,
    is_named: bool,
    shape: Shape,
) -> anyhow::Result<u64> {
    let rules = lines(shape.heads[session] * 1_000, shape.head_lines);
    let mut messages = vec![Value::Null];
    let mut prompt_tokens = 0;
    for turn in 0..TURNS {
        let (changed, at) = CHANGED;
        let date = match turn >= at && changed.contains(&session) {
            true => "Tuesday",
            false => "Monday",
        };
        let head = format!("{rules}Today is {date}.\n");
        messages[0] = json!({"role": "system", "content": head});
        let number = 10_000 + session * 1_000 + turn * 40;
        let result = lines(number, 2 + (session * 7 + turn * 3) % 6);
        messages.push(json!({"role": "user", "content": result}));
        let mut chat = Chat::new("").set("messages", messages.clone());
        if is_named {
            chat = chat.set("session", format!("agent-{session}"));
        }
        let answer = client
            .chat(&chat.max_tokens(24).endless().speculation("off"))
            .await?;
        prompt_tokens += answer.prompt_tokens();
        messages.push(json!({"role": "assistant", "content": answer.text}));
        let pause_ms = (session as u64 * 37 + turn as u64 * 101) % shape.pause_ms.max(1);
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
    }
    Ok(prompt_tokens)
}

async fn run(is_named: bool, shape: Shape) -> anyhow::Result<()> {
    let settings = "[engine]\nkv_tokens_max = 32768\n[worker]\nrunning_max = 8\n";
    let mesh = HttpMesh::start_here_tuned(WORKERS, settings, |_, file| {
        file.worker.profile_ms_max = 0;
    })
    .await?;
    mesh.workers_report(WORKERS).await;
    wait_until("the gateway knows the model", async || {
        let models = mesh.client().get("/v1/models").await.ok()?;
        models.text.contains(TINY_MODEL).then_some(())
    })
    .await;
    let began = Instant::now();
    let sessions = (0..SESSIONS).map(|number| converse(mesh.client(), number, is_named, shape));
    let prompt: u64 = try_join_all(sessions).await?.into_iter().sum();
    let seconds = began.elapsed().as_secs_f64();
    let mut cached = 0.0;
    for worker in 0..WORKERS {
        let scrape = mesh.scrape(Service::Engine(worker)).await?;
        cached += scrape.sum("refrain_engine_cached_tokens_total", &[]);
    }
    mesh.stop().await?;
    let heads = shape.heads.iter().max().map_or(0, |last| last + 1);
    let named = if is_named { "yes" } else { "no" };
    let read = prompt as f64 - cached;
    println!("{heads:>5}  {named:>5}  {prompt:>7}  {read:>6}  {seconds:>7.1}");
    Ok(())
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let head_lines = arguments.next().map_or(Ok(60), |text| text.parse())?;
    let pause_ms = arguments.next().map_or(Ok(400), |text| text.parse())?;
    println!(
        "{SESSIONS} sessions of {TURNS} turns, heads of {head_lines} lines, pauses up to {pause_ms} ms"
    );
    println!("heads  named   prompt    read  seconds");
    for heads in HEADS {
        let shape = Shape {
            heads,
            head_lines,
            pause_ms,
        };
        for is_named in [false, true] {
            run(is_named, shape).await?;
        }
    }
    Ok(())
}
