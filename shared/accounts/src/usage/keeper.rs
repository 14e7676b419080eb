//! The totals and their file. An actor works on them, and everybody else sends it messages.
//!
//! A short request is the exception. It has no earlier message, so it writes its only record itself, while the file
//! is free and quick. Waking the actor and being woken by it takes longer than such a write.
//!
//! A request reserves room for its last message before it runs. So that message is sent at once, also when the client
//! has left, and nothing is lost when the disk is slow: new requests wait instead. Progress in between has no such
//! room. It is left out while the queue is full, since the next progress says the same and more.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use parking_lot::Mutex;
use refrain_protocol::usage::{UsageCounts, UsageErasure, UsageRow, hour_of};
use refrain_service_kit::actors::{self, Inbox};
use refrain_service_kit::clock::{unix_ms, unix_s};
use tokio::sync::{mpsc, oneshot};

use super::book::{Book, Record, UsageSubject};
use super::journal::{FoundJournal, Journal};
use crate::metrics::AccountMetrics;
use crate::tenants::Budgets;

/// Messages that may wait, beside the last ones of the requests in flight.
const QUEUE: usize = 8_192;

/// Messages that are written at once.
const BATCH: usize = 256;

/// Pause between two attempts to rewrite the file on a disk that refuses.
const REWRITE_PAUSE: Duration = Duration::from_secs(1);

/// A write that takes longer is a sign of a slow disk. Requests do not write themselves then,
const SLOW_WRITE: Duration = Duration::from_millis(5);
/// for this time, since whatever their threads also serve would wait with them.
const SLOW_PAUSE: Duration = Duration::from_secs(10);

/// Counts of a request since it began.
#[derive(Debug)]
pub(super) struct RequestCounts {
    pub(super) request: u64,
    pub(super) subject: Arc<UsageSubject>,
    pub(super) at_ms: u64,
    pub(super) counts: UsageCounts,
}

/// Rows for a store.
#[derive(Debug, Default)]
pub(super) struct ChangedRows {
    pub(super) rows: Vec<UsageRow>,
    /// The last change that is in them.
    pub(super) last_change: u64,
    /// Rows that have changed after that.
    pub(super) more: usize,
}

/// A message to the actor.
#[derive(Debug)]
pub(super) enum Message {
    /// A request runs.
    Progress(RequestCounts),
    /// A request has ended. The answer comes when that is written.
    Settled {
        of: RequestCounts,
        reply: Option<oneshot::Sender<()>>,
    },
    /// Asks for the rows that have changed after a change.
    Changed {
        after: u64,
        rows_max: usize,
        reply: oneshot::Sender<ChangedRows>,
    },
    /// The usage of tenants was erased. The answer comes when nothing of it is in the file any more.
    Erase {
        erasures: Vec<UsageErasure>,
        reply: oneshot::Sender<()>,
    },
    /// All changes up to this one have been sent to every store.
    Sent(u64),
    /// Asks for the end of the actor.
    Close(oneshot::Sender<()>),
}

/// The way to the actor. Cheap to clone.
#[derive(Clone)]
pub(super) struct KeeperHandle {
    pub(super) messages: mpsc::Sender<Message>,
    pub(super) gateway: u128,
    /// `None` once the actor has ended.
    keeper: Arc<Mutex<Option<Keeper>>>,
}

impl KeeperHandle {
    /// The way to a queue that a test reads itself.
    #[cfg(test)]
    pub(super) fn of_queue(messages: mpsc::Sender<Message>) -> Self {
        KeeperHandle {
            messages,
            gateway: 1,
            keeper: Arc::default(),
        }
    }

    /// Writes down a request that has ended and had no progress. The caller's thread does so, and is held for as long
    /// as one write to the file takes.
    ///
    /// # Errors
    /// Gives the counts back where they have to be sent as a message: the actor is at work, or the disk is slow or
    /// refuses.
    pub(super) fn settle_at_once(&self, of: RequestCounts) -> Result<(), RequestCounts> {
        let Some(mut keeper) = self.keeper.try_lock() else {
            return Err(of);
        };
        match keeper.as_mut() {
            Some(keeper) => keeper.settle_at_once(of),
            None => Err(of),
        }
    }

    /// Sends a message, and waits for its answer. `None` if the actor has ended.
    pub(super) async fn ask<T>(
        &self,
        message: impl FnOnce(oneshot::Sender<T>) -> Message,
    ) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.messages.send(message(reply)).await.ok()?;
        answer.await.ok()
    }

    /// Writes what is left, and ends the actor.
    pub(super) async fn close(&self) {
        let _ = self.ask(Message::Close).await;
    }
}

