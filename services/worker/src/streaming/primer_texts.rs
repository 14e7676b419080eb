//! The outputs that a primer sends: the newest ones of a namespace, and how far each has been sent.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use lru::LruCache;
use refrain_protocol::document::{DocumentUpdate, FeedEvent};
use refrain_protocol::{DocumentId, TokenId};

/// Most tokens that an engine is sent at once. Requests that run there wait for as long as it reads them.
const PIECE_TOKENS: usize = 512;
/// Tokens that the parts of a long text share. An engine needs as many before a token as it compares.
const SHARED_TOKENS: usize = 32;

/// The newest outputs of a namespace, each after the end of its prompt. It has no clock and does no I/O.
pub(super) struct PrimerTexts {
    tokens_max: usize,
    /// The output that changed last is the most recent one.
    texts: LruCache<DocumentId, PrimerText>,
    tokens: usize,
    /// The ended outputs by a hash of their texts. The last one of several that are equal is kept.
    ended: HashMap<u64, DocumentId>,
}

struct PrimerText {
    /// Tokens of the prompt at the beginning.
    left: usize,
    tokens: Vec<TokenId>,
    has_ended: bool,
    /// Tokens that the engine was sent since it started.
    sent: usize,
}

/// A part of the outputs that is sent at once.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct PrimerPiece {
    pub(super) tokens: Vec<TokenId>,
    /// Outputs that end in it.
    pub(super) documents: u64,
}

impl PrimerTexts {
    /// Keeps outputs of at most `tokens_max` tokens together.
    pub(super) fn new(tokens_max: u32) -> Self {
        PrimerTexts {
            tokens_max: tokens_max as usize,
            texts: LruCache::unbounded(),
            tokens: 0,
            ended: HashMap::new(),
        }
    }

    /// Applies a change of the store's feed. Past the limit the oldest outputs are dropped.
    pub(super) fn apply(&mut self, event: FeedEvent) {
        match event {
            FeedEvent::Remove(document) => _ = self.take(document),
            FeedEvent::Update(update) => self.grow(update),
        }
        while self.tokens > self.tokens_max
            && let Some((oldest, _)) = self.texts.peek_lru()
        {
            self.take(*oldest);
        }
    }

    fn grow(&mut self, update: DocumentUpdate) {
        let mut text = self.take(update.document).unwrap_or(PrimerText {
            left: update.head.left_context.len(),
            tokens: update.head.left_context,
            has_ended: false,
            sent: 0,
        });
        let before = text.left + update.prev_len as usize;
        let len = before + update.tokens.len();
        // An output without its beginning, or one that alone exceeds the limit, is left out.
        if before > text.tokens.len() || len > self.tokens_max {
            return;
        }
        text.tokens.truncate(before);
        text.tokens.extend(update.tokens);
        text.sent = text.sent.min(before);
        text.has_ended = update.finish.is_some();
        if text.has_ended {
            let equal = self.ended.get(&hash_of(&text.tokens)).copied();
            if let Some(equal) = equal.and_then(|document| self.take(document)) {
                // The engine knows as much of the text as it was sent of that output.
                text.sent = equal.sent;
            }
            self.ended.insert(hash_of(&text.tokens), update.document);
        }
        self.tokens += len;
        self.texts.put(update.document, text);
    }

    fn take(&mut self, document: DocumentId) -> Option<PrimerText> {
        let text = self.texts.pop(&document)?;
        self.tokens -= text.tokens.len();
        if text.has_ended {
            self.ended.remove(&hash_of(&text.tokens));
        }
        Some(text)
    }

    /// Notes that the engine knows none of it any more.
    pub(super) fn begin_anew(&mut self) {
        for (_, text) in &mut self.texts {
            text.sent = 0;
        }
    }

    /// The next piece of what the engine was not sent yet. The newest outputs come last, since the engine keeps the
    /// last of several continuations.
    pub(super) fn next_piece(&mut self) -> Option<PrimerPiece> {
        let mut piece = PrimerPiece::default();
        for (_, text) in self.texts.iter_mut().rev() {
            let room = PIECE_TOKENS - piece.tokens.len();
            if room <= SHARED_TOKENS {
                break;
            }
            if text.has_ended && text.sent < text.tokens.len() {
                let from = text.sent.saturating_sub(SHARED_TOKENS);
                let to = text.tokens.len().min(from + room);
                piece.tokens.extend_from_slice(&text.tokens[from..to]);
                piece.documents += u64::from(to == text.tokens.len());
                text.sent = to;
            }
        }
        (!piece.tokens.is_empty()).then_some(piece)
    }
}

