//! Tests with files that are built here.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::writer::{Item, Writer};
use crate::testing::{IM_END, byte_level_files};
use crate::{ChatInput, GgufHeader, JsonList, ModelFiles};

const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

/// A file in a folder of its own.
fn file(bytes: &[u8]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.GGUF");
    std::fs::write(&path, bytes).unwrap();
    (folder, path)
}

fn read(writer: &Writer) -> Result<ModelFiles, String> {
    let (_folder, path) = file(&writer.bytes(3));
    ModelFiles::from_path(path).map_err(|error| error.to_string())
}

fn json_of(bytes: Option<&[u8]>) -> Value {
    serde_json::from_slice(bytes.unwrap()).unwrap()
}

/// A file with the vocabulary of a parsed `tokenizer.json`.
fn with_vocabulary(writer: Writer, tokenizer_json: &Value) -> Writer {
    let vocab = tokenizer_json["model"]["vocab"].as_object().unwrap();
    let mut texts = vec![String::new(); vocab.len()];
    for (text, id) in vocab {
        texts[id.as_u64().unwrap() as usize] = text.clone();
    }
    let mut kinds = vec![1; texts.len()];
    for (id, text) in texts.iter().enumerate() {
        if text.starts_with("<0x") {
            kinds[id] = BYTE;
        }
    }
    for added in tokenizer_json["added_tokens"].as_array().unwrap() {
        let is_special = added["special"] == true;
        kinds[added["id"].as_u64().unwrap() as usize] =
            if is_special { CONTROL } else { USER_DEFINED };
    }
    writer
        .with("tokenizer.ggml.tokens", &Item::Texts(texts))
        .with("tokenizer.ggml.token_type", &Item::Kinds(kinds))
}

fn merges(tokenizer_json: &Value) -> Vec<String> {
    let merges = tokenizer_json["model"]["merges"].as_array().unwrap();
    let text = |part: &Value| part.as_str().unwrap().to_owned();
    merges
        .iter()
        .map(|merge| format!("{} {}", text(&merge[0]), text(&merge[1])))
        .collect()
}

/// The byte-level model for tests, as a GGUF file.
fn byte_level() -> Writer {
    let files = byte_level_files();
    let tokenizer_json = json_of(Some(&files.tokenizer_json));
    let template = String::from_utf8(files.chat_template.unwrap()).unwrap();
    let writer = Writer::default()
        .with("general.architecture", &Item::Text("qwen2"))
        .with("qwen2.context_length", &Item::Count(512))
        .with("qwen2.block_count", &Item::Count(3))
        .with("qwen2.embedding_length", &Item::Count(64))
        .with("qwen2.attention.head_count", &Item::Count(4))
        .with("tokenizer.ggml.model", &Item::Text("gpt2"))
        .with("tokenizer.ggml.pre", &Item::Text("gpt-2"))
        .with(
            "tokenizer.ggml.merges",
            &Item::Texts(merges(&tokenizer_json)),
        )
        .with("tokenizer.ggml.eos_token_id", &Item::Count(IM_END))
        .with("tokenizer.chat_template", &Item::Text(&template));
    with_vocabulary(writer, &tokenizer_json)
}

const TEXTS: [&str; 7] = [
    "",
    "hello world",
    " hello\n\n  hell yes, it's 2024!",
    "<|im_end|>",
    "na\u{ef}ve \u{1f980} \u{4f60}\u{597d}",
    "ab<mark>  ab",
    "abc\u{2581}cab",
];

/// Both give the same tokens, and have the same vocabulary.
fn assert_same(files: &ModelFiles, expected: &ModelFiles) {
    let (found, expected) = (files.tokenizer().unwrap(), expected.tokenizer().unwrap());
    assert_eq!(found.identity(), expected.identity());
    for text in TEXTS {
        assert_eq!(found.encode(text).unwrap(), expected.encode(text).unwrap());
        let trusted = |tokenizer: &crate::Tokenizer| tokenizer.encode_trusted(text).unwrap();
        assert_eq!(trusted(&found), trusted(&expected), "{text:?}");
        let sequence = |tokenizer: &crate::Tokenizer| tokenizer.encode_sequence(text).unwrap();
        assert_eq!(sequence(&found), sequence(&expected), "{text:?}");
    }
}

