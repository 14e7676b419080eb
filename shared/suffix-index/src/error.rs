use std::fmt;

use crate::{DocumentKey, SegmentError};

/// Why the index refused a change. A refused change leaves the index as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexError {
    /// No document of this key is in the index: never opened, or removed.
    UnknownDocument(DocumentKey),
    /// The key is taken; [`remove`](crate::Index::remove) it first.
    DuplicateDocument(DocumentKey),
    /// A document can only be shortened to a length it has reached.
    BeyondEnd {
        /// The document.
        key: DocumentKey,
        /// The length asked for.
        wanted: u32,
        /// The length it has.
        len: u32,
    },
    /// State numbers are 32 bits wide and this index has used its share of them: start another one.
    Full,
    /// The index was rebuilt after this rebuild had begun, so the result no longer fits. Begin again.
    OutdatedRebuild,
    /// A segment was merged elsewhere after this merge had begun, so the result no longer fits. Begin again.
    OutdatedMerge,
    /// A segment could not be made.
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
            IndexError::Full => f.write_str("the index is full"),
            IndexError::OutdatedRebuild => {
                f.write_str("the index was rebuilt since this rebuild began")
            }
            IndexError::OutdatedMerge => {
                f.write_str("a segment was merged elsewhere since this merge began")
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
