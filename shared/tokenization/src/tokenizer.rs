//! The tokenizer: the encoder of a library, with our own rules for special tokens.

mod canary;
mod encoder;
mod file_limits;
#[cfg(test)]
mod fuzz_tests;
mod special_tokens;

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use self::encoder::{Encoder, LibraryEncoder};
use self::file_limits::TOKEN_ID_MAX;
use self::special_tokens::{SpecialToken, SpecialTokens};
use crate::token_lower_bound::{TokenLowerBound, Vocabulary};
use crate::token_spelling::TokenSpelling;
use crate::{STAGE, TokenId, TokenizationError};

/// Encodes and decodes text by a model's `tokenizer.json`.
pub struct Tokenizer {
    encoder: Encoder,
    /// The bytes of each id, empty where the vocabulary has a gap.
    bytes: Vec<Box<[u8]>>,
    is_special: Vec<bool>,
    specials: SpecialTokens,
    /// `None` if no lower bound of the number of tokens is known.
    pub(crate) lower_bound: Option<TokenLowerBound>,
    encoded_bytes: AtomicU64,
    identity: String,
    /// The token for characters outside the vocabulary. Plain text may contain it, although it is special.
    unknown: Option<TokenId>,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("identity", &self.identity)
            .field("vocab_size", &self.bytes.len())
            .finish_non_exhaustive()
    }
}

fn model_error(reason: impl fmt::Display) -> TokenizationError {
    TokenizationError::Model {
        file: "tokenizer.json",
        reason: reason.to_string(),
    }
}

/// Bytes per token of room up to which a text is encoded without computing the lower bound of its tokens first. A
/// fast encoder takes less time than the bound; what it may encode in vain stays in proportion to the room.
const UNCHECKED_BYTES_PER_TOKEN: usize = 16;

impl Tokenizer {
    /// Reads `tokenizer.json`.
    ///
    /// # Errors
    /// The file is not valid JSON, or has an unknown model, or has a decoder whose tokens have no known bytes. It is
    /// far too large, or a library cannot read or use it.
    pub fn from_bytes(tokenizer_json: &[u8]) -> Result<Self, TokenizationError> {
        let file: serde_json::Value =
            serde_json::from_slice(tokenizer_json).map_err(model_error)?;
        file_limits::check(&file).map_err(model_error)?;
        // The libraries panic for some files, and nothing of theirs is kept then.
        let built = catch_unwind(AssertUnwindSafe(|| Self::build(&file, tokenizer_json)));
        built.unwrap_or_else(|_| Err(model_error("the tokenizers library panicked on it")))
    }

    fn build(file: &serde_json::Value, tokenizer_json: &[u8]) -> Result<Self, TokenizationError> {
        let spelling = TokenSpelling::of(file).map_err(model_error)?;
        let mut marked = tokenizers::Tokenizer::from_bytes(tokenizer_json).map_err(model_error)?;
        // A file may contain the settings of a training run. Prompts are neither truncated nor padded.
        marked.with_truncation(None).map_err(model_error)?;
        marked.with_padding(None);
        let library = LibraryEncoder::new(marked);
        library.try_out();
        let marked = library.tokenizer();

        let mut entries: Vec<(TokenId, Vec<u8>, bool)> = Vec::new();
        let added = marked.get_added_tokens_decoder();
        let vocabulary = marked.get_vocab(false);
        let lower_bound = TokenLowerBound::new(
            file,
            &spelling,
            &Vocabulary {
                tokens: vocabulary.keys().map(String::as_str).collect(),
                added: added.values().map(|token| &*token.content).collect(),
                absorbs_spaces: added.values().any(|token| token.lstrip || token.rstrip),
            },
        );
        for (text, id) in vocabulary {
            if !added.contains_key(&id) {
                entries.push((id, spelling.bytes(&text), false));
            }
        }
        let mut specials = Vec::new();
        for (id, token) in &added {
            entries.push((*id, token.content.clone().into_bytes(), token.special));
            if token.special && !token.content.is_empty() {
                specials.push(SpecialToken {
                    id: *id,
                    text: token.content.clone(),
                    lstrip: token.lstrip,
                    rstrip: token.rstrip,
                });
            }
        }
        entries.sort();
        let largest = entries
            .last()
            .map(|entry| entry.0)
            .ok_or_else(|| model_error("the vocabulary is empty"))?;
        if largest > TOKEN_ID_MAX {
            return Err(model_error(format!(
                "token id {largest} is above {TOKEN_ID_MAX}"
            )));
        }

        let mut bytes = vec![Box::<[u8]>::default(); largest as usize + 1];
        let mut is_special = vec![false; largest as usize + 1];
        let mut hash = Sha256::new();
        for (id, token_bytes, special) in entries {
            hash.update(id.to_le_bytes());
            hash.update((token_bytes.len() as u64).to_le_bytes());
            hash.update(&token_bytes);
            hash.update([u8::from(special)]);
            is_special[id as usize] = special;
            bytes[id as usize] = token_bytes.into_boxed_slice();
        }
        let unknown = file["model"]["unk_token"]
            .as_str()
            .and_then(|text| marked.token_to_id(text))
            .or_else(|| file["model"]["unk_id"].as_u64()?.try_into().ok());
        Ok(Tokenizer {
            identity: hex::encode(hash.finalize()),
            encoder: Encoder::choose(file, &spelling, library),
            bytes,
            is_special,
            specials: SpecialTokens::new(specials).map_err(model_error)?,
            lower_bound,
            encoded_bytes: AtomicU64::new(0),
            unknown,
        })
    }

