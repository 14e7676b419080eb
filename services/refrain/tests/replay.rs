//! `refrain replay` as a program: what it prints where.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn replay(folder: &Path, args: &[&str]) -> std::io::Result<Output> {
    Command::new(env!("CARGO_BIN_EXE_refrain"))
        .arg("replay")
        .args(args)
        .current_dir(folder)
        .output()
}

#[test]
fn one_json_object_or_a_table_on_stdout() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let call = "{\"output_token_ids\":[1,2,3]}\n";
    std::fs::write(folder.path().join("calls.jsonl"), call.repeat(2))?;
    let output = replay(folder.path(), &["calls.jsonl", "--json"])?;
    assert!(output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout)?;
    // The second call says one token, and then two at once.
    assert_eq!((&report["docs"], &report["steps"]), (&2.into(), &5.into()));
    assert_eq!(String::from_utf8(output.stderr)?, "");

    let output = replay(folder.path(), &["calls.jsonl"])?;
    let table = String::from_utf8(output.stdout)?;
    for wanted in [
        "tokens per step ",
        "propose, us: p99 ",
        "\nglobal ",
        "\nnone ",
    ] {
        assert!(table.contains(wanted), "{wanted:?} is missing:\n{table}");
    }
    Ok(())
}

#[test]
fn a_bad_line_fails_with_its_place() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    std::fs::write(
        folder.path().join("calls.jsonl"),
        "{\"output_token_ids\":[1]}\n{}\n",
    )?;
    let output = replay(folder.path(), &["calls.jsonl", "--json"])?;
    assert!(!output.status.success());
    assert_eq!(output.stdout, b"");
    let said = String::from_utf8(output.stderr)?;
    for wanted in ["calls.jsonl, line 2", "the call has neither"] {
        assert!(said.contains(wanted), "{said}");
    }
    Ok(())
}
