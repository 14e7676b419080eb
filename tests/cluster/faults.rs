//! The faults of a round: which there are, which a round gets, and how each begins and ends.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use fastrand::Rng;
use refrain_protocol::admin::EraseReply;
use tokio::task::JoinHandle;

use crate::clients::Tally;
use crate::cluster::{Cluster, PATIENCE, STORE_WITH_DISK, eventually};
use crate::load::{Account, SESSIONS, session};
use crate::mesh::Mesh;
use crate::network::{GATEWAYS, NODES, Node, Port, WORKERS};
use crate::redelivery::redeliver;
use crate::store::{STREAM, TENANTS};

/// Most faults of a round.
const FAULTS_MAX: usize = 3;

/// Appends that are acknowledged before a fault begins, and while it lasts.
const WORK: std::ops::Range<u64> = 20..80;

/// How long a fault lasts at least, in milliseconds. Brokers notice a cut after about six seconds.
const LASTS_MS: std::ops::Range<u64> = 0..9_000;

/// How long a process of the mesh is gone at most. Gateways wait ten seconds for the scheduler, and it takes some to
/// start.
const MESH_LASTS_MAX: Duration = Duration::from_secs(3);

/// Requests that clients are answered after a process of the mesh has come back.
const ANSWERS: u64 = 6;

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    CutStore,
    CutBroker,
    KillStore,
    KillBroker,
    RestartAll,
    FullDisk,
    OldCopy,
    LostDisk,
    Erase,
    /// Messages of the stream come again, in another order.
    Redeliver,
    KillGateway,
    KillScheduler,
    KillWorker,
    KillEngine,
    /// A worker is cut off from one store.
    CutWorker,
}

/// All kinds.
pub(crate) const KINDS: [Kind; 15] = [
    Kind::CutStore,
    Kind::CutBroker,
    Kind::KillStore,
    Kind::KillBroker,
    Kind::RestartAll,
    Kind::FullDisk,
    Kind::OldCopy,
    Kind::LostDisk,
    Kind::Erase,
    Kind::Redeliver,
    Kind::KillGateway,
    Kind::KillScheduler,
    Kind::KillWorker,
    Kind::KillEngine,
    Kind::CutWorker,
];

/// A fault with all that was drawn for it.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    /// The store, broker, gateway or worker that it hits.
    node: usize,
    /// The store from which a worker is cut off.
    other: usize,
    /// Whether it ends before the next one begins.
    ends_early: bool,
    /// Whether a copy is made of the data of a store that is killed.
    saves_copy: bool,
    /// The tenant and session of an erasure.
    erased: (usize, usize),
    work: u64,
    lasts: Duration,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {}", self.kind, self.node)?;
        match self.kind {
            Kind::Erase => write!(f, " (tenant and session {:?})", self.erased),
            Kind::RestartAll | Kind::Redeliver => Ok(()),
            Kind::CutWorker => write!(f, " from store {} for {:?}", self.other, self.lasts),
            _ => write!(f, " for {:?}", self.lasts),
        }?;
        f.write_str(if self.ends_early { "" } else { ", to the end" })
    }
}

/// Draws faults. Each kind is drawn once before any is drawn again.
pub(crate) struct Deck {
    kinds: VecDeque<Kind>,
    has_disk: bool,
}

impl Deck {
    pub(crate) fn new(has_disk: bool) -> Deck {
        Deck {
            kinds: VecDeque::new(),
            has_disk,
        }
    }

    /// The faults of a round.
    pub(crate) fn draw(&mut self, rng: &mut Rng) -> Vec<Fault> {
        let count = rng.usize(1..=FAULTS_MAX);
        (0..count).map(|_| self.draw_one(rng)).collect()
    }

    fn draw_one(&mut self, rng: &mut Rng) -> Fault {
        let kind = loop {
            if self.kinds.is_empty() {
                let mut kinds = KINDS;
                rng.shuffle(&mut kinds);
                self.kinds.extend(kinds);
            }
            match self.kinds.pop_front() {
                Some(Kind::FullDisk) if !self.has_disk => {}
                Some(kind) => break kind,
                None => {}
            }
        };
        let lasts = Duration::from_millis(rng.u64(LASTS_MS));
        let is_of_mesh = kind.node_of_mesh(0).is_some();
        Fault {
            kind,
            node: match kind {
                Kind::FullDisk => STORE_WITH_DISK,
                Kind::KillScheduler => 0,
                Kind::KillGateway => rng.usize(..GATEWAYS),
                Kind::KillWorker | Kind::KillEngine | Kind::CutWorker => rng.usize(..WORKERS),
                _ => rng.usize(..NODES),
            },
            other: rng.usize(..NODES),
            // With all workers gone for long, requests would be refused, and rightly so.
            ends_early: rng.bool() || is_of_mesh,
            saves_copy: rng.bool(),
            erased: (rng.usize(..TENANTS), rng.usize(..SESSIONS)),
            work: rng.u64(WORK),
            lasts: match is_of_mesh {
                true => lasts.min(MESH_LASTS_MAX),
                false => lasts,
            },
        }
    }
}

