//! Lines that production code does not have: codes of errors as literals, and other people's errors in the form for
//! debugging.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use e2e::repository;

/// The codes that constants stand for, out of the file of these constants.
fn known_codes() -> anyhow::Result<Vec<String>> {
    let file = repository().join("shared/protocol/src/error/code.rs");
    let text = std::fs::read_to_string(file)?;
    let constants = text
        .lines()
        .filter_map(|line| line.strip_prefix("pub const "));
    constants
        .map(|line| {
            let value = line.split('"').nth(1);
            anyhow::Ok(value.context("a constant without a value")?.to_owned())
        })
        .collect()
}

/// The lines of a file before its tests.
fn production(text: &str) -> impl Iterator<Item = &str> {
    let end = text.find("\n#[cfg(test)]\nmod ").unwrap_or(text.len());
    text[..end].lines()
}

/// Whether a line names one of these codes by a literal, where a constant stands for it.
fn has_literal_code(line: &str, codes: &[String]) -> bool {
    ["with_code(", "has_code(", "&str = ", "Some("]
        .iter()
        .any(|before| {
            codes
                .iter()
                .any(|code| line.contains(&format!("{before}\"{code}\"")))
        })
}

/// Whether a line writes an error in the form for debugging.
fn debugs_error(line: &str) -> bool {
    let names = ["error", "err", "why", "cause"];
    names.iter().any(|name| {
        let in_text = line.contains(&format!("{{{name}:?}}"));
        in_text
            || [",", ")", ";"]
                .iter()
                .any(|end| line.contains(&format!("?{name}{end}")))
    })
}

#[test]
fn the_lines_are_told_from_others() {
    let codes = ["context_gone".to_owned()];
    assert!(has_literal_code(
        r#"error.has_code("context_gone")"#,
        &codes
    ));
    assert!(!has_literal_code(r#"error.has_code("other")"#, &codes));
    assert!(debugs_error(r#"format!("{url}: {error:?}")"#));
    assert!(debugs_error(r#"tracing::warn!(error = ?error, "lost")"#));
    assert!(debugs_error(r#"tracing::warn!(?error, "lost")"#));
    assert!(!debugs_error("tracing::warn!(kind = ?error.kind, %error)"));
    assert_eq!(
        production("a\n#[cfg(test)]\nmod tests {").collect::<Vec<_>>(),
        ["a"]
    );
}

#[test]
fn codes_are_constants_and_errors_are_told_in_words() -> anyhow::Result<()> {
    let codes = known_codes()?;
    ensure!(codes.len() > 20, "{codes:?}: the test is blind");
    let mut folders: Vec<PathBuf> =
        vec![repository().join("shared"), repository().join("services")];
    let (mut found, mut files) = (Vec::new(), 0);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .unwrap_or_default();
            if path.is_dir() {
                let is_production = !["tests", "benches", "examples", "target"].contains(&name);
                folders.extend(is_production.then_some(path));
            } else if name.ends_with(".rs") && !name.ends_with("tests.rs") && name != "fuzz.rs" {
                files += 1;
                found.extend(wrong_lines(&path, &codes)?);
            }
        }
    }
    ensure!(files > 100, "{files} files looked at: the test is blind");
    ensure!(found.is_empty(), "{}", found.join("\n"));
    Ok(())
}

fn wrong_lines(path: &Path, codes: &[String]) -> anyhow::Result<Vec<String>> {
    let text = std::fs::read_to_string(path)?;
    let is_home = path.ends_with("error/code.rs");
    let wrong = production(&text)
        .filter(|line| !is_home && has_literal_code(line, codes) || debugs_error(line));
    Ok(wrong
        .map(|line| format!("{}: {}", path.display(), line.trim()))
        .collect())
}
