//! An update of an output, borrowed from the request that emits it.

use refrain_protocol::document::{DocumentHead, DocumentUpdate, FinishReason};
use refrain_protocol::{DocumentId, TokenId};
use refrain_service_kit::trace::TraceLink;

/// Tokens that are merged under one hold of an index's lock: well under a millisecond.
pub(crate) const MERGED_AT_ONCE: usize = 512;

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
    /// The request in its trace, if that is exported.
    pub trace: Option<&'a TraceLink>,
}

impl<'a> DocumentUpdateRef<'a> {
    /// The update in parts of a limited size, which are merged one by one. The last part ends the document, if any
    /// does. An update without tokens is one part: it may still shorten the document.
    pub(crate) fn parts(self) -> impl Iterator<Item = DocumentUpdateRef<'a>> {
        let parts = self.tokens.len().div_ceil(MERGED_AT_ONCE).max(1);
        (0..parts).map(move |part| {
            let from = part * MERGED_AT_ONCE;
            let to = self.tokens.len().min(from + MERGED_AT_ONCE);
            DocumentUpdateRef {
                prev_len: self.prev_len + from as u32,
                tokens: &self.tokens[from..to],
                finish: self.finish.filter(|_| part + 1 == parts),
                ..self
            }
        })
    }
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
            trace: None,
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

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_protocol::document::{DocumentHead, FinishReason};

    fn update(tokens: Vec<u32>) -> DocumentUpdate {
        DocumentUpdate {
            document: DocumentId(1),
            epoch: 1,
            prev_len: 3,
            tokens,
            head: DocumentHead::default(),
            finish: Some(FinishReason::Stop),
        }
    }

    #[test]
    fn long_updates_are_split_without_loss() {
        let tokens: Vec<u32> = (0..2 * MERGED_AT_ONCE as u32 + 5).collect();
        let update = update(tokens.clone());
        let mut joined = Vec::new();
        let mut ends = Vec::new();
        for part in DocumentUpdateRef::from(&update).parts() {
            assert!(part.tokens.len() <= MERGED_AT_ONCE);
            assert_eq!(part.prev_len as usize, 3 + joined.len());
            joined.extend_from_slice(part.tokens);
            ends.push(part.finish.is_some());
        }
        assert_eq!((joined, ends), (tokens, vec![false, false, true]));
    }

    #[test]
    fn an_update_without_tokens_is_one_part() {
        let update = update(Vec::new());
        let parts: Vec<_> = DocumentUpdateRef::from(&update).parts().collect();
        assert_eq!((parts.len(), parts[0].prev_len), (1, 3));
        assert_eq!(parts[0].finish, update.finish);
    }
}
