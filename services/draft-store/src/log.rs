//! The log: an ordered map of records with atomic, durable batches.
//!
//! [`journaled`] is the implementation in use: a journal, unsealed documents in memory, and a catalogue in sled. Read
//! it first, then [`journal`]. [`RecordLog`] is the interface, which tests implement with a disk that refuses.

mod caught_panic;
pub(crate) mod journal;
pub(crate) mod journaled;
pub(crate) mod memory;
pub(crate) mod sled;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use bincode::Encode;

use crate::codec;

/// Makes directory entries durable.
pub(crate) fn sync_directory(path: &Path) -> std::io::Result<()> {
    File::open(path)?.sync_all()
}

/// Why an operation on the log failed.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum LogError {
    /// The disk or the file system refused: it is full, lacks a permission, or another process uses it. The stored
    /// data may be sound.
    #[error("{0}")]
    Refused(String),
    /// The stored data cannot be read in full.
    #[error("{0}")]
    Corrupt(String),
}

/// The error of a refused call to the file system.
pub(crate) fn refused(what: &str, path: &Path, error: &std::io::Error) -> LogError {
    LogError::Refused(format!("cannot {what} {}: {error}", path.display()))
}

/// A random number.
pub(crate) fn random() -> Result<u64, LogError> {
    getrandom::u64()
        .map_err(|error| LogError::Refused(format!("the system gives no random numbers: {error}")))
}

/// Writes that become durable together or not at all. The last write to a key wins.
#[derive(Default)]
pub(crate) struct Batch {
    writes: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
}

impl Batch {
    pub(crate) fn put(&mut self, key: Vec<u8>, value: Vec<u8>) {
        self.writes.insert(key, Some(value));
    }

    /// Puts a record in its envelope. Returns the bytes of key and value.
    pub(crate) fn put_record<T: Encode>(&mut self, key: Vec<u8>, record: &T) -> u32 {
        let value = codec::seal(&key, record);
        let bytes = key.len() + value.len();
        self.put(key, value);
        bytes as u32
    }

    pub(crate) fn remove(&mut self, key: Vec<u8>) {
        self.writes.insert(key, None);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.writes.is_empty()
    }

    /// Adds later writes.
    pub(crate) fn merge(&mut self, later: Batch) {
        self.writes.extend(later.writes);
    }

    /// Bytes of all keys and values.
    pub(crate) fn bytes(&self) -> u64 {
        self.writes
            .iter()
            .map(|(key, value)| key.len() + value.as_ref().map_or(0, Vec::len))
            .sum::<usize>() as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.writes.len()
    }

    pub(crate) fn writes(&self) -> impl Iterator<Item = (&Vec<u8>, Option<&Vec<u8>>)> {
        self.writes.iter().map(|(key, value)| (key, value.as_ref()))
    }

    /// The write to a key, if there is one.
    pub(crate) fn write_to(&self, key: &[u8]) -> Option<Option<&Vec<u8>>> {
        self.writes.get(key).map(Option::as_ref)
    }

    /// The writes to the keys of `from..to`.
    pub(crate) fn writes_between(
        &self,
        from: &[u8],
        to: &[u8],
    ) -> impl Iterator<Item = (&Vec<u8>, Option<&Vec<u8>>)> {
        let range = self.writes.range(from.to_vec()..to.to_vec());
        range.map(|(key, value)| (key, value.as_ref()))
    }
}

/// The result of a rewrite of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RewriteReport {
    pub(crate) before_bytes: u64,
    pub(crate) after_bytes: u64,
    /// Bytes of the records written to the fresh files.
    pub(crate) written_bytes: u64,
}

/// The steps of a rewrite. Tests interrupt it at each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RewriteStep {
    /// The fresh files exist, and get every commit from now on.
    Created,
    /// Some records are copied.
    Copying,
    /// All records are copied, and durable.
    Copied,
    /// The fresh files are in use.
    Swapped,
    /// The earlier files are deleted.
    Deleted,
}

/// An ordered, durable map of records.
pub(crate) trait RecordLog: Send + Sync {
    /// Writes a batch atomically, and makes it durable before it returns.
    fn commit(&self, batch: &Batch) -> Result<(), LogError>;

    /// One record.
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, LogError>;

    /// Visits the records of `from..to` in order until `visit` returns `false`. `visit` must not use the log.
    fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), LogError>;

    /// Bytes on disk.
    fn disk_bytes(&self) -> u64;

    /// Number of files with values that are too large for the catalogue's pages: an alarm unless 0.
    fn blob_files(&self) -> u64;

    /// Copies what is alive into fresh files, which then replace the earlier ones. Commits go on meanwhile. It
    /// blocks, so it needs a thread of its own. The flag ends it early, and the function runs at each step.
    ///
    /// # Errors
    /// The disk refuses, a commit failed meanwhile, or the function fails. The log stays as it was then.
    fn rewrite(
        &self,
        _stop: &AtomicBool,
        _at: &dyn Fn(RewriteStep) -> Result<(), LogError>,
    ) -> Result<RewriteReport, LogError> {
        Err(LogError::Refused("this log has no files".into()))
    }

    /// Why the log must be opened again, although all that it acknowledged is durable.
    fn fault(&self) -> Option<LogError> {
        None
    }
}
