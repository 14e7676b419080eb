//! Usage for bills, with processes that are killed: the sums in the draft store are those of the answers.

use anyhow::{Context as _, ensure};
use e2e::{Chat, Event, HttpMesh, Service, counts, long_task, until_stored};
use refrain_protocol::usage::UsageCounts;

/// Tokens of a chunk. The gateway writes progress down at each end of one.
const CHUNK_TOKENS: u64 = 8;

/// Tokens of an answer that takes a while.
const TOKENS: u32 = 400;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sums_are_exact_although_the_gateway_and_the_store_are_killed() -> anyhow::Result<()> {
    // Relative to the folder of the mesh.
    let settings = "[gateway]\nusage_dir = \"usage\"\n";
    let mut mesh = HttpMesh::start_children(1, settings, &[]).await?;
    mesh.workers_report(1).await;
    let mut expected = UsageCounts::default();
    for seed in 0..3 {
        let chat = Chat::new("How many lamps are in stock?").set("seed", seed);
        expected = expected.plus(counts(&mesh.client().chat(&chat).await?));
    }
    // The gateway is killed while it streams.
    let long = Chat::new(&long_task(9))
        .sampled(0.9, 42)
        .max_tokens(TOKENS)
        .endless()
        .set("chunk_tokens", CHUNK_TOKENS)
        .set("return_token_ids", true)
        .speculation("off");
    let mut stream = mesh.client().stream(&long).await?;
    let mut seen = 0;
    while seen < 3 * CHUNK_TOKENS {
        let Event::Data(event) = stream.next().await?.context("the stream ended early")? else {
            anyhow::bail!("the stream ended early");
        };
        let tokens = event["choices"][0]["token_ids"].as_array();
        seen += tokens.map_or(0, |tokens| tokens.len() as u64);
    }
    mesh.kill(Service::Gateway).await?;
    drop(stream);
    mesh.start_child(Service::Gateway).await?;
    mesh.ready().await;
    let sums = until_stored(&mesh, "the killed request is settled", |sums| {
        sums.requests == expected.requests + 1
    })
    .await;
    let killed = sums.minus(expected);
    ensure!(
        killed.output_tokens + CHUNK_TOKENS >= seen && killed.output_tokens < u64::from(TOKENS),
        "{seen} tokens seen, {killed:?}"
    );
    ensure!(
        killed.input_tokens > 0 && killed.requests == 1,
        "{killed:?}"
    );
    expected = sums;

    // The store is killed, and requests go on meanwhile.
    mesh.kill(Service::DraftStore).await?;
    for seed in 3..6 {
        let chat = Chat::new("How many lamps are in stock?").set("seed", seed);
        expected = expected.plus(counts(&mesh.client().chat(&chat).await?));
    }
    // The counts of all answers are written down.
    mesh.kill(Service::Gateway).await?;
    mesh.start_child(Service::DraftStore).await?;
    mesh.start_child(Service::Gateway).await?;
    mesh.ready().await;
    let sums = until_stored(&mesh, "all requests are in the store", |sums| {
        sums.requests == expected.requests
    })
    .await;
    ensure!(sums == expected, "{sums:?}, not {expected:?}");

    // One that ends by itself is counted once, also when both are killed again.
    expected = expected.plus(counts(&mesh.client().chat(&Chat::new("Once more.")).await?));
    until_stored(&mesh, "the last request", |sums| sums == expected).await;
    for service in [Service::Gateway, Service::DraftStore] {
        mesh.kill(service).await?;
        mesh.start_child(service).await?;
    }
    mesh.ready().await;
    let after = mesh.client().chat(&Chat::new("And again.")).await?;
    expected = expected.plus(counts(&after));
    until_stored(&mesh, "the sums after the last restart", |sums| {
        sums == expected
    })
    .await;
    mesh.stop().await
}
