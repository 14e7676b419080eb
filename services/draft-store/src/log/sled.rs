//! The catalogue of the log, in sled 0.34.7.
//!
//! sled's files are never the only copy of anything; see `journaled.rs`. Values stay under 4 KiB, since larger ones
//! go to blob files. After any I/O error a sled handle is dead until it is opened again.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use crate::log::caught_panic::catch;
use crate::log::journal::JournalPosition;
use crate::log::{LogError, refused};

/// An open sled directory.
pub(crate) struct SledCatalog {
    /// `None` only while it is dropped.
    db: Option<sled::Db>,
    path: PathBuf,
}

/// Attempts to get sled's lock. A dropped handle of this process gives it back a little later, when sled's threads
/// end.
const LOCK_ATTEMPTS: u32 = 100;
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// How often sled writes its buffers. Nobody waits for it: a crash in between costs a longer replay.
const FLUSH_INTERVAL_MS: u64 = 5_000;

/// How long a last flush may take before another one is begun beside it. Most take some milliseconds.
const FLUSH_PATIENCE: Duration = Duration::from_secs(1);

/// Key of the [`JournalPosition`]. No record's key begins with this byte.
const POSITION_KEY: [u8; 1] = [0];

/// sled takes a shorter configuration file for damage.
const CONF_BYTES_MIN: u64 = 9;

/// Prefix of the names of sled's snapshots.
const SNAPSHOT: &str = "snap.";

impl SledCatalog {
    /// Opens or creates the directory.
    ///
    /// sled panics on some damaged files. A panic is returned as [`LogError::Corrupt`].
    pub(crate) fn open(path: &Path, cache_bytes: u64) -> Result<Self, LogError> {
        std::fs::create_dir_all(path).map_err(|error| refused("create", path, &error))?;
        clear_unfinished(path)?;
        let mut attempt = 0;
        let opened = loop {
            let config = sled::Config::new()
                .path(path)
                .cache_capacity(cache_bytes)
                .flush_every_ms(Some(FLUSH_INTERVAL_MS));
            match guarded(|| config.open()) {
                Err(LogError::Refused(why)) if why.contains("lock") && attempt < LOCK_ATTEMPTS => {
                    attempt += 1;
                    thread::sleep(LOCK_INTERVAL);
                }
                other => break other?,
            }
        };
        Ok(SledCatalog {
            db: Some(opened),
            path: path.to_owned(),
        })
    }

    fn db(&self) -> &sled::Db {
        match &self.db {
            Some(db) => db,
            None => unreachable!("only a drop takes it out"),
        }
    }

    /// Deletes sled's files, and leaves what is beside them: earlier versions had the journal there.
    pub(crate) fn delete(path: &Path) -> Result<(), LogError> {
        for entry in entries(path)? {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let outcome = match &*name {
                "blobs" => std::fs::remove_dir_all(entry.path()),
                "db" | "conf" => std::fs::remove_file(entry.path()),
                _ if name.starts_with(SNAPSHOT) => std::fs::remove_file(entry.path()),
                _ => Ok(()),
            };
            outcome.map_err(|error| refused("delete", &entry.path(), &error))?;
        }
        Ok(())
    }

    /// Opens a directory without its snapshots, which sled does not need, after it did not open with them.
    pub(crate) fn open_without_snapshots(path: &Path, cache_bytes: u64) -> Result<Self, LogError> {
        for entry in entries(path)? {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(SNAPSHOT) {
                let aside = path.join(format!("aside-{name}"));
                std::fs::rename(entry.path(), &aside)
                    .map_err(|error| refused("move", &entry.path(), &error))?;
            }
        }
        SledCatalog::open(path, cache_bytes)
    }

    /// How far the journal was applied. `None` if that was never recorded.
    pub(crate) fn position(&self) -> Result<Option<JournalPosition>, LogError> {
        Ok(self
            .get(&POSITION_KEY)?
            .and_then(|bytes| JournalPosition::from_bytes(&bytes)))
    }

    /// Applies writes atomically. The journal has them up to `position`.
    pub(crate) fn write<'a>(
        &self,
        writes: impl Iterator<Item = (&'a Vec<u8>, Option<&'a Vec<u8>>)>,
        position: JournalPosition,
    ) -> Result<(), LogError> {
        let mut batch = sled::Batch::default();
        for (key, value) in writes {
            match value {
                Some(value) => batch.insert(key.as_slice(), value.as_slice()),
                None => batch.remove(key.as_slice()),
            }
        }
        batch.insert(&POSITION_KEY, &position.to_bytes());
        guarded(|| self.db().apply_batch(batch))
    }

    /// One record.
    pub(crate) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, LogError> {
        guarded(|| self.db().get(key)).map(|value| value.map(|value| value.to_vec()))
    }

    /// Visits the records of `from..to` in order until `visit` says `false`.
    pub(crate) fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), LogError> {
        let mut records = guarded(|| Ok(self.db().range(from..to)))?;
        // A panic of `visit` is a fault of ours and no damage, so it runs outside.
        while let Some((key, value)) = guarded(|| records.next().transpose())? {
            if *key != POSITION_KEY && !visit(&key, &value) {
                break;
            }
        }
        Ok(())
    }

    /// Bytes on disk.
    pub(crate) fn disk_bytes(&self) -> u64 {
        guarded(|| self.db().size_on_disk()).unwrap_or(0)
    }

    /// Number of files with values that are too large for sled's pages: an alarm unless 0.
    pub(crate) fn blob_files(&self) -> u64 {
        std::fs::read_dir(self.path.join("blobs")).map_or(0, |files| files.count() as u64)
    }
}

