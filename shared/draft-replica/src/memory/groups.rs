//! Trees of groups of samples: what the other samples of a prompt say is the best guess at what this one will.
//!
//! A group's tree holds what ran here, live, and is gone soon after the group: its documents are those of the
//! namespace, which keeps them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use lru::LruCache;
use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::{DocumentId, NamespaceId};
use refrain_suffix_index::IndexConfig;

use super::drafts::Drafts;
use super::shared::SharedDrafts;
use crate::config::MemoryConfig;
use crate::metrics::MemoryMetrics;

/// The tree of one group.
pub struct GroupMemory {
    pub(super) drafts: Arc<SharedDrafts>,
    tokens_max: u64,
    /// Of the newest output; 0 while none is known.
    weight_version: AtomicU64,
    used: Mutex<Instant>,
    metrics: MemoryMetrics,
}

/// A request's place in its group, given back when it is dropped.
pub struct Membership {
    group: Arc<GroupMemory>,
    document: DocumentId,
}

impl Membership {
    fn new(group: &Arc<GroupMemory>, document: DocumentId) -> Self {
        group.touch();
        group.drafts.begin(document);
        Membership {
            group: group.clone(),
            document,
        }
    }

    /// The same for those who must not wait: `None` while somebody else holds the group's drafts.
    fn try_new(group: &Arc<GroupMemory>, document: DocumentId) -> Option<Self> {
        group.drafts.try_begin(document)?;
        group.try_touch();
        Some(Membership {
            group: group.clone(),
            document,
        })
    }

    /// The group's tree.
    pub fn group(&self) -> &Arc<GroupMemory> {
        &self.group
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.group.touch();
        self.group.drafts.end(self.document);
    }
}

