//! The order in which documents were used, and how much each tenant stores.

use std::collections::HashMap;
use std::sync::Arc;

use lru::LruCache;

use crate::record::DocumentKey;

/// Tokens and bytes of a document, or of all documents of a tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StoredSize {
    tokens: u64,
    bytes: u64,
}

impl StoredSize {
    pub(super) fn new(tokens: u32, bytes: u32) -> Self {
        StoredSize {
            tokens: u64::from(tokens),
            bytes: u64::from(bytes),
        }
    }

    fn change(&mut self, before: StoredSize, after: StoredSize) {
        self.tokens = self.tokens + after.tokens - before.tokens;
        self.bytes = self.bytes + after.bytes - before.bytes;
    }
}

/// The documents of one tenant.
struct TenantUse {
    sizes: StoredSize,
    /// Least recently used first. The value is the time of use on the store-wide counter.
    order: LruCache<DocumentKey, u64>,
}

impl Default for TenantUse {
    fn default() -> Self {
        TenantUse {
            sizes: StoredSize::default(),
            order: LruCache::unbounded(),
        }
    }
}

/// The order of use of all documents, by tenant.
#[derive(Default)]
pub(super) struct RecencyOrder {
    clock: u64,
    tenants: HashMap<Arc<str>, TenantUse>,
}

impl RecencyOrder {
    fn tenant(&mut self, name: &Arc<str>) -> &mut TenantUse {
        self.tenants.entry(name.clone()).or_default()
    }

    /// Records that a document was used now, and that its size changed from the first to the second. A static
    /// document has no position in the order, since nothing evicts it.
    pub(super) fn put(
        &mut self,
        tenant: &Arc<str>,
        key: DocumentKey,
        (before, after): (StoredSize, StoredSize),
        is_static: bool,
    ) {
        self.clock += 1;
        let stamp = self.clock;
        let tenant = self.tenant(tenant);
        tenant.sizes.change(before, after);
        if is_static {
            tenant.order.pop(&key);
        } else {
            tenant.order.push(key, stamp);
        }
    }

    /// Records that the size of a document changed.
    pub(super) fn resize(&mut self, tenant: &Arc<str>, before: StoredSize, after: StoredSize) {
        self.tenant(tenant).sizes.change(before, after);
    }

    /// Removes a document.
    pub(super) fn take(&mut self, tenant: &Arc<str>, key: DocumentKey, sizes: StoredSize) {
        let tenant = self.tenant(tenant);
        tenant.sizes.change(sizes, StoredSize::default());
        tenant.order.pop(&key);
    }

    /// Moves documents, with their sizes, to another tenant. The order of use is kept.
    pub(super) fn move_to(
        &mut self,
        from: &Arc<str>,
        to: &Arc<str>,
        documents: impl Iterator<Item = (DocumentKey, StoredSize)>,
    ) {
        let source = self.tenant(from);
        let mut uses = Vec::new();
        for (key, sizes) in documents {
            source.sizes.change(sizes, StoredSize::default());
            uses.push((source.order.pop(&key), key, sizes));
        }
        uses.sort_unstable_by_key(|(stamp, ..)| *stamp);
        let target = self.tenant(to);
        for (stamp, key, sizes) in uses {
            target.sizes.change(StoredSize::default(), sizes);
            if let Some(stamp) = stamp {
                target.order.push(key, stamp);
            }
        }
    }

    /// The least recently used document of a tenant above its `quota`, and whether it is above it in tokens.
    pub(super) fn victim(&self, quota: impl Fn(&str) -> (u64, u64)) -> Option<(DocumentKey, bool)> {
        let mut over = self.tenants.iter().filter_map(|(name, tenant)| {
            let (tokens_max, bytes_max) = quota(name);
            let in_tokens = tenant.sizes.tokens > tokens_max;
            let is_over = in_tokens || tenant.sizes.bytes > bytes_max;
            // A tenant that has only static documents has nothing to evict.
            let (key, _) = tenant.order.peek_lru().filter(|_| is_over)?;
            Some((*key, in_tokens))
        });
        over.next()
    }

    /// The least recently used document of all.
    pub(super) fn oldest(&self) -> Option<DocumentKey> {
        // One look per tenant, instead of a second list of all documents (84 bytes each). A store has a few thousand
        // tenants at most, and evicts far more seldom than it appends.
        self.tenants
            .values()
            .filter_map(|tenant| tenant.order.peek_lru())
            .min_by_key(|(_, stamp)| **stamp)
            .map(|(key, _)| *key)
    }

    #[cfg(test)]
    pub(super) fn tokens(&self, tenant: &str) -> u64 {
        self.tenants[tenant].sizes.tokens
    }
}
