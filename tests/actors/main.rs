//! Each actor of a mesh is killed by a panic while a request runs. It comes back, and nothing is lost: the answers,
//! the usage, the outputs in the store and the drafts are those of an undisturbed mesh.
//!
//! The kill reaches all actors of a name in this process, so no other mesh runs in it.

use std::collections::BTreeSet;

use anyhow::ensure;
use e2e::{Chat, HttpMesh, Service, counts, until_stored, wait_until};
use refrain_protocol::usage::UsageCounts;
use refrain_service_kit::actors;

const TOKENS: u32 = 200;

/// Actors that this mesh has.
const NAMES: [&str; 15] = [
    "connection to Redis",
    "decode loop",
    "dispatch timer",
    "follower",
    "heartbeats",
    "maintenance of drafts",
    "models",
    "overdue requests",
    "settlements of limits",
    "statistics",
    "tenants",
    "uploads",
    "usage journal",
    "usage sender",
    "usage senders",
];

fn chat() -> Chat {
    Chat::random(9).max_tokens(TOKENS)
}

/// Whether a worker decodes.
async fn is_decoding(mesh: &HttpMesh) -> bool {
    let mut running = 0.0;
    for number in 0..2 {
        if let Ok(worker) = mesh.scrape(Service::Worker(number)).await {
            running += worker.sum("refrain_worker_chunks_running", &[]);
        }
    }
    running > 0.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_actor_comes_back_from_a_panic_and_nothing_is_lost() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    // Nobody listens on port 1, so there is no Redis.
    let settings = format!(
        "[gateway]\nusage_dir = \"{}\"\n[gateway.limits_redis]\nurl = \"redis://127.0.0.1:1\"\n",
        dir.path().join("usage").display()
    );
    let mesh = HttpMesh::start_here(2, &settings).await?;
    mesh.workers_report(2).await;
    let client = mesh.client();
    let undisturbed = client.chat(&chat().speculation("off")).await?;
    let mut expected = counts(&undisturbed);

    let names = actors::running();
    let missing: Vec<&str> = NAMES
        .into_iter()
        .filter(|name| !names.contains(name))
        .collect();
    ensure!(
        missing.is_empty(),
        "no actor has a name of {missing:?}: {names:?}"
    );
    let mut silent = BTreeSet::new();
    for name in names {
        let before = actors::restarts(name);
        let disturb = async {
            wait_until("a chunk runs", async || {
                is_decoding(&mesh).await.then_some(())
            })
            .await;
            actors::kill(name);
        };
        let plain = chat().speculation("off");
        let (answer, ()) = tokio::join!(client.chat(&plain), disturb);
        let answer = answer?;
        ensure!(
            answer.text == undisturbed.text,
            "another answer without {name}"
        );
        expected = expected.plus(counts(&answer));
        wait_until(&format!("the restart of {name}"), async || {
            (actors::restarts(name) > before).then_some(())
        })
        .await;
        // It works again.
        let answer = client.chat(&chat().speculation("suffix")).await?;
        ensure!(
            answer.text == undisturbed.text,
            "another answer after {name}"
        );
        expected = expected.plus(counts(&answer));
        if answer.accepted() < u64::from(TOKENS) / 2 {
            silent.insert(name);
        }
    }
    ensure!(
        silent.is_empty(),
        "there were too few drafts after {silent:?}"
    );

    let gateway = mesh.scrape(Service::Gateway).await?;
    let continuations = gateway.sum("refrain_gateway_continuations_total", &[]);
    ensure!(
        continuations >= 1.0,
        "no chunk was in the batch of the decode loop"
    );
    let shown = gateway.sum("refrain_actor_restarts_total", &[("actor", "decode loop")]);
    ensure!(shown >= 1.0, "the metrics tell of no restart");
    wait_until("all outputs are in the store", async || {
        let store = mesh.scrape(Service::DraftStore).await.ok()?;
        let documents = store.sum("refrain_draft_store_documents", &[]);
        (documents == expected.requests as f64).then_some(())
    })
    .await;
    let is_right = |sums: UsageCounts| sums == expected;
    until_stored(&mesh, "the usage of all requests", is_right).await;
    mesh.ready().await;
    mesh.stop().await
}
