//! The tokens of a GGUF file: their texts, how they merge, which are special, and which end an answer.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};

use super::metadata::Metadata;
use crate::TokenId;

/// Kinds of tokens in the format.
const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// The end of Llama 2's texts, which other vocabularies have as ordinary text of a web page.
const END_OF_TEXT_OR_TAG: &str = "</s>";

/// The texts of tokens that end an answer in some model, as in llama.cpp. Most files name only one by its id.
const ENDS: [&str; 33] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<|endoftext|>",
    END_OF_TEXT_OR_TAG,
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// The names of ids that end an answer.
const END_NAMES: [&str; 6] = ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"];

/// Longest piece of a vocabulary with scores, bytes. Every way of dividing a piece is tried.
const PIECE_BYTES_MAX: usize = 1024;

/// How a model makes tokens of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Model {
    /// Bytes are merged in the order of a list: GPT-2, Llama 3, Qwen.
    Bytes,
    /// Characters are merged in the order of a list: Gemma 4.
    Characters,
    /// Characters are merged to the pieces with the best score: Llama 2, Mistral, Gemma.
    ScoredPieces,
}

/// The tokens of a file.
pub(super) struct Vocabulary<'a> {
    metadata: &'a Metadata,
    model: Model,
    texts: &'a [String],
    kinds: &'a [i64],
    ids: HashMap<&'a str, TokenId>,
    /// The merges, the first ones first. All texts and their concatenations are tokens.
    pub(super) merges: Vec<(&'a str, &'a str)>,
    /// The tokens that end an answer.
    pub(super) ends: BTreeSet<TokenId>,
    /// The tokens that are built by merges of a list, so they are found in ordinary text.
    built: HashSet<TokenId>,
}

impl<'a> Vocabulary<'a> {
    /// Reads the tokens of a model.
    ///
    /// # Errors
    /// The file lacks tokens, merges or scores, or they do not fit each other.
    pub(super) fn read(metadata: &'a Metadata, model: Model) -> Result<Self, String> {
        let missing = |key: &str| {
            format!("it lacks the list tokenizer.ggml.{key}; use another file of this model")
        };
        let texts = metadata.texts("tokenizer.ggml.tokens");
        let texts = texts.ok_or_else(|| missing("tokens"))?;
        let kinds = metadata
            .integers("tokenizer.ggml.token_type")
            .unwrap_or_default();
        let mut vocabulary = Vocabulary {
            metadata,
            model,
            texts,
            kinds,
            ids: HashMap::with_capacity(texts.len()),
            merges: Vec::new(),
            ends: BTreeSet::new(),
            built: HashSet::new(),
        };
        for (id, text) in (0..).zip(texts) {
            // Padding makes the vocabulary as long as the weights. The model's own tokenizer does not have it.
            let is_padding = vocabulary.kind(id) != NORMAL && *text == format!("[PAD{id}]");
            if !text.is_empty() && !is_padding && vocabulary.ids.insert(text, id).is_some() {
                return Err(format!(
                    "its token {id} has the text {text:?} of another token"
                ));
            }
        }
        if model != Model::ScoredPieces {
            let merges = metadata.texts("tokenizer.ggml.merges");
            vocabulary.add_listed_merges(merges.ok_or_else(|| missing("merges"))?);
        }
        vocabulary.add_ends();
        if model == Model::ScoredPieces {
            let scores = metadata.floats("tokenizer.ggml.scores");
            let scores = scores.filter(|scores| scores.len() >= texts.len());
            vocabulary.add_scored_merges(scores.ok_or_else(|| missing("scores"))?)?;
        }
        Ok(vocabulary)
    }

    fn kind(&self, id: TokenId) -> i64 {
        self.kinds.get(id as usize).copied().unwrap_or_default()
    }

    /// The ids and texts of all tokens, in the order of the ids.
    pub(super) fn tokens(&self) -> impl Iterator<Item = (TokenId, &'a str)> {
        let tokens = (0..).zip(self.texts).map(|(id, text)| (id, &**text));
        tokens.filter(|(id, text)| self.id(text) == Some(*id))
    }