impl Kind {
    /// The process of the mesh that is killed.
    fn node_of_mesh(self, number: usize) -> Option<Node> {
        match self {
            Kind::KillGateway => Some(Node::Gateway(number)),
            Kind::KillScheduler => Some(Node::Scheduler),
            Kind::KillWorker => Some(Node::Worker(number)),
            Kind::KillEngine => Some(Node::Engine(number)),
            _ => None,
        }
    }
}

/// An erasure that was asked for while other faults went on.
pub(crate) struct Erasure {
    pub(crate) store: usize,
    pub(crate) tenant: usize,
    pub(crate) session: String,
    answer: JoinHandle<anyhow::Result<EraseReply>>,
    /// The store lost its disk meanwhile, so it may have forgotten the erasure.
    is_forgotten: bool,
}

impl Erasure {
    /// The time of the erasure. `None` if it has to be repeated.
    pub(crate) async fn erased_at_ms(self) -> Option<u64> {
        let answer = tokio::time::timeout(PATIENCE, self.answer).await;
        match answer {
            Ok(Ok(Ok(reply))) if !self.is_forgotten => Some(reply.erased_at_ms),
            _ => None,
        }
    }
}

/// The state of a cluster's faults in a round.
pub(crate) struct Damage<'a> {
    cluster: &'a mut Cluster,
    account: &'a Account,
    tally: &'a Tally,
    round: usize,
    rng: Rng,
    pub(crate) erasures: Vec<Erasure>,
    /// Messages that came once more.
    pub(crate) redelivered: usize,
}

