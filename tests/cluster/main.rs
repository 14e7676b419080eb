//! A campaign of faults against replicas of the draft store: three stores, and three brokers as one NATS cluster.
//!
//! Each round has writers append documents, and one to three faults meanwhile. Then everything heals, and the
//! replicas have to be equal and to have what they have acknowledged (`check.rs`). `CLUSTER_ROUNDS` is the number of
//! rounds, and `CLUSTER_SEED` draws the faults. With `CLUSTER_NETWORK=relays` no network namespaces are used.

mod broker;
mod check;
mod cluster;
mod disk;
mod faults;
mod ledger;
mod load;
mod namespaces;
mod network;
mod relays;
mod store;

use std::str::FromStr;
use std::time::Instant;

use anyhow::{Context as _, ensure};
use fastrand::Rng;

use crate::check::{Checked, check, compare_by_command};
use crate::cluster::{Cluster, eventually};
use crate::faults::{Damage, Deck, Erasure, Fault};
use crate::load::{Account, Load};

const ROUNDS: usize = 5;
const SEED: u64 = 1;

fn variable<T: FromStr>(name: &str, default: T) -> anyhow::Result<T> {
    match std::env::var(name) {
        Ok(value) => {
            let value = value.parse().ok();
            value.with_context(|| format!("{name} is not a number"))
        }
        Err(_) => Ok(default),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_end_equal_and_keep_their_promises_after_faults() -> anyhow::Result<()> {
    let rounds = variable("CLUSTER_ROUNDS", ROUNDS)?;
    let seed = variable("CLUSTER_SEED", SEED)?;
    let network = std::env::var("CLUSTER_NETWORK").unwrap_or_default();
    let mut cluster = Cluster::prepare(network != "relays").await?;
    eprintln!(
        "cluster: {rounds} rounds with CLUSTER_SEED={seed} and {}",
        broker::version()?
    );
    match campaign(&mut cluster, rounds, seed).await {
        Ok(()) => Ok(()),
        Err(error) => {
            let kept = cluster.keep().await?;
            let kept = format!(
                "CLUSTER_SEED={seed}; logs and data are in {}",
                kept.display()
            );
            Err(error.context(kept))
        }
    }
}

async fn campaign(cluster: &mut Cluster, rounds: usize, seed: u64) -> anyhow::Result<()> {
    let began = Instant::now();
    cluster.start_missing().await?;
    eventually("all stores are ready", async || cluster.trouble().await).await?;
    let account = Account::default();
    let has_disk = cluster.stores.iter().any(|store| store.disk.is_some());
    let (mut deck, mut rng) = (Deck::new(has_disk), Rng::with_seed(seed));
    let mut replicated = 0;
    for number in 0..rounds {
        let faults = deck.draw(&mut rng);
        let names: Vec<String> = faults.iter().map(Fault::to_string).collect();
        let names = format!("round {number}: {}", names.join("; "));
        let (before, refused) = (account.acknowledged(), account.refused());
        let checked = round(cluster, &account, number, rng.u64(..), &faults).await;
        let checked = checked.with_context(|| names.clone())?;
        replicated += checked.replicated;
        eprintln!(
            "cluster: {names}: {} appends acknowledged, {} refused; {} documents were promised as replicated, {} as \
             local; there are {} at {} s{}",
            account.acknowledged() - before,
            account.refused() - refused,
            checked.replicated,
            checked.local,
            checked.documents,
            began.elapsed().as_secs(),
            match cluster.restarts().await? {
                0.0 => String::new(),
                restarts => format!("; {restarts} times a stream was applied anew"),
            }
        );
    }
    compare_by_command(cluster).await?;
    ensure!(
        replicated > 0 && account.refused() > 0,
        "{replicated} documents were replicated, and {} appends refused: the faults had no effect",
        account.refused()
    );
    Ok(())
}

/// Load, faults, healing, and the check.
async fn round(
    cluster: &mut Cluster,
    account: &Account,
    number: usize,
    seed: u64,
    faults: &[Fault],
) -> anyhow::Result<Checked> {
    let load = Load::start(&cluster.calls(), account, number, seed)?;
    let mut damage = Damage::new(cluster, account, number);
    for fault in faults {
        damage.strike(fault).await?;
    }
    for fault in faults {
        damage.end(fault).await?;
    }
    let erasures = std::mem::take(&mut damage.erasures);
    load.stop().await?;
    cluster.check_running()?;
    for erasure in erasures {
        complete(cluster, account, erasure).await?;
    }
    check(cluster, account, number).await
}

/// Waits for an erasure. One that failed, or that its store has lost with its disk, is repeated until it is done.
async fn complete(cluster: &Cluster, account: &Account, erasure: Erasure) -> anyhow::Result<()> {
    let calls = cluster.stores[erasure.store].calls.clone();
    let (tenant, session) = (erasure.tenant, erasure.session.clone());
    let mut at_ms = erasure.erased_at_ms().await;
    if at_ms.is_none() {
        eventually("a repeated erasure is done", async || {
            let erased = calls.erase_session(tenant, &session).await;
            let erased = erased.map_err(|error| format!("{error:#}"))?;
            at_ms = Some(erased.erased_at_ms);
            Ok(())
        })
        .await?;
    }
    account
        .ledger()
        .erase(tenant, &session, at_ms.context("no time of the erasure")?);
    Ok(())
}
