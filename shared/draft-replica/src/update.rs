//! An update of an output, borrowed from the request that emits it.

use refrain_protocol::document::{DocumentHead, DocumentUpdate, FinishReason};
use refrain_protocol::{DocumentId, TokenId};

/// A [`DocumentUpdate`] that borrows its tokens and its head.
///
/// A request makes one for every step, so it must cost no allocation: the head holds strings and the end of the
/// prompt.
#[derive(Clone, Copy, Debug)]
pub struct DocumentUpdateRef<'a> {
    /// The document that the output belongs to.
    pub document: DocumentId,
    /// Fencing epoch of the attempt that emitted the tokens.
    pub epoch: u64,
    /// Output tokens before `tokens`.
    pub prev_len: u32,
    /// The new tokens.
    pub tokens: &'a [TokenId],
    /// Metadata of the document.
    pub head: &'a DocumentHead,
    /// How the output ended, if it has.
    pub finish: Option<FinishReason>,
}

impl<'a> From<&'a DocumentUpdate> for DocumentUpdateRef<'a> {
    fn from(update: &'a DocumentUpdate) -> Self {
        DocumentUpdateRef {
            document: update.document,
            epoch: update.epoch,
            prev_len: update.prev_len,
            tokens: &update.tokens,
            head: &update.head,
            finish: update.finish,
        }
    }
}

impl From<DocumentUpdateRef<'_>> for DocumentUpdate {
    fn from(update: DocumentUpdateRef<'_>) -> Self {
        DocumentUpdate {
            document: update.document,
            epoch: update.epoch,
            prev_len: update.prev_len,
            tokens: update.tokens.to_vec(),
            head: update.head.clone(),
            finish: update.finish,
        }
    }
}
