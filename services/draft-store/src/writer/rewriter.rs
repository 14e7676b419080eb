//! When the log is rewritten: at the request of an operator or an erasure, or when it has outgrown its content. It
//! decides, and does nothing itself; see `log/journaled/rewrite.rs`.

use std::time::Instant;

use refrain_protocol::ApiError;

use crate::log::{LogError, RewriteReport};
use crate::writer::errors::{RETRY_AFTER, disk_refused, no_room_for_a_copy};
use crate::writer::requests::Reply;

/// Bytes that an empty sled takes: eight of its segments of 512 KiB. No rewrite gives them back.
const EMPTY_BYTES: u64 = 4 << 20;

/// Assumed bytes on disk per byte of records in a fresh log, before any rewrite measured it. It is a little over 1
/// for text, which is in the journal only. Other records are in the catalogue as well, where they take up to four
/// times their size. Too low a guess causes one early rewrite; too high a guess leaves waste on disk.
const OVERHEAD_ASSUMED: f64 = 2.0;

/// A larger measured overhead is not plausible: it includes what was appended meanwhile.
const OVERHEAD_MIN: f64 = 1.0;
const OVERHEAD_MAX: f64 = 5.0;

/// The log is rewritten when it takes this many times the size of a fresh one.
const FACTOR: f64 = 2.0;

/// At most one part in this many of what the store holds may be waste in the log.
const WASTE_SHARE: u64 = 8;

/// The sizes that decide whether a log is rewritten.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogSizes {
    /// Bytes of the log on disk.
    pub(super) log_bytes: u64,
    /// Bytes of its live records.
    pub(super) live_bytes: u64,
    /// Bytes that the store holds, in segments and in the log.
    pub(super) held_bytes: u64,
}

/// Requested rewrites, and what earlier ones showed.
pub(super) struct Rewriter {
    /// A smaller log is left alone.
    bytes_min: u64,
    /// Callers of the next rewrite: the running one may have copied what they want gone.
    waiters: Vec<Reply<RewriteReport>>,
    /// Callers of the running one.
    running: Vec<Reply<RewriteReport>>,
    /// Bytes on disk per byte of records in a fresh log, beyond those of an empty one.
    overhead: f64,
    /// The last job was a rewrite, so segments have their turn next.
    was_last: bool,
    not_before: Option<Instant>,
}

impl Rewriter {
    pub(super) fn new(bytes_min: u64) -> Self {
        Rewriter {
            bytes_min,
            waiters: Vec::new(),
            running: Vec::new(),
            overhead: OVERHEAD_ASSUMED,
            was_last: false,
            not_before: None,
        }
    }

    /// Has the log rewritten.
    pub(super) fn request(&mut self, waiter: Reply<RewriteReport>) {
        self.waiters.push(waiter);
    }

    /// Drops all requests: their callers learn that nothing comes of them.
    pub(super) fn give_up(&mut self) {
        self.waiters.clear();
    }

    /// Whether the log is to be rewritten now. `has_room` tells whether the disk has space for so many bytes.
    ///
    /// Without a request it has to be due, and the last job must have been another one.
    pub(super) fn is_next(
        &mut self,
        sizes: LogSizes,
        now: Instant,
        has_room: impl Fn(u64) -> bool,
    ) -> bool {
        let was_last = std::mem::take(&mut self.was_last);
        let waits = was_last || self.not_before.is_some_and(|until| now < until);
        let is_due = !waits && self.is_due(sizes) && has_room(self.fresh_bytes(sizes.live_bytes));
        !self.waiters.is_empty() || is_due
    }

    /// Begins the rewrite for all who wait. Without room it does not begin, and they are told.
    pub(super) fn begin(&mut self, live_bytes: u64, has_room: impl Fn(u64) -> bool) -> bool {
        // Even an operator's request must not fill the disk: the log could not be opened again.
        let begins = has_room(self.fresh_bytes(live_bytes));
        if begins {
            self.running = std::mem::take(&mut self.waiters);
        } else {
            self.refuse(&disk_refused(&no_room_for_a_copy()));
        }
        begins
    }

    /// Tells those who wait that there is no rewrite.
    pub(super) fn refuse(&mut self, error: &ApiError) {
        for waiter in self.waiters.drain(..) {
            let _ = waiter.send(Err(error.clone()));
        }
    }

    /// Notes the end of a rewrite, and tells its callers.
    pub(super) fn ended(&mut self, outcome: &Result<RewriteReport, LogError>, now: Instant) {
        match outcome {
            Ok(done) => {
                let taken_bytes = done.after_bytes.saturating_sub(EMPTY_BYTES);
                let overhead = taken_bytes as f64 / done.written_bytes.max(1) as f64;
                self.overhead = overhead.clamp(OVERHEAD_MIN, OVERHEAD_MAX);
            }
            Err(_) => self.not_before = Some(now + RETRY_AFTER),
        }
        self.was_last = true;
        for waiter in self.running.drain(..) {
            let _ = waiter.send(outcome.clone().map_err(|error| disk_refused(&error)));
        }
    }