impl<'a> Damage<'a> {
    pub(crate) fn new(
        cluster: &'a mut Cluster,
        account: &'a Account,
        tally: &'a Tally,
        round: usize,
        seed: u64,
    ) -> Damage<'a> {
        Damage {
            cluster,
            account,
            tally,
            round,
            rng: Rng::with_seed(seed),
            erasures: Vec::new(),
            redelivered: 0,
        }
    }

    /// Has writers work for a while, begins a fault, and has them work on. It may last beyond that.
    pub(crate) async fn strike(&mut self, fault: &Fault) -> anyhow::Result<()> {
        self.work(fault.work, Duration::ZERO).await;
        self.begin(fault)
            .await
            .with_context(|| format!("{fault} did not begin"))?;
        match fault.kind.node_of_mesh(fault.node) {
            Some(_) => tokio::time::sleep(fault.lasts).await,
            None => self.work(fault.work, fault.lasts).await,
        }
        if fault.ends_early {
            self.end(fault)
                .await
                .with_context(|| format!("{fault} did not end"))?;
        }
        if fault.kind.node_of_mesh(fault.node).is_some() {
            self.serve().await?;
        }
        Ok(())
    }

    /// Waits until clients have got some answers.
    async fn serve(&self) -> anyhow::Result<()> {
        let wanted = self.tally.answered() + ANSWERS;
        eventually("clients are answered", async || {
            match self.tally.answered() {
                answered if answered >= wanted => Ok(()),
                answered => Err(format!("{answered} of {wanted} answers")),
            }
        })
        .await
    }

    /// Ends a fault. It may have ended before.
    pub(crate) async fn end(&mut self, fault: &Fault) -> anyhow::Result<()> {
        let cluster = &mut *self.cluster;
        match fault.kind {
            Kind::CutStore => cluster.set_store_cut(fault.node, false),
            Kind::CutBroker => cluster.set_broker_cut(fault.node, false),
            Kind::KillBroker => cluster.start_broker(fault.node),
            Kind::FullDisk => match &cluster.stores[fault.node].disk {
                Some(disk) => disk.set_full(false),
                None => Ok(()),
            },
            Kind::KillStore | Kind::OldCopy | Kind::LostDisk => {
                cluster.start_store(fault.node).await
            }
            Kind::CutWorker => cluster.set_worker_cut(fault.node, fault.other, false),
            Kind::KillGateway | Kind::KillScheduler | Kind::KillWorker | Kind::KillEngine => {
                match fault.kind.node_of_mesh(fault.node) {
                    Some(node) => cluster.start_node(node).await,
                    None => Ok(()),
                }
            }
            Kind::RestartAll | Kind::Erase | Kind::Redeliver => Ok(()),
        }
    }

    async fn begin(&mut self, fault: &Fault) -> anyhow::Result<()> {
        let node = fault.node;
        match fault.kind {
            Kind::CutStore => self.cluster.set_store_cut(node, true),
            Kind::CutBroker => self.cluster.set_broker_cut(node, true),
            Kind::KillBroker => self.cluster.kill_broker(node),
            Kind::FullDisk => match &self.cluster.stores[node].disk {
                Some(disk) if self.cluster.stores[node].is_running() => disk.set_full(true),
                _ => Ok(()),
            },
            Kind::KillStore => {
                self.cluster.kill_store(node).await?;
                match fault.saves_copy {
                    true => self.cluster.stores[node].save_copy(),
                    false => Ok(()),
                }
            }
            Kind::RestartAll => {
                for node in Mesh::nodes() {
                    self.cluster.kill_node(node).await?;
                }
                for number in 0..NODES {
                    self.cluster.kill_store(number).await?;
                    self.cluster.kill_broker(number)?;
                }
                self.cluster.start_missing().await
            }
            Kind::OldCopy => self.restore(fault).await,
            Kind::LostDisk => {
                self.cluster.kill_store(node).await?;
                self.cluster.stores[node].lose_data()?;
                self.lose(node);
                self.cluster.start_store(node).await
            }
            Kind::Erase => {
                self.erase(fault);
                Ok(())
            }
            Kind::Redeliver => {
                let broker = Node::Broker(node);
                let broker = self.cluster.network.listen(broker, Port::Clients);
                let url = format!("nats://{broker}");
                self.redelivered += redeliver(&url, STREAM, &mut self.rng).await;
                Ok(())
            }
            Kind::CutWorker => self.cluster.set_worker_cut(node, fault.other, true),
            Kind::KillGateway | Kind::KillScheduler | Kind::KillWorker | Kind::KillEngine => {
                match fault.kind.node_of_mesh(node) {
                    Some(node) => self.cluster.kill_node(node).await,
                    None => Ok(()),
                }
            }
        }
    }

    /// Brings an old copy of a store's data back. If there is none so far, this makes one and goes on for a while.
    async fn restore(&mut self, fault: &Fault) -> anyhow::Result<()> {
        let node = fault.node;
        self.cluster.kill_store(node).await?;
        if !self.cluster.stores[node].has_copy() {
            self.cluster.stores[node].save_copy()?;
            self.cluster.start_store(node).await?;
            self.work(2 * fault.work, Duration::ZERO).await;
            self.cluster.kill_store(node).await?;
        }
        self.cluster.stores[node].restore_copy()?;
        self.lose(node);
        self.cluster.start_store(node).await
    }

    /// Notes that a store has lost what only it had.
    fn lose(&mut self, store: usize) {
        self.account.ledger().lose(store);
        for erasure in &mut self.erasures {
            erasure.is_forgotten |= erasure.store == store;
        }
    }

    /// Asks a store for an erasure, which goes on by itself.
    fn erase(&mut self, fault: &Fault) {
        let (tenant, number) = fault.erased;
        let session = session(self.round, number);
        let calls = self.cluster.stores[fault.node].calls.clone();
        let asked = session.clone();
        let answer = tokio::spawn(async move { calls.erase_session(tenant, &asked).await });
        self.erasures.push(Erasure {
            store: fault.node,
            tenant,
            session,
            answer,
            is_forgotten: false,
        });
    }

    /// Waits until writers were acknowledged so much more, and such a time has passed. While no store runs, nobody
    /// is acknowledged anything.
    async fn work(&self, appends: u64, at_least: Duration) {
        let wanted = self.account.acknowledged() + appends;
        let began = Instant::now();
        while self.account.acknowledged() < wanted || began.elapsed() < at_least {
            let is_running = |number: usize| self.cluster.stores[number].is_running();
            if !(0..NODES).any(is_running) || began.elapsed() > PATIENCE {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ROUNDS, SEED};

    #[test]
    fn every_kind_of_fault_is_drawn_before_one_is_drawn_again() {
        for seed in 0..20 {
            let (mut deck, mut rng) = (Deck::new(true), Rng::with_seed(seed));
            let drawn: Vec<Kind> = (0..KINDS.len())
                .map(|_| deck.draw_one(&mut rng).kind)
                .collect();
            assert!(KINDS.iter().all(|kind| drawn.contains(kind)), "{drawn:?}");
        }
    }

    #[test]
    fn the_usual_rounds_have_every_kind_of_fault() {
        let (mut deck, mut rng) = (Deck::new(true), Rng::with_seed(SEED));
        let mut drawn = Vec::new();
        for _ in 0..ROUNDS {
            drawn.extend(deck.draw(&mut rng).into_iter().map(|fault| fault.kind));
            // Each round draws the seed of its load after its faults.
            rng.u64(..);
        }
        assert!(KINDS.iter().all(|kind| drawn.contains(kind)), "{drawn:?}");
    }

    #[test]
    fn the_same_seed_draws_the_same_faults() {
        let draw = |seed| {
            let (mut deck, mut rng) = (Deck::new(false), Rng::with_seed(seed));
            let rounds = (0..20).map(|_| deck.draw(&mut rng));
            let faults = rounds.flatten().map(|fault| fault.to_string());
            faults.collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        assert!(draw(7).iter().all(|fault| !fault.contains("FullDisk")));
    }
}
