//! Damaged logs never make a panic, and never hang: an error is a sentence.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::{Index, select};

use super::super::source;
use super::*;

/// The files of all samples, unpacked.
fn files() -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut folders = vec![samples()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.display().to_string();
            if path.is_dir() && !name.ends_with("/make") && !name.ends_with("/expected") {
                folders.push(path);
            } else if path.is_file() {
                let mut bytes = Vec::new();
                let mut stream = source::open(&path, ReadProgress::default()).unwrap();
                std::io::Read::read_to_end(&mut stream, &mut bytes).unwrap();
                files.insert(name, bytes);
            }
        }
    }
    files
}

/// One damage to a file.
#[derive(Clone, Debug)]
enum Damage {
    CutOff(Index),
    Flip(Index, u8),
    Remove(Index, Index),
    /// Puts a piece of the file elsewhere, so that values have other types.
    Move(Index, Index, Index),
    Insert(Index, &'static str),
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = any::<Index>;
    prop_oneof![
        at().prop_map(Damage::CutOff),
        (at(), any::<u8>()).prop_map(|(at, byte)| Damage::Flip(at, byte)),
        (at(), at()).prop_map(|(from, to)| Damage::Remove(from, to)),
        (at(), at(), at()).prop_map(|(from, to, into)| Damage::Move(from, to, into)),
        (
            at(),
            select(
                &[
                    "[",
                    "{",
                    "\"",
                    "\\",
                    "\n",
                    "null",
                    "[[[[",
                    "{\"messages\":",
                    "1e999",
                    "'",
                    "(",
                    "\u{20ac}",
                    "\\ud800"
                ][..]
            )
        )
            .prop_map(|(at, text)| Damage::Insert(at, text)),
    ]
}

fn apply(bytes: &mut Vec<u8>, damage: &Damage) {
    let len = bytes.len() + 1;
    let range = |from: &Index, to: &Index| {
        let (from, to) = (from.index(len), to.index(len));
        from.min(to)..from.max(to)
    };
    match damage {
        Damage::CutOff(at) => bytes.truncate(at.index(len)),
        Damage::Flip(at, byte) => {
            if let Some(found) = bytes.get_mut(at.index(len)) {
                *found = *byte;
            }
        }
        Damage::Remove(from, to) => drop(bytes.drain(range(from, to))),
        Damage::Move(from, to, into) => {
            let moved: Vec<u8> = bytes.drain(range(from, to)).collect();
            let at = into.index(bytes.len() + 1);
            bytes.splice(at..at, moved);
        }
        Damage::Insert(at, text) => {
            let at = at.index(len);
            bytes.splice(at..at, text.bytes());
        }
    }
}

/// `PROPTEST_CASES` asks for more.
fn cases() -> u32 {
    let asked = std::env::var("PROPTEST_CASES").ok();
    asked.and_then(|asked| asked.parse().ok()).unwrap_or(400)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_logs_are_read_or_refused(
        (name, bytes) in select(files().into_iter().collect::<Vec<_>>()),
        damages in proptest::collection::vec(damage(), 1..6),
    ) {
        let mut bytes = bytes;
        for damage in &damages {
            apply(&mut bytes, damage);
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(Path::new(&name).file_name().unwrap());
        std::fs::write(&path, bytes).unwrap();
        if let Err(error) = read(&[path]) {
            let message = format!("{error:#}");
            prop_assert!(!message.contains("not read to its end"), "the reader has panicked: {message}");
        }
    }
}

#[test]
fn deep_values_end_no_reading() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep.json");
    for (begin, end) in [
        ("[", "]"),
        ("{\"a\":", "}"),
        ("{'a': ", "}"),
        ("{'a': f(", ")}"),
        ("x={", "}"),
    ] {
        let text = format!("{}1{}", begin.repeat(100_000), end.repeat(100_000));
        std::fs::write(&path, text).unwrap();
        if let Err(error) = read(std::slice::from_ref(&path)) {
            let message = format!("{error:#}");
            assert!(!message.contains("not read to its end"), "{message}");
        }
    }
}
