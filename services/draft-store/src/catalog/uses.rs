//! The order in which documents were used, and what each tenant holds.

use std::collections::HashMap;
use std::sync::Arc;

use lru::LruCache;

use crate::record::DocumentKey;

/// What one tenant holds.
struct Tenant {
    tokens: u64,
    /// Least recently used first; the value is a stamp of the store-wide clock of uses.
    order: LruCache<DocumentKey, u64>,
}

impl Default for Tenant {
    fn default() -> Self {
        Tenant {
            tokens: 0,
            order: LruCache::unbounded(),
        }
    }
}

/// See the module.
#[derive(Default)]
pub(super) struct Uses {
    clock: u64,
    tenants: HashMap<Arc<str>, Tenant>,
}

impl Uses {
    fn tenant(&mut self, name: &Arc<str>) -> &mut Tenant {
        self.tenants.entry(name.clone()).or_default()
    }

    /// A document was used now, and holds `after` tokens instead of `before`.
    pub(super) fn put(&mut self, tenant: &Arc<str>, key: DocumentKey, before: u32, after: u32) {
        self.clock += 1;
        let stamp = self.clock;
        let tenant = self.tenant(tenant);
        tenant.tokens = tenant.tokens + u64::from(after) - u64::from(before);
        tenant.order.push(key, stamp);
    }

    /// A document of `tokens` tokens is gone.
    pub(super) fn take(&mut self, tenant: &Arc<str>, key: DocumentKey, tokens: u32) {
        let tenant = self.tenant(tenant);
        tenant.tokens -= u64::from(tokens);
        tenant.order.pop(&key);
    }

    /// Gives documents, with their tokens, to another tenant in the order in which they were used.
    pub(super) fn move_to(
        &mut self,
        from: &Arc<str>,
        to: &Arc<str>,
        documents: impl Iterator<Item = (DocumentKey, u32)>,
    ) {
        let source = self.tenant(from);
        let mut uses = Vec::new();
        for (key, tokens) in documents {
            if let Some(stamp) = source.order.pop(&key) {
                source.tokens -= u64::from(tokens);
                uses.push((stamp, key, u64::from(tokens)));
            }
        }
        uses.sort_unstable();
        let target = self.tenant(to);
        for (stamp, key, tokens) in uses {
            target.tokens += tokens;
            target.order.push(key, stamp);
        }
    }

    /// The least recently used document of a tenant that holds more than `tokens_max`.
    pub(super) fn victim(&self, tokens_max: u64) -> Option<DocumentKey> {
        let tenant = self
            .tenants
            .values()
            .find(|tenant| tenant.tokens > tokens_max)?;
        tenant.order.peek_lru().map(|(key, _)| *key)
    }

    /// The least recently used document of all.
    pub(super) fn oldest(&self) -> Option<DocumentKey> {
        // One look per tenant instead of a second list of all documents (84 bytes each). A store has some
        // thousand tenants at most, and evicts far more seldom than it appends.
        self.tenants
            .values()
            .filter_map(|tenant| tenant.order.peek_lru())
            .min_by_key(|(_, stamp)| **stamp)
            .map(|(key, _)| *key)
    }

    #[cfg(test)]
    pub(super) fn tokens(&self, tenant: &str) -> u64 {
        self.tenants[tenant].tokens
    }
}
