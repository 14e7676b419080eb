//! The audit log: lines of JSON for administrative acts, only ever appended.
//!
//! A line is on disk before its act is carried out, so an act that cannot be logged does not happen.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

use anyhow::Context;
use refrain_service_kit::clock;
use serde::Serialize;

use super::file::expiry_text;

/// A line about an act.
#[derive(Serialize)]
struct Line<'a, A: Serialize> {
    /// The time, as in RFC 3339.
    at: String,
    #[serde(flatten)]
    act: &'a A,
}

/// Appends a line, durably. It names tenants and the public ids of keys, and never a key.
///
/// # Errors
/// The file cannot be written.
pub fn append(path: &Path, act: &impl Serialize) -> anyhow::Result<()> {
    let name = || format!("the audit log, {}, cannot be written", path.display());
    let at = expiry_text(clock::unix_s().cast_signed())?;
    let mut line = serde_json::to_string(&Line { at, act })?;
    line.push('\n');
    let mut log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(name)?;
    // One write, so that lines of several processes do not mix.
    log.write_all(line.as_bytes()).with_context(name)?;
    log.sync_all().with_context(name)
}
