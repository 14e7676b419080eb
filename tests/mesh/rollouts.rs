//! Rollouts and interactive requests share a mesh: neither waits for all of the other, and no output changes.

use anyhow::ensure;
use e2e::{Answer, Chat, UpMesh, long_task, wait_until};

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