    /// The id of a text.
    fn id(&self, text: &str) -> Option<TokenId> {
        self.ids.get(text).copied()
    }

    /// The id and text of the token with a name, such as `bos`.
    pub(super) fn named(&self, name: &str) -> Option<(TokenId, &'a str)> {
        let id = self
            .metadata
            .count(&format!("tokenizer.ggml.{name}_token_id"));
        let id = id.or(match (self.model, name) {
            (Model::ScoredPieces, "unknown") => Some(0),
            (Model::ScoredPieces, "bos") => Some(1),
            (Model::ScoredPieces, "eos") => Some(2),
            _ => None,
        })?;
        let text = self.texts.get(id as usize)?;
        (self.id(text) == Some(id)).then_some((id, text))
    }

    /// Whether a token may only come from a template, and never from a user's text.
    pub(super) fn is_special(&self, id: TokenId) -> bool {
        let is_unmarked_end = self.ends.contains(&id) && !self.built.contains(&id);
        matches!(self.kind(id), UNKNOWN | CONTROL) || is_unmarked_end
    }

    /// Whether a token is found in a text before the text is split into words.
    pub(super) fn is_added(&self, id: TokenId) -> bool {
        self.kind(id) == USER_DEFINED || self.is_special(id)
    }

    fn add_listed_merges(&mut self, merges: &'a [String]) {
        for merge in merges {
            // The first character may be a space itself.
            let Some((at, _)) = merge.match_indices(' ').find(|(at, _)| *at > 0) else {
                continue;
            };
            let (left, right) = (&merge[..at], &merge[at + 1..]);
            let parts = self.id(left).zip(self.id(right));
            if let Some((_, whole)) = parts.zip(self.id(&[left, right].concat())) {
                self.merges.push((left, right));
                self.built.insert(whole);
            }
        }
    }

    /// Adds a merge for every way of making a piece of two others, the best scores first. A longer left part comes
    /// first among equals, as in the converters of tokenizers.
    fn add_scored_merges(&mut self, scores: &[f64]) -> Result<(), String> {
        let is_piece = |id: TokenId| self.kind(id) != BYTE && !self.is_special(id);
        let is_part = |text: &str| self.id(text).is_some_and(is_piece);
        let mut scored = Vec::new();
        for ((id, text), score) in self.tokens().zip(scores) {
            if text.len() > PIECE_BYTES_MAX {
                return Err(format!(
                    "its token {id} has more than {PIECE_BYTES_MAX} bytes"
                ));
            }
            for (at, _) in text.char_indices().skip(1).filter(|_| is_piece(id)) {
                let (left, right) = text.split_at(at);
                if is_part(left) && is_part(right) {
                    let lengths = (left.chars().count(), right.chars().count());
                    scored.push((score, Reverse(lengths), (left, right)));
                }
            }
        }
        scored.sort_by(|one, other| other.0.total_cmp(one.0).then(one.1.cmp(&other.1)));
        self.merges = scored.into_iter().map(|(_, _, merge)| merge).collect();
        Ok(())
    }

    fn add_ends(&mut self) {
        // Many files do not mark all their ends as special. A text that merges build is no end, though.
        let counts = |id: &TokenId, text| {
            self.kind(*id) == CONTROL || text != END_OF_TEXT_OR_TAG && !self.built.contains(id)
        };
        let by_text = ENDS
            .iter()
            .filter_map(|text| self.id(text).filter(|id| counts(id, *text)));
        let by_name = END_NAMES
            .iter()
            .filter_map(|name| self.named(name))
            .map(|(id, _)| id);
        let mut ends: BTreeSet<TokenId> = by_text.chain(by_name).collect();
        // In these formats of chats, it ends a message before the next one of the same answer.
        let has = |text| self.id(text).is_some();
        if (has("<|call|>") || has("<|calls|>")) && (has("<|return|>") || has("<|flush|>")) {
            ends.retain(|id| self.id("<|end|>") != Some(*id));
        }
        self.ends = ends;
    }
}
