//! The writer's actor. It gathers appends for a commit, gives the core its clock, and reopens the store after an
//! error or a panic.
//!
//! It lives on a thread of its own, so a slow `fdatasync` delays only those who wait for it. The core is not in a
//! `service_kit::guard`, since rebuilding it reads the disk and may fail. The store is then closed, and opened again
//! with the next tick.
//!
//! `calls.rs` has the calls of others, `commit_queue.rs` what they wait for, and `replication.rs` the calls of a
//! replica. `jobs.rs` runs background jobs and installs their results.

mod calls;
mod commit_queue;
mod gauges;
pub(crate) mod handle;
mod jobs;
mod replication;
mod replication_waiters;
#[cfg(test)]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use actix::{Actor, AsyncContext as _, Context, SpawnHandle};
use refrain_protocol::ApiError;
use refrain_service_kit::actors::Sentinel;
use refrain_service_kit::clock;
use tokio::sync::oneshot;

use crate::catalog::Catalog;
use crate::config::DraftStoreConfig;
use crate::directory::{self, DirectoryLock, Loss, Manifest, OpenedDirectory};
use crate::log::memory::MemoryLog;
use crate::log::{LogError, RecordLog};
use crate::metrics::StoreMetrics;
use crate::record::SegmentId;
use crate::segments;
use crate::shared_store::{OpenStore, SharedStore, unavailable};
use crate::writer::actor::commit_queue::CommitQueue;
use crate::writer::actor::replication_waiters::ReplicationWaiters;
use crate::writer::core::WriterCore;
use crate::writer::errors::disk_refused;
use crate::writer::outcome::CommitOutcome;
use crate::writer::remains::Remains;
use crate::writer::rewriter::Rewriter;
use crate::writer::sealer::Sealer;

/// The manifest is written at most this long after a change.
const MANIFEST_INTERVAL: Duration = Duration::from_secs(10);

/// The manifest is written this often without changes, since a start continues from its time.
const MANIFEST_AGE_MAX: Duration = Duration::from_secs(600);

/// The phases of the writer's life.
enum Lifecycle {
    Serves,
    /// The caller of a close waits until no background thread runs any more.
    Closes(oneshot::Sender<()>),
    Closed,
}

/// The last change that the manifest knows, and when it was written.
struct WrittenManifest {
    head: u64,
    at: Instant,
}

impl WrittenManifest {
    /// Whether it must be written again, for a store with this last change.
    fn is_outdated(&self, head: Option<u64>, now: Instant) -> bool {
        let age = now.saturating_duration_since(self.at);
        let is_behind = head.is_some_and(|head| head != self.head);
        age >= MANIFEST_INTERVAL && is_behind || age >= MANIFEST_AGE_MAX
    }
}

pub(crate) struct WriterActor {
    shared: Arc<SharedStore>,
    config: DraftStoreConfig,
    metrics: StoreMetrics,
    /// `None` while the store is closed.
    core: Option<WriterCore>,
    commit_queue: CommitQueue,
    commit_timer: Option<SpawnHandle>,
    evicted_documents: u64,
    lifecycle: Lifecycle,
    /// Ends the background job in progress early. A job that has ended leaves `None`.
    job: Option<Arc<AtomicBool>>,
    rewriter: Rewriter,
    sealer: Sealer,
    log_number: u64,
    /// The log of the last opening. A rewrite may still hold it after the store was closed.
    last_log: Weak<dyn RecordLog>,
    hold: DirectoryLock,
    replication_waiters: ReplicationWaiters,
    manifest: WrittenManifest,
    sentinel: Sentinel,
}

impl Actor for WriterActor {
    type Context = Context<Self>;

    fn started(&mut self, ctx: &mut Self::Context) {
        self.observe_disk();
        ctx.run_interval(
            Duration::from_millis(self.config.tuning.tick_ms),
            |writer, ctx| writer.tick(ctx),
        );
    }
}

