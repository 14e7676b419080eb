//! Recovery of the token ids that llama-server does not send.
//!
//! While its text ends inside a character, the server sends no event. The next event holds the text of all tokens
//! since then, but only the id of the last one. The count of generated tokens tells how many ids are missing. Each
//! missing token ended inside a character, and together they spell the text without the last token's part. With a
//! byte-level vocabulary this nearly always leaves one solution. Several solutions spell the same text; the one with
//! the longest first tokens is taken, as an encoder would.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use refrain_protocol::{ApiError, ErrorKind, TokenId};
use refrain_tokenization::Tokenizer;

/// Maximum number of consecutive tokens without an id.
const UNSENT_MAX: u64 = 64;

/// The tokens that are not valid UTF-8 by themselves.
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
    /// No such tokens exist.
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
                "the engine did not send all token ids, and they cannot be recovered from its text",
            )
            .with_detail(format!("{unsent} tokens without id"))
        })
    }

    /// Splits `bytes[from..]` into `left` fragments, the longest first. `dead` holds the states that lead nowhere, so
    /// that each is tried once.
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

    /// The content and id that llama-server would send for these tokens.
    fn sent(fragments: &Fragments, tokens: &[TokenId]) -> (String, TokenId) {
        (fragments.tokenizer.decode(tokens), *tokens.last().unwrap())
    }

    #[test]
    fn characters_of_several_tokens_are_recovered() {
        let fragments = fragments();
        for text in ["é", "€", "😀", "日本語"] {
            let tokens = fragments.tokenizer.encode(text).unwrap();
            let first = text.chars().next().unwrap().len_utf8();
            assert!(
                tokens.len() >= first,
                "a byte-level vocabulary without merges of these"
            );
            // The tokens of the first character; all but the last one end inside it.
            let (content, last) = sent(&fragments, &tokens[..first]);
            let spelled = fragments.spell(&content, last, first as u64 - 1).unwrap();
            assert_eq!(spelled, tokens[..first - 1], "{text}");
        }
    }

    #[test]
    fn unrecoverable_tokens_are_an_error() {
        let fragments = fragments();
        let tokens = fragments.tokenizer.encode("é").unwrap();
        let last = tokens[1];
        for (content, unsent) in [("é", 2), ("é", 1_000), ("e", 1), ("", 1)] {
            let error = fragments.spell(content, last, unsent).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Upstream);
        }
    }
}
