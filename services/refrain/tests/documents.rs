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

/// All Markdown of the repository.
fn documents() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![repository()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let entry = entry.unwrap();
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with('.') || ["target", "refrain-data"].contains(&name.as_str()) {
                continue;
            }
            if entry.file_type().unwrap().is_dir() {
                folders.push(path);
            } else if name.ends_with(".md") {
                found.push(path);
            }
        }
    }
    found
}

/// The links of a document to files and headings.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .filter(|target| !target.starts_with("http"))
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
    let mut fenced = false;
    text.lines().any(|line| {
        fenced ^= line.trim_start().starts_with("```");
        !fenced && line.starts_with('#') && anchor(line.trim_start_matches('#').trim()) == wanted
    })
}

#[test]
fn every_link_leads_somewhere() {
    let mut count = 0;
    let mut broken = Vec::new();
    for document in documents() {
        let text = read(&document);
        for target in links(&text) {
            count += 1;
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
    assert!(count > 400, "{count} links: the test is blind");
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
}

#[test]
fn the_summary_names_every_page_once() {
    let docs = repository().join("docs");
    let mut pages: Vec<_> = documents()
        .iter()
        .filter_map(|path| Some(path.strip_prefix(&docs).ok()?.display().to_string()))
        .collect();
    let summary = read(&docs.join("SUMMARY.md"));
    let mut named: Vec<_> = links(&summary)
        .filter(|target| !target.starts_with("../"))
        .collect();
    pages.sort();
    named.sort_unstable();
    assert_eq!(named, pages);
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