    /// Bytes on disk of a fresh log with this many bytes of records.
    fn fresh_bytes(&self, live_bytes: u64) -> u64 {
        EMPTY_BYTES + (live_bytes as f64 * self.overhead) as u64
    }

    /// Whether the log has outgrown its content: when it has [`FACTOR`] times the size of a fresh one, or before that
    /// when its waste is large beside all that the store holds. The second rule leaves room for the old log and the
    /// copy. A rewrite must give back at least half of what it copies.
    fn is_due(&self, sizes: LogSizes) -> bool {
        let fresh = sizes.live_bytes as f64 * self.overhead;
        let waste = sizes.log_bytes as f64 - EMPTY_BYTES as f64 - fresh;
        let outgrown = fresh * (FACTOR - 1.0);
        let much = self.bytes_min.max(sizes.held_bytes / WASTE_SHARE) as f64;
        sizes.log_bytes > self.bytes_min && waste > outgrown.min(much.max(fresh / 2.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_protocol::ErrorKind;
    use tokio::sync::oneshot;

    const SIZES: LogSizes = LogSizes {
        log_bytes: EMPTY_BYTES,
        live_bytes: 1_000,
        held_bytes: 1_000,
    };

    /// The sizes of a log that is due.
    const OUTGROWN: LogSizes = LogSizes {
        log_bytes: EMPTY_BYTES + 100_000,
        ..SIZES
    };

    const DONE: RewriteReport = RewriteReport {
        before_bytes: EMPTY_BYTES + 100_000,
        after_bytes: EMPTY_BYTES + 1_500,
        written_bytes: 1_000,
    };

    #[test]
    fn a_rewrite_is_due_when_the_log_outgrew_a_fresh_one() {
        let mut rewriter = Rewriter::new(1_000);
        rewriter.overhead = 1.5;
        let due = |log_bytes: u64, live_bytes, held_bytes| {
            rewriter.is_due(LogSizes {
                log_bytes: log_bytes + EMPTY_BYTES,
                live_bytes,
                held_bytes,
            })
        };
        assert!(due(3_001, 1_000, 1_000_000));
        assert!(!due(3_000, 1_000, 1_000_000));
        // The store holds little besides the log: wasting half of the copy is enough.
        assert!(due(15_001, 10_000 * 2 / 3, 8_000));
        assert!(!due(14_000, 10_000 * 2 / 3, 8_000));
        assert!(
            !due(15_001, 10_000 * 2 / 3, 48_000),
            "an eighth of what is held"
        );
        assert!(due(16_100, 10_000 * 2 / 3, 48_000));
        rewriter.bytes_min = EMPTY_BYTES + 1_000;
        let due = |log_bytes| {
            rewriter.is_due(LogSizes {
                log_bytes: EMPTY_BYTES + log_bytes,
                live_bytes: 0,
                held_bytes: 0,
            })
        };
        assert!(!due(1_000), "small ones are left alone");
    }

    #[test]
    fn other_jobs_have_their_turn_after_a_rewrite_and_a_failed_one_waits() {
        let (mut rewriter, now) = (Rewriter::new(1_000), Instant::now());
        assert!(!rewriter.is_next(SIZES, now, |_| true));
        assert!(rewriter.is_next(OUTGROWN, now, |_| true));
        assert!(!rewriter.is_next(OUTGROWN, now, |_| false), "no room");
        rewriter.ended(&Ok(DONE), now);
        assert!((rewriter.overhead - 1.5).abs() < 1e-9, "measured");
        assert!(!rewriter.is_next(OUTGROWN, now, |_| true));
        assert!(rewriter.is_next(OUTGROWN, now, |_| true));
        rewriter.ended(&Err(LogError::Refused("full".into())), now);
        rewriter.was_last = false;
        assert!(!rewriter.is_next(OUTGROWN, now, |_| true));
        assert!(rewriter.is_next(OUTGROWN, now + RETRY_AFTER, |_| true));
    }

    #[test]
    fn a_request_is_answered_by_the_rewrite_that_begins_after_it() {
        let (mut rewriter, now) = (Rewriter::new(1_000), Instant::now());
        let (one, mut first) = oneshot::channel();
        let (two, mut second) = oneshot::channel();
        rewriter.request(one);
        assert!(rewriter.is_next(SIZES, now, |_| false));
        assert!(rewriter.begin(SIZES.live_bytes, |_| true));
        rewriter.request(two);
        rewriter.ended(&Ok(DONE), now);
        assert_eq!(first.try_recv().unwrap(), Ok(DONE));
        assert!(second.try_recv().is_err(), "not yet");
        // It is wanted even if a rewrite was the last job.
        assert!(rewriter.is_next(SIZES, now, |_| true));
        assert!(!rewriter.begin(SIZES.live_bytes, |_| false));
        let refused = second.try_recv().unwrap().unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Unavailable);
        assert!(!rewriter.is_next(SIZES, now, |_| true));
    }
}