#[test]
fn a_byte_level_file_is_the_same_model_as_its_folder() {
    let expected = byte_level_files();
    for version in [2, 3] {
        let (_folder, path) = file(&byte_level().bytes(version));
        let files = ModelFiles::from_path(path).unwrap();
        assert_same(&files, &expected);
        assert_eq!(files.max_context(), Some(512));
        let names = json_of(files.tokenizer_config_json.as_deref());
        assert_eq!(names, json!({"eos_token": "<|im_end|>"}));
        let generation = json_of(files.generation_config_json.as_deref());
        // The other end is known by its text.
        assert_eq!(generation, json!({"eos_token_id": [0, IM_END]}));
        let prompt = |files: &ModelFiles| {
            let messages = r#"[{"role": "user", "content": "hello <|im_end|>"}]"#;
            let messages: JsonList = serde_json::from_str(messages).unwrap();
            let template = files.chat_template().unwrap().unwrap();
            let input = ChatInput::new(messages, None, None);
            let tokenizer = files.tokenizer().unwrap();
            template
                .encode_within(&tokenizer, &input, true, 1000)
                .unwrap()
        };
        assert_eq!(prompt(&files), prompt(&expected));
    }
}

/// A tokenizer of scored pieces in the layout of Llama 2.
fn pieces_json(prefix: bool) -> Value {
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let specials = ["<unk>", "<s>", "</s>"].map(str::to_owned);
    let pieces = [
        "ab",
        "\u{2581}ab",
        "abc",
        "\u{2581}\u{2581}",
        "a",
        "b",
        "c",
        "\u{2581}",
        "<mark>",
    ];
    let texts = specials
        .into_iter()
        .chain(bytes)
        .chain(pieces.map(str::to_owned));
    let vocab: serde_json::Map<String, Value> = (0u32..)
        .zip(texts)
        .map(|(id, text)| (text, id.into()))
        .collect();
    let added = |text: &str, special: bool| {
        json!({"id": vocab[text], "content": text, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": special})
    };
    let replace = |from, to| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let mut normalizers = vec![replace(" ", "\u{2581}")];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": "\u{2581}"}));
    }
    let begin = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
    let sequence = |id| json!({"Sequence": {"id": id, "type_id": 0}});
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added("<unk>", true), added("<s>", true), added("</s>", true), added("<mark>", false)],
        "normalizer": {"type": "Sequence", "normalizers": normalizers}, "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing", "single": [begin, sequence("A")],
            "pair": [begin, sequence("A"), sequence("B")],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [replace("\u{2581}", " "), {"type": "ByteFallback"},
            {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
            "vocab": vocab, "merges": [["a", "b"], ["\u{2581}", "ab"], ["ab", "c"], ["\u{2581}", "\u{2581}"]]},
    })
}

fn pieces(prefix: bool) -> Writer {
    let tokenizer_json = pieces_json(prefix);
    let count = tokenizer_json["model"]["vocab"].as_object().unwrap().len();
    let mut scores: Vec<f32> = vec![0.0; 259];
    scores.extend((0..count - 259).map(|rank| -(rank as f32)));
    let writer = Writer::default()
        .with("general.architecture", &Item::Text("llama"))
        .with("tokenizer.ggml.model", &Item::Text("llama"))
        .with("tokenizer.ggml.scores", &Item::Scores(scores))
        .with("tokenizer.ggml.add_space_prefix", &Item::Flag(prefix));
    with_vocabulary(writer, &tokenizer_json)
}

