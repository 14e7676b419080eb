//! Samples of one group on several workers draft from each other while they run, and their lengths are remembered.

use anyhow::{bail, ensure};
use e2e::{Chat, Event, EventStream, HttpMesh, Scrape, Service, wait_until};

/// One sample runs on each worker. The namespace is evicted from the replicas soon, since its feed brings the same
/// tokens, sometimes before the log of the group.
const ONE_EACH: &str = "
    [worker]
    running_max = 1

    [worker.replica]
    namespace_tokens_max = 100
";

fn sample(group: &str) -> Chat {
    Chat::random(1)
        .set("group", group)
        .set("chunk_tokens", 4_000)
}

async fn scrapes(mesh: &HttpMesh) -> anyhow::Result<[Scrape; 2]> {
    let (first, second) = (Service::Worker(0), Service::Worker(1));
    Ok([mesh.scrape(first).await?, mesh.scrape(second).await?])
}

/// Whether a stream has more to come: its next event is not the last one.
async fn goes_on(stream: &mut EventStream) -> anyhow::Result<bool> {
    match stream.next().await? {
        Some(Event::Data(data)) => Ok(data
            .pointer("/choices/0/finish_reason")
            .is_none_or(serde_json::Value::is_null)),
        Some(Event::Done) => Ok(false),
        None => bail!("the stream broke off"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_of_a_running_sample_are_drafted_on_another_worker() -> anyhow::Result<()> {
    let mesh = HttpMesh::start_here(2, ONE_EACH).await?;
    // The first sample is slow and long. The second has the same seed, so all that the first one has emitted is
    // right.
    let long = sample("g").max_tokens(2_500).speculation("off");
    let mut first = mesh.client().stream(&long).await?;
    // It is ahead by more than what the log of the group lags behind.
    first.read_pieces(800).await?;
    let short = sample("g").max_tokens(600).speculation("suffix");
    let alone = Chat::random(1).max_tokens(600).speculation("off");
    let second = mesh.client().chat(&short).await?;
    ensure!(
        goes_on(&mut first).await?,
        "the first sample has ended before the second"
    );
    let workers = scrapes(&mesh).await?;
    let sum = |name: &str| {
        workers
            .iter()
            .map(|worker| worker.sum(name, &[]))
            .sum::<f64>()
    };
    let accepted = workers.iter().map(|worker| worker.accepted_from("group"));
    let accepted: f64 = accepted.sum();
    ensure!(
        accepted >= 20.0,
        "{accepted} tokens were accepted from the group"
    );
    ensure!(sum("refrain_replica_group_tokens_received_total") >= 60.0);
    ensure!(sum("refrain_replica_group_lag_seconds_count") >= 1.0);
    // Each worker took over only what the other one emitted: the store has sent no token to its own author.
    let store = mesh.scrape(Service::DraftStore).await?;
    ensure!(store.sum("refrain_draft_store_groups", &[]) == 1.0);
    let gateway = mesh.scrape(Service::Gateway).await?;
    let registered = gateway.sum(
        "refrain_gateway_group_registrations_total",
        &[("outcome", "done")],
    );
    ensure!(
        registered == 1.0,
        "the gateway registered {registered} groups"
    );
    drop(first);
    // With drafts or without, the output is the same.
    wait_until("both workers are free", async || {
        let [one, other] = scrapes(&mesh).await.ok()?;
        let running = [one, other].map(|worker| worker.sum("refrain_worker_chunks_running", &[]));
        (running == [0.0, 0.0]).then_some(())
    })
    .await;
    let plain = mesh.client().chat(&alone).await?;
    ensure!(
        plain.text == second.text,
        "{:?} is not {:?}",
        second.text,
        plain.text
    );
    mesh.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_length_of_an_earlier_output_is_what_a_rollout_is_expected_to_take()
-> anyhow::Result<()> {
    let mesh = HttpMesh::start_here(1, "").await?;
    let of = async |outcome: &str| -> anyhow::Result<f64> {
        let gateway = mesh.scrape(Service::Gateway).await?;
        Ok(gateway.sum(
            "refrain_gateway_length_estimates_total",
            &[("outcome", outcome)],
        ))
    };
    mesh.client().chat(&Chat::random(1).max_tokens(50)).await?;
    ensure!(of("known").await? + of("unknown").await? == 0.0);
    wait_until("the store has the output", async || {
        let store = mesh.scrape(Service::DraftStore).await.ok()?;
        (store.sum("refrain_draft_store_tokens", &[]) >= 50.0).then_some(())
    })
    .await;
    // A store that does not answer at once is not waited for, so the question may fail, and comes again.
    let asked = async |chat: &Chat, outcome: &str| {
        wait_until(&format!("a length is {outcome}"), async || {
            mesh.client().chat(chat).await.ok()?;
            (of(outcome).await.ok()? == 1.0).then_some(())
        })
        .await;
    };
    // A rollout asks by the hash that the worker stored with the output: it is the same one.
    asked(&sample("a").max_tokens(20), "known").await;
    ensure!(of("unknown").await? == 0.0);
    let other = Chat::random(2).set("group", "b").max_tokens(20);
    asked(&other, "unknown").await;
    ensure!(of("known").await? == 1.0);
    mesh.stop().await
}
