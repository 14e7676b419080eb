//! Where records are kept: an ordered map with atomic, durable batches.
//!
//! The trait is the place to put another database, should sled fail us, and where tests put a disk that
//! refuses. `log/sled.rs` is the one in use.

pub(crate) mod sled;

use std::collections::BTreeMap;

/// Why the log could not do it.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum LogError {
    /// The disk or the file system refused: full, no permission, in use by another process. What is stored
    /// may be sound.
    #[error("{0}")]
    Refused(String),
    /// What is stored is not readable as a whole.
    #[error("{0}")]
    Corrupt(String),
}

/// Writes that become durable together or not at all. The last write to a key counts.
#[derive(Default)]
pub(crate) struct Batch {
    writes: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
}

impl Batch {
    pub(crate) fn put(&mut self, key: Vec<u8>, value: Vec<u8>) {
        self.writes.insert(key, Some(value));
    }

    pub(crate) fn remove(&mut self, key: Vec<u8>) {
        self.writes.insert(key, None);
    }

    /// Takes back what was to happen to a key.
    pub(crate) fn forget(&mut self, key: &[u8]) {
        self.writes.remove(key);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.writes.is_empty()
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
    /// Writes a batch, whole or not at all. It is durable after the next [`RecordLog::sync`].
    fn write(&self, batch: &Batch) -> Result<(), LogError>;

    /// Makes durable what was written: it survives a crash of the process and a loss of power.
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

    /// Visits the records of `from..to` in order until `visit` says `false`.
    fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), LogError>;

    /// Bytes it takes on disk.
    fn disk_bytes(&self) -> u64;

    /// Files in which it keeps values that it does not make durable: an alarm unless 0.
    fn blob_files(&self) -> u64;
}

#[cfg(test)]
pub(crate) mod memory {
    //! A log in memory whose disk can be told to refuse.

    use std::collections::BTreeMap;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::{Batch, LogError, RecordLog};

    #[derive(Default)]
    pub(crate) struct MemoryLog {
        pub(crate) records: Mutex<BTreeMap<Vec<u8>, Vec<u8>>>,
        pub(crate) refuses: AtomicBool,
        pub(crate) commits: AtomicU64,
    }

    impl RecordLog for MemoryLog {
        fn write(&self, batch: &Batch) -> Result<(), LogError> {
            if self.refuses.load(Ordering::Relaxed) {
                return Err(LogError::Refused("told to".into()));
            }
            self.commits.fetch_add(1, Ordering::Relaxed);
            let mut records = self.records.lock().unwrap();
            for (key, value) in batch.writes() {
                match value {
                    Some(value) => records.insert(key.clone(), value.clone()),
                    None => records.remove(key),
                };
            }
            Ok(())
        }

        fn sync(&self) -> Result<(), LogError> {
            Ok(())
        }

        fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, LogError> {
            Ok(self.records.lock().unwrap().get(key).cloned())
        }

        fn scan(
            &self,
            from: &[u8],
            to: &[u8],
            visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
        ) -> Result<(), LogError> {
            let records = self.records.lock().unwrap();
            for (key, value) in records.range(from.to_vec()..to.to_vec()) {
                if !visit(key, value) {
                    break;
                }
            }
            Ok(())
        }

        fn disk_bytes(&self) -> u64 {
            let records = self.records.lock().unwrap();
            records
                .iter()
                .map(|(key, value)| (key.len() + value.len()) as u64)
                .sum()
        }

        fn blob_files(&self) -> u64 {
            0
        }
    }
}
