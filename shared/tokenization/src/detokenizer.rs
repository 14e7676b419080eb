//! Turns a stream of tokens into a stream of text.

use std::sync::Arc;

use crate::{TokenId, Tokenizer};

/// Turns tokens into text as they arrive. Bytes that may still become a character are held back. Bytes that cannot
/// become one give U+FFFD, exactly where decoding all tokens at once would give it. The beginning of a character at
/// the end of the text has no text: no token said U+FFFD. Special tokens have none either, unless it is asked for.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    shows_special: bool,
    /// The bytes that are held back: the beginning of a character, at most three bytes.
    held: Vec<u8>,
}

impl Detokenizer {
    /// Creates a detokenizer for the beginning of a text.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Detokenizer {
            tokenizer,
            shows_special: false,
            held: Vec::new(),
        }
    }

    /// The same detokenizer, with or without the text of special tokens.
    pub fn showing_special(mut self, shows_special: bool) -> Self {
        self.shows_special = shows_special;
        self
    }

    /// The text that this token completes, which is often empty.
    pub fn push(&mut self, token: TokenId) -> String {
        if !self.shows_special && self.tokenizer.is_special(token) {
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
}
