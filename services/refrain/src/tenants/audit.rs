//! The audit log: one line of JSON for each administrative act, only ever appended.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;

use anyhow::Context;
use refrain_gateway::tenants::file::expiry_text;
use refrain_service_kit::clock;
use serde::Serialize;

/// An act.
#[derive(Serialize)]
struct Act<'a> {
    /// The time, as in RFC 3339.
    at: String,
    /// The user of the system who ran the command, as the system says.
    uid: u32,
    /// The name of that user, or of the one who used sudo, as the environment says.
    by: Option<String>,
    act: &'a str,
}

/// Appends a line, durably. It names tenants and the public ids of keys, and never a key.
pub(super) fn append(path: &Path, act: &str) -> anyhow::Result<()> {
    let name = || format!("the audit log, {}, cannot be written", path.display());
    // With sudo the user is the one who asked.
    let mut by = ["SUDO_USER", "USER", "LOGNAME"].into_iter();
    let by = by.find_map(|variable| std::env::var(variable).ok());
    let line = serde_json::to_string(&Act {
        at: expiry_text(clock::unix_s().cast_signed())?,
        uid: rustix::process::getuid().as_raw(),
        by,
        act,
    })?;
    let mut log = OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .with_context(name)?;
    writeln!(log, "{line}").with_context(name)?;
    log.sync_all().with_context(name)
}
