//! How much the log holds of what drafts are worth, by namespace.

use std::collections::HashMap;

use refrain_protocol::NamespaceId;

use super::Catalog;

/// Records and bytes of them.
#[derive(Default)]
pub(super) struct ChancesKept {
    namespaces: HashMap<NamespaceId, (usize, u64)>,
    bytes: u64,
}

impl ChancesKept {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn note(&mut self, namespace: NamespaceId, parts: usize, bytes: u64) {
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

impl Catalog {
    /// Records that a namespace has of it.
    pub(crate) fn chances_parts(&self, namespace: NamespaceId) -> usize {
        let kept = self.chances.namespaces.get(&namespace);
        kept.map_or(0, |(parts, _)| *parts)
    }

    /// Notes the records that it has now.
    pub(crate) fn note_chances(&mut self, namespace: NamespaceId, parts: usize, bytes: u64) {
        self.chances.note(namespace, parts, bytes);
    }
}
