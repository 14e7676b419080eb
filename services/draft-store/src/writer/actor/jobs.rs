//! Background jobs: one at a time, each on a thread of its own. `rewriter.rs` and `sealer.rs` decide which is next.
//!
//! A copy of the log and a segment at once would need space for both.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use actix::{AsyncContext as _, Context};
use refrain_protocol::ApiError;
use refrain_service_kit::priority::give_way;

use crate::background::seal::{self, NewSegment, SealHost, SealJob, SealReport};
use crate::config::DraftStoreConfig;
use crate::directory::DiskSpace;
use crate::log::{LogError, RewriteReport};
use crate::record::SegmentId;
use crate::segments::{self, SegmentSource};
use crate::shared_store::unavailable;
use crate::writer::actor::WriterActor;
use crate::writer::actor::handle::WriterHandle;
use crate::writer::core::WriterCore;
use crate::writer::errors::outdated;
use crate::writer::requests::Reply;
use crate::writer::rewriter::LogSizes;
use crate::writer::sealer::{PlannedSegment, SealView};

/// Tells whether the disk has space for what a job writes before it gives space back.
fn room_for(config: &DraftStoreConfig) -> impl Fn(u64) -> bool + '_ {
    |bytes| {
        let room = DiskSpace::of(&config.data_dir);
        room.is_none_or(|room| room.has_room_for(bytes, config.disk_reserve_bytes))
    }
}

impl WriterActor {
    /// Rewrites the log. The rewrite begins after this call.
    pub(crate) fn request_rewrite(
        &mut self,
        waiter: Reply<RewriteReport>,
        ctx: &mut Context<Self>,
    ) {
        // A caller whose waiter is dropped learns that the store closes.
        if !self.is_closing() {
            self.rewriter.request(waiter);
            self.begin_next(ctx);
        }
    }

    /// Rewrites all segments with removed documents, and with `seals` seals the documents that have ended. The work
    /// begins after this call.
    pub(crate) fn request_purge(
        &mut self,
        seals: bool,
        waiter: Reply<()>,
        ctx: &mut Context<Self>,
    ) {
        if !self.is_closing() {
            self.sealer.request_purge(seals, waiter);
            self.begin_next(ctx);
        }
    }

    /// Whether the log's files may hold what was removed.
    pub(crate) fn has_remains(&self) -> Result<bool, ApiError> {
        let core = self.core.as_ref().ok_or_else(unavailable)?;
        Ok(core.remains.are_in_log())
    }

    /// Begins the next job, unless one is running.
    pub(super) fn begin_next(&mut self, ctx: &mut Context<Self>) {
        if self.job.is_some() || self.is_closing() {
            return;
        }
        let (sizes, now) = (self.log_sizes(), Instant::now());
        let rewrites = match sizes {
            Some(sizes) => self.rewriter.is_next(sizes, now, room_for(&self.config)),
            None => {
                self.rewriter.refuse(&unavailable());
                false
            }
        };
        match rewrites {
            true => self.begin_rewrite(ctx),
            false => self.begin_sealing(ctx),
        }
    }

    fn log_sizes(&self) -> Option<LogSizes> {
        let open = self.shared.read().ok()?;
        let sizes = LogSizes {
            log_bytes: open.log.disk_bytes(),
            live_bytes: open.catalog.live_bytes(),
            held_bytes: open.catalog.totals().bytes,
        };
        let live_ratio = sizes.live_bytes as f64 / sizes.log_bytes.max(1) as f64;
        self.metrics.live_ratio.set(live_ratio);
        Some(sizes)
    }

