//! Trees of groups of samples: the other samples of a prompt are the best guess at the next one.
//!
//! A group's tree holds outputs that ran here. It is always live, and is dropped soon after the group: its documents
//! are those of the namespace, which keeps them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use lru::LruCache;
use refrain_protocol::{DocumentId, NamespaceId};
use refrain_suffix_index::IndexConfig;

use super::draft_index::DraftIndex;
use super::locked_index::LockedIndex;
use crate::config::ReplicaConfig;
use crate::metrics::ReplicaMetrics;
use crate::update::DocumentUpdateRef;

/// The drafts of one group of samples.
pub struct GroupReplica {
    pub(super) index: Arc<LockedIndex>,
    tokens_max: u64,
    /// The weight version of the newest output; 0 while none is known.
    weight_version: AtomicU64,
    last_used: Mutex<Instant>,
    metrics: ReplicaMetrics,
}

/// A request's membership in its group. It ends when this is dropped.
pub struct GroupMembership {
    group: Arc<GroupReplica>,
    document: DocumentId,
}

impl GroupMembership {
    fn new(group: &Arc<GroupReplica>, document: DocumentId) -> Self {
        group.touch();
        group.index.pin(document);
        GroupMembership {
            group: group.clone(),
            document,
        }
    }

    /// [`new`](Self::new) without waiting: `None` while another thread holds the group's index.
    fn try_new(group: &Arc<GroupReplica>, document: DocumentId) -> Option<Self> {
        group.index.try_pin(document)?;
        group.try_touch();
        Some(GroupMembership {
            group: group.clone(),
            document,
        })
    }

    /// The group.
    pub fn group(&self) -> &Arc<GroupReplica> {
        &self.group
    }
}

impl Drop for GroupMembership {
    fn drop(&mut self) {
        self.group.touch();
        self.group.index.unpin(self.document);
    }
}

impl GroupReplica {
    /// The index, shared with other readers. Hold it for microseconds, and not twice in one thread.
    pub fn read(&self) -> RwLockReadGuard<'_, DraftIndex> {
        self.index.read()
    }

    /// [`read`](Self::read) without waiting: `None` while a writer holds the index or waits for it.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, DraftIndex>> {
        self.index.try_read()
    }

    /// The index, for one writer. Hold it for microseconds.
    pub fn write(&self) -> RwLockWriteGuard<'_, DraftIndex> {
        self.index.write()
    }

    /// Applies an update of a running output. An output of newer weights drives out those of older ones: these are no
    /// guide to it.
    pub fn merge(&self, update: DocumentUpdateRef<'_>) {
        self.apply(self.write(), update, true);
    }

    /// Applies an update that comes from the request that emitted it; see [`DraftIndex::merge_emitted`].
    pub fn merge_emitted(&self, update: DocumentUpdateRef<'_>, is_sole_source: bool) -> bool {
        self.apply(self.write(), update, is_sole_source)
    }

    /// [`merge_emitted`](Self::merge_emitted) without waiting: `None` while another thread holds the index.
    pub fn try_merge_emitted(
        &self,
        update: DocumentUpdateRef<'_>,
        is_sole_source: bool,
    ) -> Option<bool> {
        let index = self.index.try_write()?;
        Some(self.apply(index, update, is_sole_source))
    }

    fn apply(
        &self,
        mut index: RwLockWriteGuard<'_, DraftIndex>,
        update: DocumentUpdateRef<'_>,
        is_sole_source: bool,
    ) -> bool {
        let version = update.head.weight_version;
        let newest = self.weight_version.fetch_max(version, Ordering::Relaxed);
        if version != 0 && version < newest {
            return is_sole_source;
        }
        if newest != 0 && version > newest {
            index.clear();
        }
        // Tokens that the tree has already need no capacity.
        let here = index.len_of(update.document).unwrap_or(0);
        let new = (update.prev_len as usize + update.tokens.len()).saturating_sub(here as usize);
        let new = new.min(update.tokens.len()) as u64;
        let exceeds = |index: &DraftIndex| index.index.tokens() + new > self.tokens_max;
        if exceeds(&index) {
            let left = self.tokens_max.saturating_sub(new);
            let evicted = index.evict(left);
            self.metrics.group_evictions.inc_by(evicted as u64);
        }
        // Where all of the tree runs, this output is left out from here on: its next update comes after a gap.
        let is_full = exceeds(&index) && new > 0;
        let merged =
            (!is_full).then(|| index.merge_emitted(update, is_sole_source, Instant::now()));
        // An index without capacity for more states is as much a limit of the tree.
        let Some(Ok(is_sole_source)) = merged else {
            self.metrics.group_full();
            return is_sole_source;
        };
        is_sole_source
    }

    fn touch(&self) {
        *self.lock_last_used() = Instant::now();
    }

    fn try_touch(&self) {
        if let Ok(mut last_used) = self.last_used.try_lock() {
            *last_used = Instant::now();
        }
    }

    fn is_in_use(&self) -> bool {
        self.read().is_in_use()
    }

    fn last_used(&self) -> Instant {
        *self.lock_last_used()
    }

    fn lock_last_used(&self) -> MutexGuard<'_, Instant> {
        self.last_used
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

