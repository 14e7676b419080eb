//! The number of calls that a request costs: some per request and per chunk, and none per token.

use std::time::Instant;

use anyhow::ensure;
use e2e::{Chat, HttpMesh, Service, long_task, wait_until};

const TOKENS: u32 = 100;
const UPLOAD_INTERVAL_MS: u32 = 500;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_takes_one_lease_and_one_chunk() -> anyhow::Result<()> {
    // The test counts steps, so it does without those of a profile.
    let settings = format!("[worker.uploader]\ninterval_ms = {UPLOAD_INTERVAL_MS}");
    let mesh = HttpMesh::start_here_tuned(1, &settings, |_, file| {
        file.worker.profile_ms_max = 0;
    })
    .await?;
    let started = Instant::now();
    let chat = Chat::new(&long_task(2))
        .max_tokens(TOKENS)
        .endless()
        .speculation("off");
    let answer = mesh.client().chat(&chat).await?;
    ensure!(
        answer.completion_tokens() == u64::from(TOKENS),
        "{} tokens",
        answer.completion_tokens()
    );
    // The lease is given back and the output is acknowledged shortly after the answer.
    wait_until("the output is acknowledged", async || {
        let pending = mesh
            .scrape(Service::Worker(0))
            .await
            .ok()?
            .sum("refrain_upload_pending_tokens", &[]);
        let leases = mesh
            .scrape(Service::Scheduler)
            .await
            .ok()?
            .sum("refrain_scheduler_leases_total", &[]);
        (pending == 0.0 && leases > 0.0).then_some(())
    })
    .await;

    let scheduler = mesh.scrape(Service::Scheduler).await?;
    ensure!(
        scheduler.sum("refrain_scheduler_leases_total", &[("outcome", "finished")]) == 1.0,
        "the answer did not take exactly one lease"
    );
    ensure!(
        scheduler.sum("refrain_scheduler_leases_total", &[]) == 1.0,
        "more than one lease was granted"
    );
    let worker = mesh.scrape(Service::Worker(0)).await?;
    let store = mesh.scrape(Service::DraftStore).await?;
    let intervals = started.elapsed().as_millis() as f64 / f64::from(UPLOAD_INTERVAL_MS);
    let calls = [
        ("lease", scheduler.requests_to("/internal/v1/lease")),
        ("finish", scheduler.requests_to("/internal/v1/finish")),
        ("chunk", worker.requests_to("/internal/v1/chunk")),
    ];
    for (call, count) in calls {
        ensure!(count == 1.0, "{count} calls of {call} for one answer");
    }
    ensure!(
        worker.requests_to("/internal/v1/cut") == 0.0,
        "an output that ended by itself was cut"
    );
    let appends = store.requests_to("/internal/v1/append");
    ensure!(
        appends >= 1.0 && appends <= intervals + 2.0,
        "{appends} appends in {intervals:.1} intervals"
    );
    let touches = store.requests_to("/internal/v1/touch");
    ensure!(touches <= intervals + 2.0, "{touches} touches");
    // Without drafts, the engine takes one step per token.
    let steps = mesh
        .scrape(Service::Engine(0))
        .await?
        .requests_to("/engine/v1/step");
    ensure!(
        steps >= f64::from(TOKENS),
        "{steps} steps for {TOKENS} tokens"
    );

    // The same output with drafts takes far fewer steps than it has tokens.
    mesh.client().chat(&chat.speculation("suffix")).await?;
    let more = mesh
        .scrape(Service::Engine(0))
        .await?
        .requests_to("/engine/v1/step")
        - steps;
    ensure!(
        more < f64::from(TOKENS) / 2.0,
        "{more} steps for {TOKENS} tokens that were said before"
    );
    mesh.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_cost_a_lease_each() -> anyhow::Result<()> {
    let mesh = HttpMesh::start_here_tuned(1, "", |_, file| {
        file.worker.profile_ms_max = 0;
    })
    .await?;
    let chat = Chat::new(&long_task(2))
        .max_tokens(TOKENS)
        .endless()
        .speculation("off")
        .set("chunk_tokens", 25);
    let answer = mesh.client().chat(&chat).await?;
    let leases = wait_until("all leases are given back", async || {
        let scrape = mesh.scrape(Service::Scheduler).await.ok()?;
        let is_over = scrape.sum("refrain_scheduler_leases_running", &[]) == 0.0;
        let is_counted = scrape.requests_to("/internal/v1/finish") > 0.0;
        (is_over && is_counted).then_some(scrape)
    })
    .await;
    let continued = leases.sum(
        "refrain_scheduler_leases_total",
        &[("outcome", "continues")],
    );
    ensure!(continued == 3.0, "{continued} of 4 chunks continued");
    // One call ends a chunk and asks for the next.
    let calls = ["lease", "finish"].map(|call| {
        let route = format!("/internal/v1/{call}");
        leases.requests_to(&route)
    });
    ensure!(
        calls == [4.0, 1.0],
        "{calls:?} calls for leases, and to end them"
    );
    let chunks = mesh
        .scrape(Service::Worker(0))
        .await?
        .requests_to("/internal/v1/chunk");
    ensure!(chunks == 4.0, "{chunks} chunks of 25 tokens for {TOKENS}");

    // The context is sent, indexed and read once, however many chunks the request has.
    let prompt = answer.prompt_tokens() as f64;
    let worker = mesh.scrape(Service::Worker(0)).await?;
    let sent = worker.sum("refrain_worker_context_tokens_total", &[("origin", "sent")]);
    ensure!(sent == prompt, "{sent} tokens sent of a prompt of {prompt}");
    let resumed = worker.sum("refrain_worker_parking_total", &[("outcome", "resumed")]);
    ensure!(
        resumed == 3.0,
        "{resumed} of 3 chunks found the request parked"
    );
    let engine = mesh.scrape(Service::Engine(0)).await?;
    let computed = engine.sum("refrain_engine_computed_tokens_total", &[]);
    let needed = prompt + f64::from(TOKENS) - 1.0;
    ensure!(computed == needed, "{computed} tokens computed of {needed}");
    mesh.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_measures_its_engine_once_and_leaves_nothing_there() -> anyhow::Result<()> {
    let settings = "[worker]\nstep_tokens_max = 64\nprefill_chunk_tokens = 32";
    let mesh = HttpMesh::start_here_tuned(1, settings, |_, file| {
        file.worker.profile_ms_max = 300_000;
    })
    .await?;
    let engine = mesh.scrape(Service::Engine(0)).await?;
    // One step opens the session, and two each have 1, 2, 4, up to 64 tokens.
    let steps = engine.requests_to("/engine/v1/step");
    ensure!(steps == 15.0, "{steps} steps");
    ensure!(
        engine.requests_to("/engine/v1/abort") == 1.0,
        "the session was not ended"
    );
    for left in ["sessions_open", "sessions_kept", "kv_tokens"] {
        let left = format!("refrain_engine_{left}");
        let count = engine.sum(&left, &[]);
        ensure!(count == 0.0, "{left}: {count}");
    }
    mesh.stop().await
}
