//! Comparison with llama.cpp, by vocabularies and expected tokens in a folder.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

use std::path::Path;

use crate::{ModelFiles, TokenizationError};

/// The folder with llama.cpp's `models/ggml-vocab-*.gguf`, their texts (`.inp`) and the tokens of these (`.out`).
/// Tokens with special ones recognised in the texts are in `.marked`, if there are any.
const VOCABULARIES: &str = "REFRAIN_GGUF_VOCABULARIES";

#[test]
#[ignore = "it needs the vocabularies of llama.cpp, in a folder that REFRAIN_GGUF_VOCABULARIES names"]
fn real_vocabularies_agree_with_llama_cpp() {
    let folder = std::env::var(VOCABULARIES).unwrap();
    let mut wrong = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "gguf") {
            continue;
        }
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        match differences(&path) {
            Ok(Some((texts, different))) if different.is_empty() => {
                println!("{name}: {texts} texts agree");
            }
            Ok(Some((texts, different))) => {
                println!(
                    "{name}: {} of {texts} texts differ: {:?}",
                    different.len(),
                    &different[..different.len().min(4)]
                );
                wrong.push(name);
            }
            Ok(None) => println!("{name}: it can be read, and has no expected tokens"),
            Err(error) => println!("{name}: {error}"),
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// The number of compared texts, and those that differ with their tokens and the expected ones.
type Compared = (usize, Vec<(String, Vec<u32>, Vec<u32>)>);

/// `None` if there are no expected tokens beside a vocabulary.
fn differences(path: &Path) -> Result<Option<Compared>, TokenizationError> {
    let files = ModelFiles::from_path(path)?;
    let tokenizer = files.tokenizer()?;
    let ends = files.generation_config_json.as_deref().unwrap();
    println!("{tokenizer:?} {}", String::from_utf8_lossy(ends));
    let beside = |end: &str| std::fs::read_to_string(format!("{}{end}", path.display()));
    let (Ok(texts), Ok(expected)) = (beside(".inp"), beside(".out")) else {
        return Ok(None);
    };
    let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
    let mut different = Vec::new();
    let mut compare = |expected: &str, encode: &dyn Fn(&str) -> Vec<u32>| {
        for (text, line) in texts.iter().zip(expected.lines()) {
            let ids = line.split_whitespace().map(|id| id.parse().unwrap());
            let (expected, found): (Vec<u32>, _) = (ids.collect(), encode(text));
            if found != expected {
                different.push(((*text).to_owned(), found, expected));
            }
        }
    };
    compare(&expected, &|text| {
        tokenizer.encode(text).unwrap_or_default()
    });
    if let Ok(marked) = beside(".marked") {
        compare(&marked, &|text| {
            tokenizer.encode_trusted(text).unwrap_or_default()
        });
    }
    Ok(Some((texts.len(), different)))
}
