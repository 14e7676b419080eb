//! The tokens of a GGUF file: their texts, how they merge, which are special, and which end an answer.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};

use serde_json::Value;

use super::metadata::Metadata;
use crate::TokenId;

/// Kinds of tokens in the format.
const NORMAL: i64 = 1;
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// The end of Llama 2's texts. Other vocabularies have it as the text of a web page, where llama.cpp sees an end too.
const END_OR_TAG: &str = "</s>";

/// The texts of tokens that end an answer in some model, as in llama.cpp. Most files name only one by its id.
const ENDS: &str = "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> \
    <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> \
    <|tool_response> <｜end▁of▁sentence｜> [e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> \
    <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>";

/// The names of ids that end an answer.
const END_NAMES: [&str; 6] = ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"];

/// Longest piece of a vocabulary with scores, bytes. Every way of dividing a piece is tried.
const PIECE_BYTES_MAX: usize = 1024;

/// The tokens of a file.
pub(super) struct Vocabulary<'a> {
    metadata: &'a Metadata,
    texts: Vec<&'a str>,
    kinds: Vec<i64>,
    ids: HashMap<&'a str, TokenId>,
    /// Whether pieces with better scores are merged first, instead of an order of merges in the file.
    is_scored: bool,
    /// The merges, the first ones first. All texts and their concatenations are tokens.
    pub(super) merges: Vec<(&'a str, &'a str)>,
    /// The tokens that end an answer.
    pub(super) ends: BTreeSet<TokenId>,
    /// The tokens that listed merges build, so they are found in ordinary text.
    built: HashSet<TokenId>,
}

impl<'a> Vocabulary<'a> {
    /// Reads the tokens of a model that merges by scores, or else by a list.
    ///
    /// # Errors
    /// The file lacks tokens, merges or scores, or they do not fit each other.
    pub(super) fn read(metadata: &'a Metadata, is_scored: bool) -> Result<Self, String> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let missing = |name| format!("it lacks the list {}; use another file", key(name));
        let texts = metadata.list(&key("tokens"), Value::as_str);
        let kinds = metadata.list(&key("token_type"), Value::as_i64);
        let mut vocabulary = Vocabulary {
            metadata,
            texts: texts.ok_or_else(|| missing("tokens"))?,
            kinds: kinds.unwrap_or_default(),
            ids: HashMap::new(),
            is_scored,
            merges: Vec::new(),
            ends: BTreeSet::new(),
            built: HashSet::new(),
        };
        for (id, text) in (0..).zip(&vocabulary.texts) {
            // Padding makes the vocabulary as long as the weights. The model's own tokenizer does not have it.
            let is_padding = vocabulary.kind(id) != NORMAL && *text == format!("[PAD{id}]");
            let is_token = !text.is_empty() && !is_padding;
            if is_token && vocabulary.ids.insert(text, id).is_some() {
                return Err(format!("it has the token {text:?} twice"));
            }
        }
        if is_scored {
            vocabulary.add_ends();
            let scores = metadata.list(&key("scores"), Value::as_f64);
            vocabulary.add_scored_merges(&scores.ok_or_else(|| missing("scores"))?)?;
        } else {
            let merges = metadata.list(&key("merges"), Value::as_str);
            vocabulary.add_listed_merges(&merges.ok_or_else(|| missing("merges"))?);
            vocabulary.add_ends();
        }
        Ok(vocabulary)
    }

    fn kind(&self, id: TokenId) -> i64 {
        self.kinds.get(id as usize).copied().unwrap_or_default()
    }

    /// The ids and texts of all tokens, in the order of the ids.
    pub(super) fn tokens(&self) -> impl Iterator<Item = (TokenId, &'a str)> {
        let tokens = (0..).zip(self.texts.iter().copied());
        tokens.filter(|(id, text)| self.id(text) == Some(*id))
    }

    fn id(&self, text: &str) -> Option<TokenId> {
        self.ids.get(text).copied()
    }

    /// The id and text of the token with a name, such as `bos`.
    pub(super) fn named(&self, name: &str) -> Option<(TokenId, &'a str)> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let usual = ["unknown", "bos", "eos"].iter().zip(0..);
        let mut usual = usual.filter(|(usual, _)| self.is_scored && **usual == name);
        let id = self.metadata.count(&key);
        let id = id.or_else(|| usual.next().map(|(_, id)| id))?;
        let text = *self.texts.get(id as usize)?;
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

    fn add_listed_merges(&mut self, merges: &[&'a str]) {
        for merge in merges {
            // The first character may be a space itself.
            let space = merge.match_indices(' ').find(|(at, _)| *at > 0);
            let Some((left, right)) = space.map(|(at, _)| (&merge[..at], &merge[at + 1..])) else {
                continue;
            };
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
        for (id, text) in self.tokens().filter(|(id, _)| is_piece(*id)) {
            let score = scores.get(id as usize);
            let score = *score.ok_or("it has fewer scores (tokenizer.ggml.scores) than tokens")?;
            if text.len() > PIECE_BYTES_MAX {
                return Err(format!(
                    "its token {id} has more than {PIECE_BYTES_MAX} bytes"
                ));
            }
            for (at, _) in text.char_indices().skip(1) {
                let (left, right) = text.split_at(at);
                if is_part(left) && is_part(right) {
                    scored.push((score, Reverse(left.chars().count()), (left, right)));
                }
            }
        }
        scored.sort_by(|one, other| other.0.total_cmp(&one.0).then(one.1.cmp(&other.1)));
        self.merges = scored.into_iter().map(|(_, _, merge)| merge).collect();
        Ok(())
    }

    fn add_ends(&mut self) {
        // Many files do not mark all their ends as special. A text that merges build is no end, though.
        let by_text = ENDS.split(' ').filter_map(|text| {
            let id = self.id(text)?;
            let is_clear = text != END_OR_TAG && !self.built.contains(&id);
            (self.kind(id) == CONTROL || is_clear).then_some(id)
        });
        let named = END_NAMES.iter().filter_map(|name| self.named(name));
        let mut ends: BTreeSet<TokenId> = by_text.chain(named.map(|(id, _)| id)).collect();
        // With these tokens, it ends a message before the next one of the same answer.
        let has = |text| self.id(text).is_some();
        if (has("<|call|>") || has("<|calls|>")) && (has("<|return|>") || has("<|flush|>")) {
            ends.retain(|id| self.id("<|end|>") != Some(*id));
        }
        self.ends = ends;
    }
}
