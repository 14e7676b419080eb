//! How much space the acceptance statistics of each namespace take in the log.

use std::collections::HashMap;

use refrain_protocol::NamespaceId;

/// Number of records and their bytes, per namespace and in total.
#[derive(Default)]
pub(crate) struct StatisticsSizes {
    namespaces: HashMap<NamespaceId, (usize, u64)>,
    bytes: u64,
}

impl StatisticsSizes {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of records of a namespace.
    pub(crate) fn parts(&self, namespace: NamespaceId) -> usize {
        let kept = self.namespaces.get(&namespace);
        kept.map_or(0, |(parts, _)| *parts)
    }

    /// Records how many records a namespace has now, and their bytes.
    pub(crate) fn note(&mut self, namespace: NamespaceId, parts: usize, bytes: u64) {
        let before = match parts {
            0 => self.namespaces.remove(&namespace),
            _ => self.namespaces.insert(namespace, (parts, bytes)),
        };
        self.bytes = self.bytes + bytes - before.map_or(0, |(_, bytes)| bytes);
    }

    /// Counts one more record.
    pub(super) fn found(&mut self, namespace: NamespaceId, record_bytes: u64) {
        let known = self.namespaces.get(&namespace).copied();
        let (parts, bytes) = known.unwrap_or_default();
        self.note(namespace, parts + 1, bytes + record_bytes);
    }
}
