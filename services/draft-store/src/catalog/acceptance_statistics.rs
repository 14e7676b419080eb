//! How much the log holds of what drafts are worth, by namespace.

use std::collections::HashMap;

use refrain_protocol::NamespaceId;

/// Records and bytes of them.
#[derive(Default)]
pub(super) struct StatisticsSizes {
    pub(super) namespaces: HashMap<NamespaceId, (usize, u64)>,
    bytes: u64,
}

impl StatisticsSizes {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn note(&mut self, namespace: NamespaceId, parts: usize, bytes: u64) {
        let before = match parts {
            0 => self.namespaces.remove(&namespace),
            _ => self.namespaces.insert(namespace, (parts, bytes)),
        };
        self.bytes = self.bytes + bytes - before.map_or(0, |(_, bytes)| bytes);
    }

    /// Takes one record more into account.
    pub(super) fn found(&mut self, namespace: NamespaceId, record_bytes: u64) {
        let known = self.namespaces.get(&namespace).copied();
        let (parts, bytes) = known.unwrap_or_default();
        self.note(namespace, parts + 1, bytes + record_bytes);
    }
}
