//! A campaign of faults against replicas of the draft store and a mesh in front of them: three stores, three brokers
//! as one NATS cluster, two gateways, the scheduler, and two workers with their engines.
//!
//! Each round has writers append documents and clients ask gateways, and one to three faults meanwhile. Clients are
//! to get the right answers all the time (`clients.rs`). Then everything heals, and the replicas have to be equal and
//! to have what they have acknowledged (`check.rs`). `CLUSTER_ROUNDS` is the number of rounds, and `CLUSTER_SEED`
//! draws the faults. With `CLUSTER_NETWORK=relays` no network namespaces are used. `NATS_SERVER` names another
//! broker.

mod broker;
mod check;
mod clients;
mod cluster;
mod disk;
mod faults;
mod ledger;
mod load;
mod mesh;
mod moving;
mod namespaces;
mod network;
mod redelivery;
mod relays;
mod store;

use std::time::Instant;

use anyhow::{Context as _, ensure};
use fastrand::Rng;

use crate::check::{Checked, check, compare_by_command};
use crate::clients::{Chats, Clients, Tally};
use crate::cluster::{Cluster, eventually};
use crate::faults::{Damage, Deck, Erasure, Fault, KINDS};
use crate::load::{Account, Load};
use crate::moving::moves_between_stores;

/// With these, every kind of fault occurs.
const ROUNDS: usize = 6;
const SEED: u64 = 46;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_end_equal_and_keep_their_promises_after_faults() -> anyhow::Result<()> {
    let rounds = e2e::number_of("CLUSTER_ROUNDS", ROUNDS)?;
    let seed = e2e::number_of("CLUSTER_SEED", SEED)?;
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
    cluster.start_with_one_worker().await?;
    eventually("all processes are ready", async || cluster.trouble().await).await?;
    let chats = moves_between_stores(cluster).await?;
    cluster.start_missing().await?;
    let mut run = Run {
        account: Account::default(),
        tally: Tally::default(),
        chats,
        redelivered: 0,
    };
    let has_disk = cluster.stores.iter().any(|store| store.disk.is_some());
    let (mut deck, mut rng) = (Deck::new(has_disk), Rng::with_seed(seed));
    let mut replicated = 0;
    for number in 0..rounds {
        let faults = deck.draw(&mut rng);
        let names: Vec<String> = faults.iter().map(Fault::to_string).collect();
        let names = format!("round {number}: {}", names.join("; "));
        let before = run.counts();
        let checked = run.round(cluster, number, rng.u64(..), &faults).await;
        let checked = checked.with_context(|| names.clone())?;
        replicated += checked.replicated;
        let [acknowledged, refused, answered, cut_off] =
            std::array::from_fn(|at| run.counts()[at] - before[at]);
        eprintln!(
            "cluster: {names}: {acknowledged} appends acknowledged, {refused} refused; {answered} requests answered, \
             {cut_off} cut off with their gateways; {} documents were promised as replicated, {} as local; there are \
             {} at {} s{}",
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
    let [_, refused, answered, cut_off] = run.counts();
    ensure!(
        replicated > 0 && refused > 0 && answered > 0,
        "{replicated} documents were replicated, {refused} appends refused, and {answered} requests answered: the \
         faults had no effect"
    );
    // Each kind of fault has come by then.
    ensure!(
        rounds < KINDS.len() || run.redelivered > 0 && cut_off > 0,
        "{} messages came again, and {cut_off} requests were cut off",
        run.redelivered
    );
    eprintln!("cluster: {} messages came again", run.redelivered);
    Ok(())
}

/// The state that goes on over all rounds.
struct Run {
    account: Account,
    tally: Tally,
    chats: Chats,
    /// Messages of the stream that came again.
    redelivered: usize,
}

impl Run {
    /// Appends that were acknowledged and refused, and requests that were answered and cut off, so far.
    fn counts(&self) -> [u64; 4] {
        [
            self.account.acknowledged(),
            self.account.refused(),
            self.tally.answered(),
            self.tally.cut_off(),
        ]
    }

    /// Load, faults, healing, and the check.
    async fn round(
        &mut self,
        cluster: &mut Cluster,
        number: usize,
        seed: u64,
        faults: &[Fault],
    ) -> anyhow::Result<Checked> {
        let Run {
            account,
            tally,
            chats,
            ..
        } = self;
        let load = Load::start(&cluster.calls(), account, number, seed)?;
        let mut clients = Clients::start(&cluster.mesh, chats, tally, seed);
        let mut damage = Damage::new(cluster, account, tally, number, seed);
        for fault in faults {
            let struck = damage.strike(fault).await;
            // Clients that have lost a request say more than those that wait for their answers.
            clients.check()?;
            struck?;
        }
        for fault in faults {
            damage.end(fault).await?;
        }
        let erasures = std::mem::take(&mut damage.erasures);
        self.redelivered += damage.redelivered;
        load.stop().await?;
        clients.stop().await?;
        cluster.check_running()?;
        for erasure in erasures {
            complete(cluster, account, erasure).await?;
        }
        check(cluster, account, number).await
    }
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
