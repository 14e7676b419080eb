//! One document of a segment.

use refrain_protocol::document::DocumentHead;
use refrain_protocol::{DocumentId, TokenId};

use crate::record::StateRecord;

/// A document on its way into a segment.
#[derive(Debug)]
pub(crate) struct SegmentEntry {
    pub(crate) document: DocumentId,
    pub(crate) state: StateRecord,
    pub(crate) head: DocumentHead,
    pub(crate) tokens: Vec<TokenId>,
}