    fn begin_rewrite(&mut self, ctx: &mut Context<Self>) {
        // Run the repairs first, so that removed records are not copied.
        let is_ready = self.run(WriterCore::tick).is_ok();
        let live_bytes = self.log_sizes().map_or(0, |sizes| sizes.live_bytes);
        let Some(core) = self.core.as_mut().filter(|_| is_ready) else {
            self.rewriter.refuse(&unavailable());
            return;
        };
        if !self.rewriter.begin(live_bytes, room_for(&self.config)) {
            return;
        }
        core.remains.begin_copy();
        let log = core.log.clone();
        self.begin_job(
            "draft-store-rewrite",
            ctx,
            move |_, stop| log.rewrite(&stop, &|_| Ok(())),
            |writer, outcome, ctx| writer.end_rewrite(&outcome, ctx),
        );
    }

    fn end_rewrite(&mut self, outcome: &Result<RewriteReport, LogError>, ctx: &mut Context<Self>) {
        if let Some(core) = &mut self.core
            && outcome.is_ok()
        {
            core.remains.end_copy();
        }
        let result = if outcome.is_ok() { "done" } else { "failed" };
        self.metrics.rewrites.with_label_values(&[result]).inc();
        match outcome {
            Ok(done) => {
                let (before_bytes, after_bytes) = (done.before_bytes, done.after_bytes);
                let reclaimed_bytes = before_bytes.saturating_sub(after_bytes);
                self.metrics.reclaimed_bytes.inc_by(reclaimed_bytes);
                tracing::info!(before_bytes, after_bytes, "draft store log rewritten");
            }
            Err(error) => tracing::warn!(%error, "draft store log not rewritten"),
        }
        self.observe_disk();
        self.rewriter.ended(outcome, Instant::now());
        self.after_job(ctx);
    }

    /// Starts the next job on segments that an operator wants or that is due.
    fn begin_sealing(&mut self, ctx: &mut Context<Self>) {
        let (shared, dir) = (self.shared.clone(), self.config.data_dir.clone());
        let open = shared.read().ok();
        let planned = self.sealer.next(&SealView {
            open: open.as_deref(),
            openings: self.shared.openings(),
            now: Instant::now(),
            now_ms: shared.now_ms(),
            has_room: &room_for(&self.config),
            clear_orphans: &|open| {
                let segments = open.catalog.segments();
                segments::clear_orphans(&dir, |segment| segments.get(segment).is_some())
            },
        });
        let (Some(PlannedSegment { namespace, source }), Some(open)) = (planned, open) else {
            return;
        };
        let id = self.sealer.next_id(&open);
        let names = open.catalog.names(namespace).cloned();
        drop(open);
        let from = match &source {
            SegmentSource::Log(_) => "log",
            SegmentSource::Segments(_) => "segments",
        };
        self.begin_job(
            "draft-store-seal",
            ctx,
            move |host, stop| {
                let job = SealJob {
                    dir,
                    id,
                    namespace,
                    names,
                    source,
                    stop,
                };
                seal::run(&job, &shared, host, &|_| Ok(()))
            },
            move |writer, outcome, ctx| writer.end_sealing(outcome, from, id, ctx),
        );
    }

    /// Puts a new segment into use.
    fn install(&mut self, segment: NewSegment) -> Result<(), LogError> {
        if self.is_closing() {
            return Err(outdated());
        }
        self.run(|core, catalog, now_ms| core.install(catalog, segment, now_ms))
            .map_err(|error| LogError::Refused(error.to_string()))?;
        Ok(())
    }

    fn end_sealing(
        &mut self,
        outcome: Result<SealReport, LogError>,
        from: &'static str,
        segment: SegmentId,
        ctx: &mut Context<Self>,
    ) {
        let result = if outcome.is_ok() { "done" } else { "failed" };
        let made = &self.metrics.segments_made;
        made.with_label_values(&[from, result]).inc();
        match outcome {
            Ok(made) => tracing::info!(
                from,
                documents = made.documents,
                tokens = made.tokens,
                bytes = made.bytes,
                "draft store segment made"
            ),
            Err(error) => {
                tracing::warn!(from, %error, "draft store segment not made");
                self.clear_failed(segment);
                self.sealer.failed(error, Instant::now());
            }
        }
        self.observe();
        self.observe_disk();
        self.after_job(ctx);
    }

