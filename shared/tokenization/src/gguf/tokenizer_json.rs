//! The tokenizer of a GGUF file, in the layout of `tokenizer.json`.

use serde_json::{Map, Value, json};

use super::metadata::Metadata;
use super::pre_tokenizers::{GPT2, PreTokenizer};
use super::vocabulary::{Model, Vocabulary};
use crate::TokenId;

/// The mark that represents a space in vocabularies of characters.
const SPACE_MARK: &str = "\u{2581}";

/// How a model treats text before and after its vocabulary is used.
pub(super) struct TextSteps {
    pub(super) model: Model,
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    ignores_merges: bool,
    adds_bos: bool,
}

impl TextSteps {
    /// Reads the kind of the tokenizer.
    ///
    /// # Errors
    /// The kind or its pre-tokenizer is not supported.
    pub(super) fn read(metadata: &Metadata) -> Result<Self, String> {
        let kind = metadata.text("tokenizer.ggml.model");
        let kind = kind.ok_or(
            "it has no tokenizer (tokenizer.ggml.model); name a whole model, or its first shard",
        )?;
        let replace =
            |from, to| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
        let (to_marks, to_spaces) = (replace(" ", SPACE_MARK), replace(SPACE_MARK, " "));
        let fallback = [
            to_spaces,
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        Ok(match kind {
            "gpt2" => {
                let name = metadata.text("tokenizer.ggml.pre").unwrap_or("default");
                let steps = PreTokenizer::of(name)?;
                // The byte-level step has the pattern of GPT-2 itself.
                let (patterns, use_regex) = match steps.patterns {
                    [before @ .., last] if *last == GPT2 => (before, true),
                    patterns => (patterns, false),
                };
                let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                                   "use_regex": use_regex});
                let mut parts: Vec<Value> = patterns.iter().map(|pattern| split(pattern)).collect();
                parts.push(bytes.clone());
                TextSteps {
                    model: Model::Bytes,
                    normalizer: Value::Null,
                    pre_tokenizer: json!({"type": "Sequence", "pretokenizers": parts}),
                    decoder: bytes,
                    ignores_merges: steps.ignores_merges,
                    adds_bos: steps.adds_bos,
                }
            }
            "gemma4" => TextSteps {
                model: Model::Characters,
                normalizer: to_marks,
                pre_tokenizer: split(r"[^\n]+|\n+"),
                decoder: json!({"type": "Sequence", "decoders": fallback}),
                ignores_merges: false,
                adds_bos: true,
            },
            "llama" => {
                let mut normalizers = vec![to_marks];
                let mut decoders = fallback.to_vec();
                if metadata.integer("tokenizer.ggml.add_space_prefix") != Some(0) {
                    normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE_MARK}));
                    decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
                }
                TextSteps {
                    model: Model::ScoredPieces,
                    normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
                    pre_tokenizer: Value::Null,
                    decoder: json!({"type": "Sequence", "decoders": decoders}),
                    ignores_merges: false,
                    adds_bos: true,
                }
            }
            _ => {
                return Err(format!(
                    "its tokenizer {kind:?} (tokenizer.ggml.model) is not supported, only gpt2, llama and gemma4; use \
                     the model's folder with tokenizer.json instead"
                ));
            }
        })
    }

    /// The whole `tokenizer.json`.
    pub(super) fn tokenizer_json(self, metadata: &Metadata, vocabulary: &Vocabulary<'_>) -> Value {
        // Phi-3 was trained with messages whose markers absorb the blanks behind them. The format has no key for it.
        let name = metadata
            .text("general.name")
            .unwrap_or_default()
            .to_lowercase();
        let absorbs = ["phi-3", "phi3"].iter().any(|part| name.contains(part));
        let absorbs = |text| absorbs && !["<unk>", "<s>", "<|endoftext|>"].contains(&text);
        let added = vocabulary
            .tokens()
            .filter(|(id, _)| vocabulary.is_added(*id));
        let added = added.map(|(id, text)| {
            json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": absorbs(text),
                   "normalized": false, "special": vocabulary.is_special(id)})
        });
        let added: Vec<Value> = added.collect();
        let around = |name: &str, default: bool| {
            let flag = metadata.integer(&format!("tokenizer.ggml.add_{name}_token"));
            let adds = flag.map_or(default, |flag| flag != 0);
            vocabulary.named(name).filter(|_| adds)
        };
        let around = post_processor(around("bos", self.adds_bos), around("eos", false));
        let vocab = vocabulary
            .tokens()
            .map(|(id, text)| (text.to_owned(), id.into()));
        let vocab: Map<String, Value> = vocab.collect();
        let is_characters = self.model != Model::Bytes;
        let unknown = vocabulary.named("unknown").filter(|_| is_characters);
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": self.normalizer, "pre_tokenizer": self.pre_tokenizer, "decoder": self.decoder,
            "post_processor": around,
            "model": {"type": "BPE", "dropout": null, "unk_token": unknown.map(|(_, text)| text),
                      "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": is_characters,
                      "byte_fallback": is_characters, "ignore_merges": self.ignores_merges, "vocab": vocab,
                      "merges": vocabulary.merges},
        })
    }
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

/// The step that adds a token before a sequence, and one behind it.
fn post_processor(before: Option<(TokenId, &str)>, after: Option<(TokenId, &str)>) -> Value {
    let special = |(_, text)| json!({"SpecialToken": {"id": text, "type_id": 0}});
    let template = |names: &[&str]| -> Vec<Value> {
        let sequences = names
            .iter()
            .map(|name| json!({"Sequence": {"id": name, "type_id": 0}}));
        let (before, after) = (before.map(special), after.map(special));
        before.into_iter().chain(sequences).chain(after).collect()
    };
    let tokens = before.into_iter().chain(after);
    let tokens = tokens.map(|(id, text)| {
        (
            text.to_owned(),
            json!({"id": text, "ids": [id], "tokens": [text]}),
        )
    });
    match tokens.collect::<Map<_, _>>() {
        none if none.is_empty() => Value::Null,
        tokens => {
            json!({"type": "TemplateProcessing", "single": template(&["A"]), "pair": template(&["A", "B"]),
                         "special_tokens": tokens})
        }
    }
}
