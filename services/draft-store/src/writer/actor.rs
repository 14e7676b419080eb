//! The writer's actor: gathers updates for a commit, gives the core its clock, and opens the store again
//! after an error or a panic.
//!
//! It lives on a thread of its own, so a slow fsync stalls nobody but those who wait for it. The core is not
//! in a `service_kit::guard`, since what rebuilds it reads a disk and may fail: then the store is closed, and
//! opened again with the next tick.

mod figures;
mod gathering;
mod requests;
pub(crate) mod rewriting;
pub(crate) mod sealing;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use actix::{Actor, AsyncContext, Context, Handler};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::clock;
use tokio::sync::oneshot;

use super::call::Call;
use super::{Core, Outcome, Removal};
use crate::admin;
use crate::catalog::Catalog;
use crate::config::DraftStoreConfig;
use crate::directory::{self, Hold, Loss, Manifest, Opened};
use crate::log::journaled::Index;
use crate::log::{LogError, RecordLog};
use crate::metrics::{Limit, StoreMetrics};
use crate::record::{DocumentKey, SegmentId};
use crate::segments;
use crate::shared::{Open, Shared, unavailable};
use crate::text::TextError;
use gathering::Gathered;
use rewriting::Rewriting;
use sealing::Sealing;

/// Documents that are remembered at most for having had the index built anew.
const REREAD_MAX: usize = 4_096;
/// Between two indexes that are built anew; doubled each time, up to the most.
const REBUILD_WAIT: Duration = Duration::from_secs(1);
const REBUILD_WAIT_MAX: Duration = Duration::from_secs(600);
/// How far the manifest may be behind.
const MANIFEST_INTERVAL: Duration = Duration::from_secs(10);
/// The same where nothing changed but the time, which a start goes on from.
const MANIFEST_AGE_MAX: Duration = Duration::from_secs(600);

pub(crate) struct Writer {
    shared: Arc<Shared>,
    config: DraftStoreConfig,
    metrics: StoreMetrics,
    pending_tokens: Arc<AtomicU64>,
    /// `None` while the store is closed.
    core: Option<Core>,
    gathered: Gathered,
    evicted_documents: u64,
    closed: bool,
    /// Waits for the threads to end.
    closing: Option<oneshot::Sender<()>>,
    rewriting: Rewriting,
    sealing: Sealing,
    /// How often the store was opened: what is told of an earlier time is void.
    opened: u64,
    log_number: u64,
    /// How the log's index is treated when it is opened next.
    index: Index,
    /// Documents for which the index was built anew: those that are still unreadable are so in the journal.
    reread: HashSet<DocumentKey>,
    /// How often it was built anew, and from when on it may be once more.
    rebuilds: u32,
    rebuild_not_before: Instant,
    hold: Hold,
    /// What the manifest says, and since when.
    manifest_head: u64,
    manifest_written: Instant,
}

/// How an index is treated after an error: one that could not read its own records is built anew.
fn index_after(log: &dyn RecordLog) -> Index {
    match log.is_suspect() {
        true => Index::Rebuilt,
        false => Index::Believed,
    }
}

/// The store cannot be opened or written; the caller may try again.
fn refuses(error: &LogError) -> ApiError {
    ApiError::new(
        ErrorKind::Unavailable,
        "the draft store's disk refuses; try again",
    )
    .with_retry_after_ms(1_000)
    .with_detail(error)
}

impl Writer {
    /// Opens the store.
    ///
    /// # Errors
    /// The disk refuses, or another process holds the directory.
    pub(crate) fn open(
        config: DraftStoreConfig,
        shared: Arc<Shared>,
        metrics: StoreMetrics,
        pending_tokens: Arc<AtomicU64>,
    ) -> Result<Self, LogError> {
        let hold = Hold::take(&config.data_dir)?;
        let mut writer = Writer {
            shared,
            config,
            metrics,
            pending_tokens,
            core: None,
            gathered: Gathered::default(),
            evicted_documents: 0,
            closed: false,
            closing: None,
            rewriting: Rewriting::new(),
            sealing: Sealing::default(),
            opened: 0,
            log_number: 0,
            index: Index::Believed,
            reread: HashSet::new(),
            rebuilds: 0,
            rebuild_not_before: Instant::now(),
            hold,
            manifest_head: 0,
            manifest_written: Instant::now(),
        };
        writer.reopen()?;
        Ok(writer)
    }

