//! A fuzz target of the reader of `tokenizer.json`.

use serde_json::{Value, json};

use super::Tokenizer;
use crate::testing::byte_level_files;

/// Pointers to all values of a file, except the entries of the vocabulary, which are many and all alike.
fn pointers(value: &Value, at: String, found: &mut Vec<String>) {
    match value {
        Value::Array(items) => {
            for (number, item) in items.iter().enumerate() {
                pointers(item, format!("{at}/{number}"), found);
            }
        }
        Value::Object(fields) if !at.ends_with("/vocab") => {
            for (name, field) in fields {
                pointers(field, format!("{at}/{name}"), found);
            }
        }
        _ => {}
    }
    found.push(at);
}

/// Values that stand in a tokenizer file somewhere, or should not.
fn replacements() -> Vec<Value> {
    let metaspace =
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always"});
    let replace = json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "});
    vec![
        Value::Null,
        json!(true),
        json!(false),
        json!(""),
        json!("a"),
        json!("<|im_end|>"),
        json!("\u{2581}"),
        json!("ByteLevel"),
        json!("Unigram"),
        json!(0),
        json!(-1),
        json!(300),
        json!(u64::MAX),
        json!(1.5),
        json!([]),
        json!({}),
        json!([["h", "e"]]),
        json!({"type": "NFC"}),
        json!({"type": "NFKC"}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Sequence", "decoders": [replace], "pretokenizers": [metaspace], "normalizers": []}),
        metaspace,
        replace,
    ]
}

/// A damaged `tokenizer.json` is an error, or makes a tokenizer that can be used without a panic.
///
/// `cargo test` runs this for a second, and `cargo bolero test -p refrain-tokenization
/// tokenizer::fuzz_tests::damaged_files_do_not_panic` runs it for as long as wanted, guided by coverage.
#[test]
fn damaged_files_do_not_panic() {
    let file: Value = serde_json::from_slice(&byte_level_files().tokenizer_json).expect("JSON");
    let replacements = replacements();
    bolero::check!()
        .with_type::<Vec<(u16, u8)>>()
        .with_max_len(12)
        .for_each(|edits| {
            let mut file = file.clone();
            for (place, replacement) in edits {
                let mut found = Vec::new();
                pointers(&file, String::new(), &mut found);
                let pointer = &found[usize::from(*place) % found.len()];
                let replacement = &replacements[usize::from(*replacement) % replacements.len()];
                if let Some(value) = file.pointer_mut(pointer) {
                    *value = replacement.clone();
                }
            }
            let Ok(tokenizer) = Tokenizer::from_bytes(file.to_string().as_bytes()) else {
                return;
            };
            for text in ["", "hello <|im_end|> hello", "na\u{ef}ve \u{1f980}"] {
                for tokens in [
                    tokenizer.encode_within(text, 5),
                    tokenizer.encode_trusted(text),
                ] {
                    tokenizer.decode(&tokens.unwrap_or_default());
                }
            }
        });
}
