//! The lock that keeps other processes out of a data directory.

use std::fs::{File, TryLockError};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::log::{LogError, refused, sync_directory};

/// Name of the locked file.
const LOCK: &str = "lock";

/// How long the lock is waited for. A store that ends gives it back, but a child that its process has just started
/// holds it as well, until the child executes its program. The system has no wait for a lock with an end.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(20);

/// Keeps other processes away. sled's own lock is not enough: it covers one log, and rewrites change which log is in
/// use.
pub(crate) struct DirectoryLock {
    file: File,
    path: PathBuf,
}

impl DirectoryLock {
    /// Creates the directory if needed, readable for its owner only, and locks it.
    pub(crate) fn acquire(dir: &Path) -> Result<Self, LogError> {
        std::fs::create_dir_all(dir).map_err(|error| refused("create", dir, &error))?;
        restrict(dir)?;
        if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            sync_directory(parent).map_err(|error| refused("sync", parent, &error))?;
        }
        let path = dir.join(LOCK);
        let file = File::create(&path).map_err(|error| refused("create", &path, &error))?;
        Self::lock(file, path)
    }

    /// Locks a directory that is only read, and may be read-only. `None` if no process ever locked it.
    pub(crate) fn acquire_existing(dir: &Path) -> Result<Option<Self>, LogError> {
        let path = dir.join(LOCK);
        match File::open(&path) {
            Ok(file) => Self::lock(file, path).map(Some),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(refused("open", &path, &error)),
        }
    }

    fn lock(file: File, path: PathBuf) -> Result<Self, LogError> {
        let began = Instant::now();
        while file.try_lock().is_err() {
            if began.elapsed() >= PATIENCE {
                return Err(LogError::Refused(format!(
                    "{} is locked: another process uses this data directory; stop it first",
                    path.display()
                )));
            }
            thread::sleep(PAUSE);
        }
        Ok(DirectoryLock { file, path })
    }

    /// Whether the directory is still the one that was locked. A directory that was removed under a running store
    /// must not be created again: its data would seem never to have existed.
    pub(crate) fn check(&self) -> Result<(), LogError> {
        let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
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

/// Whether a process serves the store in `dir` now. A store that starts meanwhile waits for the moment that this
/// takes.
///
/// # Errors
/// The directory may not be read, or its file system has no locks.
pub fn is_in_use(dir: &Path) -> std::io::Result<bool> {
    let file = match File::open(dir.join(LOCK)) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    match file.try_lock_shared() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Makes the directory private to its owner, since outputs of models are nobody else's to read.
fn restrict(dir: &Path) -> Result<(), LogError> {
    let failed = |error: std::io::Error| refused("restrict", dir, &error);
    let mode = std::fs::metadata(dir).map_err(failed)?.permissions().mode();
    if mode & 0o077 == 0 {
        return Ok(());
    }
    match std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode & 0o700)) {
        Ok(()) => Ok(()),
        // A mounted volume may belong to another user, with a group that this process is in.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            tracing::warn!(%error, "data_dir is readable for other users, and its mode cannot be changed");
            Ok(())
        }
        Err(error) => Err(failed(error)),
    }
}
