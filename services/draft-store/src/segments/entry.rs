//! One document of a segment, outside its file.

use refrain_protocol::document::DocumentHead;
use refrain_protocol::{DocumentId, TokenId};

use crate::record::StateRecord;

/// A document on its way into a segment, or read from one.
#[derive(Debug)]
pub(crate) struct SegmentEntry {
    pub(crate) document: DocumentId,
    pub(crate) state: StateRecord,
    pub(crate) head: DocumentHead,
    pub(crate) tokens: Vec<TokenId>,
}
