//! The libraries that encode text, and which of them a model gets.
//!
//! `tokenizers` is the reference: models were trained with it. `fastokens` gives the same tokens for byte-level BPE
//! 50 to 100 times as quickly. It is young, and has `unsafe` code. So it is used for byte-level BPE only, and only if
//! both libraries give the same tokens for a text that has all that is known to be difficult (`canary.rs`).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use fastokens::AddedTokenPolicy;
#[cfg(target_os = "linux")]
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;

use super::canary;
use crate::token_spelling::TokenSpelling;
use crate::{TokenId, TokenizationError};

/// Encodes text by one of the libraries.
pub(super) enum Encoder {
    Fast(Box<FastEncoder>),
    Library(Box<LibraryEncoder>),
}

/// `fastokens`.
pub(super) struct FastEncoder {
    tokenizer: fastokens::Tokenizer,
    /// The tokens that stand before a sequence.
    before: Vec<TokenId>,
    /// The tokens that stand behind it.
    after: Vec<TokenId>,
}

/// `tokenizers`.
pub(super) struct LibraryEncoder {
    /// Recognises special tokens in the text. It is for text that our templates wrote.
    marked: tokenizers::Tokenizer,
    /// Treats special tokens as ordinary text. It is for text that users wrote. It is a second copy, because the
    /// library keeps this switch inside the tokenizer, and toggling it would need a lock around every encoding.
    plain: tokenizers::Tokenizer,
}

impl Encoder {
    /// Chooses the library for a parsed `tokenizer.json` that `library` has read.
    pub(super) fn choose(file: &Value, spelling: &TokenSpelling, library: LibraryEncoder) -> Self {
        if !is_byte_level_bpe(file, spelling) {
            return Encoder::Library(Box::new(library));
        }
        // A panic of a young library at this place must not keep a model from being served.
        match catch_unwind(AssertUnwindSafe(|| FastEncoder::agreeing(file, &library))) {
            Ok(Ok(fast)) => Encoder::Fast(Box::new(fast)),
            failed => {
                let reason = match failed {
                    Ok(Err(reason)) => reason,
                    _ => "it panicked".to_owned(),
                };
                tracing::warn!(
                    reason,
                    "fastokens cannot encode for this tokenizer, so the slower tokenizers library does"
                );
                Encoder::Library(Box::new(library))
            }
        }
    }

    /// Whether encoding takes a few nanoseconds per byte.
    pub(super) fn is_fast(&self) -> bool {
        matches!(self, Encoder::Fast(_))
    }

    /// The tokens of a text in which special tokens are ordinary text, with the tokens around a sequence if
    /// `as_sequence`. `is_stray` tells the tokens that a text may not contain all the same.
    ///
    /// # Errors
    /// The vocabulary cannot spell the text, or only with a stray token.
    pub(super) fn plain(
        &self,
        text: &str,
        as_sequence: bool,
        is_stray: impl Fn(TokenId) -> bool,
    ) -> Result<Vec<TokenId>, TokenizationError> {
        // Some models (Unigram) find the spelling of a special token among their pieces, whatever the policy is.
        let stray = || {
            let reason = "this vocabulary can spell it only with a special token";
            TokenizationError::Encode(reason.into())
        };
        caught(|| match self {
            Encoder::Fast(fast) => {
                let mut ids = fast.plain(text).map_err(TokenizationError::Encode)?;
                if ids.iter().any(|id| is_stray(*id)) {
                    return Err(stray());
                }
                if as_sequence {
                    ids.splice(..0, fast.before.iter().copied());
                    ids.extend_from_slice(&fast.after);
                }
                Ok(ids)
            }
            Encoder::Library(library) => {
                let encoding = library
                    .plain
                    .encode_fast(text, as_sequence)
                    .map_err(|error| TokenizationError::Encode(error.to_string()))?;
                // The mask marks the tokens that the tokenizer added around the sequence.
                let around = encoding.get_special_tokens_mask();
                let is_own = |at| around.get(at).is_none_or(|mask| *mask == 0);
                let mut ids = encoding.get_ids().iter().enumerate();
                if ids.any(|(at, id)| is_stray(*id) && is_own(at)) {
                    return Err(stray());
                }
                Ok(encoding.get_ids().to_vec())
            }
        })
    }

    /// The tokens of a text in which special tokens are recognised.
    ///
    /// # Errors
    /// The vocabulary cannot spell the text.
    pub(super) fn marked(&self, text: &str) -> Result<Vec<TokenId>, TokenizationError> {
        let marked = || match self {
            Encoder::Fast(fast) => fast.marked(text),
            Encoder::Library(library) => library.marked(text),
        };
        caught(|| marked().map_err(TokenizationError::Encode))
    }

    /// The id of a token by its spelling in the vocabulary.
    pub(super) fn token_id(&self, text: &str) -> Option<TokenId> {
        match self {
            Encoder::Fast(fast) => fast.tokenizer.token_to_id(text),
            Encoder::Library(library) => library.marked.token_to_id(text),
        }
    }
}

