//! Checks that no text that fits is refused, whatever the preprocessing, and that texts that cannot fit are refused.

use proptest::prelude::*;
use serde_json::{Value, json};
use unicode_normalization_alignments::UnicodeNormalization;

use super::NFC_SHRINK;
use crate::testing::byte_level_files;
use crate::{ChatInput, ChatTemplate, TokenizationError, Tokenizer};

fn shipped() -> Value {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../services/reference-engine/model/tokenizer.json"
    );
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn added(id: usize, text: &str, special: bool, rstrip: bool) -> Value {
    json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": rstrip,
           "normalized": false, "special": special})
}

/// A vocabulary of sentence pieces: merges of a few letters and marks, and a token for every byte.
fn pieces() -> Value {
    let mut tokens: Vec<String> = vec!["<unk>".into(), "<s>".into()];
    tokens.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["\u{2581}", "t", "h", "e", "a", "\u{e9}"].map(String::from));
    let mut merges = Vec::new();
    for (left, right) in [
        ("\u{2581}", "t"),
        ("h", "e"),
        ("\u{2581}t", "he"),
        ("\u{2581}", "\u{2581}"),
        ("\u{2581}\u{2581}", "\u{2581}\u{2581}"),
        ("a", "a"),
        ("aa", "aa"),
        ("\u{2581}", "a"),
        ("h", "\u{e9}"),
    ] {
        merges.push([left, right]);
        tokens.push(format!("{left}{right}"));
    }
    let vocab: serde_json::Map<_, _> = (0..)
        .zip(&tokens)
        .map(|(id, token)| (token.clone(), Value::from(id)))
        .collect();
    let space = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0, "<unk>", true, false), added(1, "<s>", true, false)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"}, space]},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true,
                  "ignore_merges": false, "vocab": vocab, "merges": merges},
    })
}

/// Tokenizers of all kinds that have a lower bound, by name.
fn tokenizers() -> Vec<(&'static str, Tokenizer)> {
    let read = |file: &Value| Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap();
    let plain = shipped();
    let mut composed = shipped();
    composed["normalizer"] = json!({"type": "NFC"});
    for (id, text) in [(4096, "<think>"), (4097, "\u{301}x"), (4098, "\u{212a}")] {
        let tokens = composed["added_tokens"].as_array_mut().unwrap();
        tokens.push(added(id, text, false, false));
    }
    let mut stripping = shipped();
    stripping["added_tokens"][2]["rstrip"] = true.into();
    stripping["added_tokens"]
        .as_array_mut()
        .unwrap()
        .push(added(4096, "<pad>", false, true));
    let mut spaced = shipped();
    spaced["pre_tokenizer"]["add_prefix_space"] = true.into();
    let mut metaspace = pieces();
    metaspace["normalizer"] = Value::Null;
    metaspace["pre_tokenizer"] = json!({"type": "Metaspace", "replacement": "\u{2581}",
        "prepend_scheme": "always", "split": true});
    let small: Value = serde_json::from_slice(&byte_level_files().tokenizer_json).unwrap();
    // A token with a composed letter in the middle. A text can spell that letter with two characters.
    let mut composed_small = small.clone();
    composed_small["normalizer"] = json!({"type": "NFC"});
    let model = &mut composed_small["model"];
    for (left, right) in [
        ("\u{c3}", "\u{a9}"),
        ("a", "\u{c3}\u{a9}"),
        ("a\u{c3}\u{a9}", "h"),
    ] {
        let next = model["vocab"].as_object().unwrap().len();
        model["vocab"][format!("{left}{right}")] = next.into();
        let merges = model["merges"].as_array_mut().unwrap();
        merges.push(json!([left, right]));
    }
    vec![
        ("plain", read(&plain)),
        ("composed", read(&composed)),
        ("stripping", read(&stripping)),
        ("spaced", read(&spaced)),
        ("pieces", read(&pieces())),
        ("metaspace", read(&metaspace)),
        ("small", read(&small)),
        ("composed small", read(&composed_small)),
    ]
}