impl WriterActor {
    /// Opens the store.
    ///
    /// # Errors
    /// The disk refuses, or another process holds the directory.
    pub(crate) fn open(
        config: DraftStoreConfig,
        shared: Arc<SharedStore>,
        metrics: StoreMetrics,
    ) -> Result<Self, LogError> {
        let hold = DirectoryLock::acquire(&config.data_dir)?;
        let mut writer = WriterActor {
            rewriter: Rewriter::new(config.tuning.rewrite_bytes_min),
            sealer: Sealer::new(&config),
            shared,
            config,
            metrics,
            core: None,
            commit_queue: CommitQueue::default(),
            commit_timer: None,
            evicted_documents: 0,
            lifecycle: Lifecycle::Serves,
            job: None,
            log_number: 0,
            last_log: Weak::<MemoryLog>::new(),
            hold,
            replication_waiters: ReplicationWaiters::default(),
            manifest: WrittenManifest {
                head: 0,
                at: Instant::now(),
            },
            sentinel: Sentinel::new("writer"),
        };
        writer.reopen()?;
        Ok(writer)
    }

    fn reopen(&mut self) -> Result<(), LogError> {
        self.hold.check()?;
        if self.last_log.strong_count() > 0 {
            let why = "a rewrite of the log has not ended yet";
            return Err(LogError::Refused(why.into()));
        }
        let OpenedDirectory {
            log,
            number,
            store,
            loaded,
            quarantined,
            loss,
            known_ms,
            is_new,
            damage: _,
        } = directory::open(
            &self.config.data_dir,
            self.config.cache_bytes,
            clock::unix_ms(),
        )?;
        self.last_log = Arc::downgrade(&log);
        // Without a time in the manifest, the last use of a document is the best known time.
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
                "draft store has damaged records"
            );
        }
        let mut core = WriterCore::new(
            log.clone(),
            self.config.clone(),
            store,
            loaded.repairs,
            loaded.damaged,
        );
        core.remains = Remains::of_opened(is_new);
        let mut catalog = loaded.catalog;
        core.prepare_replication(&mut catalog);
        self.shared.set_open(Some(OpenStore { catalog, log }));
        self.core = Some(core);
        self.log_number = number;
        self.observe();
        Ok(())
    }

    /// Runs an action on the open store, under the lock. After an error or a panic the store is closed.
    fn run(
        &mut self,
        action: impl FnOnce(&mut WriterCore, &mut Catalog, u64) -> Result<CommitOutcome, LogError>,
    ) -> Result<CommitOutcome, ApiError> {
        let mut closed = None;
        let outcome = {
            let mut open = self.shared.write();
            let (Some(core), Some(store)) = (self.core.as_mut(), open.as_mut()) else {
                return Err(unavailable());
            };
            // The core and the catalog are discarded after a panic, which makes the unwind safe.
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                action(core, &mut store.catalog, self.shared.now_ms())
            }));
            if !matches!(outcome, Ok(Ok(_))) {
                // Close before anybody else gets the lock.
                self.shared.note_closed();
                closed = Some((open.take(), self.core.take()));
            }
            outcome
        };
        // Both hold the log, and sled gives its lock back with the last of them. It writes before that, which readers
        // do not wait for.
        if closed.is_some() {
            drop(closed);
            self.stop_job();
        }
        match outcome {
            Ok(Ok(outcome)) => {
                self.publish(&outcome);
                Ok(outcome)
            }
            Ok(Err(error)) => {
                self.note_restart();
                tracing::error!(%error, "draft store log failed; reopening it");
                Err(disk_refused(&error))
            }
            Err(_) => {
                self.note_restart();
                tracing::error!("draft store writer panicked; reopening the log");
                Err(ApiError::internal("the writer panicked"))
            }
        }
    }

    /// Runs an action that has an answer beside its outcome.
    fn answer<T>(
        &mut self,
        action: impl FnOnce(&mut WriterCore, &mut Catalog, u64) -> Result<(T, CommitOutcome), LogError>,
    ) -> Result<T, ApiError> {
        let mut answer = None;
        self.run(|core, catalog, now_ms| {
            let (found, outcome) = action(core, catalog, now_ms)?;
            answer = Some(found);
            Ok(outcome)
        })?;
        answer.ok_or_else(unavailable)
    }

    /// Closes a log whose catalogue has failed. The next tick opens it.
    fn close_faulty(&mut self) -> bool {
        let Some(error) = self.core.as_ref().and_then(|core| core.log.fault()) else {
            return false;
        };
        tracing::error!(%error, "reopening the draft store log, whose journal has everything");
        self.note_restart();
        self.shared.set_open(None);
        self.core = None;
        self.stop_job();
        true
    }

    fn note_restart(&self) {
        self.metrics.writer_restarts.inc();
        self.sentinel.restarted();
    }

    fn publish(&mut self, outcome: &CommitOutcome) {
        self.metrics.appended_tokens.inc_by(outcome.appended_tokens);
        self.metrics.fenced_tokens.inc_by(outcome.fenced_tokens);
        for (_, removal) in &outcome.removed {
            self.metrics
                .evictions
                .with_label_values(&[removal.as_str()])
                .inc();
        }
        for limit in &outcome.group_rejections {
            self.metrics.reject(*limit);
        }
        self.evicted_documents += outcome.removed.len() as u64;
        self.delete_emptied(&outcome.emptied);
        if outcome.reserved {
            let _ = self.write_manifest(false);
        }
        self.observe();
        self.shared.wake(&outcome.changed);
        if outcome.sends {
            self.shared.outbox_changed.notify_one();
        }
    }

    /// Deletes the files of segments without documents. A file that cannot be deleted is an orphan, for the next
    /// start or erasure.
    fn delete_emptied(&self, emptied: &[SegmentId]) {
        if emptied.is_empty() {
            return;
        }
        // Look-up views keep files open. Without this their space would not come back.
        if let Err(error) = segments::delete(&self.config.data_dir, emptied) {
            tracing::warn!(%error, "draft store segment not deleted");
        }
    }

    fn tick(&mut self, ctx: &mut Context<Self>) {
        if self.is_closing() {
            return;
        }
        if self.core.is_none() {
            match self.reopen() {
                Ok(()) => tracing::info!("draft store log reopened"),
                Err(error) => tracing::error!(%error, "draft store log cannot be opened"),
            }
            return;
        }
        if self.close_faulty() {
            return;
        }
        self.tend_outbox();
        let more = self.run(WriterCore::tick).is_ok_and(|outcome| outcome.more);
        self.observe_disk();
        self.refresh_manifest();
        self.begin_next(ctx);
        if more {
            // Calls in the mailbox go first.
            ctx.run_later(Duration::from_millis(1), |writer, ctx| writer.tick(ctx));
        }
    }

    /// Writes the manifest. While the store is closed there is nothing to write.
    fn write_manifest(&mut self, closed: bool) -> Result<(), LogError> {
        let (Some(core), Ok(open)) = (&self.core, self.shared.read()) else {
            return Ok(());
        };
        let manifest = Manifest::new(self.log_number, core.store, &open.catalog, closed)
            .with(self.shared.loss(), self.shared.now_ms());
        self.manifest = WrittenManifest {
            head: open.catalog.head(),
            at: Instant::now(),
        };
        // Without a fresh manifest a rollback of sled is noticed later or not at all. That is no reason to stop.
        manifest
            .write(&self.config.data_dir)
            .inspect_err(|error| tracing::warn!(%error, "draft store manifest not written"))
    }

    /// Writes the manifest if it has been out of date for a while.
    fn refresh_manifest(&mut self) {
        let head = self.shared.read().ok().map(|open| open.catalog.head());
        if self.manifest.is_outdated(head, Instant::now()) {
            let _ = self.write_manifest(false);
        }
    }

    /// Commits what waits, and closes the log once no job runs any more.
    pub(crate) fn close_soon(&mut self, reply: oneshot::Sender<()>) {
        self.commit();
        self.rewriter.give_up();
        self.sealer.give_up();
        self.stop_job();
        self.lifecycle = Lifecycle::Closes(reply);
        self.close_if_quiet();
    }

    /// Closes the store if that was requested and no job runs any more.
    fn close_if_quiet(&mut self) {
        if self.job.is_some() || !self.is_closing() {
            return;
        }
        if let Lifecycle::Closes(reply) = std::mem::replace(&mut self.lifecycle, Lifecycle::Closed)
        {
            // Writes the times of use.
            let _ = self.run(WriterCore::tick);
            let _ = self.write_manifest(true);
            self.shared.set_open(None);
            self.core = None;
            let _ = reply.send(());
        }
    }

    fn is_closing(&self) -> bool {
        !matches!(self.lifecycle, Lifecycle::Serves)
    }

    fn observe(&self) {
        gauges::observe(&self.metrics, &self.shared, self.evicted_documents);
    }

    fn observe_disk(&self) {
        gauges::observe_disk(&self.metrics, &self.shared, &self.config);
    }
}
