//! The writer's part in a rewrite of its log: when one begins, the two moments at which the copying thread needs the
//! writer, and the report at the end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use actix::{AsyncContext as _, Context, Recipient};
use tokio::sync::oneshot;

use crate::background::log_rewrite::{
    LogSizes, RewriteHost, RewriteJob, RewriteReport, is_due, rewrite,
};
use crate::directory::{DiskSpace, Manifest};
use crate::log::{LogError, RecordLog};
use crate::shared_store::unavailable;
use crate::writer::actor::WriterActor;
use crate::writer::actor::errors::{disk_refused, no_room_for_a_copy, outdated};
use crate::writer::actor::rewrite_state::RunningRewrite;
use crate::writer::core::WriterCore;
use crate::writer::messages::{RewriteMessage, WriterMessage};

/// Bytes that an empty sled takes: eight of its segments of 512 KiB. No rewrite gives them back.
const EMPTY_BYTES: u64 = 4 << 20;

/// A larger measured overhead is not plausible: it includes what was appended meanwhile.
const OVERHEAD_MAX: f64 = 5.0;

/// The log is rewritten when it takes this many times the size of a fresh one.
const REWRITE_FACTOR: u64 = 2;

/// Wait after a failed rewrite.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// How long a commit may wait for the copy. A busy store commits between any two steps. With a much shorter step it
/// would grow faster than it is copied.
const STEP: Duration = Duration::from_millis(20);

impl WriterActor {
    pub(super) fn handle_rewrite(&mut self, call: RewriteMessage, ctx: &mut Context<Self>) {
        match call {
            RewriteMessage::Rewrite(waiter) => {
                self.rewriting.waiters.push(waiter);
                self.begin_next(ctx);
            }
            RewriteMessage::Mirror {
                openings,
                to,
                reply,
            } => {
                let outcome = match &mut self.core {
                    Some(core) if openings == self.openings && self.closing.is_none() => {
                        // The writer handles this message between two commits.
                        Ok(core.begin_mirror(to))
                    }
                    _ => Err(outdated()),
                };
                let _ = reply.send(outcome);
            }
            RewriteMessage::Swap {
                openings,
                number,
                reply,
            } => {
                let outcome = if openings == self.openings {
                    self.swap(number)
                } else {
                    Err(outdated())
                };
                let _ = reply.send(outcome);
            }
            RewriteMessage::Ended(outcome) => self.end_rewrite(outcome, ctx),
        }
    }

    /// Begins the next job, unless one is running. A copy of the log and a segment at once would need space for both.
    pub(super) fn begin_next(&mut self, ctx: &mut Context<Self>) {
        if self.rewriting.is_running() || self.sealing.is_running() || self.closing.is_some() {
            return;
        }
        let was_rewritten = std::mem::take(&mut self.rewriting.was_last);
        if !self.rewriting.waiters.is_empty() || !was_rewritten && self.is_rewrite_due() {
            self.begin_rewrite(ctx);
        } else {
            self.seal_next(ctx);
        }
    }

    /// Whether the log has outgrown its content, and the disk has space for a fresh one.
    fn is_rewrite_due(&self) -> bool {
        let (live_bytes, held_bytes, log_bytes) = match self.shared.read().as_ref() {
            Some(open) => (
                open.catalog.live_bytes(),
                open.catalog.totals().bytes,
                open.log.disk_bytes(),
            ),
            None => return false,
        };
        let sizes = LogSizes {
            log_bytes,
            live_bytes,
            empty_bytes: EMPTY_BYTES,
            overhead: self.rewriting.overhead,
            held_bytes,
        };
        self.metrics
            .live_ratio
            .set(live_bytes as f64 / sizes.log_bytes.max(1) as f64);
        let due = is_due(sizes, REWRITE_FACTOR, self.config.tuning.rewrite_bytes_min);
        due && Instant::now() >= self.rewriting.not_before
            && self.has_room_for(self.fresh_bytes(live_bytes))
    }

    /// Bytes on disk of a fresh log with this many bytes of records.
    fn fresh_bytes(&self, live_bytes: u64) -> u64 {
        EMPTY_BYTES + (live_bytes as f64 * self.rewriting.overhead) as u64
    }

    /// Whether the disk has space for what a job writes before it gives space back.
    pub(super) fn has_room_for(&self, bytes: u64) -> bool {
        let room = DiskSpace::of(&self.config.data_dir);
        room.is_none_or(|room| room.has_room_for(bytes, self.config.disk_reserve_bytes))
    }

