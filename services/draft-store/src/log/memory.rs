//! Records in memory: the newest part of the log in use, a journal that is only inspected, and in tests a disk that
//! can be told to refuse.

use std::collections::BTreeMap;
use std::ops::Bound;
#[cfg(test)]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::RwLock;
#[cfg(test)]
use parking_lot::RwLockWriteGuard;

use crate::log::{Batch, LogError, RecordLog};

/// An ordered map behind a lock.
#[derive(Default)]
pub(crate) struct MemoryLog {
    records: RwLock<BTreeMap<Vec<u8>, Vec<u8>>>,
    #[cfg(test)]
    pub(crate) refuses: AtomicBool,
    #[cfg(test)]
    pub(crate) commits: AtomicU64,
}

impl MemoryLog {
    /// All records, to be looked at or changed.
    #[cfg(test)]
    pub(crate) fn records(&self) -> RwLockWriteGuard<'_, BTreeMap<Vec<u8>, Vec<u8>>> {
        self.records.write()
    }

    /// Whether there is no record at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.records.read().is_empty()
    }

    /// Applies writes.
    pub(crate) fn apply<'a>(
        &self,
        writes: impl Iterator<Item = (&'a Vec<u8>, Option<&'a Vec<u8>>)>,
    ) {
        let mut records = self.records.write();
        for (key, value) in writes {
            match value {
                Some(value) => records.insert(key.clone(), value.clone()),
                None => records.remove(key),
            };
        }
    }
}

impl RecordLog for MemoryLog {
    fn commit(&self, batch: &Batch) -> Result<(), LogError> {
        #[cfg(test)]
        if !batch.is_empty() {
            if self.refuses.load(Ordering::Relaxed) {
                return Err(LogError::Refused("the test refuses writes".into()));
            }
            self.commits.fetch_add(1, Ordering::Relaxed);
        }
        self.apply(batch.writes());
        Ok(())
    }

    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, LogError> {
        Ok(self.records.read().get(key).cloned())
    }

    fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        visit: &mut dyn FnMut(&[u8], &[u8]) -> bool,
    ) -> Result<(), LogError> {
        if from >= to {
            // A range that ends before it begins is a panic of the map.
            return Ok(());
        }
        let bounds = (Bound::Included(from), Bound::Excluded(to));
        let records = self.records.read();
        for (key, value) in records.range::<[u8], _>(bounds) {
            if !visit(key, value) {
                break;
            }
        }
        Ok(())
    }

    fn disk_bytes(&self) -> u64 {
        let records = self.records.read();
        records
            .iter()
            .map(|(key, value)| (key.len() + value.len()) as u64)
            .sum()
    }

    fn blob_files(&self) -> u64 {
        0
    }
}
