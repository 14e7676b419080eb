//! Logs and segments that were not believed: moved aside, and read as far as they can be.

use std::path::{Path, PathBuf};

use super::refused;
use crate::codec;
use crate::log::sled::{SledLog, sync_directory};
use crate::log::{Batch, LogError, RecordLog};
use crate::record::Kind;

/// What the names of such directories begin with.
const PREFIX: &str = "quarantine-";
/// Records copied in one commit.
const COPY_BATCH: usize = 512;

/// A directory that is not there yet.
fn free_name(dir: &Path, now_ms: u64) -> PathBuf {
    let mut to = dir.join(format!("{PREFIX}{now_ms}"));
    let mut suffix = 1;
    while to.exists() {
        to = dir.join(format!("{PREFIX}{now_ms}-{suffix}"));
        suffix += 1;
    }
    to
}

/// Moves files aside.
pub(super) fn quarantine_files(
    dir: &Path,
    files: &[PathBuf],
    now_ms: u64,
) -> Result<PathBuf, LogError> {
    let to = free_name(dir, now_ms);
    std::fs::create_dir(&to).map_err(|error| refused("create", &to, &error))?;
    for from in files {
        if let Some(name) = from.file_name() {
            std::fs::rename(from, to.join(name)).map_err(|error| refused("move", from, &error))?;
        }
    }
    sync_directory(&to).map_err(|error| refused("sync", &to, &error))?;
    sync_directory(dir).map_err(|error| refused("sync", dir, &error))?;
    Ok(to)
}

/// Moves a log aside.
pub(super) fn quarantine(dir: &Path, from: &Path, now_ms: u64) -> Result<PathBuf, LogError> {
    let to = free_name(dir, now_ms);
    std::fs::rename(from, &to).map_err(|error| refused("move", from, &error))?;
    sync_directory(dir).map_err(|error| refused("sync", dir, &error))?;
    Ok(to)
}

/// Copies every record of documents, and of what drafts are worth, that still decodes. Answers how many; damage ends the copy, not the start.
pub(super) fn salvage(from: &Path, to: &SledLog, cache_bytes: u64) -> Result<u64, LogError> {
    let old = match SledLog::open(from, cache_bytes) {
        Ok(old) => old,
        Err(error) => {
            tracing::warn!(%error, "quarantined log does not open");
            return Ok(0);
        }
    };
    let mut copied = 0;
    // Text before the states that count on it: a copy that breaks off leaves no state without text.
    for kind in [
        Kind::Erasure,
        Kind::Erased,
        Kind::Namespace,
        Kind::Segment,
        Kind::Marks,
        Kind::Piece,
        Kind::Head,
        Kind::State,
        Kind::Chances,
    ] {
        match copy(&old, to, kind) {
            Ok(count) => copied += count,
            Err(CopyError::From(error)) => {
                tracing::warn!(%error, "quarantined log breaks off");
            }
            Err(CopyError::To(error)) => return Err(error),
        }
    }
    Ok(copied)
}

enum CopyError {
    From(LogError),
    To(LogError),
}

/// Copies the records of one kind whose checksums hold.
fn copy(from: &SledLog, to: &SledLog, kind: Kind) -> Result<u64, CopyError> {
    let (mut at, end) = kind.range();
    let mut copied = 0;
    loop {
        let mut batch = Batch::default();
        let mut last = None;
        let scanned = from.scan(&at, &end, &mut |key, value| {
            last = Some(key.to_vec());
            if codec::check(key, value).is_ok() {
                batch.put(key.to_vec(), value.to_vec());
            }
            batch.len() < COPY_BATCH
        });
        to.commit(&batch).map_err(CopyError::To)?;
        copied += batch.len() as u64;
        scanned.map_err(CopyError::From)?;
        match last {
            // The least key above the last one read.
            Some(mut key) if batch.len() == COPY_BATCH => {
                key.push(0);
                at = key;
            }
            _ => return Ok(copied),
        }
    }
}

/// Deletes all of them. Answers how many there were.
///
/// What could be read was salvaged when each was made; what is left in them cannot be told apart by tenant.
pub(crate) fn delete_all(dir: &Path) -> Result<u64, LogError> {
    let failed = |error: std::io::Error| refused("clear", dir, &error);
    let mut deleted = 0;
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_name().to_string_lossy().starts_with(PREFIX) {
            std::fs::remove_dir_all(entry.path()).map_err(failed)?;
            deleted += 1;
        }
    }
    sync_directory(dir).map_err(failed)?;
    Ok(deleted)
}