struct Keeper {
    book: Book,
    journal: Journal,
    metrics: Arc<AccountMetrics>,
    rewrite_not_before: Instant,
    /// Requests do not write themselves before.
    at_once_not_before: Instant,
    was_refused: bool,
    /// Messages that are being taken. Those behind one that panics are taken with the next batch.
    batch: VecDeque<Message>,
    /// The file still has rows that were erased.
    has_unwritten_erasure: bool,
}

/// Reads the file in `dir`, tells the budgets what was counted, and starts the actor. It needs a runtime.
///
/// A full disk is not an error: as in a gateway that runs already, counts stay in memory until there is room.
///
/// # Errors
/// The directory cannot be used.
pub(super) fn start(
    dir: &Path,
    requests_max: usize,
    budgets: &Budgets,
    metrics: &Arc<AccountMetrics>,
) -> anyhow::Result<KeeperHandle> {
    let place = || format!("gateway.usage_dir = {}", dir.display());
    let mut found = FoundJournal::read(dir, unix_ms()).with_context(place)?;
    let gateway = found.gateway;
    let book = Book::recovered(gateway, std::mem::take(&mut found.records));
    for row in book.rows() {
        budgets.restore(
            &row.id.tenant,
            &row.id.key,
            row.id.hour,
            row.total.counts.tokens(),
        );
    }
    for (month, tenant, key, tokens) in book.forgotten() {
        budgets.restore_month(tenant, key, month, tokens);
    }
    let mut keeper = Keeper {
        book,
        journal: found.journal(),
        metrics: metrics.clone(),
        rewrite_not_before: Instant::now(),
        at_once_not_before: Instant::now(),
        was_refused: false,
        batch: VecDeque::with_capacity(BATCH),
        has_unwritten_erasure: false,
    };
    match keeper.journal.rewrite(keeper.book.records()) {
        Err(error) if !is_full(&error) => return Err(error).with_context(place),
        rewritten => keeper.note("written", rewritten.err()),
    }
    let room = QUEUE
        .saturating_add(requests_max)
        .min(tokio::sync::Semaphore::MAX_PERMITS);
    let keeper = Arc::new(Mutex::new(Some(keeper)));
    let kept = keeper.clone();
    let (messages, actor) =
        actors::start_with("usage journal", room, move |inbox| run(kept.clone(), inbox));
    // It ends when it is told to close, or with the last sender.
    actor.detached();
    Ok(KeeperHandle {
        messages,
        gateway,
        keeper,
    })
}

/// Whether a disk refuses because it has no room.
fn is_full(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded)
}

/// The body of the actor. It takes the keeper away when it ends.
async fn run(kept: Arc<Mutex<Option<Keeper>>>, mut messages: Inbox<Message>) {
    let mut closing = None;
    while closing.is_none() {
        let mut batch = Vec::with_capacity(BATCH);
        if messages.recv_many(&mut batch, BATCH).await == 0 {
            break;
        }
        let kept = kept.clone();
        closing = actors::blocking(move || kept.lock().as_mut()?.take_all(batch)).await;
    }
    actors::blocking(move || {
        let last = kept.lock().take();
        if let Some(mut keeper) = last {
            keeper.sync();
        }
    })
    .await;
    if let Some(reply) = closing {
        let _ = reply.send(());
    }
}

impl Keeper {
    /// Takes messages, and writes what they say. Returns how to answer a wish to close.
    fn take_all(&mut self, batch: Vec<Message>) -> Option<oneshot::Sender<()>> {
        let (mut closing, mut settled) = (None, Vec::new());
        self.batch.extend(batch);
        while let Some(message) = self.batch.pop_front() {
            match message {
                Message::Close(reply) => closing = Some(reply),
                Message::Settled { of, reply } => {
                    self.settle(of);
                    settled.extend(reply);
                }
                other => self.take(other),
            }
        }
        self.write();
        for reply in settled {
            let _ = reply.send(());
        }
        self.observe();
        closing
    }

