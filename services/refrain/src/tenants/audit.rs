//! The lines that commands append to the audit log beside the file.

use std::path::Path;

use refrain_accounts::tenants::audit;
use serde::Serialize;

/// An act.
#[derive(Serialize)]
struct Act<'a> {
    /// The user of the system who ran the command, as the system says.
    uid: u32,
    /// The name of that user, or of the one who used sudo, as the environment says.
    by: Option<String>,
    act: &'a str,
}

/// Appends a line, durably.
pub(super) fn append(path: &Path, act: &str) -> anyhow::Result<()> {
    // With sudo the user is the one who asked.
    let mut by = ["SUDO_USER", "USER", "LOGNAME"].into_iter();
    let by = by.find_map(|variable| std::env::var(variable).ok());
    let uid = rustix::process::getuid().as_raw();
    audit::append(path, &Act { uid, by, act })
}
