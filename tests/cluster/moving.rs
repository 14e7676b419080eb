//! A worker whose store goes: it drafts on, reads nothing again, and erasures reach it at its new store.

use anyhow::{Context as _, ensure};
use e2e::Scrape;

use crate::check::all_sums;
use crate::clients::Chats;
use crate::cluster::{Cluster, eventually};
use crate::mesh::TENANT;
use crate::network::NODES;

/// The only worker that runs.
const WORKER: usize = 0;

/// The reads of a worker from stores, and how often it has gone on at another one.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Read {
    take_overs: f64,
    bytes: f64,
    documents: f64,
    moves: f64,
}

fn read(worker: &Scrape) -> Read {
    let sum = |name: &str| worker.sum(&format!("refrain_replica_{name}"), &[]);
    Read {
        take_overs: sum("take_overs_total"),
        bytes: sum("take_over_bytes_total"),
        documents: sum("documents"),
        moves: sum("moves_total"),
    }
}

/// Checks it. Only one worker runs, and no store has any document yet.
pub(crate) async fn moves_between_stores(cluster: &mut Cluster) -> anyhow::Result<Chats> {
    let client = cluster.mesh.clients()[0].clone();
    let chats = Chats::ask(&client).await?;
    let drafted = async |cluster: &Cluster| {
        let accepted = chats.ask_with_drafts(&client).await?;
        let worker = cluster.mesh.scrape(WORKER).await?;
        // The prompts come again, so those of a group of equal prompts may be credited.
        let scopes = ["tenant", "group"].map(|scope| worker.accepted_from(scope));
        anyhow::Ok((accepted, scopes.iter().sum::<f64>()))
    };
    let half = chats.tokens() / 2;
    let (accepted, warm) = drafted(cluster).await?;
    ensure!(
        accepted > half,
        "{accepted} draft tokens were accepted before any fault"
    );
    let mut followed = None;
    eventually(
        "all documents are everywhere, and one store is followed",
        async || {
            cluster.trouble().await?;
            let failed = |error: anyhow::Error| format!("{error:#}");
            let sums = all_sums(cluster).await.map_err(failed)?;
            let documents = 2 * chats.count();
            let worker = read(&cluster.mesh.scrape(WORKER).await.map_err(failed)?);
            if worker.documents != documents as f64 {
                return Err(format!("the worker has {worker:?}"));
            }
            if sums.iter().flatten().any(|sum| sum.documents != documents)
                || sums.iter().any(Vec::is_empty)
            {
                return Err(format!("{sums:?}"));
            }
            followed = None;
            for number in 0..NODES {
                let scrape = cluster.stores[number]
                    .calls
                    .scrape()
                    .await
                    .map_err(failed)?;
                if scrape.sum("refrain_draft_store_feed_waiters", &[]) > 0.0 {
                    followed = Some(number);
                }
            }
            followed
                .map(drop)
                .ok_or_else(|| "no store is followed".to_owned())
        },
    )
    .await?;
    let followed = followed.context("no store is followed")?;
    let before = read(&cluster.mesh.scrape(WORKER).await?);
    cluster.kill_store(followed).await?;
    let moved = Read {
        moves: before.moves + 1.0,
        ..before
    };
    eventually("the worker follows another store", async || {
        let worker = cluster.mesh.scrape(WORKER).await;
        let now = read(&worker.map_err(|error| format!("{error:#}"))?);
        match now.moves == moved.moves {
            true => Ok(()),
            false => Err(format!("{now:?}")),
        }
    })
    .await?;
    let now = read(&cluster.mesh.scrape(WORKER).await?);
    ensure!(now == moved, "{now:?} is not {moved:?}");
    let (accepted, total) = drafted(cluster).await?;
    ensure!(
        accepted > half && total > warm,
        "{accepted} draft tokens were accepted after the move"
    );
    cluster.start_store(followed).await?;
    eventually("the store is back", async || cluster.trouble().await).await?;
    let other = (followed + 1) % NODES;
    cluster.stores[other].calls.erase_tenant(TENANT).await?;
    eventually(
        "the erasure has reached the worker and all stores",
        async || {
            let failed = |error: anyhow::Error| format!("{error:#}");
            let now = read(&cluster.mesh.scrape(WORKER).await.map_err(failed)?);
            let sums = all_sums(cluster).await.map_err(failed)?;
            match now.documents == 0.0 && sums.iter().all(Vec::is_empty) {
                true => Ok(()),
                false => Err(format!("the worker has {now:?}, and the stores {sums:?}")),
            }
        },
    )
    .await?;
    eprintln!(
        "cluster: a worker went from store {followed} to another one, and read nothing again"
    );
    Ok(chats)
}
