//! The tokenizer: a library's encoder behind rules of our own about special tokens.

use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use aho_corasick::{AhoCorasick, MatchKind};
use sha2::{Digest, Sha256};

use crate::bytes::Spelling;
use crate::floor::{TokenFloor, Vocabulary};
use crate::{TokenId, TokenizationError};

/// A marker of the model's own language, such as `<|im_end|>`.
#[derive(Clone, Debug)]
struct Special {
    id: TokenId,
    text: String,
    /// Swallows the white space before it.
    lstrip: bool,
    /// Swallows the white space after it.
    rstrip: bool,
}

/// Encodes and decodes as the model's `tokenizer.json` says.
pub struct Tokenizer {
    /// Recognises special tokens written in the text: for what our templates wrote.
    marked: tokenizers::Tokenizer,
    /// Takes them for ordinary text: for what users wrote. A second copy, because the library keeps the
    /// switch inside the tokenizer; toggling it would put a lock around every encoding.
    plain: tokenizers::Tokenizer,
    /// Bytes of each id; empty where the vocabulary has a hole.
    bytes: Vec<Box<[u8]>>,
    is_special: Vec<bool>,
    specials: Vec<Special>,
    /// Finds all of `specials` in a text, those that overlap as well.
    special_places: AhoCorasick,
    /// Finds them one after the other, of several at one place the longest.
    special_finder: AhoCorasick,
    /// `None` where nothing can be promised of the number of tokens.
    pub(crate) floor: Option<TokenFloor>,
    encoded_bytes: AtomicU64,
    identity: String,
    /// Stands for characters outside the vocabulary, so plain text may bring it though it is special.
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

/// Largest id accepted: a file that claims more would make us allocate for it.
const TOKEN_ID_MAX: TokenId = 4_000_000;

impl Tokenizer {
    /// Reads `tokenizer.json`.
    ///
    /// # Errors
    /// What the file says cannot be used: no JSON, an unknown model, or a decoder whose tokens cannot be
    /// turned into bytes.
    pub fn from_bytes(tokenizer_json: &[u8]) -> Result<Self, TokenizationError> {
        let file: serde_json::Value =
            serde_json::from_slice(tokenizer_json).map_err(model_error)?;
        let spelling = Spelling::of(&file).map_err(model_error)?;
        let mut marked = tokenizers::Tokenizer::from_bytes(tokenizer_json).map_err(model_error)?;
        // A file may carry the settings of somebody's training run; prompts are neither cut nor filled up.
        marked.with_truncation(None).map_err(model_error)?;
        marked.with_padding(None);
        let mut plain = marked.clone();
        plain.set_encode_special_tokens(true);

        let mut entries: Vec<(TokenId, Vec<u8>, bool)> = Vec::new();
        let added = marked.get_added_tokens_decoder();
        let vocabulary = marked.get_vocab(false);
        let floor = TokenFloor::new(
            &file,
            &spelling,
            &Vocabulary {
                tokens: vocabulary.keys().map(String::as_str).collect(),
                added: added.values().map(|token| &*token.content).collect(),
                swallows_spaces: added.values().any(|token| token.lstrip || token.rstrip),
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
                specials.push(Special {
                    id: *id,
                    text: token.content.clone(),
                    lstrip: token.lstrip,
                    rstrip: token.rstrip,
                });
            }
        }
        specials.sort_by_key(|special| special.id);
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
        let special_texts = || specials.iter().map(|special| &*special.text);
        let special_places = AhoCorasick::new(special_texts()).map_err(model_error)?;
        let special_finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(special_texts())
            .map_err(model_error)?;
        let unknown = file["model"]["unk_token"]
            .as_str()
            .and_then(|text| marked.token_to_id(text))
            .or_else(|| {
                file["model"]["unk_id"]
                    .as_u64()
                    .and_then(|id| TokenId::try_from(id).ok())
            });
        Ok(Tokenizer {
            identity: hex::encode(hash.finalize()),
            marked,
            plain,
            bytes,
            is_special,
            specials,
            special_places,
            special_finder,
            floor,
            encoded_bytes: AtomicU64::new(0),
            unknown,
        })
    }

    /// Reads `tokenizer.json` of a model's folder.
    ///
    /// # Errors
    /// As [`Tokenizer::from_bytes`], and a file that cannot be read.
    pub fn from_dir(folder: impl AsRef<Path>) -> Result<Self, TokenizationError> {
        crate::ModelFiles::from_dir(folder)?.tokenizer()
    }

    /// Tokens of a text. Special tokens written in it are ordinary text, and none is added.
    ///
    /// # Errors
    /// Text that this vocabulary cannot spell, or only with a special token.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, TokenizationError> {
        self.encode_plain(text, false)
    }

    /// Tokens of a text that begins a sequence: as [`Tokenizer::encode`], with what the tokenizer itself
    /// puts around a sequence (often a begin-of-text token).
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_sequence(&self, text: &str) -> Result<Vec<TokenId>, TokenizationError> {
        self.encode_plain(text, true)
    }

    /// As [`Tokenizer::encode`], of a text that is refused without tokenizing it if it has more than `most` tokens
    /// for certain. It can have more all the same.
    ///
    /// # Errors
    /// [`TokenizationError::TooLong`], and as [`Tokenizer::encode`].
    pub fn encode_within(
        &self,
        text: &str,
        most: usize,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        self.check_floor(text, None, most)?;
        self.encode(text)
    }

    /// As [`Tokenizer::encode_sequence`], with the refusal of [`Tokenizer::encode_within`].
    ///
    /// # Errors
    /// As [`Tokenizer::encode_within`].
    pub fn encode_sequence_within(
        &self,
        text: &str,
        most: usize,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        self.check_floor(text, None, most)?;
        self.encode_sequence(text)
    }

