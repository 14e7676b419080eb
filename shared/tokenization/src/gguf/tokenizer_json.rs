//! The tokenizer of a GGUF file, in the layout of `tokenizer.json`.

use serde_json::{Map, Value, json};

use super::metadata::Metadata;
use super::pre_tokenizers::{GPT2, PreTokenizer};
use super::vocabulary::Vocabulary;
use crate::TokenId;

/// The mark that represents a space in vocabularies of characters.
const SPACE_MARK: &str = "\u{2581}";

/// Makes a `tokenizer.json`, and hands it back with the vocabulary.
///
/// # Errors
/// The kind of the tokenizer or its pre-tokenizer is not supported, or the vocabulary is incomplete.
pub(super) fn convert(metadata: &Metadata) -> Result<(Value, Vocabulary<'_>), String> {
    let kind = metadata.text("tokenizer.ggml.model");
    let kind =
        kind.ok_or("it has no tokenizer.ggml.model; name a whole model, or its first file")?;
    let is_scored = match kind {
        "gpt2" | "gemma4" => false,
        "llama" => true,
        _ => {
            return Err(format!(
                "its tokenizer {kind:?} (tokenizer.ggml.model) is not supported, only gpt2, llama and gemma4; use the \
                 model's folder with tokenizer.json instead"
            ));
        }
    };
    let mut file = json!({"version": "1.0", "truncation": null, "padding": null,
        "model": {"type": "BPE", "dropout": null, "continuing_subword_prefix": null, "end_of_word_suffix": null}});
    let adds_bos = match kind {
        "gpt2" => {
            let name = metadata.text("tokenizer.ggml.pre").unwrap_or("default");
            add_byte_steps(&mut file, &PreTokenizer::of(name)?)
        }
        _ => {
            // Gemma 4 never puts a space in front of a text.
            let key = "tokenizer.ggml.add_space_prefix";
            add_character_steps(&mut file, is_scored && metadata.count(key) != Some(0))
        }
    };
    let vocabulary = Vocabulary::read(metadata, is_scored)?;
    let model = &mut file["model"];
    if kind != "gpt2" {
        model["unk_token"] = vocabulary.named("unknown").map(|(_, text)| text).into();
    }
    let vocab = vocabulary
        .tokens()
        .map(|(id, text)| (text.to_owned(), id.into()));
    model["vocab"] = Value::Object(vocab.collect());
    model["merges"] = json!(vocabulary.merges);
    file["added_tokens"] = added_tokens(metadata, &vocabulary);
    let around = |name: &str, adds: bool| {
        let flag = metadata.count(&format!("tokenizer.ggml.add_{name}_token"));
        vocabulary
            .named(name)
            .filter(|_| flag.map_or(adds, |flag| flag != 0))
    };
    file["post_processor"] = post_processor(around("bos", adds_bos), around("eos", false));
    Ok((file, vocabulary))
}

/// Adds the steps of a vocabulary whose characters represent bytes. Tells whether a token begins each sequence.
fn add_byte_steps(file: &mut Value, steps: &PreTokenizer) -> bool {
    // The byte-level step has the pattern of GPT-2 itself.
    let (patterns, use_regex) = match steps.patterns {
        [before @ .., last] if *last == GPT2 => (before, true),
        patterns => (patterns, false),
    };
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    let splits = patterns.iter().map(|pattern| split(pattern));
    let steps_before: Vec<Value> = splits.chain([bytes.clone()]).collect();
    file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": steps_before});
    file["decoder"] = bytes;
    file["model"]["ignore_merges"] = steps.ignores_merges.into();
    steps.adds_bos
}

/// Adds the steps of a vocabulary of characters, with a mark for each space, and tokens for other bytes.
fn add_character_steps(file: &mut Value, has_prefix: bool) -> bool {
    let replace = |from, to| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let mut normalizers = vec![replace(" ", SPACE_MARK)];
    let mut decoders = vec![
        replace(SPACE_MARK, " "),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if has_prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE_MARK}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    file["normalizer"] = json!({"type": "Sequence", "normalizers": normalizers});
    file["decoder"] = json!({"type": "Sequence", "decoders": decoders});
    file["model"]["fuse_unk"] = true.into();
    file["model"]["byte_fallback"] = true.into();
    true
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

/// The tokens that are found in a text before anything else.
fn added_tokens(metadata: &Metadata, vocabulary: &Vocabulary<'_>) -> Value {
    // Phi-3 was trained with messages whose markers absorb the blanks behind them. The format has no key for it.
    let name = metadata.text("general.name").unwrap_or_default();
    let is_phi3 = ["phi-3", "phi3"]
        .iter()
        .any(|part| name.to_lowercase().contains(part));
    let absorbs = |text| is_phi3 && !["<unk>", "<s>", "<|endoftext|>"].contains(&text);
    let added = vocabulary
        .tokens()
        .filter(|(id, _)| vocabulary.is_added(*id));
    let added = added.map(|(id, text)| {
        json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": absorbs(text),
               "normalized": false, "special": vocabulary.is_special(id)})
    });
    added.collect()
}

/// The step that adds a token before a sequence, and one behind it.
fn post_processor(before: Option<(TokenId, &str)>, after: Option<(TokenId, &str)>) -> Value {
    let special = |(_, text)| json!({"SpecialToken": {"id": text, "type_id": 0}});
    let template = |names: &[&str]| -> Vec<Value> {
        let sequence = |name| json!({"Sequence": {"id": name, "type_id": 0}});
        let sequences = names.iter().map(sequence);
        let (before, after) = (before.map(special), after.map(special));
        before.into_iter().chain(sequences).chain(after).collect()
    };
    let token = |(id, text)| json!({"id": text, "ids": [id], "tokens": [text]});
    let tokens = before.into_iter().chain(after);
    let tokens: Map<_, _> = tokens
        .map(|(id, text)| (text.to_owned(), token((id, text))))
        .collect();
    match tokens.is_empty() {
        true => Value::Null,
        false => {
            json!({"type": "TemplateProcessing", "single": template(&["A"]), "pair": template(&["A", "B"]),
                        "special_tokens": tokens})
        }
    }
}
