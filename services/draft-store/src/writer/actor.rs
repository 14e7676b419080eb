//! The writer's actor. It gathers appends for a commit, gives the core its clock, and reopens the store after an
//! error or a panic.
//!
//! It lives on a thread of its own, so a slow `fdatasync` delays only those who wait for it. The core is not in a
//! `service_kit::guard`, since rebuilding it reads the disk and may fail. The store is then closed, and opened again
//! with the next tick.
//!
//! Read `commits.rs` first, the way of an append. Then `jobs.rs`, which runs background jobs, and `sealing.rs`,
//! `purging.rs` and `log_rewriting.rs`, which start them and install their results. `seal_state.rs`,
//! `rewrite_state.rs` and `commit_queue.rs` hold what these files remember. `manifest.rs`, `requests.rs`,
//! `replication.rs`, `usage.rs` and `gauges.rs` are one concern each.

mod commit_queue;
mod commits;
mod errors;
mod gauges;
mod jobs;
mod log_rewriting;
mod manifest;
mod next_segment;
mod purging;
mod replication;
mod replication_waiters;
mod requests;
mod rewrite_state;
mod seal_state;
mod sealing;
#[cfg(test)]
mod tests;
mod usage;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use actix::{Actor, AsyncContext as _, Context};
use refrain_protocol::ApiError;
use refrain_service_kit::clock;
use refrain_service_kit::tasks::Sentinel;
use tokio::sync::oneshot;

use crate::catalog::Catalog;
use crate::config::DraftStoreConfig;
use crate::directory::{self, DirectoryLock, Loss, OpenedDirectory};
use crate::log::memory::MemoryLog;
use crate::log::{LogError, RecordLog};
use crate::metrics::StoreMetrics;
use crate::reading::lookup::LookupViews;
use crate::record::SegmentId;
use crate::segments;
use crate::shared_store::{OpenStore, SharedStore, unavailable};
use crate::writer::actor::commit_queue::CommitQueue;
use crate::writer::actor::errors::disk_refused;
use crate::writer::actor::replication_waiters::ReplicationWaiters;
use crate::writer::actor::rewrite_state::RewriteState;
use crate::writer::actor::seal_state::SealState;
use crate::writer::core::WriterCore;
use crate::writer::outcome::CommitOutcome;
use crate::writer::remains::Remains;

pub(crate) struct WriterActor {
    shared: Arc<SharedStore>,
    lookup_views: Arc<LookupViews>,
    config: DraftStoreConfig,
    metrics: StoreMetrics,
    /// `None` while the store is closed.
    core: Option<WriterCore>,
    commit_queue: CommitQueue,
    evicted_documents: u64,
    closed: bool,
    /// The caller of a close, while background threads still run.
    closing: Option<oneshot::Sender<()>>,
    /// Ends the background job in progress early. A job that has ended leaves `None`.
    job: Option<Arc<AtomicBool>>,
    rewriting: RewriteState,
    sealing: SealState,
    /// How often the store was opened. Results of jobs from an earlier opening are refused.
    openings: u64,
    log_number: u64,
    /// The log of the last opening. A rewrite may still hold it after the store was closed.
    last_log: Weak<dyn RecordLog>,
    hold: DirectoryLock,
    replication_waiters: ReplicationWaiters,
    /// The last change in the manifest, and when it was written.
    manifest_head: u64,
    manifest_written: Instant,
    _sentinel: Sentinel,
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
        lookup_views: Arc<LookupViews>,
        metrics: StoreMetrics,
    ) -> Result<Self, LogError> {
        let hold = DirectoryLock::acquire(&config.data_dir)?;
        let mut writer = WriterActor {
            shared,
            lookup_views,
            config,
            metrics,
            core: None,
            commit_queue: CommitQueue::default(),
            evicted_documents: 0,
            closed: false,
            closing: None,
            job: None,
            rewriting: RewriteState::new(),
            sealing: SealState::default(),
            openings: 0,
            log_number: 0,
            last_log: Weak::<MemoryLog>::new(),
            hold,
            replication_waiters: ReplicationWaiters::default(),
            manifest_head: 0,
            manifest_written: Instant::now(),
            _sentinel: Sentinel("writer"),
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
        self.openings += 1;
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
                self.metrics.writer_restarts.inc();
                tracing::error!(%error, "draft store log failed; reopening it");
                Err(disk_refused(&error))
            }
            Err(_) => {
                self.metrics.writer_restarts.inc();
                tracing::error!("draft store writer panicked; reopening the log");
                Err(ApiError::internal("the writer panicked"))
            }
        }
    }

    /// Closes a log whose catalogue has failed. The next tick opens it.
    fn close_faulty(&mut self) -> bool {
        let Some(error) = self.core.as_ref().and_then(|core| core.log.fault()) else {
            return false;
        };
        tracing::error!(%error, "reopening the draft store log, whose journal has everything");
        self.metrics.writer_restarts.inc();
        self.shared.set_open(None);
        self.core = None;
        self.stop_job();
        true
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
        self.drop_views();
        if let Err(error) = segments::delete(&self.config.data_dir, emptied) {
            tracing::warn!(%error, "draft store segment not deleted");
        }
    }

    fn tick(&mut self, ctx: &mut Context<Self>) {
        if self.closed || self.closing.is_some() {
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
        self.drop_views();
        self.observe_disk();
        self.refresh_manifest();
        self.begin_next(ctx);
        if more {
            // Calls in the mailbox go first.
            ctx.run_later(Duration::from_millis(1), |writer, ctx| writer.tick(ctx));
        }
    }
}
