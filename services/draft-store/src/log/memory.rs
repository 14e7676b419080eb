//! Records in memory: a journal that is read without an index, and in tests a disk that can be told to refuse.

#[cfg(test)]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use std::collections::BTreeMap;

use parking_lot::{Mutex, MutexGuard};

use crate::log::{Batch, LogError, RecordLog};

/// An ordered map behind a lock.
#[derive(Default)]
pub(crate) struct MemoryLog {
    records: Mutex<BTreeMap<Vec<u8>, Vec<u8>>>,
    #[cfg(test)]
    pub(crate) refuses: AtomicBool,
    #[cfg(test)]
    pub(crate) commits: AtomicU64,
}

impl MemoryLog {
    pub(crate) fn records(&self) -> MutexGuard<'_, BTreeMap<Vec<u8>, Vec<u8>>> {
        self.records.lock()
    }

    /// Whether there is no record at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.records().is_empty()
    }
}

impl RecordLog for MemoryLog {
    fn write(&self, batch: &Batch) -> Result<(), LogError> {
        #[cfg(test)]
        {
            if self.refuses.load(Ordering::Relaxed) {
                return Err(LogError::Refused("the test refuses writes".into()));
            }
            self.commits.fetch_add(1, Ordering::Relaxed);
        }
        let mut records = self.records();
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
        Ok(self.records().get(key).cloned())
    }

    fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), LogError> {
        let records = self.records();
        for (key, value) in records.range(from.to_vec()..to.to_vec()) {
            if !visit(key, value) {
                break;
            }
        }
        Ok(())
    }

    fn disk_bytes(&self) -> u64 {
        self.records()
            .iter()
            .map(|(key, value)| (key.len() + value.len()) as u64)
            .sum()
    }

    fn blob_files(&self) -> u64 {
        0
    }
}
