//! Turns the text of calls into tokens.

use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;
use refrain_suffix_index::Token;
use xxhash_rust::xxh3::xxh3_128;

use super::call::{Content, LoggedCall, RecordedCall};
use super::tokenizer::LogTokenizer;

/// Pieces of prompts whose tokens are kept: conversations repeat all that stood before.
const PIECES_MAX: usize = 1 << 16;
/// Their tokens together.
const TOKENS_MAX: usize = 16 << 20;

/// Turns calls with text into calls with tokens.
pub(super) struct Encoder {
    tokenizer: LogTokenizer,
    /// Whether it turned a text into tokens.
    has_encoded: bool,
    /// Tokens of pieces of prompts, by their digest.
    known: LruCache<u128, Arc<[Token]>>,
    known_tokens: usize,
    /// Length of the texts that were outputs, and their tokens: what a count is estimated from.
    encoded_bytes: u64,
    encoded_tokens: u64,
}

impl Encoder {
    pub(super) fn new(tokenizer: LogTokenizer) -> Self {
        Encoder {
            tokenizer,
            has_encoded: false,
            known: LruCache::new(NonZeroUsize::new(PIECES_MAX).unwrap_or(NonZeroUsize::MIN)),
            known_tokens: 0,
            encoded_bytes: 0,
            encoded_tokens: 0,
        }
    }

    /// Whether a text was turned into tokens.
    pub(super) fn has_encoded(&self) -> bool {
        self.has_encoded
    }

    /// Whether texts were split by the approximate tokenizer.
    pub(super) fn is_approximate(&self) -> bool {
        self.has_encoded && matches!(self.tokenizer, LogTokenizer::Approximate(_))
    }

    fn encode_all(&mut self, texts: &[(&str, bool)]) -> anyhow::Result<Vec<Vec<Token>>> {
        self.has_encoded |= !texts.is_empty();
        self.tokenizer.encode_all(texts)
    }

    /// The call with tokens.
    pub(super) fn recorded(&mut self, call: LoggedCall) -> anyhow::Result<RecordedCall> {
        let prompt = match call.prompt {
            Content::Tokens(tokens) => tokens,
            Content::Text(pieces) => self.prompt_tokens(&pieces)?,
        };
        let output = match call.output {
            Content::Tokens(tokens) => tokens,
            Content::Text(pieces) => {
                let text = pieces.concat();
                let tokens = self.encode_all(&[(&text, false)])?.concat();
                self.encoded_bytes += text.len() as u64;
                self.encoded_tokens += tokens.len() as u64;
                tokens
            }
        };
        Ok(RecordedCall {
            prompt,
            output,
            ..call.head
        })
    }

    fn prompt_tokens(&mut self, pieces: &[Arc<str>]) -> anyhow::Result<Vec<Token>> {
        let mut parts = Vec::with_capacity(pieces.len());
        let mut missing = Vec::new();
        for (at, piece) in pieces.iter().enumerate() {
            let is_beginning = at == 0;
            let key = xxh3_128(piece.as_bytes()) ^ u128::from(is_beginning);
            let known = self.known.get(&key).cloned();
            if known.is_none() {
                missing.push((&**piece, is_beginning));
            }
            parts.push((key, known));
        }
        let mut encoded = self.encode_all(&missing)?.into_iter();
        let mut tokens = Vec::new();
        for (key, known) in parts {
            let part = known.unwrap_or_else(|| {
                let part: Arc<[Token]> = encoded.next().unwrap_or_default().into();
                self.keep(key, part.clone());
                part
            });
            tokens.extend_from_slice(&part);
        }
        Ok(tokens)
    }

    fn keep(&mut self, key: u128, tokens: Arc<[Token]>) {
        self.known_tokens += tokens.len();
        if let Some((_, replaced)) = self.known.push(key, tokens) {
            self.known_tokens -= replaced.len();
        }
        while self.known_tokens > TOKENS_MAX
            && let Some((_, oldest)) = self.known.pop_lru()
        {
            self.known_tokens -= oldest.len();
        }
    }

    /// How many tokens an output has, and whether that is estimated from its length.
    pub(super) fn output_tokens(&self, call: &LoggedCall) -> (u64, bool) {
        match &call.output {
            Content::Tokens(tokens) => (tokens.len() as u64, false),
            Content::Text(pieces) => {
                let bytes: usize = pieces.iter().map(|piece| piece.len()).sum();
                let (tokens, of_bytes) = match self.encoded_bytes {
                    // English has about four letters a token.
                    0 => (1, 4),
                    of_bytes => (self.encoded_tokens, of_bytes),
                };
                ((bytes as u64 * tokens).div_ceil(of_bytes), true)
            }
        }
    }
}