/// Parts of texts that are easy to handle wrongly.
const PARTS: [&str; 38] = [
    " ",
    "    ",
    "\n",
    "\t\t",
    "the",
    " the",
    "The",
    "hello",
    "SELECT ",
    "aaaa",
    "\u{2581}",
    "\u{2581}the",
    "<s>",
    "<0x41>",
    "<|im_end|>",
    "<|im_",
    "end|>",
    "<think>",
    "<pad>",
    "\u{e9}",
    "e\u{301}",
    "ae\u{301}h",
    "\u{301}",
    "\u{338}",
    "\u{323}\u{302}",
    "\u{212a}",
    "\u{1100}\u{1161}",
    "\u{11a8}",
    "\u{ac00}",
    "\u{1fbe}\u{308}\u{301}",
    "\u{4f60}\u{597d}",
    "\u{1f980}",
    "\u{93f}",
    "\u{f0000}",
    "\u{3000}",
    "(a, b)",
    "1234",
    "'ll",
];

/// Texts that consist of such parts and of random ones.
fn texts() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        prop::sample::select(PARTS.to_vec()).prop_map(str::to_owned),
        "[a-z ]{1,12}",
        "\\PC{1,4}",
    ];
    prop::collection::vec(part, 0..40).prop_map(|parts| parts.concat())
}

#[test]
fn no_short_text_that_fits_is_refused() {
    for (name, tokenizer) in tokenizers() {
        let bound = tokenizer.lower_bound.as_ref().expect(name);
        for (first, second) in PARTS.iter().flat_map(|a| PARTS.iter().map(move |b| (a, b))) {
            for text in [first.to_string(), format!("{first}{second}")] {
                let most = tokenizer.encode(&text).unwrap().len();
                assert_eq!(bound.above(&text, None, most), None, "{name}: {text:?}");
            }
        }
    }
}

