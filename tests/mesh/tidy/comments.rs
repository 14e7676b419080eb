//! Comments fit on a screen and begin like sentences, and the README stays short.

use std::path::PathBuf;

use anyhow::ensure;
use e2e::repository;

/// Longest comment line, columns.
const COMMENT_COLUMNS_MAX: usize = 118;

/// Words that begin no sentence of a comment, questions apart. A sentence that begins so usually has no subject.
const NO_BEGINNINGS: [&str; 6] = ["What", "Whose", "Of", "Who", "Behind", "Beside"];

/// The text of a comment line, without its marker.
fn comment(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("//")?;
    Some(rest.trim_start_matches(['/', '!']))
}

/// The sentences of the comments of a file that begin with a forbidden word.
fn bad_beginnings(text: &str) -> Vec<String> {
    let mut paragraphs: Vec<String> = Vec::new();
    let mut is_code = false;
    let mut continues = false;
    for line in text.lines() {
        let Some(words) = comment(line).map(str::trim) else {
            continues = false;
            is_code = false;
            continue;
        };
        if words.starts_with("```") {
            is_code = !is_code;
            continues = false;
            continue;
        }
        let item = words.strip_prefix("* ").or(words.strip_prefix("- "));
        if is_code || words.is_empty() {
            continues = false;
        } else if let (true, None, Some(paragraph)) = (continues, item, paragraphs.last_mut()) {
            paragraph.push(' ');
            paragraph.push_str(words);
        } else {
            paragraphs.push(item.unwrap_or(words).to_owned());
            continues = true;
        }
    }
    paragraphs
        .iter()
        .flat_map(|paragraph| bad_sentences(paragraph))
        .collect()
}

fn bad_sentences(paragraph: &str) -> Vec<String> {
    let mut bad = Vec::new();
    let mut rest = paragraph;
    while !rest.is_empty() {
        let end = rest.find(". ").into_iter().chain(rest.find("? ")).min();
        let end = end.map_or(rest.len(), |end| end + 1);
        let sentence = rest[..end].trim();
        let first = sentence.split(' ').next().unwrap_or_default();
        if NO_BEGINNINGS.contains(&first) && !sentence.ends_with('?') {
            bad.push(sentence.chars().take(60).collect());
        }
        rest = rest[end..].trim_start();
    }
    bad
}

fn rust_files() -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = ["shared", "services", "tests"]
        .map(|name| repository().join(name))
        .into();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

#[test]
fn comments_are_short_lines_of_whole_sentences() -> anyhow::Result<()> {
    let mut wrong = Vec::new();
    let files = rust_files()?;
    ensure!(
        files.len() > 100,
        "only {} files were found: the test is blind",
        files.len()
    );
    for file in &files {
        let text = std::fs::read_to_string(file)?;
        let name = file.display();
        for (number, line) in (1..).zip(text.lines()) {
            let columns = line.chars().count();
            if comment(line).is_some() && columns > COMMENT_COLUMNS_MAX {
                wrong.push(format!(
                    "{name}:{number}: the comment has {columns} columns"
                ));
            }
        }
        wrong.extend(
            bad_beginnings(&text)
                .iter()
                .map(|sentence| format!("{name}: {sentence}")),
        );
    }
    ensure!(
        wrong.is_empty(),
        "comments to rewrite:\n{}",
        wrong.join("\n")
    );
    Ok(())
}

#[test]
fn sentences_without_a_subject_are_found() {
    let bad = |text: &str| bad_beginnings(text).len();
    assert_eq!(bad("/// What it does.\nfn f() {}"), 1);
    assert_eq!(
        bad("    // It works. Whose it is,\n    // nobody knows. Of these, two. The end."),
        2
    );
    assert_eq!(bad("//! * Who it is.\n//!   It goes on. Beside it."), 2);
    assert_eq!(bad("/// What does it do? It\n/// Of"), 0);
    assert_eq!(
        bad("/// Offers. Whatever. Whoever.\nlet what = \"What\";"),
        0
    );
    assert_eq!(bad("/// ```\n/// Of code\n/// ```"), 0);
}
