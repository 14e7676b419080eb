//! The lock that keeps other processes out of a data directory.

use std::fs::File;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use crate::log::{LogError, refused, sync_directory};

/// The file that is held.
const LOCK: &str = "lock";

/// Keeps other processes away. sled's own lock is not enough: it is on one log, and which one counts changes.
pub(crate) struct DirectoryLock {
    file: File,
    path: PathBuf,
}

impl DirectoryLock {
    /// Creates the directory if need be, for its owner alone, and takes it.
    pub(crate) fn take(dir: &Path) -> Result<Self, LogError> {
        std::fs::create_dir_all(dir).map_err(|error| refused("create", dir, &error))?;
        restrict(dir)?;
        if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            sync_directory(parent).map_err(|error| refused("sync", parent, &error))?;
        }
        let path = dir.join(LOCK);
        let file = File::create(&path).map_err(|error| refused("create", &path, &error))?;
        Self::lock(file, path)
    }

    /// Takes a directory that is only looked at, and may be read-only. `None`: nobody ever held it.
    pub(crate) fn look(dir: &Path) -> Result<Option<Self>, LogError> {
        let path = dir.join(LOCK);
        match File::open(&path) {
            Ok(file) => Self::lock(file, path).map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(refused("open", &path, &error)),
        }
    }

    fn lock(file: File, path: PathBuf) -> Result<Self, LogError> {
        file.try_lock().map_err(|_| {
            LogError::Refused(format!(
                "{} is locked: another process uses this directory",
                path.display()
            ))
        })?;
        Ok(DirectoryLock { file, path })
    }

    /// Whether the directory is still the one that was taken. One that was removed under a running store is not to be
    /// created anew: what was stored in it would seem never to have been there.
    pub(crate) fn check(&self) -> Result<(), LogError> {
        let identity = |told: std::fs::Metadata| (told.dev(), told.ino());
        let held = self.file.metadata().map(identity).ok();
        let there = std::fs::metadata(&self.path).map(identity).ok();
        if held.is_some() && held == there {
            return Ok(());
        }
        Err(LogError::Refused(format!(
            "{} was removed or replaced while the store ran; put the directory back, or start the store again",
            self.path.display()
        )))
    }
}

/// Outputs of models are nobody else's to read.
fn restrict(dir: &Path) -> Result<(), LogError> {
    let failed = |error: std::io::Error| refused("restrict", dir, &error);
    let mode = std::fs::metadata(dir).map_err(failed)?.permissions().mode();
    if mode & 0o077 == 0 {
        return Ok(());
    }
    match std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode & 0o700)) {
        Ok(()) => Ok(()),
        // A mounted volume may belong to somebody else, with a group that this process is in.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            tracing::warn!(%error, "data_dir can be read by others, and its mode cannot be changed");
            Ok(())
        }
        Err(error) => Err(failed(error)),
    }
}
