//! How a worker takes over what the draft store has sealed: which segments there are, their bytes in pieces, and
//! the documents that are in none. From there on it follows the feed.
//!
//! Nothing here is kept for the caller in between. A segment that was merged away meanwhile is not found, and the
//! caller begins again. These types cross in bincode.

use serde::{Deserialize, Serialize};

use crate::document::{DocumentUpdate, FeedCursor};
use crate::{DocumentId, SignedNamespace};

/// Asks what of a namespace is sealed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SegmentsRequest {
    /// Signed by the gateway.
    pub namespace: SignedNamespace,
}

/// All documents of a namespace at one moment: those in segments, and the others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentsReply {
    /// That moment: whatever changed later is told by the feed after this.
    pub cursor: FeedCursor,
    /// Oldest first.
    pub segments: Vec<SegmentInfo>,
    /// Documents in no segment, the longest unchanged first.
    pub unsealed: Vec<DocumentId>,
}

/// One segment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentInfo {
    /// Its name, a checksum, which tells nothing of other namespaces.
    pub segment: u64,
    /// Words of 32 bits that its bytes are.
    pub words: u64,
    /// Tokens of output, those of masked documents not counted.
    pub tokens: u64,
    /// Numbers, in the order of the segment, of documents that are there no more or were gone on with.
    pub masked: Vec<u32>,
}

/// Asks for bytes of a segment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SegmentPieceRequest {
    /// Signed by the gateway.
    pub namespace: SignedNamespace,
    /// Which one of that namespace.
    pub segment: u64,
    /// Words before the piece.
    pub offset: u64,
    /// Most words to send.
    pub max_words: u32,
}

/// Words of a segment, little-endian. All of them together begin with the checksum of the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentPiece {
    /// At least one, unless the segment ends before.
    pub words: Vec<u32>,
}

/// Asks for documents as they are now.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DocumentsRequest {
    /// Signed by the gateway.
    pub namespace: SignedNamespace,
    /// Which ones of that namespace.
    pub documents: Vec<DocumentId>,
    /// Most tokens to send (at least one document is sent).
    pub max_tokens: u32,
}

/// The answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentsReply {
    /// Those that are there, whole.
    pub updates: Vec<DocumentUpdate>,
    /// How many of those asked for the answer covers; ask again for the others.
    pub covered: u32,
}
