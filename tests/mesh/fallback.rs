//! A worker without an EAGLE-3 head transfers requests to a worker that has one.

use anyhow::ensure;
use e2e::{Chat, HttpMesh, Service, varied_prompts, wait_until};
use futures_util::future::try_join_all;
use refrain::config::MeshFile;

/// Worker 0 has no head and falls back to worker 1. Worker 1 accepts no suffix draft, and uses its head as soon as it
/// has tried it, however slow the head is on this machine. Requests go to the least loaded worker. The cheaper one
/// could be worker 1, and a request that begins there is never transferred.
const SETTINGS: &str = r#"
[scheduler]
placement = "least_loaded"

[reference-engine-0]
eagle3 = "off"

[worker-0.speculation]
fallback = "worker-1"

[worker-1.speculation]
router = "score"
score_threshold = 1000
"#;

/// Has worker 1 try its head soon, and use it whatever it brings.
fn try_head_early(service: Service, file: &mut MeshFile) {
    if service == Service::Worker(1) {
        let trials = &mut file.worker.speculation.drafter.trials;
        trials.backoff_steps = 4;
        trials.backoff_steps_max = 8;
        trials.gain_enter = 0.001;
        trials.gain_leave = 0.001;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_moves_to_the_worker_that_has_a_head() -> anyhow::Result<()> {
    let mesh = HttpMesh::start_here_tuned(2, SETTINGS, try_head_early).await?;
    let client = mesh.client();
    let prompts = varied_prompts(8);
    let chat = Chat::new(&prompts[0]).max_tokens(48).endless();
    let plain = client.chat(&chat.clone().speculation("off")).await?;
    ensure!(
        plain.number("/metrics/timings/chunks") == 1,
        "plain decoding has no reason to move"
    );

    // Both workers are busy now, so worker 1 tries its head.
    wait_until("the head of worker 1 is in use", async || {
        let chats = prompts.iter().map(|prompt| {
            let chat = Chat::new(prompt).max_tokens(48).endless();
            let client = client.clone();
            async move { client.chat(&chat).await }
        });
        try_join_all(chats).await.ok()?;
        let scrape = mesh.scrape(Service::Worker(1)).await.ok()?;
        (scrape.sum("refrain_self_draft_in_use", &[]) > 0.0).then_some(())
    })
    .await;

    // An idle mesh sends requests to worker 0, the first of two equal workers. It learns about worker 1 from
    // heartbeats.
    let moved = wait_until("a request is transferred", async || {
        let answer = client
            .chat(&chat.clone().speculation("eagle3"))
            .await
            .ok()?;
        (answer.number("/metrics/timings/chunks") == 2).then_some(answer)
    })
    .await;
    ensure!(
        moved.accepted_from("eagle3") > 0,
        "it was handed over for nothing"
    );
    ensure!(
        moved.text == plain.text,
        "the request says something else after it was handed over"
    );
    let on_worker = async |number| {
        let scrape = mesh.scrape(Service::Worker(number)).await?;
        anyhow::Ok(scrape.sum(
            "refrain_spec_accepted_tokens_total",
            &[("source", "eagle3")],
        ))
    };
    ensure!(
        on_worker(0).await? == 0.0 && on_worker(1).await? > 0.0,
        "drafts of the head were accepted on the wrong worker"
    );
    mesh.stop().await
}
