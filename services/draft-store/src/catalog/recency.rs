//! The order in which documents were used, and how much each tenant stores.

use std::collections::HashMap;
use std::sync::Arc;

use lru::LruCache;

use crate::record::DocumentKey;
use crate::segments::CountedDocument;

/// Tokens and bytes of documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StoredSize {
    pub(super) tokens: u64,
    pub(super) bytes: u64,
}

impl StoredSize {
    /// Adds or removes a document.
    pub(super) fn count(&mut self, counted: CountedDocument, comes: bool) {
        let add = |sum: &mut u64, by: u32| {
            let by = u64::from(by);
            *sum = if comes { *sum + by } else { *sum - by };
        };
        add(&mut self.tokens, counted.len);
        add(&mut self.bytes, counted.bytes);
    }
}

/// The documents of one tenant.
struct TenantUse {
    size: StoredSize,
    /// Least recently used first. The value is the time of use on the store-wide counter.
    order: LruCache<DocumentKey, u64>,
}

impl Default for TenantUse {
    fn default() -> Self {
        TenantUse {
            size: StoredSize::default(),
            order: LruCache::unbounded(),
        }
    }
}

/// The order of use of all documents, by tenant.
#[derive(Default)]
pub(crate) struct RecencyOrder {
    clock: u64,
    tenants: HashMap<Arc<str>, TenantUse>,
}

impl RecencyOrder {
    fn tenant(&mut self, name: &Arc<str>) -> &mut TenantUse {
        self.tenants.entry(name.clone()).or_default()
    }

    /// The size of all documents of a tenant.
    pub(super) fn size_mut(&mut self, tenant: &Arc<str>) -> &mut StoredSize {
        &mut self.tenant(tenant).size
    }

    /// Records that a document was used now. A static document has no position in the order, since nothing evicts
    /// it.
    pub(super) fn touch(&mut self, tenant: &Arc<str>, key: DocumentKey, is_static: bool) {
        self.clock += 1;
        let stamp = self.clock;
        let order = &mut self.tenant(tenant).order;
        if is_static {
            order.pop(&key);
        } else {
            order.push(key, stamp);
        }
    }

    /// Removes a document from the order.
    pub(super) fn remove(&mut self, tenant: &Arc<str>, key: DocumentKey) {
        self.tenant(tenant).order.pop(&key);
    }

    /// Moves documents, with their sizes, to another tenant. The order of use is kept.
    pub(super) fn move_to(
        &mut self,
        from: &Arc<str>,
        to: &Arc<str>,
        documents: impl Iterator<Item = CountedDocument>,
    ) {
        let source = self.tenant(from);
        let mut uses = Vec::new();
        for document in documents {
            source.size.count(document, false);
            uses.push((source.order.pop(&document.key), document));
        }
        uses.sort_unstable_by_key(|(stamp, _)| *stamp);
        let target = self.tenant(to);
        for (stamp, document) in uses {
            target.size.count(document, true);
            if let Some(stamp) = stamp {
                target.order.push(document.key, stamp);
            }
        }
    }

    /// The least recently used document of a tenant above its `quota`, and whether it is above it in tokens.
    pub(crate) fn victim(&self, quota: impl Fn(&str) -> (u64, u64)) -> Option<(DocumentKey, bool)> {
        let mut over = self.tenants.iter().filter_map(|(name, tenant)| {
            let (tokens_max, bytes_max) = quota(name);
            let in_tokens = tenant.size.tokens > tokens_max;
            let is_over = in_tokens || tenant.size.bytes > bytes_max;
            // A tenant that has only static documents has nothing to evict.
            let (key, _) = tenant.order.peek_lru().filter(|_| is_over)?;
            Some((*key, in_tokens))
        });
        over.next()
    }

    /// The least recently used document of all.
    pub(crate) fn oldest(&self) -> Option<DocumentKey> {
        // One look per tenant, instead of a second list of all documents (84 bytes each). A store has a few thousand
        // tenants at most, and evicts far more seldom than it appends.
        self.tenants
            .values()
            .filter_map(|tenant| tenant.order.peek_lru())
            .min_by_key(|(_, stamp)| **stamp)
            .map(|(key, _)| *key)
    }
}
