//! Tests of encoding, decoding and identity with a small byte-level vocabulary.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

use std::sync::Arc;

use refrain_tokenization::testing::{FIRST_BYTE, IM_END, IM_START, byte_level_files};
use refrain_tokenization::{Detokenizer, TokenId, TokenizationError, Tokenizer};
use serde_json::json;

fn tokenizer() -> Tokenizer {
    byte_level_files().tokenizer().unwrap()
}

fn byte(byte: u8) -> TokenId {
    FIRST_BYTE + TokenId::from(byte)
}

#[test]
fn text_survives_a_round_trip() {
    let tokenizer = tokenizer();
    for text in [
        "",
        "hello",
        "hello world\n\thello",
        "na\u{ef}ve \u{1f980}\u{200d}\u{1f525} \u{4f60}\u{597d}",
        "\u{0}\r\n",
    ] {
        assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()), text);
    }
    assert_eq!(tokenizer.encode("hello").unwrap().len(), 1);
}

#[test]
fn user_text_never_becomes_a_special_token() {
    let tokenizer = tokenizer();
    let ids = tokenizer.encode("a<|im_end|>b").unwrap();
    assert!(ids.iter().all(|id| !tokenizer.is_special(*id)));
    assert_eq!(tokenizer.decode(&ids), "a<|im_end|>b");
    assert_eq!(tokenizer.encode_sequence("a<|im_end|>b").unwrap(), ids);
    assert_eq!(
        tokenizer.encode_trusted("<|im_start|>").unwrap(),
        [IM_START]
    );
}

#[test]
fn special_tokens_have_bytes_but_give_no_text() {
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.token_bytes(IM_END), b"<|im_end|>");
    assert_eq!(tokenizer.decode(&[byte(b'a'), IM_END]), "a");
    assert_eq!(tokenizer.token_id("<|im_end|>"), Some(IM_END));
}

#[test]
fn ids_outside_the_vocabulary_are_harmless() {
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.vocab_size(), 3 + 256 + 4);
    assert_eq!(tokenizer.token_bytes(TokenId::MAX), b"");
    assert!(!tokenizer.is_special(TokenId::MAX));
    assert_eq!(tokenizer.decode(&[TokenId::MAX, byte(b'x')]), "x");
}

#[test]
fn identity_depends_on_the_vocabulary_and_not_on_the_file() {
    let files = byte_level_files();
    let identity = tokenizer().identity().to_owned();
    assert_eq!(identity.len(), 64);
    let value: serde_json::Value = serde_json::from_slice(&files.tokenizer_json).unwrap();
    let rewritten = serde_json::to_vec_pretty(&value).unwrap();
    assert_eq!(
        Tokenizer::from_bytes(&rewritten).unwrap().identity(),
        identity
    );

    let mut unmarked = value.clone();
    unmarked["added_tokens"][2]["special"] = false.into();
    assert_ne!(
        Tokenizer::from_bytes(unmarked.to_string().as_bytes())
            .unwrap()
            .identity(),
        identity
    );

    let mut swapped = value;
    swapped["model"]["vocab"]["a"] = byte(b'b').into();
    swapped["model"]["vocab"]["b"] = byte(b'a').into();
    assert_ne!(
        Tokenizer::from_bytes(swapped.to_string().as_bytes())
            .unwrap()
            .identity(),
        identity
    );
}

/// A change of a `tokenizer.json`.
type Change = Box<dyn FnOnce(&mut serde_json::Value)>;

/// A `tokenizer.json` that `change` has changed.
fn changed(change: impl FnOnce(&mut serde_json::Value)) -> Result<Tokenizer, TokenizationError> {
    let mut file = serde_json::from_slice(&byte_level_files().tokenizer_json).unwrap();
    change(&mut file);
    Tokenizer::from_bytes(file.to_string().as_bytes())
}

/// An added token of a `tokenizer.json`.
fn added(id: u64, content: &str) -> serde_json::Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
           "normalized": false, "special": false})
}

/// A normalizer that replaces what a pattern finds.
fn replace(pattern: serde_json::Value, content: &str) -> serde_json::Value {
    json!({"type": "Replace", "pattern": pattern, "content": content})
}