    /// Deletes the leftovers of a segment that was not made. A segment that is in use all the same stays: its name
    /// became durable before something failed.
    fn clear_failed(&self, segment: SegmentId) {
        // While the store is closed nobody knows which segments are in use. The next start does.
        let Ok(open) = self.shared.read() else { return };
        let segments = open.catalog.segments();
        if segments.get(segment).is_none()
            && let Err(error) = seal::clear(&self.config.data_dir, segment)
        {
            tracing::warn!(%error, "orphaned draft store segment not deleted");
        }
    }

    /// Runs a job on a thread called `name`. `report` gets its outcome on the writer's thread.
    fn begin_job<T: Send + 'static>(
        &mut self,
        name: &str,
        ctx: &mut Context<Self>,
        run: impl FnOnce(&JobHost, Arc<AtomicBool>) -> Result<T, LogError> + Send + 'static,
        report: impl FnOnce(&mut WriterActor, Result<T, LogError>, &mut Context<Self>) + Send + 'static,
    ) {
        let stop = Arc::new(AtomicBool::new(false));
        self.job = Some(stop.clone());
        let host = JobHost {
            writer: WriterHandle::from(ctx.address()),
            openings: self.shared.openings(),
        };
        let end = JobEnd {
            writer: host.writer.clone(),
            outcome: Err(LogError::Refused(format!(
                "{name} panicked, or its thread did not start"
            ))),
            report: Some(report),
        };
        let thread = std::thread::Builder::new().name(name.to_owned());
        let spawned = thread.spawn(move || {
            // Callers do not wait for jobs: a store under load seals later, and more at once.
            give_way();
            let mut end = end;
            end.outcome = run(&host, stop);
        });
        if let Err(error) = spawned {
            tracing::error!(%error, name, "thread of a draft store job not started");
        }
    }

    /// Ends the job in progress soon. Its report follows.
    pub(super) fn stop_job(&self) {
        if let Some(stop) = &self.job {
            stop.store(true, Ordering::Relaxed);
        }
    }

    /// Goes on after a job: closes the store if that was requested, or begins the next job.
    fn after_job(&mut self, ctx: &mut Context<Self>) {
        self.close_if_quiet();
        self.begin_next(ctx);
    }
}

/// Tells the writer how a job ended. It does so when it is dropped, so also after a panic.
struct JobEnd<T: Send + 'static, R>
where
    R: FnOnce(&mut WriterActor, Result<T, LogError>, &mut Context<WriterActor>) + Send + 'static,
{
    writer: WriterHandle,
    outcome: Result<T, LogError>,
    report: Option<R>,
}

impl<T: Send + 'static, R> Drop for JobEnd<T, R>
where
    R: FnOnce(&mut WriterActor, Result<T, LogError>, &mut Context<WriterActor>) + Send + 'static,
{
    fn drop(&mut self) {
        let outcome = std::mem::replace(&mut self.outcome, Err(outdated()));
        if let Some(report) = self.report.take() {
            self.writer.send(move |writer, ctx| {
                writer.job = None;
                report(writer, outcome, ctx);
            });
        }
    }
}

/// The writer, as the thread of a job sees it.
pub(super) struct JobHost {
    writer: WriterHandle,
    openings: u64,
}

impl JobHost {
    /// Has the writer do something, unless the store was closed or opened again since the job began.
    fn ask<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut WriterActor) -> Result<T, LogError> + Send + 'static,
    ) -> Result<T, LogError> {
        let openings = self.openings;
        // A few calls per job: the mailbox takes them even when it is full.
        let answer = self.writer.ask(move |writer| {
            match writer.core.is_some() && writer.shared.openings() == openings {
                true => call(writer),
                false => Err(outdated()),
            }
        });
        answer.blocking_recv().unwrap_or_else(|_| Err(outdated()))
    }
}

impl SealHost for JobHost {
    fn install(&self, segment: NewSegment) -> Result<(), LogError> {
        self.ask(move |writer| writer.install(segment))
    }
}
