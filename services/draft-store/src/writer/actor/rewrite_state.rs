//! The writer's state about rewrites of its log.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::writer::messages::RewriteWaiter;

/// Assumed bytes on disk per byte of records in a fresh log, before any rewrite measured it. It is 1.5 for large
/// records to 3.9 for small ones in the index, and a little over 1 in the journal. Too low a guess causes one early
/// rewrite; too high a guess leaves waste on disk.
const OVERHEAD_ASSUMED: f64 = 2.5;

/// The rewrite in progress.
pub(super) struct RunningRewrite {
    pub(super) stop: Arc<AtomicBool>,
    pub(super) waiters: Vec<RewriteWaiter>,
}

/// Running and requested rewrites.
pub(super) struct RewriteState {
    pub(super) running: Option<RunningRewrite>,
    /// Callers of the next rewrite: the running one may have copied what they want gone.
    pub(super) waiters: Vec<RewriteWaiter>,
    pub(super) overhead: f64,
    /// Whether the last background job was a rewrite.
    pub(super) was_last: bool,
    pub(super) not_before: Instant,
}

impl RewriteState {
    pub(super) fn new() -> Self {
        RewriteState {
            running: None,
            waiters: Vec::new(),
            overhead: OVERHEAD_ASSUMED,
            was_last: false,
            not_before: Instant::now(),
        }
    }

    /// Ends the running rewrite soon. `RewriteMessage::Ended` follows.
    pub(super) fn stop(&mut self) {
        self.waiters.clear();
        if let Some(running) = &self.running {
            running.stop.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }
}