impl GroupMemory {
    /// The group's drafts for those who only look, to be held for microseconds and once by a thread.
    pub fn read(&self) -> RwLockReadGuard<'_, Drafts> {
        self.drafts.read()
    }

    /// [`read`](Self::read) for those who must not wait: `None` while somebody changes them, or waits to.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, Drafts>> {
        self.drafts.try_read()
    }

    /// The group's drafts, to be held for microseconds.
    pub fn lock(&self) -> RwLockWriteGuard<'_, Drafts> {
        self.drafts.lock()
    }

    /// Takes a piece of a running output. What newer weights say drives out what older ones said: their samples are
    /// no guide to these.
    pub fn merge(&self, update: &DocumentUpdate) {
        self.take(self.lock(), update, true);
    }

    /// The same from the request that says it; see [`Drafts::merge_said`].
    pub fn merge_said(&self, update: &DocumentUpdate, is_alone: bool) -> bool {
        self.take(self.lock(), update, is_alone)
    }

    /// The same for those who must not wait: `None` while somebody else holds the drafts.
    pub fn try_merge_said(&self, update: &DocumentUpdate, is_alone: bool) -> Option<bool> {
        let drafts = self.drafts.try_lock()?;
        Some(self.take(drafts, update, is_alone))
    }

    fn take(
        &self,
        mut drafts: RwLockWriteGuard<'_, Drafts>,
        update: &DocumentUpdate,
        is_alone: bool,
    ) -> bool {
        let version = update.head.weight_version;
        let newest = self.weight_version.fetch_max(version, Ordering::Relaxed);
        if version != 0 && version < newest {
            return is_alone;
        }
        if newest != 0 && version > newest {
            drafts.clear();
        }
        // What the tree has already is not new.
        let here = drafts.len_of(update.document).unwrap_or(0);
        let new = (update.prev_len as usize + update.tokens.len()).saturating_sub(here as usize);
        let new = new.min(update.tokens.len()) as u64;
        let over = |drafts: &Drafts| drafts.index.tokens() + new > self.tokens_max;
        if over(&drafts) {
            let left = self.tokens_max.saturating_sub(new);
            let evicted = drafts.evict(left);
            self.metrics.group_evictions.inc_by(evicted as u64);
        }
        // All of it runs: this output is left out from here on, as if a piece of it were missing.
        let is_full = over(&drafts) && new > 0;
        let merged = (!is_full).then(|| drafts.merge_said(update, is_alone, Instant::now()));
        // Or the tree has no room for more states, which is as much a limit of it.
        let Some(Ok(is_alone)) = merged else {
            self.metrics.group_full();
            return is_alone;
        };
        is_alone
    }

    fn touch(&self) {
        *self
            .used
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner()) = Instant::now();
    }

    fn try_touch(&self) {
        if let Ok(mut used) = self.used.try_lock() {
            *used = Instant::now();
        }
    }

    fn is_running(&self) -> bool {
        self.lock().is_running()
    }

    fn used(&self) -> Instant {
        *self
            .used
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

type Key = (NamespaceId, String);

/// The trees of all groups.
pub(super) struct Groups {
    index: IndexConfig,
    groups_max: usize,
    tokens_max: u64,
    ttl: Duration,
    metrics: MemoryMetrics,
    groups: Mutex<LruCache<Key, Arc<GroupMemory>>>,
}

impl Groups {
    pub(super) fn new(config: &MemoryConfig, index: IndexConfig, metrics: MemoryMetrics) -> Self {
        Groups {
            index,
            groups_max: config.groups_max,
            tokens_max: config.group_tokens_max,
            ttl: Duration::from_millis(config.group_ttl_ms),
            metrics,
            groups: Mutex::new(LruCache::unbounded()),
        }
    }

    /// Places a request in its group. `None` if there is no room: requests of all groups run.
    pub(super) fn join(
        &self,
        namespace: NamespaceId,
        group: &str,
        document: DocumentId,
    ) -> Option<Membership> {
        let key = (namespace, group.to_owned());
        let mut groups = self.lock();
        if let Some(memory) = groups.get(&key) {
            return Some(Membership::new(memory, document));
        }
        if groups.len() >= self.groups_max {
            let idle = groups.iter().rev().find(|(_, memory)| !memory.is_running());
            let Some(idle) = idle.map(|(key, _)| key.clone()) else {
                self.metrics.group_refused();
                return None;
            };
            groups.pop(&idle);
            self.metrics.group_evictions.inc();
        }
        let memory = self.create();
        let membership = Membership::new(&memory, document);
        groups.put(key, memory);
        Some(membership)
    }

    /// The same for those who must not wait: `None` also where another group would have to go for it, or somebody holds what
    /// is needed.
    pub(super) fn try_join(
        &self,
        namespace: NamespaceId,
        group: &str,
        document: DocumentId,
    ) -> Option<Membership> {
        let key = (namespace, group.to_owned());
        let mut groups = self.groups.try_lock().ok()?;
        if let Some(memory) = groups.get(&key) {
            return Membership::try_new(memory, document);
        }
        if groups.len() >= self.groups_max {
            return None;
        }
        let memory = self.create();
        let membership = Membership::try_new(&memory, document)?;
        groups.put(key, memory);
        Some(membership)
    }

    fn create(&self) -> Arc<GroupMemory> {
        Arc::new(GroupMemory {
            drafts: Arc::new(SharedDrafts::new(self.index.clone())),
            tokens_max: self.tokens_max,
            weight_version: AtomicU64::new(0),
            used: Mutex::new(Instant::now()),
            metrics: self.metrics.clone(),
        })
    }

    /// Nothing of these documents is offered any more.
    pub(super) fn remove(&self, namespace: NamespaceId, documents: &[DocumentId]) {
        for memory in self.of(namespace) {
            memory.lock().remove(documents);
        }
    }

    /// Only what runs is left.
    pub(super) fn reset(&self, namespace: NamespaceId) {
        for memory in self.of(namespace) {
            memory.lock().reset();
        }
    }

    /// Lets go of a namespace's groups, those that run through their requests' own references.
    pub(super) fn forget(&self, namespace: NamespaceId) {
        self.retain(|key, _| key.0 != namespace);
    }

    /// Lets go of groups that nobody has asked for in a while.
    pub(super) fn expire(&self, now: Instant) {
        self.retain(|_, memory| {
            now.saturating_duration_since(memory.used()) < self.ttl || memory.is_running()
        });
    }

    pub(super) fn all(&self) -> Vec<Arc<GroupMemory>> {
        self.lock()
            .iter()
            .map(|(_, memory)| memory.clone())
            .collect()
    }

    fn of(&self, namespace: NamespaceId) -> Vec<Arc<GroupMemory>> {
        let groups = self.lock();
        let of = groups.iter().filter(|(key, _)| key.0 == namespace);
        of.map(|(_, memory)| memory.clone()).collect()
    }

    fn retain(&self, kept: impl Fn(&Key, &GroupMemory) -> bool) {
        let mut groups = self.lock();
        let gone = groups.iter().filter(|(key, memory)| !kept(key, memory));
        let gone: Vec<Key> = gone.map(|(key, _)| key.clone()).collect();
        for key in gone {
            groups.pop(&key);
        }
    }

    fn lock(&self) -> MutexGuard<'_, LruCache<Key, Arc<GroupMemory>>> {
        self.groups
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests;