/// Has `fastokens` encode on the thread that asks, long texts as well. It has its turn, the other threads have other
/// work, and each thread that encodes keeps a cache of up to 64 MiB.
///
/// The library starts as many threads as its first caller may use CPUs, once and for all. So that caller is a thread
/// that may use one.
fn encode_on_asking_threads() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let first = std::thread::Builder::new().name("fastokens".into());
        let threads = first.spawn(|| {
            stay_on_one_cpu();
            fastokens::fanout::threads()
        });
        let threads = threads.ok().and_then(|first| first.join().ok());
        if threads != Some(1) {
            tracing::debug!(threads, "long texts are encoded on several threads");
        }
    });
}

/// Keeps this thread on one of its CPUs, where the system can do that.
fn stay_on_one_cpu() {
    #[cfg(target_os = "linux")]
    if let Ok(mut cpus) = sched_getaffinity(None) {
        let allowed = (0..CpuSet::MAX_CPU).filter(|cpu| cpus.is_set(*cpu));
        for cpu in allowed.skip(1).collect::<Vec<_>>() {
            cpus.unset(cpu);
        }
        // If it fails, the library has threads of its own.
        let _ = sched_setaffinity(None, &cpus);
    }
}

/// Has a library encode a text. A panic is an error of this text: the libraries keep nothing of it but whole entries
/// of caches.
fn caught<T>(
    encode: impl FnOnce() -> Result<T, TokenizationError>,
) -> Result<T, TokenizationError> {
    let panicked = || TokenizationError::Encode("the tokenizer's library panicked".into());
    catch_unwind(AssertUnwindSafe(encode)).unwrap_or_else(|_| Err(panicked()))
}

/// Whether `fastokens` may be tried. It has no other way of matching added tokens than as they are.
fn is_byte_level_bpe(file: &Value, spelling: &TokenSpelling) -> bool {
    let model = &file["model"];
    let is_bpe = model["type"] == "BPE" || model["type"].is_null() && model["merges"].is_array();
    let added = file["added_tokens"].as_array().into_iter().flatten();
    matches!(spelling, TokenSpelling::ByteLevel(_))
        && is_bpe
        && model["dropout"].is_null()
        && added.clone().all(|token| token["single_word"] != true)
}

impl FastEncoder {
    /// Reads a parsed `tokenizer.json`, and compares the tokens of the canary text with those of `library`. This also
    /// builds the tables that the first encoding needs.
    fn agreeing(file: &Value, library: &LibraryEncoder) -> Result<Self, String> {
        encode_on_asking_threads();
        let mut file = file.clone();
        // Prompts are neither truncated nor padded, whatever the settings of the training run were.
        file["truncation"] = Value::Null;
        file["padding"] = Value::Null;
        let (before, after) = library.around()?;
        let fast = FastEncoder {
            tokenizer: fastokens::Tokenizer::from_json(file).map_err(|error| error.to_string())?,
            before,
            after,
        };
        let added = library.marked.get_added_tokens_decoder();
        for text in canary::texts(added.values().map(|token| &*token.content)) {
            if fast.plain(&text)? != library.plain(&text)?
                || fast.marked(&text)? != library.marked(&text)?
            {
                return Err("its tokens of a canary text differ".into());
            }
        }
        Ok(fast)
    }

    fn plain(&self, text: &str) -> Result<Vec<TokenId>, String> {
        self.tokenizer
            .encode_with_policy(text, false, AddedTokenPolicy::SkipSpecial)
            .map_err(|error| error.to_string())
    }

    fn marked(&self, text: &str) -> Result<Vec<TokenId>, String> {
        self.tokenizer
            .encode_with_policy(text, false, AddedTokenPolicy::All)
            .map_err(|error| error.to_string())
    }
}

impl LibraryEncoder {
    /// Takes a tokenizer that neither truncates nor pads.
    pub(super) fn new(marked: tokenizers::Tokenizer) -> Self {
        let mut plain = marked.clone();
        plain.set_encode_special_tokens(true);
        LibraryEncoder { marked, plain }
    }

    /// Encodes difficult texts, and panics if the library does. Not every vocabulary can spell them.
    pub(super) fn try_out(&self) {
        for text in canary::texts([].into_iter()) {
            let _ = (self.plain(&text), self.marked(&text));
        }
    }

    /// The tokenizer that recognises special tokens.
    pub(super) fn tokenizer(&self) -> &tokenizers::Tokenizer {
        &self.marked
    }

    fn plain(&self, text: &str) -> Result<Vec<TokenId>, String> {
        let ids = self.plain.encode_fast(text, false);
        Ok(ids.map_err(|error| error.to_string())?.get_ids().to_vec())
    }

    fn marked(&self, text: &str) -> Result<Vec<TokenId>, String> {
        let ids = self.marked.encode_fast(text, false);
        Ok(ids.map_err(|error| error.to_string())?.get_ids().to_vec())
    }

    /// The tokens that are added before and behind a sequence.
    fn around(&self) -> Result<(Vec<TokenId>, Vec<TokenId>), String> {
        let text = "a";
        let own = self.plain(text)?;
        let encoding = self.plain.encode_fast(text, true);
        let encoding = encoding.map_err(|error| error.to_string())?;
        let ids = encoding.get_ids();
        let mask = encoding.get_special_tokens_mask();
        let from = mask.iter().take_while(|mask| **mask != 0).count();
        let to = from + own.len();
        match ids.get(from..to) == Some(&*own) {
            true => Ok((ids[..from].to_vec(), ids[to..].to_vec())),
            false => Err("the tokens around a sequence are not known".into()),
        }
    }
}

#[cfg(test)]
mod tests;