proptest! {
    #[test]
    fn no_text_that_fits_is_refused(text in texts(), times in 1..4usize) {
        thread_local!(static TOKENIZERS: Vec<(&'static str, Tokenizer)> = tokenizers());
        let text = text.repeat(times);
        TOKENIZERS.with(|tokenizers| {
            for (name, tokenizer) in tokenizers {
                let bound = tokenizer.lower_bound.as_ref().expect(name);
                for tokens in [tokenizer.encode(&text), tokenizer.encode_trusted(&text)] {
                    let most = tokens.unwrap().len();
                    prop_assert_eq!(bound.above(&text, None, most), None, "{} {:?} {}", name, text, most);
                }
            }
            Ok(())
        })?;
    }

    #[test]
    fn no_chat_that_fits_is_refused(text in texts(), other in texts()) {
        thread_local!(static TOKENIZERS: Vec<(&'static str, Tokenizer)> = tokenizers());
        let source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";
        let template = ChatTemplate::of_source(source).unwrap();
        let input = ChatInput::from_messages([("user", &*text), ("assistant", &*other)]);
        TOKENIZERS.with(|tokenizers| {
            for (name, tokenizer) in tokenizers {
                let ids = template.encode_within(tokenizer, &input, false, usize::MAX).unwrap();
                let within = template.encode_within(tokenizer, &input, false, ids.len());
                prop_assert_eq!(within.ok(), Some(ids), "{}", name);
            }
            Ok(())
        })?;
    }

    /// Compares the pass with the definition: the fewest prefixes of tokens that cover the text.
    #[test]
    fn the_pass_finds_the_fewest_pieces(text in "[helo <|im_end>]{0,40}") {
        let tokenizer = byte_level_files().tokenizer().unwrap();
        let tokens: Vec<&[u8]> = (0..tokenizer.vocab_size()).map(|id| tokenizer.token_bytes(id)).collect();
        let bytes = text.as_bytes();
        let mut fewest = vec![0];
        for end in 1..=bytes.len() {
            let fits = |from: &usize| tokens.iter().any(|token| token.starts_with(&bytes[*from..end]));
            fewest.push((0..end).filter(fits).map(|from| fewest[from] + 1).min().unwrap());
        }
        let bound = tokenizer.lower_bound.as_ref().unwrap();
        let exact = fewest[bytes.len()];
        prop_assert_eq!(bound.above(&text, None, exact), None);
        if exact > 0 {
            prop_assert!(bound.above(&text, None, exact - 1).is_some());
        }
    }
}

#[test]
fn a_text_that_cannot_fit_is_refused_without_being_encoded() {
    for (name, tokenizer) in tokenizers() {
        for text in [
            "a".repeat(200_000),
            " \n".repeat(100_000),
            "<|im_end|>".repeat(20_000),
            "qzxj".repeat(50_000),
            "\u{4f60}\u{597d}".repeat(30_000),
        ] {
            if name == "stripping" && text.trim().is_empty() {
                // This tokenizer has a token that absorbs all of the text.
                assert!(tokenizer.encode_within(&text, 1_000).is_ok());
                continue;
            }
            let before = tokenizer.encoded_bytes();
            let error = tokenizer.encode_within(&text, 1_000).unwrap_err();
            let TokenizationError::TooLong { at_least } = error else {
                panic!("{name}: {error}");
            };
            assert!(at_least > 1_000, "{name}: {at_least}");
            assert!(tokenizer.encode_sequence_within(&text, 1_000).is_err());
            assert_eq!(tokenizer.encoded_bytes(), before, "{name}");
        }
    }
}

#[test]
fn a_text_that_just_fits_is_encoded_as_without_a_limit() {
    let tokenizer = Tokenizer::from_bytes(shipped().to_string().as_bytes()).unwrap();
    let text = "SELECT name, total FROM orders WHERE total > 1024;\n".repeat(200);
    let ids = tokenizer.encode(&text).unwrap();
    assert_eq!(tokenizer.encode_within(&text, ids.len()).unwrap(), ids);
    let sequence = tokenizer.encode_sequence_within(&text, ids.len());
    assert_eq!(sequence.unwrap(), tokenizer.encode_sequence(&text).unwrap());
    // The bound is useful: it refuses a text that is twice as long, if it is computed at all.
    let bound = tokenizer.lower_bound.as_ref().unwrap();
    assert!(bound.above(&text.repeat(2), None, ids.len()).is_some());
    assert!(tokenizer.encode_within(&text.repeat(9), ids.len()).is_err());
}

#[test]
fn tokenizers_that_drop_or_shorten_text_have_no_lower_bound() {
    let changes: [fn(&mut Value); 6] = [
        |file| {
            file["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true});
        },
        |file| file["normalizer"] = json!({"type": "NFKC"}),
        |file| {
            file["normalizer"] =
                json!({"type": "Replace", "pattern": {"Regex": " +"}, "content": " "});
        },
        |file| {
            let level = file["pre_tokenizer"].take();
            let dropped = json!({"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": false});
            file["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [dropped, level]});
        },
        |file| file["pre_tokenizer"] = Value::Null,
        |file| {
            file["model"]["vocab"].as_object_mut().unwrap().remove("!");
        },
    ];
    for (place, change) in changes.iter().enumerate() {
        let mut file: Value = serde_json::from_slice(&byte_level_files().tokenizer_json).unwrap();
        change(&mut file);
        let tokenizer = Tokenizer::from_bytes(file.to_string().as_bytes()).unwrap();
        assert!(tokenizer.lower_bound.is_none(), "change {place}");
    }
    let mut unknown = pieces();
    unknown["model"]["byte_fallback"] = false.into();
    let tokenizer = Tokenizer::from_bytes(unknown.to_string().as_bytes()).unwrap();
    assert!(tokenizer.lower_bound.is_none());
    assert!(tokenizer.encode_within(&"a".repeat(9_000), 10).is_ok());
}

/// NFC composes each character of its output from a decomposition. Each part of that comes from some character of the
/// input, which has a known number of bytes per part at most.
#[test]
fn nfc_shrinks_text_no_more_than_assumed() {
    let all = || ('\0'..=char::MAX).map(|character| (character, nfd(character)));
    let mut cost = std::collections::HashMap::new();
    for (character, parts) in all() {
        let bytes = character.len_utf8() as f64 / parts.len() as f64;
        for part in parts {
            let largest = cost.entry(part).or_insert(0.0f64);
            *largest = largest.max(bytes);
        }
    }
    for (character, parts) in all() {
        let bytes: f64 = parts.iter().map(|part| cost[part]).sum();
        let ratio = bytes / character.len_utf8() as f64;
        assert!(ratio <= NFC_SHRINK as f64, "{character:?}: {ratio}");
    }
}

fn nfd(character: char) -> Vec<char> {
    let text = character.to_string();
    text.as_str().nfd().map(|(part, _)| part).collect()
}
