//! The documents are short, and every link and file name in them leads somewhere.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

use std::path::{Path, PathBuf};

fn repository() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// README.md, ARCHITECTURE.md and all pages in docs/. Pictures are beside them.
fn documents() -> Vec<PathBuf> {
    let root = repository();
    let mut found = vec![root.join("README.md"), root.join("ARCHITECTURE.md")];
    let mut folders = vec![root.join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    found
}

/// The anchor of a heading, as GitHub makes it.
fn anchor(heading: &str) -> String {
    let kept = heading
        .to_lowercase()
        .replace(' ', "-")
        .replace(|c: char| !c.is_alphanumeric() && c != '-' && c != '_', "");
    kept.trim_start_matches('-').to_owned()
}

fn has_anchor(text: &str, wanted: &str) -> bool {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| anchor(line.trim_start_matches('#').trim()))
        .any(|found| found == wanted)
}

#[test]
fn every_link_leads_somewhere() {
    let mut links = 0;
    let mut broken = Vec::new();
    for document in documents() {
        let text = read(&document);
        for link in text.split("](").skip(1) {
            let target = link.split(')').next().unwrap_or_default();
            if target.starts_with("http") {
                continue;
            }
            links += 1;
            let (file, fragment) = target.split_once('#').unwrap_or((target, ""));
            let path = match file {
                "" => document.clone(),
                file => document.parent().unwrap().join(file),
            };
            let leads =
                path.is_file() && (fragment.is_empty() || has_anchor(&read(&path), fragment));
            if !leads {
                broken.push(format!("{}: {target}", document.display()));
            }
        }
    }
    assert!(links > 40, "{links} links: the test is blind");
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
}

/// File names between backticks are relative to the repository, or to the crate that was named last.
#[test]
fn every_file_that_the_maps_name_exists() {
    let root = repository();
    let mut names = 0;
    let mut missing = Vec::new();
    for document in ["README.md", "ARCHITECTURE.md"] {
        let text = read(&root.join(document));
        let mut fenced = false;
        let mut current = root.clone();
        for line in text.lines() {
            if line.starts_with("```") {
                fenced = !fenced;
            }
            if fenced {
                continue;
            }
            for word in line.split('`').skip(1).step_by(2) {
                if ["services/", "shared/", "tests"]
                    .iter()
                    .any(|place| word.starts_with(place))
                    && root.join(word).is_dir()
                {
                    current = root.join(word);
                }
                let is_file = [".rs", ".md", ".py"]
                    .iter()
                    .any(|ending| word.ends_with(ending));
                if is_file && !word.contains(' ') {
                    names += 1;
                    if !root.join(word).exists() && !current.join(word).exists() {
                        missing.push(format!("{document}: {word}"));
                    }
                }
            }
        }
    }
    assert!(names > 30, "{names} names: the test is blind");
    assert!(missing.is_empty(), "no such files:\n{}", missing.join("\n"));
}

#[test]
fn the_readme_is_short() {
    let text = read(&repository().join("README.md"));
    assert!(
        text.lines().count() <= 200,
        "{} lines",
        text.lines().count()
    );
    for (number, line) in text.lines().enumerate() {
        let columns = line.chars().count();
        assert!(columns <= 100, "line {}: {columns} columns", number + 1);
    }
}
