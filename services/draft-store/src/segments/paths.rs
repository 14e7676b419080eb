//! The segment files on disk: their paths, their list, and their removal.

use std::path::{Path, PathBuf};

use crate::log::{LogError, refused, sync_directory};
use crate::record::SegmentId;

/// The directory of all segment files.
pub(crate) fn directory(dir: &Path) -> PathBuf {
    dir.join("segments")
}

/// The path of a segment's file.
pub(crate) fn path(dir: &Path, segment: SegmentId) -> PathBuf {
    directory(dir).join(format!("{segment:016x}.segment"))
}

/// The files in the directory: numbers of segments, and paths of all other files.
pub(crate) fn list(dir: &Path) -> Result<(Vec<SegmentId>, Vec<PathBuf>), LogError> {
    let (mut segments, mut others) = (Vec::new(), Vec::new());
    let directory = directory(dir);
    let entries = match std::fs::read_dir(&directory) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok((segments, others));
        }
        entries => entries.map_err(|error| refused("list", &directory, &error))?,
    };
    for entry in entries {
        let entry = entry.map_err(|error| refused("list", &directory, &error))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let number = name.strip_suffix(".segment");
        match number.and_then(|digits| SegmentId::from_str_radix(digits, 16).ok()) {
            Some(segment) if entry.path() == path(dir, segment) => segments.push(segment),
            _ => others.push(entry.path()),
        }
    }
    segments.sort_unstable();
    Ok((segments, others))
}

/// Deletes the files of segments that are no longer in use.
pub(crate) fn delete(dir: &Path, segments: &[SegmentId]) -> Result<(), LogError> {
    let paths: Vec<PathBuf> = segments.iter().map(|segment| path(dir, *segment)).collect();
    delete_files(dir, &paths)
}

/// Deletes every file except those of wanted segments.
pub(crate) fn clear_orphans(
    dir: &Path,
    is_wanted: impl Fn(SegmentId) -> bool,
) -> Result<(), LogError> {
    let (segments, others) = list(dir)?;
    let orphans: Vec<PathBuf> = segments
        .into_iter()
        .filter(|segment| !is_wanted(*segment))
        .map(|segment| path(dir, segment))
        .chain(others)
        .collect();
    delete_files(dir, &orphans)
}

/// Deletes files durably.
pub(crate) fn delete_files(dir: &Path, paths: &[PathBuf]) -> Result<(), LogError> {
    for path in paths {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(refused("delete", path, &error));
            }
            _ => {}
        }
    }
    if paths.is_empty() {
        return Ok(());
    }
    let directory = directory(dir);
    sync_directory(&directory).map_err(|error| refused("sync", &directory, &error))
}
