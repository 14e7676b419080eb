//! Pages and completions of packages name each command, and all files with a version have the same one.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

use std::path::PathBuf;
use std::process::Command;

/// Runs the program for its output.
fn output(arguments: &[&str]) -> String {
    let program = env!("CARGO_BIN_EXE_refrain");
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn read(path: &str) -> String {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The commands by the program's help.
fn commands() -> Vec<String> {
    let help = output(&["--help"]);
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let lines = lines.take_while(|line| !line.is_empty());
    let names = lines.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let names: Vec<_> = names.filter(|name| !["", "help"].contains(name)).collect();
    assert!(names.len() > 15, "the test is blind: {help}");
    names.into_iter().map(str::to_owned).collect()
}

#[test]
fn completions_name_every_command() {
    let commands = commands();
    for shell in ["bash", "zsh", "fish"] {
        let text = output(&["completions", shell]);
        let words: Vec<_> = text
            .split(|c: char| !c.is_alphanumeric() && c != '-')
            .collect();
        for command in &commands {
            assert!(words.contains(&command.as_str()), "{shell}: {command}");
        }
    }
}

#[test]
fn every_command_has_a_page() {
    let page = output(&["man"]).replace("\\-", "-");
    let folder = tempfile::tempdir().unwrap();
    output(&["man", "--folder", folder.path().to_str().unwrap()]);
    for command in commands() {
        assert!(page.contains(&format!("refrain-{command}(1)")), "{command}");
        let name = format!("refrain-{command}.1");
        assert!(folder.path().join(&name).is_file(), "{name}");
    }
}

#[test]
fn the_version_has_the_commit() {
    let printed = output(&["--version"]);
    let commit = printed
        .trim()
        .strip_prefix(concat!("refrain ", env!("CARGO_PKG_VERSION"), " ("));
    let commit = commit.unwrap().strip_suffix(')').unwrap();
    let archived = read("services/refrain/commit.txt");
    if !archived.starts_with('$') {
        assert_eq!(commit, &archived[..12]);
        return;
    }
    let git = [
        "-C",
        env!("CARGO_MANIFEST_DIR"),
        "rev-parse",
        "--short=12",
        "HEAD",
    ];
    let here = Command::new("git").args(git).output();
    match here.ok().filter(|git| git.status.success()) {
        Some(git) => assert_eq!(commit, String::from_utf8_lossy(&git.stdout).trim()),
        None => assert_eq!(commit, "unknown"),
    }
}

#[test]
fn every_file_has_the_version_of_the_program() {
    let version = env!("CARGO_PKG_VERSION");
    for (file, lines) in [
        ("CHANGELOG.md", vec![format!("## [{version}]")]),
        (
            "deploy/helm/refrain/Chart.yaml",
            vec![
                format!("version: {version}"),
                format!("appVersion: {version}"),
            ],
        ),
        (
            "services/refrain/pyproject.toml",
            vec![
                format!("vllm = [\"refrain-client[vllm]=={version}\"]"),
                format!("sglang = [\"refrain-client[sglang]=={version}\"]"),
            ],
        ),
        (
            "deploy/image/Dockerfile",
            vec![format!("ARG VERSION={version}")],
        ),
    ] {
        let text = read(file);
        for line in lines {
            assert!(
                text.lines().any(|found| found.starts_with(&line)),
                "{file}: no line {line}"
            );
        }
    }
}
