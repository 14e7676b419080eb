//! The control messages to a running chunk, and the ways in which a chunk ends.

use refrain_protocol::ApiError;
use refrain_protocol::chunk::{ChunkCut, ChunkEnd, ChunkEndReason, ChunkEvent};
use tokio::sync::{mpsc, oneshot};

/// The queue of events to a chunk's reader.
pub(super) type Events = mpsc::Sender<Result<ChunkEvent, ApiError>>;

/// A control message to a running chunk. Each ends the chunk.
pub(super) enum ChunkControl {
    /// The reader needs no more of the output.
    Cut(ChunkCut, oneshot::Sender<()>),
    /// The request goes on under another lease: the worker drains, or another tenant waits for a slot.
    End(ChunkEndReason),
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
    /// A control message ended it.
    Controlled(ChunkControl),
}
