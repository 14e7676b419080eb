//! Reads logs of many tools.

mod mutated;
mod own_form;
mod pieces;
mod samples;

use std::path::{Path, PathBuf};

use super::*;

/// The calls of a log as they are in it, and the summary.
fn read(paths: &[PathBuf]) -> anyhow::Result<(Vec<LoggedCall>, LogSummary)> {
    let mut logs = Logs::open(paths, LogTokenizer::default())?;
    let mut calls = Vec::new();
    while let Some(call) = logs.next_logged()? {
        calls.push(call);
    }
    Ok((calls, logs.summary()))
}

fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/logs")
}
