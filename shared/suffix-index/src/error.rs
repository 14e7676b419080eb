//! The errors of an index.

use std::fmt;

use crate::{DocumentKey, SegmentError};

/// The reason why the index refused a change. A refused change leaves the index as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexError {
    /// No document has this key: it was never opened, or it was removed.
    UnknownDocument(DocumentKey),
    /// Another document has this key. [`remove`](crate::Index::remove) it first.
    DuplicateDocument(DocumentKey),
    /// The document is shorter than the length to which it should be cut.
    BeyondEnd {
        /// The document.
        key: DocumentKey,
        /// The requested length.
        wanted: u32,
        /// The document's length.
        len: u32,
    },
    /// The index has no state numbers of 32 bits left. Start another index.
    Full,
    /// The index was rebuilt after this rebuild began, so the result no longer fits. Begin again.
    OutdatedRebuild,
    /// Another merge replaced an input after this merge began, so the result no longer fits. Begin again.
    OutdatedMerge,
    /// A segment could not be built.
    Segment(SegmentError),
}

impl fmt::Display for IndexError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            IndexError::UnknownDocument(key) => {
                write!(f, "document {:032x} is not in the index", key.0)
            }
            IndexError::DuplicateDocument(key) => {
                write!(f, "document {:032x} is already in the index", key.0)
            }
            IndexError::BeyondEnd { key, wanted, len } => {
                write!(
                    f,
                    "document {:032x} holds {len} tokens and cannot be shortened to {wanted}",
                    key.0
                )
            }
            IndexError::Full => f.write_str("the index is full: start another one"),
            IndexError::OutdatedRebuild => {
                f.write_str("the index was rebuilt since this rebuild began: begin again")
            }
            IndexError::OutdatedMerge => {
                f.write_str("another merge replaced a segment since this merge began: begin again")
            }
            IndexError::Segment(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for IndexError {}

impl From<SegmentError> for IndexError {
    fn from(error: SegmentError) -> Self {
        IndexError::Segment(error)
    }
}
