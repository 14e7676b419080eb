//! The writes of a commit in the making, over the log that will get them.

use std::collections::BTreeMap;
use std::sync::Arc;

use bincode::Encode;

use crate::log::{Batch, LogError, RecordLog};

/// See the module.
pub(in crate::writer) struct PendingWrites {
    pub(in crate::writer) log: Arc<dyn RecordLog>,
    pub(in crate::writer) batch: Batch,
}

impl PendingWrites {
    pub(in crate::writer) fn new(log: Arc<dyn RecordLog>) -> Self {
        PendingWrites {
            log,
            batch: Batch::default(),
        }
    }

    /// Puts a record in its envelope. Returns the bytes of key and value.
    pub(in crate::writer) fn put<T: Encode>(&mut self, key: Vec<u8>, record: &T) -> u32 {
        self.batch.put_record(key, record)
    }

    pub(in crate::writer) fn remove(&mut self, key: Vec<u8>) {
        self.batch.remove(key);
    }

    /// One record, as it will be once this is committed.
    pub(in crate::writer) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, LogError> {
        match self.batch.write_to(key) {
            Some(written) => Ok(written.cloned()),
            None => self.log.get(key),
        }
    }

    /// All records between two keys, as they will be once this is committed.
    pub(in crate::writer) fn scan(
        &self,
        from: &[u8],
        to: &[u8],
    ) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, LogError> {
        let mut records = BTreeMap::new();
        self.log.scan(from, to, &mut |key, value| {
            records.insert(key.to_vec(), value.to_vec());
            true
        })?;
        for (key, value) in self.batch.writes_between(from, to) {
            match value {
                Some(value) => records.insert(key.clone(), value.clone()),
                None => records.remove(key),
            };
        }
        Ok(records)
    }
}