/// sled flushes when its last handle is dropped, and a write that fails on one of its threads does not always wake
/// the flush that waits for it. Every flush that begins after the failure wakes all that wait.
///
/// It also panics there if its file cannot be synced. While a rewrite goes on there are two of them, and a second
/// panic would end the process.
impl Drop for SledCatalog {
    fn drop(&mut self) {
        let Some(db) = self.db.take() else { return };
        flush_with_wakers(FLUSH_PATIENCE, || {
            // As sled does it: its own threads may write meanwhile.
            while guarded(|| db.flush()).is_ok_and(|bytes| bytes > 0) {}
        });
        let closed = guarded(|| {
            drop(db);
            Ok(())
        });
        if let Err(error) = closed {
            tracing::warn!(%error, "draft store catalogue not closed cleanly");
        }
    }
}

/// Flushes, and begins another flush each time that `patience` has passed, which doubles then.
fn flush_with_wakers(patience: Duration, flush: impl Fn() + Sync) {
    let flush = &flush;
    thread::scope(|scope| {
        let (done, is_done) = channel::<()>();
        let wake = move || {
            let mut patience = patience;
            while is_done.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                // Without a thread the next one may wake them.
                let _ = thread::Builder::new().spawn_scoped(scope, flush);
                patience *= 2;
            }
        };
        let _ = thread::Builder::new().spawn_scoped(scope, wake);
        flush();
        drop(done);
    });
}

fn entries(path: &Path) -> Result<Vec<std::fs::DirEntry>, LogError> {
    std::fs::read_dir(path)
        .and_then(Iterator::collect)
        .map_err(|error| refused("list", path, &error))
}

/// Removes the leftovers of an interrupted open.
///
/// sled takes an unfinished snapshot for its newest one, and an empty configuration for damage. Both stay behind when
/// a disk is full or the power fails.
fn clear_unfinished(path: &Path) -> Result<(), LogError> {
    for entry in entries(path)? {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_unfinished = match &*name {
            "conf" => entry
                .metadata()
                .is_ok_and(|metadata| metadata.len() < CONF_BYTES_MIN),
            _ => name.starts_with(SNAPSHOT) && name.ends_with(".generating"),
        };
        if is_unfinished {
            std::fs::remove_file(entry.path())
                .map_err(|error| refused("delete", &entry.path(), &error))?;
        }
    }
    Ok(())
}

/// Runs a call of sled, and turns its errors and panics into [`LogError`].
fn guarded<T>(call: impl FnOnce() -> sled::Result<T>) -> Result<T, LogError> {
    // A log whose sled panicked is suspect, and the writer drops it at its next tick.
    match catch(call) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(classify(&error)),
        Err(why) => Err(LogError::Corrupt(format!("sled gave its files up: {why}"))),
    }
}

/// EIO, EBADMSG and EUCLEAN: a part of the disk cannot be read. The index is rebuilt elsewhere.
const MEDIA_ERRORS: [i32; 3] = [5, 74, 117];

/// Classifies an error of sled. A full disk or a held lock must never be taken for damage: the stored data would be
/// thrown away.
fn classify(error: &sled::Error) -> LogError {
    use std::io::ErrorKind::{InvalidData, InvalidInput, Other, UnexpectedEof};
    match error {
        sled::Error::Io(io)
            if io
                .raw_os_error()
                .is_some_and(|code| MEDIA_ERRORS.contains(&code)) =>
        {
            LogError::Corrupt(error.to_string())
        }
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

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
    use std::sync::atomic::{AtomicUsize, Ordering};

    use parking_lot::{Condvar, Mutex};

    use super::*;
    use crate::log::Batch;

    #[test]
    fn a_panic_of_a_visitor_is_not_taken_for_damage() {
        let dir = tempfile::tempdir().unwrap();
        let log = SledCatalog::open(dir.path(), 1 << 20).unwrap();
        let mut batch = Batch::default();
        batch.put(b"d".to_vec(), vec![7]);
        let position = JournalPosition { journal: 1, end: 1 };
        log.write(batch.writes(), position).unwrap();
        let scan = || log.scan(&[], &[u8::MAX], &mut |_, _| resume_unwind(Box::new("boom")));
        let panicked = catch_unwind(AssertUnwindSafe(scan));
        assert_eq!(panicked.unwrap_err().downcast_ref::<&str>(), Some(&"boom"));
        assert_eq!(log.get(b"d").unwrap(), Some(vec![7]));
    }

    #[test]
    fn a_flush_that_nobody_wakes_is_woken_by_a_later_one() {
        let (failed, woken, flushes) = (Mutex::new(false), Condvar::new(), AtomicUsize::new(0));
        flush_with_wakers(Duration::from_millis(1), || {
            let mut has_failed = failed.lock();
            // The first two begin before the failure, which wakes nobody.
            if flushes.fetch_add(1, Ordering::Relaxed) < 2 {
                woken.wait(&mut has_failed);
            }
            *has_failed = true;
            woken.notify_all();
        });
        assert!(flushes.into_inner() >= 3);
    }

    #[test]
    fn a_flush_that_ends_is_made_once() {
        let flushes = AtomicUsize::new(0);
        flush_with_wakers(Duration::from_secs(3_600), || {
            flushes.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(flushes.into_inner(), 1);
    }
}
