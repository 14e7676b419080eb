//! The log: an ordered map of records with atomic, durable batches.
//!
//! [`journaled`] is the implementation in use: a journal, and sled as its index. Read it first, then [`journal`].
//! [`RecordLog`] is the interface, which tests implement with a disk that refuses.

mod caught_panic;
pub(crate) mod journal;
pub(crate) mod journaled;
pub(crate) mod memory;
mod recent;
pub(crate) mod sled;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use bincode::Encode;

use crate::codec;
use crate::record::DocumentKey;

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
    /// A document's text cannot be read from the index. The journal may have it.
    #[error("document {} of namespace {} cannot be read from the index", .0.document, .0.namespace)]
    Unreadable(DocumentKey),
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

    /// Removes the pending write to a key.
    pub(crate) fn forget(&mut self, key: &[u8]) {
        self.writes.remove(key);
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

    /// All records between two keys, as they will be once this batch is committed to `log`.
    pub(crate) fn scan_over(
        &self,
        log: &dyn RecordLog,
        from: &[u8],
        to: &[u8],
    ) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, LogError> {
        let mut records = BTreeMap::new();
        log.scan(from, to, &mut |key, value| {
            records.insert(key.to_vec(), value.to_vec());
            true
        })?;
        for (key, value) in self.writes.range(from.to_vec()..to.to_vec()) {
            match value {
                Some(value) => records.insert(key.clone(), value.clone()),
                None => records.remove(key),
            };
        }
        Ok(records)
    }
}

/// An ordered, durable map of records.
pub(crate) trait RecordLog: Send + Sync {
    /// Writes a batch atomically. It is durable after the next [`RecordLog::sync`].
    fn write(&self, batch: &Batch) -> Result<(), LogError>;

    /// Makes durable what was written, so that it survives a crash of the process and a loss of power.
    fn sync(&self) -> Result<(), LogError>;

    /// Writes a batch, and makes it durable before it returns.
    fn commit(&self, batch: &Batch) -> Result<(), LogError> {
        if batch.is_empty() {
            return Ok(());
        }
        self.write(batch)?;
        self.sync()
    }

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

    /// Bytes of records that the index does not have yet, so that it will grow by about as much.
    fn unindexed_bytes(&self) -> u64 {
        0
    }

    /// Number of files with values that are too large for the index's pages: an alarm unless 0.
    fn blob_files(&self) -> u64;

    /// Whether a record that is missing or damaged here may come back when the log is opened with a rebuilt index.
    fn can_be_rebuilt(&self) -> bool {
        false
    }

    /// Notes that the log is about to be deleted, so that nothing is written to its index any more.
    fn retire(&self) {}

    /// Waits until there is memory for further writes. A write itself never waits for that, since its caller holds a
    /// lock. So whoever writes calls this first, and holds no lock that others wait for.
    ///
    /// # Errors
    /// There is no memory, and there will be none until the log is opened again.
    fn await_room(&self) -> Result<(), LogError> {
        Ok(())
    }

    /// Why the log should be opened again, although all that it acknowledged is durable. With `Corrupt` it misread
    /// something that it holds, so it should be repaired as well.
    fn fault(&self) -> Option<LogError> {
        None
    }
}
