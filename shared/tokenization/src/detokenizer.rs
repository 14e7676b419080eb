//! A stream of tokens to a stream of text.

use std::sync::Arc;

use crate::{TokenId, Tokenizer};

/// Turns tokens into text as they come. Bytes that may still become a character are held back; bytes that
/// cannot are shown as U+FFFD, exactly where decoding the whole at once would show it.
///
/// Special tokens give no text.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// The beginning of a character, at most three bytes.
    held: Vec<u8>,
}

impl Detokenizer {
    /// At the beginning of a text.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Detokenizer {
            tokenizer,
            held: Vec::new(),
        }
    }

    /// The text that this token completes; often empty.
    pub fn push(&mut self, token: TokenId) -> String {
        if self.tokenizer.is_special(token) {
            return String::new();
        }
        self.held
            .extend_from_slice(self.tokenizer.token_bytes(token));
        let mut text = String::new();
        loop {
            match std::str::from_utf8(&self.held) {
                Ok(whole) => {
                    text.push_str(whole);
                    self.held.clear();
                    return text;
                }
                Err(error) => {
                    let (valid, rest) = self.held.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    let bad = error.error_len();
                    let kept = rest[bad.unwrap_or(0)..].to_vec();
                    self.held = kept;
                    match bad {
                        Some(_) => text.push(char::REPLACEMENT_CHARACTER),
                        None => return text,
                    }
                }
            }
        }
    }

    /// Whether the beginning of a character is held back.
    pub fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// What is held back, when nothing follows: U+FFFD for the beginning of a character, else nothing.
    pub fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned()
    }
}
