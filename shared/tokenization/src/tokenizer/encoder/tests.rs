//! Compares both libraries on texts of all kinds, for the pre-tokenizers and normalizers of published models.

use serde_json::{Value, json};

use super::*;

/// The patterns by which published models split text before BPE.
const GPT_4: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const QWEN: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
const GPT_4O: &str = "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";
/// A pattern that no published model has, so that no library can have a scanner of its own for it.
const OTHER: &str = "\\p{L}{1,4}|\\p{N}|\\s+|[^\\s\\p{L}\\p{N}]+";

fn shipped() -> Value {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../services/reference-engine/model/tokenizer.json"
    );
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The shipped tokenizer with another pre-tokenizer, as published models have it.
fn splitting(pattern: &str) -> Value {
    let mut file = shipped();
    file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]});
    file
}

fn added(id: usize, text: &str, special: bool, strips: bool) -> Value {
    json!({"id": id, "content": text, "single_word": false, "lstrip": strips, "rstrip": strips,
           "normalized": false, "special": special})
}

/// Files of many kinds by name.
fn files() -> Vec<(&'static str, Value)> {
    let mut composing = splitting(QWEN);
    composing["normalizer"] = json!({"type": "NFC"});
    let mut adding = splitting(GPT_4);
    for token in [
        added(4096, "<think>", false, false),
        added(4097, "<pad>", true, true),
        added(4098, "\u{e9}t\u{e9}", false, false),
    ] {
        adding["added_tokens"].as_array_mut().unwrap().push(token);
    }
    adding["model"]["ignore_merges"] = true.into();
    let mut spaced = shipped();
    spaced["pre_tokenizer"]["add_prefix_space"] = true.into();
    let mut sequenced = shipped();
    sequenced["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                   {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]},
            "<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]},
        },
    });
    let mut cut = shipped();
    cut["truncation"] =
        json!({"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0});
    cut["padding"] = json!({"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                            "pad_type_id": 0, "pad_token": "<|endoftext|>"});
    vec![
        ("GPT-2", shipped()),
        ("GPT-4", splitting(GPT_4)),
        ("GPT-4o", splitting(GPT_4O)),
        ("Qwen", splitting(QWEN)),
        ("other", splitting(OTHER)),
        ("composing", composing),
        ("adding", adding),
        ("spaced", spaced),
        ("sequenced", sequenced),
        ("cut", cut),
    ]
}

fn library(file: &Value) -> LibraryEncoder {
    let mut read = tokenizers::Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap();
    read.with_truncation(None).unwrap();
    read.with_padding(None);
    LibraryEncoder::new(read)
}

fn chosen(file: &Value) -> Encoder {
    let spelling = TokenSpelling::of(file).unwrap();
    Encoder::choose(file, &spelling, library(file))
}

/// Parts of texts that are easy to split or to merge wrongly.
const PARTS: [&str; 48] = [
    " ",
    "  ",
    "   ",
    "\n",
    "\r\n",
    "\t",
    "\u{a0}",
    "\u{3000}",
    "\u{85}",
    "\u{2028}",
    "a",
    "b",
    "the",
    " the",
    "The",
    "hello",
    "'s",
    "'LL",
    "'",
    "1",
    "23",
    "4567",
    "\u{661}",
    "\u{bd}",
    "\u{2167}",
    "!",
    "??",
    "//",
    "_",
    "\u{e9}",
    "e\u{301}",
    "\u{301}",
    "\u{1100}\u{1161}\u{11a8}",
    "\u{ac00}",
    "\u{4f60}\u{597d}",
    "\u{1f980}",
    "\u{200d}",
    "\u{fe0f}",
    "\u{212b}",
    "\u{93f}",
    "\u{f0000}",
    "\u{0}",
    "<|im_end|>",
    "<|im_",
    "end|>",
    "<think>",
    "<pad>",
    "\u{e9}t\u{e9}",
];

/// `cargo test` runs this fuzz target for a second, and `cargo bolero test -p refrain-tokenization
/// tokenizer::encoder::tests::both_libraries_give_the_same_tokens` runs it for as long as wanted.
#[test]
fn both_libraries_give_the_same_tokens() {
    let pairs: Vec<_> = files()
        .into_iter()
        .map(|(name, file)| {
            (
                name,
                chosen(&file),
                Encoder::Library(Box::new(library(&file))),
            )
        })
        .collect();
    for (name, chosen, _) in &pairs {
        assert!(chosen.is_fast(), "{name}");
    }
    let any_token = |_| false;
    bolero::check!()
        .with_type::<(Vec<u8>, Vec<char>)>()
        .with_max_len(400)
        .for_each(|(parts, others)| {
            let mut others = others.iter().cycle();
            let text: String = parts
                .iter()
                .map(|at| match PARTS.get(usize::from(*at)) {
                    Some(part) => (*part).to_owned(),
                    None if *at < 128 => PARTS[usize::from(*at) % PARTS.len()].to_owned(),
                    None => others.next().map(char::to_string).unwrap_or_default(),
                })
                .collect();
            for (name, fast, slow) in &pairs {
                for as_sequence in [false, true] {
                    assert_eq!(
                        fast.plain(&text, as_sequence, any_token).ok(),
                        slow.plain(&text, as_sequence, any_token).ok(),
                        "{name}: {text:?}"
                    );
                }
                assert_eq!(
                    fast.marked(&text).ok(),
                    slow.marked(&text).ok(),
                    "{name}: {text:?}"
                );
            }
        });
}

#[test]
fn a_long_text_has_the_same_tokens_as_from_the_reference() {
    // Beyond 64 KiB a text is encoded in parts.
    let canary = canary::texts(std::iter::empty()).concat();
    let text = canary.repeat(150_000 / canary.len());
    for (name, file) in files().into_iter().take(4) {
        let slow = Encoder::Library(Box::new(library(&file)));
        let fast = chosen(&file);
        assert_eq!(
            fast.marked(&text).unwrap(),
            slow.marked(&text).unwrap(),
            "{name}"
        );
    }
}

#[test]
fn other_models_keep_the_reference() {
    let mut single_word = shipped();
    single_word["added_tokens"][0]["single_word"] = true.into();
    let mut random = shipped();
    random["model"]["dropout"] = 0.1.into();
    for file in [single_word, random] {
        assert!(!chosen(&file).is_fast());
    }
    let spelling = TokenSpelling::Pieces {
        mark: "\u{2581}".into(),
    };
    assert!(!Encoder::choose(&shipped(), &spelling, library(&shipped())).is_fast());
}

#[test]
fn a_library_that_differs_is_not_used() {
    // The reference reads another file here, so its tokens differ.
    let spelling = TokenSpelling::of(&shipped()).unwrap();
    let encoder = Encoder::choose(&shipped(), &spelling, library(&splitting(OTHER)));
    assert!(!encoder.is_fast());
    let ids = encoder.marked("hello there 123").unwrap();
    assert_eq!(
        ids,
        library(&splitting(OTHER))
            .marked("hello there 123")
            .unwrap()
    );
}

#[cfg(target_os = "linux")]
#[test]
fn long_texts_are_encoded_on_the_thread_that_asks() {
    let library = library(&shipped());
    let fast = FastEncoder::agreeing(&shipped(), &library).unwrap();
    assert_eq!(fastokens::fanout::threads(), 1);
    let long = "SELECT name FROM teachers;\n".repeat(10_000);
    assert_eq!(fast.plain(&long), library.plain(&long));
}