    /// The tokens of a text. Special tokens in it are ordinary text, and no special token is added.
    ///
    /// # Errors
    /// The vocabulary cannot spell the text, or only with a special token.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, TokenizationError> {
        self.encode_plain(text, false)
    }

    /// The tokens of a text that begins a sequence: as [`Tokenizer::encode`], with the tokens that the tokenizer adds
    /// around a sequence, often a begin-of-text token.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_sequence(&self, text: &str) -> Result<Vec<TokenId>, TokenizationError> {
        self.encode_plain(text, true)
    }

    /// As [`Tokenizer::encode`], but a text that surely has more than `tokens_max` tokens is refused without encoding
    /// it. A text that is accepted can still have more.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`], and [`TokenizationError::TooLong`].
    pub fn encode_within(
        &self,
        text: &str,
        tokens_max: usize,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        self.check_length(text, None, tokens_max)?;
        self.encode(text)
    }

    /// As [`Tokenizer::encode_sequence`], with the check of [`Tokenizer::encode_within`].
    ///
    /// # Errors
    /// As [`Tokenizer::encode_within`].
    pub fn encode_sequence_within(
        &self,
        text: &str,
        tokens_max: usize,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        self.check_length(text, None, tokens_max)?;
        self.encode_sequence(text)
    }

    /// Refuses a text that surely has more than `tokens_max` tokens. `left_out` is a character that is removed from
    /// the text before it is encoded.
    pub(crate) fn check_length(
        &self,
        text: &str,
        left_out: Option<char>,
        tokens_max: usize,
    ) -> Result<(), TokenizationError> {
        let unchecked_bytes = match self.encoder.is_fast() {
            true => tokens_max.saturating_mul(UNCHECKED_BYTES_PER_TOKEN),
            // No text has more tokens than bytes, so its lower bound is no higher.
            false => tokens_max,
        };
        if text.len() <= unchecked_bytes {
            return Ok(());
        }
        let bound = self.lower_bound.as_ref();
        match bound.and_then(|bound| bound.above(text, left_out, tokens_max)) {
            Some(at_least) => Err(TokenizationError::TooLong { at_least }),
            None => Ok(()),
        }
    }

    fn encode_plain(
        &self,
        text: &str,
        as_sequence: bool,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        self.count(text);
        let is_stray = |id| self.is_special(id) && Some(id) != self.unknown;
        self.encoder.plain(text, as_sequence, is_stray)
    }

    /// The tokens of a trusted text, in which special tokens are recognised. Never use it for text that a user wrote.
    ///
    /// # Errors
    /// The vocabulary cannot spell the text.
    pub fn encode_trusted(&self, text: &str) -> Result<Vec<TokenId>, TokenizationError> {
        self.count(text);
        self.encoder.marked(text)
    }

    fn encode_guarded(&self, text: &str, guard: char) -> Result<Vec<TokenId>, TokenizationError> {
        let mut ids = Vec::new();
        let (mut from, mut strip_left) = (0, false);
        let found = self.specials.find_in(text);
        let found = found.map(|(range, special)| (range, Some(special)));
        for (range, special) in found.chain([(text.len()..text.len(), None)]) {
            let plain = text[from..range.start].chars();
            let plain: String = plain.filter(|character| *character != guard).collect();
            let mut plain = plain.as_str();
            if strip_left {
                plain = plain.trim_start();
            }
            if special.is_some_and(|special| special.lstrip) {
                plain = plain.trim_end();
            }
            if !plain.is_empty() {
                ids.extend(self.encode(plain)?);
            }
            ids.extend(special.map(|special| special.id));
            strip_left = special.is_some_and(|special| special.rstrip);
            from = range.end;
        }
        Ok(ids)
    }

    /// The tokens of a rendered prompt. Special tokens without the `guard` inside are recognised, the guards are
    /// removed, and the rest is ordinary text.
    pub(crate) fn encode_rendered(
        &self,
        text: &str,
        guard: Option<char>,
        tokens_max: usize,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        let _stage = tracing::trace_span!(target: STAGE, "tokenize").entered();
        self.check_length(text, guard, tokens_max)?;
        match guard {
            Some(guard) => self.encode_guarded(text, guard),
            None => self.encode_trusted(text),
        }
    }

    /// The places of the special tokens in a rendered text.
    pub(crate) fn special_ranges(&self, text: &str) -> Vec<Range<usize>> {
        let found = self.specials.find_in(text);
        found.map(|(range, _)| range).collect()
    }

    /// Whether [`Tokenizer::guard`] would change this text.
    pub(crate) fn needs_guard(&self, text: &str) -> bool {
        self.specials.needs_guard(text)
    }

    /// Puts `guard` inside every special token of `text`, and inside every end of `text` that other text could
    /// complete to a special token. `None` if there is no such place.
    pub(crate) fn guard(&self, text: &str, guard: char) -> Option<String> {
        self.specials.guard(text, guard)
    }

    fn count(&self, text: &str) {
        let bytes = text.len() as u64;
        self.encoded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes of text that this tokenizer has encoded so far. Tests assert this work instead of seconds.
    pub fn encoded_bytes(&self) -> u64 {
        self.encoded_bytes.load(Ordering::Relaxed)
    }

    /// The text of tokens. Special tokens have no text, and bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, tokens: &[TokenId]) -> String {
        let mut bytes = Vec::new();
        for token in tokens {
            if !self.is_special(*token) {
                bytes.extend_from_slice(self.token_bytes(*token));
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes of a token. Those of a special token are its spelling, and an id outside the vocabulary has none.
    pub fn token_bytes(&self, token: TokenId) -> &[u8] {
        self.bytes.get(token as usize).map_or(&[], |bytes| &**bytes)
    }

    /// Whether a token is a special token.
    pub fn is_special(&self, token: TokenId) -> bool {
        self.is_special
            .get(token as usize)
            .is_some_and(|special| *special)
    }

    /// The id of a token by its spelling in the vocabulary.
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.encoder.token_id(text)
    }

    /// The spellings of all special tokens.
    pub fn special_texts(&self) -> Vec<&str> {
        let specials = self.bytes.iter().zip(&self.is_special);
        let bytes = specials.filter_map(|(bytes, special)| special.then_some(&**bytes));
        bytes
            .filter_map(|bytes| std::str::from_utf8(bytes).ok())
            .collect()
    }

    /// The size of the vocabulary: the largest id plus one.
    pub fn vocab_size(&self) -> u32 {
        self.bytes.len() as u32
    }

    /// The hex SHA-256 of all ids with their bytes and whether they are special. It is the same for equal
    /// vocabularies, whatever the format of their files.
    pub fn identity(&self) -> &str {
        &self.identity
    }
}