#[test]
fn a_file_with_scored_pieces_is_the_same_model_as_its_folder() {
    for prefix in [true, false] {
        let files = read(&pieces(prefix)).unwrap();
        let expected = ModelFiles {
            tokenizer_json: pieces_json(prefix).to_string().into_bytes(),
            ..ModelFiles::default()
        };
        assert_same(&files, &expected);
        // The ids of these names are the usual ones, if the file does not say them.
        let names = json_of(files.tokenizer_config_json.as_deref());
        assert_eq!(
            names,
            json!({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
        );
        let tokenizer = files.tokenizer().unwrap();
        let ab = tokenizer.token_id(if prefix { "\u{2581}ab" } else { "ab" });
        assert_eq!(tokenizer.encode_sequence("ab").unwrap(), [1, ab.unwrap()]);
    }
}

#[test]
fn a_damaged_file_is_refused_without_a_panic() {
    let read = |bytes: &[u8]| super::Metadata::read(bytes, bytes.len() as u64);
    for mut bytes in [byte_level().bytes(3), pieces(true).bytes(2)] {
        for length in 0..bytes.len() {
            let error = read(&bytes[..length]).unwrap_err();
            assert!(error.contains("fetch the file again"), "{error}");
        }
        // A changed byte may leave the file as good as before. Every place is tried in a file, and few are enough in
        // what the tokenizer is made of.
        for at in 0..bytes.len() {
            let own = bytes[at];
            bytes[at] = own.wrapping_add(0x7F);
            if let (Ok(metadata), 0) = (read(&bytes), at % 23) {
                let _ = super::model_files(&metadata);
                let _ = GgufHeader::read(Path::new("a.gguf"), &metadata, 0);
            }
            bytes[at] = own;
        }
    }
    let (_folder, path) = file(&byte_level().bytes(3)[..500]);
    let error = ModelFiles::from_path(&path).unwrap_err().to_string();
    assert!(
        error.contains("model.GGUF: tokenizer.") || error.contains("damaged"),
        "{error}"
    );
}

#[test]
fn absurd_lengths_take_no_memory() {
    let lengths: [(u32, Vec<u8>); 3] = [
        (8, u64::MAX.to_le_bytes().to_vec()),
        (
            9,
            [&8u32.to_le_bytes()[..], &(1u64 << 40).to_le_bytes()].concat(),
        ),
        (
            9,
            [&0u32.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat(),
        ),
    ];
    for (kind, bytes) in lengths {
        let mut writer = Writer::default().with("a", &Item::Count(1));
        writer.truncate(8);
        writer.typed(kind, &bytes);
        let error = read(&writer).unwrap_err();
        assert!(error.contains("a length of"), "{error}");
    }
}

#[test]
fn what_is_not_supported_is_named() {
    let refused = |writer: Writer, named: &str| {
        let error = read(&writer).unwrap_err();
        assert!(error.contains(named), "{error}");
    };
    let kind = |kind| Writer::default().with("tokenizer.ggml.model", &Item::Text(kind));
    for name in ["bert", "t5", "rwkv"] {
        refused(kind(name), name);
    }
    refused(
        kind("gpt2").with("tokenizer.ggml.pre", &Item::Text("new-bpe")),
        "new-bpe",
    );
    refused(kind("gpt2"), "tokenizer.ggml.tokens");
    refused(Writer::default(), "tokenizer.ggml.model");
    let tokens = |texts: [&str; 2]| {
        let texts = texts.map(str::to_owned).to_vec();
        kind("gpt2").with("tokenizer.ggml.tokens", &Item::Texts(texts))
    };
    refused(tokens(["a", "b"]), "tokenizer.ggml.merges");
    refused(tokens(["a", "a"]), "twice");
    refused(
        kind("gpt2").with("tokenizer.ggml.model", &Item::Flag(true)),
        "twice",
    );
    let mut nested = Writer::default().with("a", &Item::Count(1));
    nested.truncate(8);
    nested.typed(9, &[9, 0, 0, 0]);
    refused(nested, "list of lists");
    for (version, reason) in [(1u32, "version 1"), (3u32.swap_bytes(), "big-endian")] {
        let (_folder, path) = file(&Writer::default().bytes(version));
        let error = ModelFiles::from_path(path).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
    let error = ModelFiles::from_path("/nowhere/a.gguf")
        .unwrap_err()
        .to_string();
    assert!(error.contains("/nowhere/a.gguf"), "{error}");
}

/// The end tokens, and the special tokens, of byte-level tokens with kinds.
fn ends_of(tokens: &[(&str, i32)], merges: &[&str]) -> (Vec<String>, Vec<String>) {
    let texts: Vec<String> = tokens.iter().map(|(text, _)| (*text).to_owned()).collect();
    let kinds = tokens.iter().map(|(_, kind)| *kind).collect();
    let merges = merges.iter().map(|merge| (*merge).to_owned()).collect();
    let writer = Writer::default()
        .with("tokenizer.ggml.model", &Item::Text("gpt2"))
        .with("tokenizer.ggml.merges", &Item::Texts(merges))
        .with("tokenizer.ggml.tokens", &Item::Texts(texts.clone()))
        .with("tokenizer.ggml.token_type", &Item::Kinds(kinds));
    let files = read(&writer).unwrap();
    let ends = json_of(files.generation_config_json.as_deref());
    let ends = ends["eos_token_id"].as_array().unwrap().iter();
    let ends = ends.map(|id| texts[id.as_u64().unwrap() as usize].clone());
    let tokenizer = files.tokenizer().unwrap();
    let specials = tokenizer.special_texts().into_iter().map(str::to_owned);
    (ends.collect(), specials.collect())
}

#[test]
fn ends_are_found_by_their_texts() {
    // An end that is not marked is special all the same, unless merges build it of ordinary text.
    let unmarked = [
        ("<|im_end|>", 1),
        ("<", 1),
        ("eos>", 1),
        ("<eos>", 1),
        ("</s>", USER_DEFINED),
    ];
    let (ends, specials) = ends_of(&unmarked, &["< eos>"]);
    assert_eq!(ends, ["<|im_end|>"]);
    assert_eq!(specials, ["<|im_end|>"]);
    // A message of this format does not end the answer.
    let harmony = ["<|end|>", "<|return|>", "<|call|>"].map(|text| (text, CONTROL));
    let (ends, specials) = ends_of(&harmony, &[]);
    assert_eq!(ends, ["<|return|>", "<|call|>"]);
    assert_eq!(specials.len(), 3);
    assert_eq!(
        ends_of(&[("<|end|>", CONTROL), ("</s>", CONTROL)], &[])
            .0
            .len(),
        2
    );
}

#[test]
fn padding_is_no_part_of_the_vocabulary() {
    let tokens = [("a", 1), ("b", 1), ("[PAD2]", USER_DEFINED), ("", 1)];
    let (_, specials) = ends_of(&tokens, &[]);
    assert_eq!(specials, Vec::<String>::new());
    let texts = tokens.map(|(text, _)| text.to_owned()).to_vec();
    let writer = Writer::default()
        .with("tokenizer.ggml.model", &Item::Text("gpt2"))
        .with("tokenizer.ggml.merges", &Item::Texts(Vec::new()))
        .with("tokenizer.ggml.tokens", &Item::Texts(texts))
        .with("tokenizer.ggml.token_type", &Item::Kinds(vec![1, 1, 5, 1]));
    assert_eq!(read(&writer).unwrap().tokenizer().unwrap().vocab_size(), 2);
}

#[test]
fn a_header_tells_what_memory_depends_on() {
    let (_folder, path) = file(&byte_level().bytes(3));
    let header = GgufHeader::from_path(&path).unwrap();
    let expected = GgufHeader {
        architecture: "qwen2".into(),
        context_length: Some(512),
        layers: 3,
        embedding_length: 64,
        kv_heads: vec![4; 3],
        key_length: 16,
        value_length: 16,
        vocab_size: 263,
        shards: 1,
        file_bytes: std::fs::metadata(&path).unwrap().len(),
    };
    assert_eq!(header, expected);
    assert_eq!(header.cache_values_per_token(), 3 * 4 * 32);
    let own = byte_level()
        .with("qwen2.attention.head_count_kv", &Item::Kinds(vec![0, 1, 2]))
        .with("qwen2.attention.key_length", &Item::Count(10))
        .with("qwen2.attention.value_length", &Item::Count(20))
        .with("qwen2.vocab_size", &Item::Count(300));
    std::fs::write(&path, own.bytes(3)).unwrap();
    let header = GgufHeader::from_path(&path).unwrap();
    assert_eq!(header.kv_heads, [0, 1, 2]);
    assert_eq!(
        (header.cache_values_per_token(), header.vocab_size),
        (3 * 30, 300)
    );
}

#[test]
fn a_header_without_a_shape_is_refused() {
    let refused = |writer: Writer, named: &str| {
        let (_folder, path) = file(&writer.bytes(3));
        let error = GgufHeader::from_path(path).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    };
    let named = || Writer::default().with("general.architecture", &Item::Text("gpt-oss"));
    refused(Writer::default(), "general.architecture");
    refused(named(), "gpt-oss.block_count");
    let layers = |count| named().with("gpt-oss.block_count", &Item::Count(count));
    refused(layers(2), "gpt-oss.embedding_length");
    refused(layers(u32::MAX), "layers");
}

#[test]
fn all_files_of_a_split_model_count() {
    let folder = tempfile::tempdir().unwrap();
    let first = folder.path().join("a-00001-of-00002.gguf");
    let bytes = byte_level().with("split.count", &Item::Count(2)).bytes(3);
    std::fs::write(&first, &bytes).unwrap();
    let error = GgufHeader::from_path(&first).unwrap_err().to_string();
    assert!(error.contains("its file a-00002-of-00002.gguf:"), "{error}");
    let second = folder.path().join("a-00002-of-00002.gguf");
    std::fs::write(&second, [0; 100]).unwrap();
    let header = GgufHeader::from_path(&first).unwrap();
    assert_eq!(
        (header.shards, header.file_bytes),
        (2, bytes.len() as u64 + 100)
    );
    std::fs::write(&second, &bytes).unwrap();
    let error = GgufHeader::from_path(&second).unwrap_err().to_string();
    assert!(
        error.contains("name the one with -00001-of-00002.gguf"),
        "{error}"
    );
}
