//! The control messages to a running chunk, and the ways in which a chunk ends.

use refrain_protocol::ApiError;
use refrain_protocol::chunk::{ChunkCut, ChunkEnd, ChunkEndReason, ChunkEvent};
use tokio::sync::{mpsc, oneshot};

use crate::running::ActiveRequest;

/// The queue of events to a chunk's reader.
pub(super) type Events = mpsc::Sender<Result<ChunkEvent, ApiError>>;

/// A control message to a running chunk. Each ends the chunk.
pub(super) enum ChunkControl {
    /// The reader needs no more of the output.
    Cut(ChunkCut, oneshot::Sender<()>),
    /// The worker drains, and another worker continues the request.
    Evacuate,
    /// Another tenant waits for a slot.
    GiveWay,
    /// A newer lease of the same request is here.
    TakenOver,
}

/// The way in which a chunk ends.
pub(super) enum ChunkEnding {
    /// The chunk ended properly.
    Ended(ChunkEnd),
    /// The engine failed.
    Failed(ApiError),
    /// The request timed out.
    Overdue(ApiError),
    /// The reader has left.
    ReaderLeft,
    /// The reader stalled for too long.
    ReaderStalled,
    /// The reader needs no more of the output.
    Cut(ChunkCut, oneshot::Sender<()>),
    /// A newer lease of the same request is here.
    TakenOver,
}

impl ChunkEnding {
    /// The ending that a control message asks for.
    pub(super) fn by_control(control: ChunkControl, running: &ActiveRequest) -> Self {
        match control {
            ChunkControl::Cut(cut, done) => ChunkEnding::Cut(cut, done),
            ChunkControl::Evacuate => ChunkEnding::Ended(running.end(ChunkEndReason::Draining)),
            ChunkControl::GiveWay => ChunkEnding::Ended(running.end(ChunkEndReason::GaveWay)),
            ChunkControl::TakenOver => ChunkEnding::TakenOver,
        }
    }
}
