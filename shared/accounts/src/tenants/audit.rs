//! The audit log: lines of JSON for administrative acts, only ever appended.
//!
//! A line is on disk before its act is carried out, so an act that cannot be logged does not happen.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
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

/// Appends a line, durably. A file that is new may be read by its owner only. A line names tenants and the public ids
/// of keys, and never a key.
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
        .mode(0o600)
        .open(path)
        .with_context(name)?;
    // One write, so that lines of several processes do not mix.
    log.write_all(line.as_bytes()).with_context(name)?;
    log.sync_all().with_context(name)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn others_cannot_read_a_new_log_and_one_that_is_there_keeps_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        append(&path, &serde_json::json!({"act": "a"})).unwrap();
        assert_eq!(mode(), 0o600);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        append(&path, &serde_json::json!({"act": "b"})).unwrap();
        assert_eq!(mode(), 0o640);
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 2);
    }
}
