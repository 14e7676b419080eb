//! The incremental readers, compared with complete ones.

use proptest::prelude::*;
use serde_json::Value;

use crate::json::{JsonReader, Progress, StringReader, escape, is_json, quoted};
use crate::python::literal_as_json;

#[test]
fn valid_and_invalid_json() {
    for text in [
        "{}",
        "[]",
        "0",
        "-0.5e+3",
        "10E2",
        "\"\"",
        "true",
        " [1, {\"a\": [null]}] ",
        "\"\\u00e9\\n\"",
    ] {
        assert!(is_json(text), "{text}");
    }
    for text in [
        "",
        "{",
        "01",
        "1.",
        ".5",
        "-",
        "+1",
        "1e",
        "tru",
        "truex",
        "{a: 1}",
        "{\"a\"}",
        "{\"a\": 1,}",
        "[1,]",
        "[1 2]",
        "\"\\x\"",
        "\"\n\"",
        "\"\\u12g4\"",
        "{} {}",
        "[}",
        "'a'",
        "nan",
    ] {
        assert!(!is_json(text), "{text}");
    }
    let deep = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    assert!(is_json(&deep(128)) && !is_json(&deep(129)));
}

#[test]
fn python_literals() {
    for (python, json) in [
        ("'a\"b'", r#""a\"b""#),
        (
            r#""\x41\u00e9\U0001f980\q\'\
""#,
            r#""Aé🦀\\q'""#,
        ),
        ("(1, 'a',)", r#"[1, "a"]"#),
        (
            "{1: True, 'b': None, None: false}",
            r#"{"1": true, "b": null, "null": false}"#,
        ),
        ("-1_000", "-1000"),
        ("+2.", "2.0"),
        ("-.5e3", "-0.5e3"),
        ("2.e3", "2.0e3"),
        ("[ ]", "[]"),
    ] {
        assert_eq!(literal_as_json(python).as_deref(), Some(json), "{python}");
    }
    for python in [
        "", "f(1)", "[1", "'a", "{1}", "{'a' 1}", "[,]", "a", "1 2", "0x10", "[1)", "{[]: 1}", "01",
    ] {
        assert_eq!(literal_as_json(python), None, "{python}");
    }
}

/// Text with many characters that matter to JSON.
fn json_like() -> impl Strategy<Value = String> {
    let parts = [
        "{", "}", "[", "]", "\"", "\\", ",", ":", "1", "-", ".", "e", "true", "null", " ", "\"a\"",
        "\"a\": ", "\\u00e9", "\n", "é", "0",
    ];
    proptest::collection::vec(proptest::sample::select(parts.to_vec()), 0..20)
        .prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn validity_is_that_of_serde_json(text in json_like()) {
        prop_assert_eq!(is_json(&text), serde_json::from_str::<Value>(&text).is_ok());
    }

    #[test]
    fn the_end_of_a_value_does_not_depend_on_chunks(text in json_like(), at in 0usize..40) {
        let mut whole = JsonReader::new();
        let end = whole.feed(&text);
        let (first, second) = text.split_at(crate::sink::floor(&text, at));
        let mut cut = JsonReader::new();
        let mut taken = cut.feed(first);
        if taken == first.len() {
            taken += cut.feed(second);
        }
        prop_assert_eq!((taken, cut.is_valid(), cut.is_whole()), (end, whole.is_valid(), whole.is_whole()));
    }

    #[test]
    fn strings_are_read_as_they_were_written(text in any::<String>()) {
        let json = quoted(&text);
        prop_assert_eq!(serde_json::from_str::<String>(&json).ok(), Some(text.clone()));
        let mut escaped = String::new();
        escape(&text, &mut escaped);
        let ascii: String = escaped
            .chars()
            .flat_map(|c| match c.is_ascii() {
                true => vec![c.to_string()],
                false => c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect(),
            })
            .collect();
        for spelling in [escaped, ascii] {
            let mut reader = StringReader::default();
            let mut out = String::new();
            for c in spelling.chars() {
                prop_assert_eq!(reader.feed(c.encode_utf8(&mut [0; 4]), &mut out).1, Progress::More);
            }
            prop_assert_eq!(reader.feed("\"", &mut out), (1, Progress::Done));
            prop_assert_eq!(&out, &text);
        }
    }
}