    /// Refuses a text that has more than `most` tokens whatever the encoder makes of it. `left_out` is a character
    /// that the encoder will not see.
    pub(crate) fn check_floor(
        &self,
        text: &str,
        left_out: Option<char>,
        most: usize,
    ) -> Result<(), TokenizationError> {
        let floor = self.floor.as_ref();
        match floor.and_then(|floor| floor.above(text, left_out, most)) {
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
        let encoding = self
            .plain
            .encode_fast(text, as_sequence)
            .map_err(|error| TokenizationError::Encode(error.to_string()))?;
        // Some models (Unigram) find a special token's spelling among their pieces whatever the switch says.
        // The mask tells those that the tokenizer put around the sequence.
        let around = encoding.get_special_tokens_mask();
        let stray = encoding.get_ids().iter().enumerate().any(|(at, id)| {
            self.is_special(*id)
                && Some(*id) != self.unknown
                && around.get(at).is_none_or(|mask| *mask == 0)
        });
        if stray {
            return Err(TokenizationError::Encode(
                "this vocabulary spells it with a special token".into(),
            ));
        }
        Ok(encoding.get_ids().to_vec())
    }

    /// Tokens of a text of ours, in which special tokens are recognised. Never for what a user wrote.
    ///
    /// # Errors
    /// Text that this vocabulary cannot spell.
    pub fn encode_trusted(&self, text: &str) -> Result<Vec<TokenId>, TokenizationError> {
        self.count(text);
        let ids = self
            .marked
            .encode_fast(text, false)
            .map_err(|error| TokenizationError::Encode(error.to_string()))?;
        Ok(ids.get_ids().to_vec())
    }

    /// Tokens of a text in which `guard` stands inside every special token that is not ours: those without
    /// it are recognised, the guards are taken out, and the rest is ordinary text.
    pub(crate) fn encode_guarded(
        &self,
        text: &str,
        guard: char,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        let mut ids = Vec::new();
        let mut plain_from = 0;
        let mut strip_next = false;
        let plain = |from: usize,
                     to: usize,
                     strip_left: bool,
                     strip_right: bool,
                     ids: &mut Vec<TokenId>| {
            let mut piece: String = text[from..to]
                .chars()
                .filter(|character| *character != guard)
                .collect();
            if strip_right {
                piece.truncate(piece.trim_end().len());
            }
            let piece = if strip_left {
                piece.trim_start()
            } else {
                &piece
            };
            if !piece.is_empty() {
                ids.extend(self.encode(piece)?);
            }
            Ok::<(), TokenizationError>(())
        };
        for found in self.special_finder.find_iter(text) {
            let special = &self.specials[found.pattern()];
            let (from, to) = (plain_from, found.start());
            plain(from, to, strip_next, special.lstrip, &mut ids)?;
            ids.push(special.id);
            strip_next = special.rstrip;
            plain_from = found.end();
        }
        plain(plain_from, text.len(), strip_next, false, &mut ids)?;
        Ok(ids)
    }

    /// Puts `guard` inside every place of `text` that is a special token, or could be the beginning of one
    /// that other text completes. `None` if there is no such place.
    pub(crate) fn guard(&self, text: &str, guard: char) -> Option<String> {
        let found = self.special_places.find_overlapping_iter(text);
        let mut places: Vec<usize> = found.map(|found| found.start()).collect();
        let lens = self.specials.iter().map(|special| special.text.len());
        let tail = text.len().saturating_sub(lens.max().unwrap_or(0));
        let begins = |rest: &str| {
            let mut specials = self.specials.iter();
            specials.any(|special| special.text.starts_with(rest))
        };
        let dangling = (tail..text.len()).filter(|at| text.get(*at..).is_some_and(begins));
        places.extend(dangling);
        places.sort_unstable();
        places.dedup();
        if places.is_empty() {
            return None;
        }
        let mut guarded = String::with_capacity(text.len() + places.len() * guard.len_utf8());
        let mut copied = 0;
        for at in places {
            let character = text[at..].chars().next();
            let after = at + character.map_or(0, char::len_utf8);
            guarded.push_str(&text[copied..after]);
            guarded.push(guard);
            copied = after;
        }
        guarded.push_str(&text[copied..]);
        Some(guarded)
    }

    fn count(&self, text: &str) {
        let bytes = text.len() as u64;
        self.encoded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes of text that were encoded since this tokenizer was read: the work that texts have cost.
    pub fn encoded_bytes(&self) -> u64 {
        self.encoded_bytes.load(Ordering::Relaxed)
    }

    /// Text of tokens. Special ones give none; bytes that are not UTF-8 show as U+FFFD.
    pub fn decode(&self, tokens: &[TokenId]) -> String {
        let mut bytes = Vec::new();
        for token in tokens {
            if !self.is_special(*token) {
                bytes.extend_from_slice(self.token_bytes(*token));
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes of one token, a special one's own spelling included; none for an id outside the vocabulary.
    pub fn token_bytes(&self, token: TokenId) -> &[u8] {
        self.bytes.get(token as usize).map_or(&[], |bytes| &**bytes)
    }

    /// Whether a token is a marker rather than text.
    pub fn is_special(&self, token: TokenId) -> bool {
        self.is_special
            .get(token as usize)
            .copied()
            .unwrap_or(false)
    }

    /// The id of a token as it is written in the vocabulary.
    pub fn token_id(&self, text: &str) -> Option<TokenId> {
        self.marked.token_to_id(text)
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> u32 {
        self.bytes.len() as u32
    }

    /// Hex SHA-256 of the id -> bytes map and of which ids are special: equal for equal vocabularies, however
    /// their files are written.
    pub fn identity(&self) -> &str {
        &self.identity
    }
}