type GroupKey = (NamespaceId, String);

/// All groups of all namespaces.
pub(super) struct Groups {
    index: IndexConfig,
    groups_max: usize,
    tokens_max: u64,
    ttl: Duration,
    metrics: ReplicaMetrics,
    /// Unbounded, because eviction passes over groups in use.
    groups: Mutex<LruCache<GroupKey, Arc<GroupReplica>>>,
}

impl Groups {
    pub(super) fn new(config: &ReplicaConfig, index: IndexConfig, metrics: ReplicaMetrics) -> Self {
        Groups {
            index,
            groups_max: config.groups_max,
            tokens_max: config.group_tokens_max,
            ttl: Duration::from_millis(config.group_ttl_ms),
            metrics,
            groups: Mutex::new(LruCache::unbounded()),
        }
    }

    /// Adds a request to its group. `None` where requests of as many groups run as there may be.
    pub(super) fn join(
        &self,
        namespace: NamespaceId,
        group: &str,
        document: DocumentId,
    ) -> Option<GroupMembership> {
        let key = (namespace, group.to_owned());
        let mut groups = self.lock();
        if let Some(group) = groups.get(&key) {
            return Some(GroupMembership::new(group, document));
        }
        if groups.len() >= self.groups_max {
            let idle = groups.iter().rev().find(|(_, group)| !group.is_in_use());
            let Some(idle) = idle.map(|(key, _)| key.clone()) else {
                self.metrics.group_refused();
                return None;
            };
            groups.pop(&idle);
            self.metrics.group_evictions.inc();
        }
        let group = self.create();
        let membership = GroupMembership::new(&group, document);
        groups.put(key, group);
        Some(membership)
    }

    /// [`join`](Self::join) without waiting: `None` also where another group would have to be evicted, or another
    /// thread holds a lock that is needed.
    pub(super) fn try_join(
        &self,
        namespace: NamespaceId,
        group: &str,
        document: DocumentId,
    ) -> Option<GroupMembership> {
        let key = (namespace, group.to_owned());
        let mut groups = self.groups.try_lock().ok()?;
        if let Some(group) = groups.get(&key) {
            return GroupMembership::try_new(group, document);
        }
        if groups.len() >= self.groups_max {
            return None;
        }
        let group = self.create();
        let membership = GroupMembership::try_new(&group, document)?;
        groups.put(key, group);
        Some(membership)
    }

    fn create(&self) -> Arc<GroupReplica> {
        Arc::new(GroupReplica {
            index: Arc::new(LockedIndex::new(self.index.clone())),
            tokens_max: self.tokens_max,
            weight_version: AtomicU64::new(0),
            last_used: Mutex::new(Instant::now()),
            metrics: self.metrics.clone(),
        })
    }

    /// Removes documents from all groups of a namespace.
    pub(super) fn remove(&self, namespace: NamespaceId, documents: &[DocumentId]) {
        for group in self.of(namespace) {
            group.write().remove(documents);
        }
    }

    /// Removes all documents but those of requests that run here from the groups of a namespace.
    pub(super) fn reset(&self, namespace: NamespaceId) {
        for group in self.of(namespace) {
            group.write().reset();
        }
    }

    /// Drops the groups of a namespace. Running requests keep theirs through their own references.
    pub(super) fn forget(&self, namespace: NamespaceId) {
        self.retain(|key, _| key.0 != namespace);
    }

    /// Drops idle groups that no request has joined or left for their time to live.
    pub(super) fn expire(&self, now: Instant) {
        self.retain(|_, group| {
            now.saturating_duration_since(group.last_used()) < self.ttl || group.is_in_use()
        });
    }

    pub(super) fn all(&self) -> Vec<Arc<GroupReplica>> {
        let groups = self.lock();
        groups.iter().map(|(_, group)| group.clone()).collect()
    }

    fn of(&self, namespace: NamespaceId) -> Vec<Arc<GroupReplica>> {
        let groups = self.lock();
        let of = groups.iter().filter(|(key, _)| key.0 == namespace);
        of.map(|(_, group)| group.clone()).collect()
    }

    fn retain(&self, keeps: impl Fn(&GroupKey, &GroupReplica) -> bool) {
        let mut groups = self.lock();
        let dropped = groups.iter().filter(|(key, group)| !keeps(key, group));
        let dropped: Vec<GroupKey> = dropped.map(|(key, _)| key.clone()).collect();
        for key in dropped {
            groups.pop(&key);
        }
    }

    fn lock(&self) -> MutexGuard<'_, LruCache<GroupKey, Arc<GroupReplica>>> {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
