//! Tells the program how far its code is optimised, so that it can say when a measurement would mislead, and which
//! commit it is built from.

#![allow(
    clippy::expect_used,
    reason = "cargo sets the variable for every build script"
)]

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // A name with the prefix `REFRAIN_` would be taken for a setting where cargo runs the program.
    let level = std::env::var("OPT_LEVEL").expect("cargo sets OPT_LEVEL");
    println!("cargo::rustc-env=BUILD_OPT_LEVEL={level}");
    let given = given_commit().or_else(archived_commit).or_else(git_commit);
    let commit = given.unwrap_or_else(|| "unknown".to_owned());
    let end = commit.len().min(12);
    println!("cargo::rustc-env=BUILD_COMMIT={}", &commit[..end]);
}

/// Builds without git, as those of images, name the commit.
fn given_commit() -> Option<String> {
    println!("cargo::rerun-if-env-changed=BUILD_COMMIT");
    let commit = std::env::var("BUILD_COMMIT").ok()?;
    (!commit.is_empty() && commit.is_ascii()).then_some(commit)
}

/// `git archive` writes the commit into this file. It comes before git, because an archive may lie inside another
/// repository.
fn archived_commit() -> Option<String> {
    println!("cargo::rerun-if-changed=commit.txt");
    let text = std::fs::read_to_string("commit.txt").ok()?;
    let commit = text.trim();
    (!commit.starts_with('$')).then(|| commit.to_owned())
}

fn git_commit() -> Option<String> {
    // Every commit and every checkout adds a line to this log.
    let log = git(&[
        "rev-parse",
        "--path-format=absolute",
        "--git-path",
        "logs/HEAD",
    ])?;
    if std::path::Path::new(&log).exists() {
        println!("cargo::rerun-if-changed={log}");
    }
    git(&["rev-parse", "HEAD"])
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
