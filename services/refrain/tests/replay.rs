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
fn a_bad_line_is_left_out_and_named_and_nothing_but_bad_lines_fails()
-> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("calls.jsonl");
    std::fs::write(&file, "{\"output_token_ids\":[1]}\n{}\n")?;
    let output = replay(folder.path(), &["calls.jsonl", "--json"])?;
    assert!(output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout)?;
    assert_eq!(report["docs"], 1);
    let first = &report["log"]["left_out"][0]["first"];
    assert_eq!(first, "calls.jsonl, line 2", "{}", report["log"]);

    std::fs::write(&file, "{}\n")?;
    let output = replay(folder.path(), &["calls.jsonl", "--json"])?;
    assert!(!output.status.success());
    assert_eq!(output.stdout, b"");
    let said = String::from_utf8(output.stderr)?;
    for wanted in ["calls.jsonl, line 1", "no call can be read"] {
        assert!(said.contains(wanted), "{said}");
    }
    Ok(())
}
