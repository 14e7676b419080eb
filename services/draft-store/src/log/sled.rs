//! The log in sled 0.34.7, used by the recipe that survived crash and power-loss tests.
//!
//! sled's `flush` ends in `sync_file_range`, which writes neither metadata nor the drive's cache, so each
//! commit adds an `fdatasync` of sled's file through a second descriptor (sled locks with `flock`, which a
//! second descriptor does not disturb). Values stay under 4 KiB, since larger ones go to blob files that sled
//! never syncs. After any I/O error a sled handle is dead until it is opened again.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Batch, LogError, RecordLog};

/// An open sled directory.
pub(crate) struct SledLog {
    db: sled::Db,
    file: File,
    path: PathBuf,
}

/// A dropped handle of this process gives its lock back a little later, when sled's threads let go of it.
const LOCK_ATTEMPTS: u32 = 100;
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// Makes directory entries durable.
pub(crate) fn sync_directory(path: &Path) -> std::io::Result<()> {
    File::open(path)?.sync_all()
}

impl SledLog {
    /// Opens or creates the directory, and makes its entries durable.
    ///
    /// sled panics on some damaged files; a panic is answered as [`LogError::Corrupt`].
    pub(crate) fn open(path: &Path, cache_bytes: u64) -> Result<Self, LogError> {
        let mut attempt = 0;
        let opened = loop {
            let config = sled::Config::new().path(path).cache_capacity(cache_bytes);
            match guarded(|| config.open()) {
                Err(LogError::Refused(why)) if why.contains("lock") && attempt < LOCK_ATTEMPTS => {
                    attempt += 1;
                    std::thread::sleep(LOCK_INTERVAL);
                }
                other => break other?,
            }
        };
        let refused = |error: std::io::Error| LogError::Refused(error.to_string());
        // Writing through it is never done; the permission is what fdatasync of some file systems asks for.
        let file = File::options()
            .read(true)
            .write(true)
            .open(path.join("db"))
            .map_err(refused)?;
        file.sync_all().map_err(refused)?;
        sync_directory(path).map_err(refused)?;
        if let Some(parent) = path.parent() {
            sync_directory(parent).map_err(refused)?;
        }
        Ok(SledLog {
            db: opened,
            file,
            path: path.to_owned(),
        })
    }

    /// Whether there is not a single record.
    pub(crate) fn is_empty(&self) -> Result<bool, LogError> {
        guarded(|| self.db.iter().next().transpose()).map(|first| first.is_none())
    }
}

/// Runs a call of sled, and turns its errors and its panics into ours.
fn guarded<T>(call: impl FnOnce() -> sled::Result<T>) -> Result<T, LogError> {
    // Nothing of a panicked sled is used again: its callers drop the handle.
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(classify(&error)),
        Err(_) => Err(LogError::Corrupt("sled panicked".into())),
    }
}

/// A full disk or a held lock must never be taken for damage: what is stored would be thrown away.
fn classify(error: &sled::Error) -> LogError {
    use std::io::ErrorKind::{InvalidData, InvalidInput, Other, UnexpectedEof};
    match error {
        sled::Error::Io(io)
            if !matches!(io.kind(), InvalidData | InvalidInput | UnexpectedEof)
                // sled wraps a held lock in an error of kind `Other` that names it.
                && (io.kind() != Other || io.to_string().contains("lock")) =>
        {
            LogError::Refused(error.to_string())
        }
        _ => LogError::Corrupt(error.to_string()),
    }
}

impl RecordLog for SledLog {
    fn write(&self, batch: &Batch) -> Result<(), LogError> {
        let mut writes = sled::Batch::default();
        for (key, value) in batch.writes() {
            match value {
                Some(value) => writes.insert(key.as_slice(), value.as_slice()),
                None => writes.remove(key.as_slice()),
            }
        }
        guarded(|| self.db.apply_batch(writes))
    }

    fn sync(&self) -> Result<(), LogError> {
        guarded(|| self.db.flush())?;
        self.file
            .sync_data()
            .map_err(|error| LogError::Refused(error.to_string()))
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, LogError> {
        guarded(|| self.db.get(key)).map(|value| value.map(|value| value.to_vec()))
    }

    fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), LogError> {
        guarded(|| {
            for record in self.db.range(from..to) {
                let (key, value) = record?;
                if !visit(&key, &value) {
                    break;
                }
            }
            Ok(())
        })
    }

    fn disk_bytes(&self) -> u64 {
        guarded(|| self.db.size_on_disk()).unwrap_or(0)
    }

    fn blob_files(&self) -> u64 {
        std::fs::read_dir(self.path.join("blobs"))
            .map(|files| files.count() as u64)
            .unwrap_or(0)
    }
}
