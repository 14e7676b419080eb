//! How streams are cut into values.

use std::io::Read;

use super::super::pieces::{Piece, Pieces};
use super::*;

/// A stream that gives few bytes at a time.
struct Drops<'a>(&'a [u8]);

impl Read for Drops<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let len = into.len().min(3);
        self.0.read(&mut into[..len])
    }
}

/// The pieces, with the lines in which they begin.
fn cut(text: &str) -> Vec<(Piece, String, u64)> {
    let mut pieces = Pieces::new(Drops(text.as_bytes()));
    let mut found = Vec::new();
    while let Some(piece) = pieces.advance().unwrap() {
        let bytes = String::from_utf8_lossy(pieces.bytes()).into_owned();
        found.push((piece, bytes, pieces.line()));
    }
    found
}

fn json(text: &str, line: u64) -> (Piece, String, u64) {
    (Piece::Json, text.to_owned(), line)
}

fn list_end(line: u64) -> (Piece, String, u64) {
    (Piece::ListEnd, String::new(), line)
}

#[test]
fn values_stand_in_lines_or_over_lines_or_in_lists() {
    let lines = [json("{\"a\":1}", 1), json("{\"b\":\"}\\\"\"}", 3)];
    assert_eq!(cut("\u{feff}{\"a\":1}\n\n{\"b\":\"}\\\"\"}"), lines);
    assert_eq!(
        cut("{\n \"a\": [\n1]\n}{}\n"),
        [json("{\n \"a\": [\n1]\n}", 1), json("{}", 4)]
    );
    let list = [json("{}", 1), json("{\"a\":[{}]}", 2), list_end(3)];
    assert_eq!(cut("[{},\n{\"a\":[{}]}\n]"), list);
    assert_eq!(
        cut("{\"data\": [{\"x\":1}, {}], \"next\": {\"a\": \"]}\"}}\n{\"y\":2}"),
        [
            json("{\"x\":1}", 1),
            json("{}", 1),
            list_end(1),
            json("{\"y\":2}", 2)
        ]
    );
    // A list of messages is one value, and so is an object of them.
    let talk = "{\"conversations\": [{\"from\":\"human\"}]}";
    assert_eq!(cut(talk), [json(talk, 1)]);
}

#[test]
fn a_record_that_was_cut_off_takes_no_other_with_it() {
    assert_eq!(
        cut("{\"a\": \"tex\n{\"b\":1}\n{\"c\": {\"d\": 2\n{\"e\":3}\n[2026-11-29] text\n"),
        [
            json("{\"a\": \"tex", 1),
            json("{\"b\":1}", 2),
            json("{\"c\": {\"d\": 2\n", 3),
            json("{\"e\":3}", 4),
            (Piece::Line, "[2026-11-29] text".to_owned(), 5)
        ]
    );
}

#[test]
fn halves_and_names_are_found_in_any_order_of_files() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let write = |name: &str, text: &str| -> anyhow::Result<PathBuf> {
        let path = folder.path().join(name);
        std::fs::write(&path, text)?;
        Ok(path)
    };
    let response = r#"{"custom_id":"x","response":{"status_code":200,"body":{"choices":[{"message":{"role":"assistant","content":"4"}}]}}}"#;
    let request = r#"{"custom_id":"x","body":{"model":"m","messages":[{"role":"user","content":"2 + 2?"}],"metadata":{"session_id":"s"}}}"#;
    let paths = [write("out.jsonl", response)?, write("in.jsonl", request)?];
    for order in [[0, 1], [1, 0]] {
        let (calls, _) = read(&order.map(|at| paths[at].clone()))?;
        assert_eq!(calls.len(), 1);
        assert_eq!(calls[0].head.session.as_deref(), Some("s"));
        assert!(!calls[0].prompt.is_empty());
    }
    Ok(())
}