    fn settle_at_once(&mut self, of: RequestCounts) -> Result<(), RequestCounts> {
        // A file that is written anew takes too long for the threads that serve requests.
        if Instant::now() < self.at_once_not_before || self.journal.is_rewrite_due() {
            return Err(of);
        }
        let record = whole(&of);
        self.journal.append(&record);
        if !self.write_journal() {
            // The message will say it again, and from now on the whole file is to be written.
            return Err(of);
        }
        self.book.apply(record);
        self.observe();
        Ok(())
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Progress(of) => {
                self.begin(&of);
                let RequestCounts {
                    request,
                    at_ms,
                    counts,
                    ..
                } = of;
                self.record(Record::Progress {
                    request,
                    at_ms,
                    counts,
                });
            }
            Message::Changed {
                after,
                rows_max,
                reply,
            } => {
                // A store must not know more than the disk: after a loss of power the totals here would be behind
                // it, and what is counted next would not be seen there.
                self.write();
                self.sync();
                let (rows, last_change) = self.book.changed(after, rows_max);
                let more = self.book.changed_count(last_change);
                let _ = reply.send(ChangedRows {
                    rows,
                    last_change,
                    more,
                });
            }
            Message::Erase { erasures, reply } => {
                for UsageErasure { tenant, at_ms } in erasures {
                    if self.book.is_new_erasure(&tenant, at_ms) {
                        self.book.apply(Record::Erased { tenant, at_ms });
                        self.has_unwritten_erasure = true;
                    }
                }
                if !self.has_unwritten_erasure || self.rewrite() {
                    let _ = reply.send(());
                }
            }
            Message::Sent(change) => {
                let rows = self.book.len();
                let lost = self.book.forget(hour_of(unix_s()), change);
                if lost > 0 {
                    self.metrics.families.usage_lost.inc_by(lost);
                    tracing::error!(
                        rows = lost,
                        "usage that could not be sent to a draft store was given up"
                    );
                }
                if self.book.len() != rows {
                    self.rewrite();
                }
            }
            Message::Settled { .. } | Message::Close(_) => {}
        }
    }

    fn settle(&mut self, of: RequestCounts) {
        self.record(match self.book.is_running(of.request) {
            true => Record::End {
                request: of.request,
                at_ms: of.at_ms,
                counts: of.counts,
            },
            false => whole(&of),
        });
    }

    /// Notes the beginning of a request that has no record yet.
    fn begin(&mut self, of: &RequestCounts) {
        if !self.book.is_running(of.request) {
            self.record(Record::Begin {
                request: of.request,
                subject: (*of.subject).clone(),
            });
        }
    }

    fn record(&mut self, record: Record) {
        self.journal.append(&record);
        self.book.apply(record);
    }

    /// Writes what the journal has taken. Returns whether the disk took it.
    fn write_journal(&mut self) -> bool {
        let began = Instant::now();
        let written = self.journal.write();
        let ended = Instant::now();
        if ended - began > SLOW_WRITE {
            self.at_once_not_before = ended + SLOW_PAUSE;
        }
        let is_written = written.is_ok();
        self.note("written", written.err());
        is_written
    }

    fn write(&mut self) {
        self.write_journal();
        if self.journal.is_rewrite_due() && Instant::now() >= self.rewrite_not_before {
            self.rewrite();
        }
    }

    fn sync(&mut self) {
        let synced = self.journal.sync();
        self.note("made durable", synced.err());
    }

    /// Writes the file anew. Returns whether that is done.
    fn rewrite(&mut self) -> bool {
        let rewritten = self.journal.rewrite(self.book.records());
        let is_done = rewritten.is_ok();
        self.has_unwritten_erasure &= !is_done;
        if is_done && self.was_refused {
            self.was_refused = false;
            tracing::info!("the usage journal is complete again");
        }
        if !is_done {
            self.rewrite_not_before = Instant::now() + REWRITE_PAUSE;
        }
        self.note("rewritten", rewritten.err());
        is_done
    }

    /// Counts a failure, and logs the first one. The totals in memory have everything.
    fn note(&mut self, what: &str, error: Option<std::io::Error>) {
        let Some(error) = error else { return };
        self.metrics.families.usage_write_failures.inc();
        if !std::mem::replace(&mut self.was_refused, true) {
            tracing::error!(
                %error,
                "the usage journal cannot be {what}: what is counted now would be lost with this process; make room"
            );
        }
    }

    fn observe(&self) {
        let families = &self.metrics.families;
        families.usage_rows.set(self.book.len() as i64);
        families
            .usage_journal_bytes
            .set(self.journal.bytes() as i64);
    }
}

/// The only record of a request.
fn whole(of: &RequestCounts) -> Record {
    Record::Whole {
        subject: (*of.subject).clone(),
        at_ms: of.at_ms,
        counts: of.counts,
    }
}

#[cfg(test)]
mod tests;
