//! A new worker takes over the sealed segments of the store and drafts as the worker before it.

use anyhow::ensure;
use e2e::{Chat, HttpMesh, Service, wait_until};

const TOKENS: u32 = 120;
const CHATS: usize = 3;

/// Settings with which finished outputs are sealed at once.
const SEALING: &str = "
    [draft_store]
    seal_after_s = 0
    seal_tokens = 200
";

fn chat(number: usize) -> Chat {
    Chat::random(number)
        .max_tokens(TOKENS)
        .speculation("suffix")
}

/// The results of all chats.
struct Totals {
    /// Draft tokens accepted from the tenant's namespace.
    accepted: f64,
    /// Tokens per step.
    accepted_length: f64,
}

async fn say(mesh: &HttpMesh) -> anyhow::Result<Totals> {
    let before = mesh.scrape(Service::Worker(0)).await?;
    let mut steps = 0;
    for number in 0..CHATS {
        let answer = mesh.client().chat(&chat(number)).await?;
        steps += answer.number("/metrics/speculative_decoding/steps");
    }
    let after = mesh.scrape(Service::Worker(0)).await?;
    Ok(Totals {
        accepted: after.accepted_from("tenant") - before.accepted_from("tenant"),
        accepted_length: f64::from(TOKENS) * CHATS as f64 / steps as f64,
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_worker_drafts_as_a_warm_one_after_a_call_for_each_segment() -> anyhow::Result<()> {
    let mut mesh = HttpMesh::start_children(1, SEALING, &[]).await?;
    let cold = say(&mesh).await?;
    let warm = say(&mesh).await?;
    ensure!(
        warm.accepted > f64::from(TOKENS) * CHATS as f64 / 2.0
            && warm.accepted_length > 1.5 * cold.accepted_length,
        "a cold worker took {} tokens per step, a warm one {}",
        cold.accepted_length,
        warm.accepted_length
    );
    wait_until("the store has sealed all outputs", async || {
        let store = mesh.scrape(Service::DraftStore).await.ok()?;
        let all = store.sum("refrain_draft_store_tokens", &[]);
        let unsealed = store.sum("refrain_draft_store_unsealed_tokens", &[]);
        let is_all = all >= f64::from(TOKENS) * 2.0 * CHATS as f64;
        (is_all && unsealed < 200.0).then_some(())
    })
    .await;
    let before = mesh.scrape(Service::DraftStore).await?;
    mesh.kill(Service::Worker(0)).await?;
    mesh.start_child(Service::Worker(0)).await?;
    mesh.ready().await;
    // With the first request of a namespace, the worker begins to follow it.
    let small = Chat::new("a").max_tokens(1).speculation("off");
    mesh.client().chat(&small).await?;
    wait_until("the new worker has taken over the segments", async || {
        let worker = mesh.scrape(Service::Worker(0)).await.ok()?;
        let labels = [("outcome", "done")];
        let sealed = worker.sum("refrain_replica_sealed_tokens", &[]);
        let is_done = worker.sum("refrain_replica_take_overs_total", &labels) == 1.0;
        (is_done && sealed >= before.sum("refrain_draft_store_tokens", &[]) - 200.0).then_some(())
    })
    .await;
    let after = mesh.scrape(Service::DraftStore).await?;
    let calls = |route: &str| after.requests_to(route) - before.requests_to(route);
    let (pieces, segments) = (
        calls("/internal/v1/segments/piece"),
        after.sum("refrain_draft_store_segments", &[]),
    );
    ensure!(
        calls("/internal/v1/segments") == 1.0 && (1.0..=segments + 2.0).contains(&pieces),
        "{pieces} pieces of {segments} segments"
    );
    ensure!(calls("/internal/v1/documents") <= 1.0);
    let new = say(&mesh).await?;
    ensure!(
        new.accepted >= 0.9 * warm.accepted && new.accepted_length >= 0.9 * warm.accepted_length,
        "the new worker took {} tokens per step, the warm one {}",
        new.accepted_length,
        warm.accepted_length
    );
    mesh.stop().await
}
