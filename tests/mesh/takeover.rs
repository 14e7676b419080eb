//! A new worker takes over the sealed segments of the store and drafts as the worker before it. A worker without room
//! for them gets drafts from the store.

use anyhow::{bail, ensure};
use e2e::{Chat, HttpMesh, Service, UpMesh, wait_until};
use refrain::config::MeshFile;

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

/// Tunes a worker with room for one answer, which waits for look-ups as long as needed.
fn small_replica(file: &mut MeshFile) {
    file.draft_store.tuning.tick_ms = 20;
    let replica = &mut file.worker.replica;
    replica.namespace_tokens_max = 150;
    replica.upkeep_ms = 5;
    let remote_lookup = &mut file.worker.remote_lookup;
    remote_lookup.wait_us_max = 60_000_000;
    remote_lookup.step_share_max = 1.0;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_drafts_for_a_worker_without_room() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let mesh = UpMesh::start_tuned(dir.path(), SEALING, small_replica).await?;
    let client = mesh.client();
    let mut said = Vec::new();
    for number in 0..4 {
        said.push(client.chat(&chat(number)).await?.text);
    }
    // The store seals once enough has come together, so the last answer may wait for others.
    for number in 4.. {
        let scrape = wait_until("the store has all answers", async || {
            let scrape = client.scrape().await.ok()?;
            let stored = scrape.sum("refrain_draft_store_tokens", &[]);
            (stored >= f64::from(TOKENS) * number as f64).then_some(scrape)
        })
        .await;
        let figure = |name: &str| scrape.sum(name, &[]);
        let sealed =
            figure("refrain_draft_store_tokens") - figure("refrain_draft_store_unsealed_tokens");
        if sealed >= f64::from(TOKENS) * 4.0 {
            break;
        }
        ensure!(number < 40, "the store has sealed {sealed} tokens only");
        client.chat(&chat(number)).await?;
    }
    // The store updates the index of its look-ups at most four times a second, so the first drafts may be from before
    // the sealing.
    let mut gains = Vec::new();
    for number in (0..4).cycle().take(40) {
        wait_until("the worker holds one answer", async || {
            let scrape = client.scrape().await.ok()?;
            let tokens = scrape.sum("refrain_replica_tokens", &[]);
            (tokens < f64::from(TOKENS) * 2.0).then_some(())
        })
        .await;
        let before = client.scrape().await?;
        let again = client.chat(&chat(number)).await?;
        let after = client.scrape().await?;
        ensure!(
            again.text == said[number],
            "drafts of the store changed the answer"
        );
        let answered = |scrape: &e2e::Scrape| {
            scrape.sum("refrain_replica_lookups_total", &[("outcome", "answered")])
        };
        let is_answered = answered(&after) > answered(&before);
        let gained = after.accepted_from("tenant") - before.accepted_from("tenant");
        if is_answered && gained > f64::from(TOKENS) / 2.0 {
            mesh.stop().await;
            return Ok(());
        }
        gains.push(gained);
    }
    bail!("the store's drafts never made up half of an answer: {gains:?}")
}
