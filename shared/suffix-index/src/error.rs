//! The errors of an index.

use crate::{DocumentKey, SegmentError};

/// The reason why the index refused a change. A refused change leaves the index as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IndexError {
    /// No document has this key: it was never opened, or it was removed.
    #[error("document {:032x} is not in the index", .0.0)]
    UnknownDocument(DocumentKey),
    /// Another document has this key. [`remove`](crate::Index::remove) it first.
    #[error("document {:032x} is already in the index", .0.0)]
    DuplicateDocument(DocumentKey),
    /// The document is shorter than the length to which it should be cut.
    #[error("document {:032x} holds {len} tokens and cannot be shortened to {wanted}", .key.0)]
    BeyondEnd {
        /// The document.
        key: DocumentKey,
        /// The requested length.
        wanted: u32,
        /// The document's length.
        len: u32,
    },
    /// The index has no state numbers of 32 bits left. Start another index.
    #[error("the index is full: start another one")]
    Full,
    /// The index was rebuilt after this rebuild began, so the result no longer fits. Begin again.
    #[error("the index was rebuilt since this rebuild began: begin again")]
    OutdatedRebuild,
    /// Another merge replaced an input after this merge began, so the result no longer fits. Begin again.
    #[error("another merge replaced a segment since this merge began: begin again")]
    OutdatedMerge,
    /// A segment could not be built.
    #[error(transparent)]
    Segment(#[from] SegmentError),
}
