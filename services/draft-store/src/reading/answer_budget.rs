//! The size of an answer: a limit of tokens, and one of bytes.

use refrain_protocol::document::FeedEvent;

/// Bytes of an event beside its tokens and names, and more than it has of them.
const EVENT_BYTES: usize = 192;

/// The room that is left in an answer.
pub(crate) struct AnswerBudget {
    tokens: usize,
    bytes: usize,
    is_begun: bool,
}

impl AnswerBudget {
    pub(crate) fn new(tokens: usize, bytes: usize) -> Self {
        AnswerBudget {
            tokens,
            bytes,
            is_begun: false,
        }
    }

    /// Whether a change of so many tokens has room. The first one always has.
    pub(crate) fn admits(&self, tokens: usize) -> bool {
        !self.is_begun || tokens <= self.tokens && self.bytes > 0
    }

    /// Takes the room of an event, which may be more than was left in bytes.
    pub(crate) fn take(&mut self, event: &FeedEvent) {
        let (mut tokens, mut names) = (0, 0);
        if let FeedEvent::Update(update) = event {
            tokens = update.tokens.len();
            let of_head = [&update.head.session, &update.head.group];
            names = of_head.into_iter().flatten().map(String::len).sum();
        }
        self.is_begun = true;
        self.tokens = self.tokens.saturating_sub(tokens);
        let bytes = EVENT_BYTES + names + tokens * size_of::<u32>();
        self.bytes = self.bytes.saturating_sub(bytes);
    }

    /// Whether no change has room any more.
    pub(crate) fn is_spent(&self) -> bool {
        self.is_begun && (self.tokens == 0 || self.bytes == 0)
    }
}

#[cfg(test)]
mod tests {
    use refrain_protocol::DocumentId;
    use refrain_protocol::document::{DocumentHead, DocumentUpdate};

    use super::*;

    #[test]
    fn an_answer_has_one_change_at_least_and_ends_with_its_tokens_or_bytes() {
        let update = |tokens| {
            FeedEvent::Update(DocumentUpdate {
                document: DocumentId(1),
                epoch: 1,
                prev_len: 0,
                tokens: vec![1; tokens],
                head: DocumentHead::default(),
                finish: None,
            })
        };
        let mut budget = AnswerBudget::new(10, 3 * EVENT_BYTES);
        assert!(budget.admits(50) && !budget.is_spent());
        budget.take(&update(8));
        assert!(budget.admits(2) && !budget.admits(3));
        budget.take(&FeedEvent::Remove(DocumentId(1)));
        assert!(budget.admits(2) && !budget.is_spent());
        // The bytes of the next one are not all there, and then there are none.
        budget.take(&update(1));
        assert!(!budget.admits(0) && budget.is_spent());
    }
}
