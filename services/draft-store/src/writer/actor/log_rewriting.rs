//! The writer's part in a rewrite of its log: when one begins, and the report at the end.

use std::time::Instant;

use actix::Context;
use refrain_protocol::ApiError;

use crate::background::log_rewrite::{LogSizes, is_due};
use crate::log::{LogError, RewriteReport};
use crate::shared_store::unavailable;
use crate::writer::actor::WriterActor;
use crate::writer::actor::errors::{disk_refused, no_room_for_a_copy};
use crate::writer::actor::jobs::RETRY_AFTER;
use crate::writer::core::WriterCore;
use crate::writer::requests::Reply;

/// Bytes that an empty sled takes: eight of its segments of 512 KiB. No rewrite gives them back.
const EMPTY_BYTES: u64 = 4 << 20;

/// A larger measured overhead is not plausible: it includes what was appended meanwhile.
const OVERHEAD_MIN: f64 = 1.0;
const OVERHEAD_MAX: f64 = 5.0;

/// The log is rewritten when it takes this many times the size of a fresh one.
const REWRITE_FACTOR: u64 = 2;

impl WriterActor {
    /// Rewrites the log. The rewrite begins after this call.
    pub(crate) fn request_rewrite(
        &mut self,
        waiter: Reply<RewriteReport>,
        ctx: &mut Context<Self>,
    ) {
        self.rewriting.waiters.push(waiter);
        self.begin_next(ctx);
    }

    /// Whether the log's files may hold what was removed.
    pub(crate) fn has_remains(&self) -> Result<bool, ApiError> {
        let core = self.core.as_ref().ok_or_else(unavailable)?;
        Ok(core.remains.are_in_log())
    }

    /// Whether the log has outgrown its content, and the disk has space for a fresh one.
    pub(super) fn is_rewrite_due(&self) -> bool {
        let sizes = match self.shared.read() {
            Ok(open) => LogSizes {
                log_bytes: open.log.disk_bytes(),
                live_bytes: open.catalog.live_bytes(),
                empty_bytes: EMPTY_BYTES,
                overhead: self.rewriting.overhead,
                held_bytes: open.catalog.totals().bytes,
            },
            Err(_) => return false,
        };
        let live_bytes = sizes.live_bytes;
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

    pub(super) fn begin_rewrite(&mut self, ctx: &mut Context<Self>) {
        // Run the repairs first, so that removed records are not copied.
        let ready = self.closing.is_none() && self.run(WriterCore::tick).is_ok();
        let waiters = std::mem::take(&mut self.rewriting.waiters);
        let open = self.shared.read();
        let live_bytes = open.map_or(0, |open| open.catalog.live_bytes());
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
        let Some(core) = &mut self.core else { return };
        core.remains.begin_copy();
        let log = core.log.clone();
        self.begin_job(
            "draft-store-rewrite",
            ctx,
            move |_, stop| log.rewrite(&stop, &|_| Ok(())),
            move |writer, outcome, ctx| writer.end_rewrite(outcome, waiters, ctx),
        );
    }

    fn end_rewrite(
        &mut self,
        outcome: Result<RewriteReport, LogError>,
        waiters: Vec<Reply<RewriteReport>>,
        ctx: &mut Context<Self>,
    ) {
        if let Some(core) = &mut self.core
            && outcome.is_ok()
        {
            core.remains.end_copy();
        }
        match &outcome {
            Ok(done) => {
                let taken_bytes = done.after_bytes.saturating_sub(EMPTY_BYTES);
                let overhead = taken_bytes as f64 / done.written_bytes.max(1) as f64;
                self.rewriting.overhead = overhead.clamp(OVERHEAD_MIN, OVERHEAD_MAX);
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
        for waiter in waiters {
            let _ = waiter.send(outcome.clone().map_err(|error| disk_refused(&error)));
        }
        // Segments have their turn next.
        self.rewriting.was_last = true;
        self.after_job(ctx);
    }
}
