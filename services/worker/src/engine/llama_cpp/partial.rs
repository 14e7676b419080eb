//! Ids that llama-server keeps to itself.
//!
//! While its text ends inside a character the server sends nothing; the event after that holds the text of all tokens
//! since, but the id of the last one only. How many were left out is known from the count of tokens drawn. Each of them
//! ended inside a character, and together they spell the text less the last token's: with a byte-level vocabulary that
//! leaves one answer nearly always. Where it leaves several, they spell the same text, and the one with the longest
//! first tokens is taken, as an encoder would.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use refrain_protocol::{ApiError, ErrorKind, TokenId};
use refrain_tokenization::Tokenizer;

/// Most tokens in a row that may lack an id.
const UNSENT_MAX: u64 = 64;

/// Tokens that are no text by themselves.
pub(super) struct Fragments {
    tokenizer: Arc<Tokenizer>,
    ids: HashMap<Vec<u8>, TokenId>,
    longest: usize,
}

impl Fragments {
    pub(super) fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let tokens = (0..tokenizer.vocab_size()).filter(|token| !tokenizer.is_special(*token));
        let ids: HashMap<Vec<u8>, TokenId> = tokens
            .map(|token| (tokenizer.token_bytes(token).to_vec(), token))
            .filter(|(bytes, _)| std::str::from_utf8(bytes).is_err())
            .collect();
        Fragments {
            longest: ids.keys().map(Vec::len).max().unwrap_or(0),
            ids,
            tokenizer,
        }
    }

    #[cfg(test)]
    pub(super) fn decode(&self, tokens: &[TokenId]) -> String {
        self.tokenizer.decode(tokens)
    }

    /// The `unsent` tokens before `last` that spell `content` together with it.
    ///
    /// # Errors
    /// No tokens do.
    pub(super) fn spell(
        &self,
        content: &str,
        last: TokenId,
        unsent: u64,
    ) -> Result<Vec<TokenId>, ApiError> {
        let spelled = content
            .as_bytes()
            .strip_suffix(self.tokenizer.token_bytes(last))
            .filter(|_| unsent <= UNSENT_MAX)
            .and_then(|bytes| {
                let mut tokens = Vec::with_capacity(unsent as usize);
                let mut dead = HashSet::new();
                self.split(bytes, 0, unsent as usize, &mut tokens, &mut dead)
                    .then_some(tokens)
            });
        spelled.ok_or_else(|| {
            ApiError::new(
                ErrorKind::Upstream,
                "the engine did not send all tokens, and its text does not tell which they were",
            )
            .with_detail(format!("{unsent} tokens without id"))
        })
    }

    /// Splits `bytes[from..]` into `left` fragments, longest first. Ways that lead nowhere are remembered, so that each
    /// is gone once.
    fn split(
        &self,
        bytes: &[u8],
        from: usize,
        left: usize,
        tokens: &mut Vec<TokenId>,
        dead: &mut HashSet<(usize, usize)>,
    ) -> bool {
        if left == 0 {
            return from == bytes.len();
        }
        if dead.contains(&(from, left)) {
            return false;
        }
        let longest = self.longest.min(bytes.len() - from);
        for len in (1..=longest).rev() {
            let to = from + len;
            let Some(token) = self.ids.get(&bytes[from..to]) else {
                continue;
            };
            if !ends_inside_character(&bytes[..to]) {
                continue;
            }
            tokens.push(*token);
            if self.split(bytes, to, left - 1, tokens, dead) {
                return true;
            }
            tokens.pop();
        }
        dead.insert((from, left));
        false
    }
}

fn ends_inside_character(bytes: &[u8]) -> bool {
    match std::str::from_utf8(bytes) {
        Ok(_) => false,
        Err(error) => error.error_len().is_none(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_tokenization::testing::byte_level_files;

    fn fragments() -> Fragments {
        Fragments::new(Arc::new(byte_level_files().tokenizer().unwrap()))
    }

    /// What llama-server would have sent of these tokens: text and last id.
    fn said(fragments: &Fragments, tokens: &[TokenId]) -> (String, TokenId) {
        (fragments.tokenizer.decode(tokens), *tokens.last().unwrap())
    }

    #[test]
    fn characters_of_several_tokens_come_back() {
        let fragments = fragments();
        for text in ["é", "€", "😀", "日本語"] {
            let tokens = fragments.tokenizer.encode(text).unwrap();
            let first = text.chars().next().unwrap().len_utf8();
            assert!(
                tokens.len() >= first,
                "a byte-level vocabulary without merges of these"
            );
            // The first character's tokens; all but the last end inside it.
            let (content, last) = said(&fragments, &tokens[..first]);
            let spelled = fragments.spell(&content, last, first as u64 - 1).unwrap();
            assert_eq!(spelled, tokens[..first - 1], "{text}");
        }
    }

    #[test]
    fn what_cannot_be_spelled_is_an_error() {
        let fragments = fragments();
        let tokens = fragments.tokenizer.encode("é").unwrap();
        let last = tokens[1];
        for (content, unsent) in [("é", 2), ("é", 1_000), ("e", 1), ("", 1)] {
            let error = fragments.spell(content, last, unsent).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Upstream);
        }
    }
}