fn hash_of(tokens: &[TokenId]) -> u64 {
    let mut hasher = DefaultHasher::new();
    tokens.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use refrain_protocol::document::{DocumentHead, FinishReason};

    use super::*;

    fn update(document: u128, prev_len: u32, tokens: &[TokenId], ends: bool) -> FeedEvent {
        FeedEvent::Update(DocumentUpdate {
            document: DocumentId(document),
            epoch: 1,
            prev_len,
            tokens: tokens.to_vec(),
            head: DocumentHead {
                left_context: vec![900, 901],
                ..DocumentHead::default()
            },
            finish: ends.then_some(FinishReason::Stop),
        })
    }

    fn pieces(texts: &mut PrimerTexts) -> Vec<Vec<TokenId>> {
        std::iter::from_fn(|| texts.next_piece())
            .map(|piece| piece.tokens)
            .collect()
    }

    #[test]
    fn ended_outputs_are_sent_once_with_the_newest_last_and_anew_after_a_start() {
        let mut texts = PrimerTexts::new(100);
        texts.apply(update(1, 0, &[1, 2], false));
        texts.apply(update(2, 0, &[5], true));
        assert_eq!(pieces(&mut texts), [[900, 901, 5]]);
        texts.apply(update(1, 2, &[3], true));
        assert_eq!(pieces(&mut texts), [[900, 901, 1, 2, 3]]);
        assert_eq!(texts.next_piece(), None);
        texts.begin_anew();
        let all = PrimerPiece {
            tokens: vec![900, 901, 5, 900, 901, 1, 2, 3],
            documents: 2,
        };
        assert_eq!(texts.next_piece(), Some(all));
        // A removed output is not sent again.
        texts.apply(FeedEvent::Remove(DocumentId(2)));
        texts.begin_anew();
        assert_eq!(pieces(&mut texts), [[900, 901, 1, 2, 3]]);
    }

    #[test]
    fn a_changed_output_is_sent_from_its_change_on() {
        let mut texts = PrimerTexts::new(1_000);
        let long: Vec<TokenId> = (0..60).collect();
        texts.apply(update(1, 0, &long, true));
        assert_eq!(pieces(&mut texts)[0].len(), 62);
        texts.apply(update(1, 58, &[77], true));
        let changed = pieces(&mut texts);
        assert_eq!(changed[0][..], [&long[26..58], &[77]].concat());
        // A part whose beginning is missing stands nowhere.
        texts.apply(update(3, 4, &[1], true));
        assert_eq!(texts.next_piece(), None);
    }

    #[test]
    fn the_oldest_outputs_make_room_and_one_that_is_too_long_is_left_out() {
        let mut texts = PrimerTexts::new(9);
        texts.apply(update(1, 0, &[1], true));
        texts.apply(update(2, 0, &[2, 2], true));
        texts.apply(update(3, 0, &[3, 3], true));
        texts.apply(update(4, 0, &[4; 9], true));
        assert_eq!(pieces(&mut texts), [[900, 901, 2, 2, 900, 901, 3, 3]]);
        assert_eq!(texts.tokens, 8);
    }

    #[test]
    fn of_equal_outputs_the_last_is_kept_and_sent_once() {
        let mut texts = PrimerTexts::new(100);
        for document in 1..=3 {
            texts.apply(update(document, 0, &[1, 2], true));
        }
        texts.apply(update(4, 0, &[1], true));
        assert_eq!(texts.tokens, 7);
        assert_eq!(pieces(&mut texts), [[900, 901, 1, 2, 900, 901, 1]]);
        texts.apply(update(5, 0, &[1, 2], true));
        assert_eq!(texts.next_piece(), None);
        // It is the newest one now.
        texts.begin_anew();
        assert_eq!(pieces(&mut texts), [[900, 901, 1, 900, 901, 1, 2]]);
        texts.apply(FeedEvent::Remove(DocumentId(5)));
        texts.apply(FeedEvent::Remove(DocumentId(4)));
        assert_eq!((texts.tokens, texts.ended.len()), (0, 0));
    }

    #[test]
    fn a_long_output_goes_in_parts_that_share_tokens() {
        let mut texts = PrimerTexts::new(10_000);
        let long: Vec<TokenId> = (0..1_200).collect();
        texts.apply(update(1, 0, &long, true));
        texts.apply(update(2, 0, &[7], true));
        let sent = pieces(&mut texts);
        assert!(sent.iter().all(|piece| piece.len() <= PIECE_TOKENS));
        let mut joined = sent[0].clone();
        for piece in &sent[1..] {
            assert_eq!(
                joined[joined.len() - SHARED_TOKENS..],
                piece[..SHARED_TOKENS]
            );
            joined.extend(&piece[SHARED_TOKENS..]);
        }
        assert_eq!(joined, [&[900, 901], &long[..], &[900, 901, 7]].concat());
    }
}