    fn reopen(&mut self) -> Result<(), LogError> {
        self.hold.check()?;
        let Opened {
            log,
            number,
            store,
            loaded,
            quarantined,
            loss,
            known_ms,
            damage: _,
        } = directory::open(
            &self.config.data_dir,
            self.config.cache_bytes,
            clock::unix_ms(),
            self.index,
        )?;
        self.index = Index::Believed;
        // Where no manifest tells the time, the documents do.
        self.shared.start_clock(match known_ms {
            0 => loaded.catalog.last_used_ms().unwrap_or(0),
            known_ms => known_ms,
        });
        self.shared.set_loss(loss);
        if let Some(Loss { expected, found }) = loss {
            tracing::error!(expected, found, "draft store has lost documents");
        }
        if quarantined.is_some() {
            self.metrics.quarantines.inc();
        }
        self.metrics.damaged_records.inc_by(loaded.damaged_records);
        self.metrics
            .segments_lost
            .inc_by(loaded.lost_segments as u64);
        if loaded.damaged_records > 0 {
            tracing::error!(
                records = loaded.damaged_records,
                "draft store records are damaged"
            );
        }
        let mut core = Core::new(
            log.clone(),
            self.config.clone(),
            store,
            loaded.repairs,
            loaded.damaged,
        );
        core.set_reread(Arc::new(self.reread.clone()));
        self.shared.set_open(Some(Open {
            catalog: loaded.catalog,
            log,
        }));
        self.core = Some(core);
        self.opened += 1;
        self.log_number = number;
        self.observe();
        Ok(())
    }

    /// Runs an action on the open store, under the lock. After an error or a panic the store is closed.
    fn run(
        &mut self,
        action: impl FnOnce(&mut Core, &mut Catalog, u64) -> Result<Outcome, LogError>,
    ) -> Result<Outcome, ApiError> {
        let outcome = {
            let mut open = self.shared.write();
            let (Some(core), Some(store)) = (self.core.as_mut(), open.as_mut()) else {
                return Err(unavailable());
            };
            // Core and catalog are thrown away after a panic: that is what makes the unwind safe.
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                action(core, &mut store.catalog, self.shared.now_ms())
            }));
            if !matches!(outcome, Ok(Ok(_))) {
                self.index = index_after(&*store.log);
                if let Ok(Err(LogError::Unreadable(key))) = &outcome {
                    self.reread.insert(*key);
                    self.index = Index::Rebuilt;
                }
                // Before anybody else gets the lock. Core and catalog both hold the log; sled gives its own
                // lock back with the last of them.
                self.shared.note_closed();
                *open = None;
                self.core = None;
            }
            outcome
        };
        match outcome {
            Ok(Ok(outcome)) => {
                self.publish(&outcome);
                Ok(outcome)
            }
            Ok(Err(error)) => {
                self.metrics.writer_restarts.inc();
                tracing::error!(%error, "draft store log refused, opening it again");
                Err(refuses(&error))
            }
            Err(_) => {
                self.metrics.writer_restarts.inc();
                tracing::error!("draft store writer panicked, opening the log again");
                Err(ApiError::internal("the writer panicked"))
            }
        }
    }

    fn publish(&mut self, outcome: &Outcome) {
        self.metrics.appended_tokens.inc_by(outcome.appended_tokens);
        for (_, removal) in &outcome.removed {
            self.metrics
                .evictions
                .with_label_values(&[removal.as_str()])
                .inc();
        }
        let full = Limit::GroupTokens.as_str();
        let rejections = self.metrics.rejections.with_label_values(&[full]);
        rejections.inc_by(outcome.group_rejections);
        self.evicted_documents += outcome.removed.len() as u64;
        self.delete_emptied(&outcome.emptied);
        if outcome.reserved {
            let _ = self.write_manifest(false);
        }
        self.observe();
        self.shared.wake(&outcome.changed);
    }

    /// Deletes the files of segments that nothing is left of. What that fails at is an orphan, for the next start or
    /// erasure.
    fn delete_emptied(&self, emptied: &[SegmentId]) {
        if emptied.is_empty() {
            return;
        }
        // Views hold on to files: without this their room would not come back.
        self.drop_views();
        if let Err(error) = segments::delete(&self.config.data_dir, emptied) {
            tracing::warn!(%error, "draft store segment not deleted");
        }
    }

    /// Writes the manifest; while the store is closed there is none to write.
    fn write_manifest(&mut self, closed: bool) -> Result<(), LogError> {
        let open = self.shared.read();
        let (Some(core), Some(open)) = (&self.core, open.as_ref()) else {
            return Ok(());
        };
        let manifest = Manifest::new(self.log_number, core.store(), &open.catalog, closed)
            .with(self.shared.loss(), self.shared.now_ms());
        self.manifest_head = open.catalog.head();
        self.manifest_written = Instant::now();
        // Without a fresh one a rollback of sled would be noticed later or not at all; no reason to stop.
        manifest
            .write(&self.config.data_dir)
            .inspect_err(|error| tracing::warn!(%error, "draft store manifest not written"))
    }

    /// Writes the manifest when it has been out of date for a while.
    fn refresh_manifest(&mut self) {
        let head = self.shared.read().as_ref().map(|open| open.catalog.head());
        let age = self.manifest_written.elapsed();
        let is_behind = head.is_some_and(|head| head != self.manifest_head);
        if age >= MANIFEST_INTERVAL && is_behind || age >= MANIFEST_AGE_MAX {
            let _ = self.write_manifest(false);
        }
    }

    /// Closes a log whose index a reader could not read. The next tick opens it with an index built anew.
    fn close_suspect(&mut self) -> bool {
        let is_suspect = self
            .shared
            .read()
            .as_ref()
            .is_some_and(|open| open.log.is_suspect());
        if is_suspect {
            self.rebuild_index();
        }
        self.core.is_none()
    }

    /// Answers which of the documents that a reader could not read cannot be read now. `None`: for some of them the index is
    /// to be built anew first.
    fn still_unreadable(&mut self, keys: Vec<DocumentKey>) -> Option<Vec<DocumentKey>> {
        let mut unreadable = keys;
        let mut new = Vec::new();
        if let Some(open) = self.shared.read().as_ref() {
            unreadable.retain(|key| {
                open.catalog.document(*key).is_some()
                    && matches!(admin::whole(open, *key), Err(TextError::Damaged(_)))
            });
            new.extend(unreadable.iter().copied().filter(|key| {
                open.log.can_be_rebuilt()
                    && open.catalog.sealed(*key).is_none()
                    && !self.reread.contains(key)
            }));
        }
        if new.is_empty() {
            return Some(unreadable);
        }
        self.note_reread(new);
        None
    }

    /// Remembers for which documents the index is built anew. Past the bound one may be built in vain.
    fn note_reread(&mut self, keys: impl IntoIterator<Item = DocumentKey>) {
        if self.reread.len() >= REREAD_MAX {
            self.reread.clear();
        }
        self.reread.extend(keys);
    }

    /// Closes the store, unless that was done a moment ago. The next tick opens it with an index built anew.
    fn rebuild_index(&mut self) {
        let now = Instant::now();
        if now < self.rebuild_not_before {
            return;
        }
        let wait = REBUILD_WAIT.saturating_mul(1 << self.rebuilds.min(10));
        self.rebuild_not_before = now + wait.min(REBUILD_WAIT_MAX);
        self.rebuilds = self.rebuilds.saturating_add(1);
        tracing::error!("draft store index is damaged, building it anew");
        self.metrics.writer_restarts.inc();
        self.index = Index::Rebuilt;
        self.shared.set_open(None);
        self.core = None;
    }

    fn tick(&mut self, ctx: &mut Context<Self>) {
        if self.closed || self.closing.is_some() {
            return;
        }
        if self.core.is_none() {
            match self.reopen() {
                Ok(()) => tracing::info!("draft store log open again"),
                Err(error) => tracing::error!(%error, "draft store log does not open"),
            }
            return;
        }
        if self.close_suspect() {
            return;
        }
        let more = self.run(Core::tick).is_ok_and(|outcome| outcome.more);
        self.drop_views();
        self.observe_disk();
        self.refresh_manifest();
        self.begin_next(ctx);
        if more {
            // What waits in the mailbox goes first.
            ctx.run_later(Duration::from_millis(1), |writer, ctx| writer.tick(ctx));
        }
    }
}

