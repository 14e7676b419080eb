//! Writers that append documents to the replicas, and note what is acknowledged.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fastrand::Rng;
use parking_lot::{Mutex, MutexGuard};
use refrain_protocol::DocumentId;
use refrain_protocol::document::{Acknowledgement, DocumentHead, DocumentUpdate, FinishReason};
use refrain_rpc::HttpDraftStore;
use refrain_service_kit::clock::unix_ms;
use tokio::task::JoinSet;

use crate::ledger::{Ledger, State, text};
use crate::network::NODES;
use crate::store::{Calls, TENANTS};

/// Writers whose first choice is the same store.
const WRITERS_PER_STORE: usize = 2;

/// Sessions of a round, per tenant.
pub(crate) const SESSIONS: usize = 3;

/// Attempts to send a piece. After that the document stays as it is, like that of a worker that was lost.
const ATTEMPTS_MAX: usize = 6;

/// Pause before another attempt.
const PAUSE: Duration = Duration::from_millis(100);

/// The account that all writers share.
#[derive(Clone, Default)]
pub(crate) struct Account {
    ledger: Arc<Mutex<Ledger>>,
    acknowledged: Arc<AtomicU64>,
    refused: Arc<AtomicU64>,
}

impl Account {
    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock()
    }

    /// Appends that were acknowledged so far.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    /// Appends that failed so far.
    pub(crate) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

/// Writers at work.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    writers: JoinSet<()>,
}

impl Load {
    pub(crate) fn start(
        stores: &[Calls],
        account: &Account,
        round: usize,
        seed: u64,
    ) -> anyhow::Result<Load> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut writers = JoinSet::new();
        for number in 0..NODES * WRITERS_PER_STORE {
            let clients = stores.iter().map(Calls::writer);
            let mut writer = Writer {
                stores: stores.to_vec(),
                clients: clients.collect::<anyhow::Result<_>>()?,
                account: account.clone(),
                stop: stop.clone(),
                rng: Rng::with_seed(seed.wrapping_mul(31).wrapping_add(number as u64)),
                round,
                number,
                documents: 0,
            };
            writers.spawn(async move {
                while !writer.is_stopped() {
                    writer.write().await;
                }
            });
        }
        Ok(Load { stop, writers })
    }

    /// Stops the writers. Documents that they were writing stay without an end.
    pub(crate) async fn stop(mut self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.writers.join_next().await {
            ended?;
        }
        Ok(())
    }
}

struct Writer {
    stores: Vec<Calls>,
    clients: Vec<HttpDraftStore>,
    account: Account,
    stop: Arc<AtomicBool>,
    rng: Rng,
    round: usize,
    number: usize,
    documents: u32,
}

/// The name of a session.
pub(crate) fn session(round: usize, number: usize) -> String {
    format!("session-{round}-{number}")
}

/// A document that is being written.
struct Document {
    number: u128,
    tenant: usize,
    head: DocumentHead,
    epoch: u64,
}

impl Writer {
    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Writes a document, piece by piece.
    async fn write(&mut self) {
        self.documents += 1;
        let number =
            (self.round as u128) << 64 | (self.number as u128) << 32 | u128::from(self.documents);
        let tenant = self.rng.usize(..TENANTS);
        let session = self
            .rng
            .bool()
            .then(|| session(self.round, self.rng.usize(..SESSIONS)));
        let created_ms = unix_ms();
        let head = DocumentHead {
            session: session.clone(),
            created_ms,
            left_context: text(number + 1, 16),
            ..DocumentHead::default()
        };
        self.account
            .ledger()
            .begin(number, self.round, tenant, session, created_ms);
        let mut document = Document {
            number,
            tenant,
            head,
            epoch: 1,
        };
        let (len, piece_max) = match self.rng.u8(..60) {
            0 => (self.rng.u32(10_000..30_000), 8_000),
            _ => (self.rng.u32(10..250), 80),
        };
        let has_end = self.rng.u8(..5) > 0;
        let mut store = match self.rng.u8(..5) {
            0 => self.rng.usize(..NODES),
            _ => self.number % NODES,
        };
        // Tokens that the store has said it has, and tokens that there are.
        let (mut stored, mut end) = (0, 0);
        while end < len {
            end = len.min(end + self.rng.u32(1..=piece_max));
            let is_finished = has_end && end == len;
            let sent = self.send(&mut document, &mut store, stored, end, is_finished);
            if !sent.await {
                return;
            }
            stored = end;
            let pause = Duration::from_millis(self.rng.u64(5..60));
            tokio::time::sleep(pause).await;
        }
    }

    /// Sends what a store lacks of a document, until it is acknowledged or too many attempts have failed. The
    /// document may move to another store.
    async fn send(
        &mut self,
        document: &mut Document,
        store: &mut usize,
        mut stored: u32,
        end: u32,
        is_finished: bool,
    ) -> bool {
        for _ in 0..ATTEMPTS_MAX {
            if self.is_stopped() {
                return false;
            }
            let level = match self.rng.bool() {
                true => Acknowledgement::Replicated,
                false => Acknowledgement::Local,
            };
            let state = State {
                epoch: document.epoch,
                len: end,
                is_finished,
            };
            let piece = DocumentUpdate {
                document: DocumentId(document.number),
                epoch: document.epoch,
                prev_len: stored,
                tokens: text(document.number, end).split_off(stored as usize),
                head: document.head.clone(),
                finish: is_finished.then_some(FinishReason::Stop),
            };
            self.account.ledger().send(document.number, state);
            let (calls, client) = (&self.stores[*store], &self.clients[*store]);
            match calls.append(client, document.tenant, level, piece).await {
                Ok(len) if len >= end => {
                    let mut ledger = self.account.ledger();
                    ledger.acknowledge(document.number, *store, level, state);
                    self.account.acknowledged.fetch_add(1, Ordering::Relaxed);
                    return true;
                }
                // The store has lost the beginning with its disk.
                Ok(len) => stored = len,
                Err(_) => {
                    self.account.refused.fetch_add(1, Ordering::Relaxed);
                    if self.rng.bool() {
                        // The request goes on elsewhere, and its new worker sends all of it.
                        *store = self.rng.usize(..NODES);
                        document.epoch += 1;
                        stored = 0;
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        false
    }
}
