//! The take-over of sealed segments by a worker: the list of segments, their bytes in pieces, and the documents in
//! none. After that the worker follows the feed.
//!
//! The store keeps no state between these calls. If a segment was merged away meanwhile, it is not found, and the
//! worker begins anew. These types travel in bincode.

use serde::{Deserialize, Serialize};

use crate::document::{DocumentUpdate, FeedCursor};
use crate::{DocumentId, SignedNamespace};

/// Asks for the segments of a namespace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SegmentsRequest {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
}

/// All documents of a namespace at one moment: those in segments and the others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentsReply {
    /// The position of that moment in the feed, which has all later changes.
    pub cursor: FeedCursor,
    /// The segments, oldest first.
    pub segments: Vec<SegmentInfo>,
    /// Documents in no segment. The one that is unchanged for longest comes first.
    pub unsealed: Vec<DocumentId>,
}

/// A sealed segment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentInfo {
    /// Its name, a checksum, which reveals nothing about other namespaces.
    pub segment: u64,
    /// Its size in words of 32 bits.
    pub words: u64,
    /// Its output tokens without those of masked documents.
    pub tokens: u64,
    /// Indices in the segment of documents that are no longer valid: they were removed, or have grown since.
    pub masked: Vec<u32>,
}

/// Asks for a piece of a segment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SegmentPieceRequest {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The name of the segment.
    pub segment: u64,
    /// Number of words before the piece.
    pub offset: u64,
    /// Most words of the answer.
    pub max_words: u32,
}

/// Words of a segment, little-endian. A whole segment begins with the checksum of the rest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentPiece {
    /// The words, at least one unless the segment ends before.
    pub words: Vec<u32>,
}

/// Asks for documents in their present state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DocumentsRequest {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The documents.
    pub documents: Vec<DocumentId>,
    /// Most tokens of the answer, which has at least one document.
    pub max_tokens: u32,
}

/// The answer to [`DocumentsRequest`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentsReply {
    /// The documents that exist, each in one piece.
    pub updates: Vec<DocumentUpdate>,
    /// Number of documents of the request that the answer covers. Ask again for the others.
    pub covered: u32,
}
