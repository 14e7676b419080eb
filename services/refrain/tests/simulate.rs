//! `refrain simulate` as a program: what it prints and writes.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const SMALL: [&str; 9] = [
    "calls.jsonl",
    "--instances",
    "2",
    "--slots",
    "2",
    "--kv-tokens",
    "1000",
    "--policies",
    "group-fifo,auto",
];

fn simulate(folder: &Path, more: &[&str]) -> std::io::Result<Output> {
    let mut calls = String::new();
    for nth in 0..12u32 {
        let tokens: Vec<u32> = (0..20 + nth).collect();
        let group = nth / 4;
        calls += &format!("{{\"group\":\"{group}\",\"output_token_ids\":{tokens:?}}}\n");
    }
    std::fs::write(folder.join("calls.jsonl"), calls)?;
    Command::new(env!("CARGO_BIN_EXE_refrain"))
        .arg("simulate")
        .args(SMALL)
        .args(more)
        .current_dir(folder)
        .output()
}

#[test]
fn a_table_with_a_line_for_each_policy() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let output = simulate(folder.path(), &[])?;
    assert!(output.status.success());
    let table = String::from_utf8(output.stdout)?;
    for wanted in [
        "calls.jsonl: 12 requests in 3 groups, 306 output tokens, on 2 instances",
        "makespan",
        "\ngroup-fifo ",
        "\nauto ",
    ] {
        assert!(table.contains(wanted), "{wanted:?} is missing:\n{table}");
    }
    assert_eq!(String::from_utf8(output.stderr)?, "");
    Ok(())
}

#[test]
fn one_json_object_and_a_page() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let output = simulate(folder.path(), &["--json", "--html", "page.html"])?;
    assert!(output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let runs = &report["workloads"][0]["runs"];
    for (nth, policy) in ["group-fifo", "auto"].into_iter().enumerate() {
        let run = &runs[nth];
        assert_eq!(
            (&run["policy"], &run["output_tokens"]),
            (&policy.into(), &306.into())
        );
        assert!(run["makespan_s"].as_f64() > Some(0.0), "{run}");
    }
    let page = std::fs::read_to_string(folder.path().join("page.html"))?;
    for wanted in ["<svg", "calls.jsonl: auto", "Requests that are not done"] {
        assert!(page.contains(wanted), "{wanted:?} is missing");
    }
    Ok(())
}

#[test]
fn an_option_that_cannot_be_followed_is_named() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let output = simulate(folder.path(), &["--scale", "100"])?;
    assert!(!output.status.success());
    assert_eq!(output.stdout, b"");
    let said = String::from_utf8(output.stderr)?;
    assert!(said.contains("raise --kv-tokens"), "{said}");
    Ok(())
}