    fn begin_rewrite(&mut self, ctx: &mut Context<Self>) {
        // Run the repairs first, so that removed records are not copied.
        let ready = self.closing.is_none() && self.run(WriterCore::tick).is_ok();
        let waiters = std::mem::take(&mut self.rewriting.waiters);
        let live_bytes = match self.shared.read().as_ref() {
            Some(open) => open.catalog.live_bytes(),
            None => 0,
        };
        let refused = match ready {
            false => Some(unavailable()),
            // Even an operator's request must not fill the disk: the log could not be opened again.
            true if !self.has_room_for(self.fresh_bytes(live_bytes)) => {
                Some(disk_refused(&no_room_for_a_copy()))
            }
            true => None,
        };
        if let Some(refused) = refused {
            for waiter in waiters {
                let _ = waiter.send(Err(refused.clone()));
            }
            return;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let job = RewriteJob {
            dir: self.config.data_dir.clone(),
            from: self.log_number,
            cache_bytes: self.config.cache_bytes,
            step: STEP,
            stop: stop.clone(),
        };
        self.rewriting.running = Some(RunningRewrite { stop, waiters });
        let (shared, writer, openings) = (
            self.shared.clone(),
            ctx.address().recipient(),
            self.openings,
        );
        let spawned = std::thread::Builder::new()
            .name("draft-store-rewrite".to_owned())
            .spawn(move || {
                let host = RewriteRequests { writer, openings };
                // The writer must receive the end in any case, also after a panic.
                let outcome = catch_unwind(AssertUnwindSafe(|| rewrite(&job, &shared, &host)))
                    .unwrap_or_else(|_| {
                        Err(LogError::Refused("the rewrite of the log panicked".into()))
                    });
                host.writer
                    .do_send(WriterMessage::Rewrite(RewriteMessage::Ended(outcome)));
            });
        if let Err(error) = spawned {
            self.end_rewrite(Err(LogError::Refused(error.to_string())), ctx);
        }
    }

    /// Replaces the log under the lock, so that nobody sees one log with the other's manifest.
    fn swap(&mut self, number: u64) -> Result<u64, LogError> {
        let mut open = self.shared.write();
        let (Some(core), Some(open)) = (self.core.as_mut(), open.as_mut()) else {
            return Err(outdated());
        };
        let log = core.complete_mirror()?;
        Manifest::new(number, core.store(), &open.catalog, false)
            .with(self.shared.loss(), self.shared.now_ms())
            .write(&self.config.data_dir)?;
        core.end_mirror(Some(log.clone()));
        open.log = log;
        self.log_number = number;
        Ok(core.mirrored_bytes())
    }

    fn end_rewrite(&mut self, outcome: Result<RewriteReport, LogError>, ctx: &mut Context<Self>) {
        let running = self.rewriting.running.take();
        if let Some(core) = &mut self.core {
            core.end_mirror(None);
        }
        match &outcome {
            Ok(done) => {
                let taken_bytes = done.after_bytes.saturating_sub(EMPTY_BYTES);
                let overhead = taken_bytes as f64 / done.written_bytes.max(1) as f64;
                self.rewriting.overhead = overhead.clamp(1.0, OVERHEAD_MAX);
                self.metrics.rewrites.with_label_values(&["done"]).inc();
                self.metrics
                    .reclaimed_bytes
                    .inc_by(done.before_bytes.saturating_sub(done.after_bytes));
                tracing::info!(
                    before_bytes = done.before_bytes,
                    after_bytes = done.after_bytes,
                    "draft store log rewritten"
                );
            }
            Err(error) => {
                self.rewriting.not_before = Instant::now() + RETRY_AFTER;
                self.metrics.rewrites.with_label_values(&["failed"]).inc();
                tracing::warn!(%error, "draft store log not rewritten");
            }
        }
        self.observe_disk();
        for waiter in running.into_iter().flat_map(|running| running.waiters) {
            let _ = waiter.send(outcome.clone().map_err(|error| disk_refused(&error)));
        }
        if self.closing.is_some() {
            self.close_if_quiet();
            return;
        }
        // Segments have their turn next.
        self.rewriting.was_last = true;
        self.begin_next(ctx);
    }
}

/// The writer, as the copying thread sees it.
struct RewriteRequests {
    writer: Recipient<WriterMessage>,
    openings: u64,
}

impl RewriteRequests {
    fn ask<T>(
        &self,
        call: impl FnOnce(oneshot::Sender<Result<T, LogError>>) -> RewriteMessage,
    ) -> Result<T, LogError> {
        let (reply, answer) = oneshot::channel();
        // One message each per rewrite: the mailbox takes them even when it is full.
        self.writer.do_send(WriterMessage::Rewrite(call(reply)));
        answer.blocking_recv().unwrap_or_else(|_| Err(outdated()))
    }
}

impl RewriteHost for RewriteRequests {
    fn mirror(&self, to: Arc<dyn RecordLog>) -> Result<Arc<dyn RecordLog>, LogError> {
        let openings = self.openings;
        self.ask(|reply| RewriteMessage::Mirror {
            openings,
            to,
            reply,
        })
    }

    fn swap(&self, number: u64) -> Result<u64, LogError> {
        let openings = self.openings;
        self.ask(|reply| RewriteMessage::Swap {
            openings,
            number,
            reply,
        })
    }
}