impl Actor for Writer {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(self.config.mailbox_max);
        self.observe_disk();
        ctx.run_interval(Duration::from_millis(self.config.tick_ms), |writer, ctx| {
            writer.tick(ctx)
        });
    }
}

impl Handler<Call> for Writer {
    type Result = ();

    fn handle(&mut self, call: Call, ctx: &mut Self::Context) {
        match call {
            Call::Append {
                append,
                tokens,
                reply,
            } => self.gather_append(append, tokens, reply, ctx),
            Call::Touch(keys) => {
                // Advisory: while the store is closed there is nothing to touch.
                let _ = self.run(|core, catalog, now_ms| {
                    core.touch(catalog, &keys, now_ms);
                    Ok(Outcome::default())
                });
            }
            Call::Forget(keys) => {
                let Some(keys) = self.still_unreadable(keys) else {
                    // Perhaps the index alone is damaged, and the journal has the text.
                    self.rebuild_index();
                    return;
                };
                if keys.is_empty() {
                    return;
                }
                self.metrics.damaged_records.inc_by(keys.len() as u64);
                tracing::error!(documents = keys.len(), "documents are damaged and removed");
                let _ = self.run(|core, catalog, now_ms| {
                    core.remove(catalog, &keys, Removal::Damage, now_ms)
                });
            }
            Call::Register(registration, reply) => {
                let _ = reply.send(self.register_group(registration));
            }
            Call::Mark(mark, reply) => {
                // What was told before an erasure is erased by it.
                self.commit();
                let _ = reply.send(self.mark(mark));
            }
            Call::Erase(keys, reply) => {
                let outcome = self.run(|core, catalog, now_ms| {
                    core.remove(catalog, &keys, Removal::Erased, now_ms)
                });
                let _ = reply.send(outcome.map(|outcome| outcome.removed.len() as u64));
            }
            Call::Ask(namespace, reply) => {
                let _ = reply.send(self.known_chances(namespace));
            }
            Call::Confirm(what, reply) => {
                let _ = reply.send(self.confirm(what));
            }
            Call::Tell(told, reply) => self.gather_told(told, reply, ctx),
            Call::Rewrite(call) => self.handle_rewrite(call, ctx),
            Call::Seal(call) => self.handle_seal(call, ctx),
            Call::Close(reply) => {
                self.commit();
                self.rewriting.stop();
                self.sealing.stop();
                self.closing = Some(reply);
                self.close_if_quiet();
            }
        }
    }
}
