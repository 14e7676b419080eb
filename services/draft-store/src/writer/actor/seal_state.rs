//! What the writer knows of segments that are being made.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::record::SegmentId;
use crate::writer::messages::PurgeWaiter;

/// The work under way.
pub(super) struct RunningSeal {
    pub(super) stop: Arc<AtomicBool>,
    pub(super) from: &'static str,
    pub(super) segment: SegmentId,
}

/// RewriteState what has documents that are gone, and sealing.
pub(super) struct Purge {
    /// Which opening of the store it looked at; what was left in another is not known.
    pub(super) opened: u64,
    pub(super) left: VecDeque<SegmentId>,
    /// Seal what was at its end before this time.
    pub(super) seals_before_ms: Option<u64>,
    pub(super) waiters: Vec<PurgeWaiter>,
}

/// See the module.
#[derive(Default)]
pub(super) struct SealState {
    pub(super) running: Option<RunningSeal>,
    pub(super) purge: Option<Purge>,
    /// For the next purge: the work under way may have read what they want gone.
    pub(super) waiters: Vec<(PurgeWaiter, bool)>,
    pub(super) not_before: Option<Instant>,
    /// The last segment was sealed, so that merging has its turn.
    pub(super) merges_next: bool,
    /// When all namespaces were looked through for what is old; that is too much for every tick.
    pub(super) aged_at: Option<Instant>,
    /// The last number given to a segment by this process; it is given to no other, whatever came of it.
    pub(super) last: SegmentId,
}

impl SealState {
    /// Has the work under way end soon: then [`SealMessage::Ended`] comes.
    pub(super) fn stop(&mut self) {
        self.waiters.clear();
        self.purge = None;
        if let Some(running) = &self.running {
            running.stop.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }
}
