//! Background jobs: one at a time, each on a thread of its own.
//!
//! A copy of the log and a segment at once would need space for both.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use actix::{AsyncContext as _, Context};
use refrain_service_kit::priority::give_way;

use crate::background::seal::{NewSegment, SealHost};
use crate::directory::DiskSpace;
use crate::log::LogError;
use crate::writer::actor::WriterActor;
use crate::writer::actor::errors::outdated;
use crate::writer::handle::WriterHandle;

/// Wait after a failed job.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(60);

impl WriterActor {
    /// Begins the next job, unless one is running.
    pub(super) fn begin_next(&mut self, ctx: &mut Context<Self>) {
        if self.job.is_some() || self.closing.is_some() {
            return;
        }
        let was_rewritten = std::mem::take(&mut self.rewriting.was_last);
        if !self.rewriting.waiters.is_empty() || !was_rewritten && self.is_rewrite_due() {
            self.begin_rewrite(ctx);
        } else {
            self.seal_next(ctx);
        }
    }

    /// Runs a job on a thread called `name`. `report` gets its outcome on the writer's thread.
    pub(super) fn begin_job<T: Send + 'static>(
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
            openings: self.openings,
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
    pub(super) fn after_job(&mut self, ctx: &mut Context<Self>) {
        if self.closing.is_some() {
            self.close_if_quiet();
        } else {
            self.begin_next(ctx);
        }
    }

    /// Whether the disk has space for what a job writes before it gives space back.
    pub(super) fn has_room_for(&self, bytes: u64) -> bool {
        DiskSpace::of(&self.config.data_dir)
            .is_none_or(|room| room.has_room_for(bytes, self.config.disk_reserve_bytes))
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
            match writer.core.is_some() && writer.openings == openings {
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
