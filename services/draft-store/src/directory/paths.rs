//! The logs of a data directory: their paths, their list, and their removal.

use std::path::{Path, PathBuf};

use crate::log::{LogError, refused, sync_directory};

/// The directory of the log with a number.
pub(crate) fn log_path(dir: &Path, number: u64) -> PathBuf {
    match number {
        0 => dir.join("log"),
        _ => dir.join(format!("log-{number}")),
    }
}

/// The numbers of all logs, in order.
pub(crate) fn log_numbers(dir: &Path) -> Result<Vec<u64>, LogError> {
    let failed = |error: std::io::Error| refused("list", dir, &error);
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let name = name.to_string_lossy();
        if name == "log" {
            numbers.push(0);
        } else if let Some(number) = name.strip_prefix("log-").and_then(|text| text.parse().ok()) {
            numbers.push(number);
        }
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Bytes of all files under a directory.
pub(crate) fn disk_bytes(dir: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(dir) else {
        return 0;
    };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => disk_bytes(&entry.path()),
            Ok(metadata) => metadata.len(),
            // Deleted since it was listed.
            Err(_) => 0,
        })
        .sum()
}

/// Deletes every log except the one in use: leftovers of failed rewrites.
pub(crate) fn clear_leftovers(dir: &Path, counts: u64) -> Result<(), LogError> {
    for number in log_numbers(dir)? {
        if number != counts {
            delete_log(dir, &log_path(dir, number))?;
        }
    }
    Ok(())
}

/// Deletes a log.
pub(crate) fn delete_log(dir: &Path, path: &Path) -> Result<(), LogError> {
    if !path.exists() {
        return Ok(());
    }
    std::fs::remove_dir_all(path).map_err(|error| refused("delete", path, &error))?;
    sync_directory(dir).map_err(|error| refused("sync", dir, &error))
}