#[test]
fn a_hostile_file_is_refused_before_a_library_builds_it() {
    let doubles = replace(json!({"String": "a"}), "aa");
    let refused: [(&str, Change, &str); 7] = [
        (
            "a large added id",
            Box::new(|file| file["added_tokens"][0] = added(1 << 31, "<a>")),
            "token id 2147483648",
        ),
        (
            "a large id",
            Box::new(|file| file["model"]["vocab"]["hello"] = json!(1u64 << 31)),
            "token id 2147483648",
        ),
        (
            "many added tokens",
            Box::new(|file| {
                let tokens = (0..200_000u64).map(|id| added(id, &format!("<{id}>")));
                file["added_tokens"] = tokens.collect();
            }),
            "200000 added tokens",
        ),
        (
            "texts that double thirty times",
            Box::new(|file| {
                file["normalizer"] = json!({"type": "Sequence", "normalizers": vec![doubles; 30]});
            }),
            "1073741824 times",
        ),
        (
            "a long text in place of a short one",
            Box::new(|file| file["normalizer"] = replace(json!({"Regex": "."}), &"a".repeat(900))),
            "901 times",
        ),
        (
            "an empty text that is replaced",
            Box::new(|file| file["normalizer"] = replace(json!({"String": ""}), "a")),
            "an empty text",
        ),
        (
            "a damaged table of the library's own format",
            Box::new(|file| {
                file["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"});
            }),
            "",
        ),
    ];
    for (name, change, reason) in refused {
        let error = changed(change).expect_err(name).to_string();
        let of_file = error.starts_with("tokenizer.json");
        assert!(of_file && error.contains(reason), "{name}: {error}");
    }
    // Published models have these.
    for normalizer in [
        json!({"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"}, replace(json!({"String": " "}), "\u{2581}"),
        ]}),
        json!({"type": "Sequence", "normalizers": [
            {"type": "NFKD"}, replace(json!({"Regex": " {2,}"}), " "), {"type": "Lowercase"},
        ]}),
    ] {
        changed(|file| file["normalizer"] = normalizer).unwrap();
    }
}

#[test]
fn a_bad_file_is_an_error_that_names_it() {
    for bytes in [&b"{"[..], b"{}", b"[1, 2]", b"\xff"] {
        let error = Tokenizer::from_bytes(bytes).unwrap_err();
        assert!(
            matches!(
                error,
                TokenizationError::Model {
                    file: "tokenizer.json",
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn half_characters_are_held_back_until_they_are_complete() {
    let tokenizer = Arc::new(tokenizer());
    let mut text = Detokenizer::new(tokenizer);
    let crab = "\u{1f980}".as_bytes();
    assert_eq!(text.push(byte(b'a')), "a");
    for part in &crab[..3] {
        assert_eq!(text.push(byte(*part)), "");
    }
    assert_eq!(text.push(byte(crab[3])), "\u{1f980}");
    assert_eq!(text.push(byte(crab[0])), "");
    assert_eq!(text.push(byte(b'!')), "\u{fffd}!");
    assert_eq!(text.push(byte(crab[0])), "");
}

#[test]
fn a_stream_gives_the_same_text_as_decoding_at_once() {
    let tokenizer = Arc::new(tokenizer());
    // A linear congruential generator makes valid and invalid UTF-8, special tokens and unknown ids.
    let mut state = 7u64;
    for _ in 0..300 {
        let mut ids = Vec::new();
        for _ in 0..24 {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let choice = (state >> 33) as u32;
            ids.push(match choice % 4 {
                0 => byte(
                    [0xF0, 0x9F, 0xA6, 0x80, 0xE4, 0xBD, 0xA0, 0xC3][(choice >> 8) as usize % 8],
                ),
                1 => byte((choice >> 8) as u8),
                2 => byte(0x80 | ((choice >> 8) as u8 & 0x3f)),
                _ => (choice >> 8) % 300,
            });
        }
        let mut stream = Detokenizer::new(tokenizer.clone());
        let text: String = ids.iter().map(|id| stream.push(*id)).collect();
        // Only the end may differ: a character that has begun there.
        let whole = tokenizer.decode(&ids);
        let more = whole.strip_prefix(&text);
        assert!(matches!(more, Some("" | "\u{fffd}")), "{ids:?}");
    }
}
