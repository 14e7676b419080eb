//! The writer's state about rewrites of its log.

use std::time::Instant;

use crate::log::RewriteReport;
use crate::writer::requests::Reply;

/// Assumed bytes on disk per byte of records in a fresh log, before any rewrite measured it. It is a little over 1 for
/// text, which is in the journal only. Other records are in the catalogue as well, where they take up to four times
/// their size. Too low a guess causes one early rewrite; too high a guess leaves waste on disk.
const OVERHEAD_ASSUMED: f64 = 2.0;

/// Requested rewrites, and what earlier ones showed.
pub(super) struct RewriteState {
    /// Callers of the next rewrite: the running one may have copied what they want gone.
    pub(super) waiters: Vec<Reply<RewriteReport>>,
    pub(super) overhead: f64,
    /// Whether the last background job was a rewrite.
    pub(super) was_last: bool,
    pub(super) not_before: Instant,
}

impl RewriteState {
    pub(super) fn new() -> Self {
        RewriteState {
            waiters: Vec::new(),
            overhead: OVERHEAD_ASSUMED,
            was_last: false,
            not_before: Instant::now(),
        }
    }
}
