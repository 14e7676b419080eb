//! Turns the text of calls into tokens.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use lru::LruCache;
use refrain_suffix_index::Token;
use refrain_tokenization::Tokenizer;
use xxhash_rust::xxh3::xxh3_128;

use super::call::{Content, LoggedCall, RecordedCall};
use crate::approximate_tokenizer::ApproximateTokenizer;

/// Pieces of prompts whose tokens are kept: conversations repeat all that stood before.
const PIECES_MAX: usize = 1 << 16;
/// Their tokens together.
const TOKENS_MAX: usize = 16 << 20;

/// Turns text into tokens.
#[derive(Clone)]
pub(crate) enum LogTokenizer {
    /// The model's own tokenizer.
    Own(Arc<Tokenizer>),
    /// One that needs no vocabulary.
    Approximate(Arc<ApproximateTokenizer>),
}

impl Default for LogTokenizer {
    fn default() -> Self {
        LogTokenizer::Approximate(Arc::default())
    }
}

impl LogTokenizer {
    /// The tokenizer in this file, or in the folder of a model.
    ///
    /// # Errors
    /// A file that cannot be read or is no tokenizer.
    pub(crate) fn load(path: &Path) -> anyhow::Result<Self> {
        let path = match path.is_dir() {
            true => &path.join("tokenizer.json"),
            false => path,
        };
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        let tokenizer =
            Tokenizer::from_bytes(&bytes).with_context(|| path.display().to_string())?;
        Ok(LogTokenizer::Own(Arc::new(tokenizer)))
    }

    /// The tokens of a text. One that `is_beginning` has the tokens that begin a sequence.
    fn encode(&self, text: &str, is_beginning: bool) -> anyhow::Result<Vec<Token>> {
        Ok(match self {
            LogTokenizer::Own(tokenizer) if is_beginning => tokenizer.encode_sequence(text)?,
            LogTokenizer::Own(tokenizer) => tokenizer.encode(text)?,
            LogTokenizer::Approximate(tokenizer) => tokenizer.encode(text),
        })
    }

    /// The text of tokens.
    pub(crate) fn decode(&self, tokens: &[Token]) -> String {
        match self {
            LogTokenizer::Own(tokenizer) => tokenizer.decode(tokens),
            LogTokenizer::Approximate(tokenizer) => tokenizer.decode(tokens),
        }
    }
}

/// Turns calls with text into calls with tokens.
pub(super) struct Encoder {
    tokenizer: LogTokenizer,
    /// Whether it turned a text into tokens.
    has_encoded: bool,
    /// Tokens of pieces of prompts, by their digest.
    known: LruCache<u128, Vec<Token>>,
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

    fn encode(&mut self, text: &str, is_beginning: bool) -> anyhow::Result<Vec<Token>> {
        self.has_encoded = true;
        self.tokenizer.encode(text, is_beginning)
    }

    /// The call with tokens.
    pub(super) fn recorded(&mut self, call: LoggedCall) -> anyhow::Result<RecordedCall> {
        let prompt = match call.prompt {
            Content::Tokens(tokens) => tokens,
            Content::Text(pieces) => {
                let mut tokens = Vec::new();
                for (at, piece) in pieces.iter().enumerate() {
                    self.append_piece(&mut tokens, piece, at == 0)?;
                }
                tokens
            }
        };
        let output = match call.output {
            Content::Tokens(tokens) => tokens,
            Content::Text(pieces) => {
                let text = pieces.concat();
                let tokens = self.encode(&text, false)?;
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

    fn append_piece(
        &mut self,
        tokens: &mut Vec<Token>,
        piece: &str,
        is_beginning: bool,
    ) -> anyhow::Result<()> {
        let key = xxh3_128(piece.as_bytes()) ^ u128::from(is_beginning);
        if let Some(known) = self.known.get(&key) {
            tokens.extend_from_slice(known);
            return Ok(());
        }
        let encoded = self.encode(piece, is_beginning)?;
        tokens.extend_from_slice(&encoded);
        self.known_tokens += encoded.len();
        if let Some((_, replaced)) = self.known.push(key, encoded) {
            self.known_tokens -= replaced.len();
        }
        while self.known_tokens > TOKENS_MAX
            && let Some((_, oldest)) = self.known.pop_lru()
        {
            self.known_tokens -= oldest.len();
        }
        Ok(())
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
