//! Trees of groups of samples: the other samples of a prompt are the best guess at the next one.
//!
//! A group's tree holds outputs that ran here, and those that run elsewhere, as the log of the group brings them
//! (`group_log.rs`). It is always live, and is dropped soon after the group: its documents are those of the
//! namespace, which keeps them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lru::LruCache;
use parking_lot::{Mutex, RwLockReadGuard, RwLockWriteGuard};
use refrain_protocol::document::FeedCursor;
use refrain_protocol::{DocumentId, NamespaceId};
use refrain_suffix_index::IndexConfig;
use tokio::sync::Notify;

use super::draft_index::DraftIndex;
use super::locked_index::LockedIndex;
use crate::config::ReplicaConfig;
use crate::metrics::{
    DOCUMENT, GROUP, GROUP_TOKENS_MAX, GROUPS_MAX, GROUPS_TOKENS_MAX, ReplicaMetrics,
};
use crate::update::DocumentUpdateRef;

/// The drafts of one group of samples.
pub struct GroupReplica {
    pub(super) index: Arc<LockedIndex>,
    tokens_max: u64,
    /// The tokens of all groups together, and the most that there may be.
    all_tokens: Arc<AtomicU64>,
    all_tokens_max: u64,
    log: Mutex<LogState>,
    last_used: Mutex<Instant>,
    metrics: ReplicaMetrics,
}

/// How far the group's log in the store was read.
#[derive(Clone, Copy, Default)]
struct LogState {
    position: LogPosition,
    registered: Option<tokio::time::Instant>,
}

/// A place in a group's log, up to which the group has what the log says.
#[derive(Clone, Copy, Default)]
pub(super) struct LogPosition {
    pub(super) cursor: FeedCursor,
    /// How often the log was begun anew before.
    beginnings: u64,
}

impl LogState {
    /// The log is read from its beginning from here on.
    fn begin_anew(&mut self) {
        self.position = LogPosition {
            cursor: FeedCursor::default(),
            beginnings: self.position.beginnings + 1,
        };
    }
}

/// A request's membership in its group. It ends when this is dropped.
pub struct GroupMembership {
    group: Arc<GroupReplica>,
    document: DocumentId,
}

impl GroupMembership {
    fn new(group: &Arc<GroupReplica>, document: DocumentId) -> Self {
        group.touch();
        group.write().pin(document, Instant::now());
        GroupMembership {
            group: group.clone(),
            document,
        }
    }

    /// [`new`](Self::new) without waiting: `None` while another thread holds the group's index.
    fn try_new(group: &Arc<GroupReplica>, document: DocumentId) -> Option<Self> {
        let now = Instant::now();
        group.index.drafts.try_write()?.pin(document, now);
        if let Some(mut last_used) = group.last_used.try_lock() {
            *last_used = now;
        }
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
        self.group.write().unpin(self.document);
    }
}

impl GroupReplica {
    /// The index, shared with other readers. Hold it for microseconds, and not twice in one thread.
    pub fn read(&self) -> RwLockReadGuard<'_, DraftIndex> {
        self.index.drafts.read()
    }

    /// [`read`](Self::read) without waiting: `None` while a writer holds the index or waits for it.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, DraftIndex>> {
        self.index.drafts.try_read()
    }

    /// The index, for one writer. Hold it for microseconds.
    pub fn write(&self) -> RwLockWriteGuard<'_, DraftIndex> {
        self.index.drafts.write()
    }

    /// Applies an update of a running output. Outputs of older weights stay: most of their text is still the best
    /// guess, and where it is not, the router learns that from what is accepted.
    pub fn merge(&self, update: DocumentUpdateRef<'_>) {
        self.merge_emitted(update, true);
    }

    /// Applies an update that comes from the request that emitted it; see [`DraftIndex::merge`]. The lock is held for
    /// a part of the update at a time.
    pub fn merge_emitted(&self, update: DocumentUpdateRef<'_>, is_sole_source: bool) -> bool {
        update.parts().fold(is_sole_source, |is_sole_source, part| {
            self.apply(self.write(), part, is_sole_source)
        })
    }

    /// [`merge_emitted`](Self::merge_emitted) without waiting: `None` while another thread holds the index.
    pub fn try_merge_emitted(
        &self,
        update: DocumentUpdateRef<'_>,
        is_sole_source: bool,
    ) -> Option<bool> {
        let index = self.index.drafts.try_write()?;
        Some(self.apply(index, update, is_sole_source))
    }

    fn apply(
        &self,
        mut index: RwLockWriteGuard<'_, DraftIndex>,
        update: DocumentUpdateRef<'_>,
        is_sole_source: bool,
    ) -> bool {
        // Tokens that the tree has already need no capacity.
        let here = index.len_of(update.document).unwrap_or(0);
        let new = (update.prev_len as usize + update.tokens.len()).saturating_sub(here as usize);
        let new = new.min(update.tokens.len()) as u64;
        let exceeds = |index: &DraftIndex| index.index.tokens() + new > self.tokens_max;
        if exceeds(&index) {
            let left = self.tokens_max.saturating_sub(new);
            let evicted = index.evict(left);
            let evictions = self.metrics.group_evictions.with_label_values(&[DOCUMENT]);
            evictions.inc_by(evicted as u64);
        }
        let all_tokens = self.all_tokens.load(Ordering::Relaxed);
        if new > 0 && all_tokens + new > self.all_tokens_max {
            let rejections = &self.metrics.group_rejections;
            rejections.with_label_values(&[GROUPS_TOKENS_MAX]).inc();
            return is_sole_source;
        }
        // Where all of the tree runs, this output is left out from here on: its next update comes after a gap.
        let is_full = exceeds(&index) && new > 0;
        let merged = (!is_full).then(|| index.merge(update, is_sole_source, Instant::now()));
        // An index without capacity for more states is as much a limit of the tree.
        let Some(Ok(is_sole_source)) = merged else {
            let rejections = &self.metrics.group_rejections;
            rejections.with_label_values(&[GROUP_TOKENS_MAX]).inc();
            return is_sole_source;
        };
        // Until the next count, which finds out what has been removed.
        self.all_tokens.fetch_add(new, Ordering::Relaxed);
        is_sole_source
    }

    /// The position up to which the group's log was read.
    pub(super) fn log_position(&self) -> LogPosition {
        self.log.lock().position
    }

    /// Notes that the log was read from a position to a cursor. A log that was begun anew meanwhile stays at its
    /// beginning, because the tree was emptied of what had been read.
    pub(super) fn advance_log(&self, from: LogPosition, to: FeedCursor) {
        let mut log = self.log.lock();
        if log.position.beginnings == from.beginnings {
            log.position.cursor = to;
        }
    }

    /// Whether the log was begun anew since it was at a position.
    pub(super) fn has_begun_anew(&self, since: LogPosition) -> bool {
        self.log.lock().position.beginnings != since.beginnings
    }

    /// Whether the group has not been registered in the store for so long.
    pub(super) fn needs_registration(&self, after: Duration) -> bool {
        let registered = self.log.lock().registered;
        registered.is_none_or(|registered| registered.elapsed() >= after)
    }

    pub(super) fn note_registered(&self) {
        self.log.lock().registered = Some(tokio::time::Instant::now());
    }

    /// Has the log read from its beginning.
    pub(super) fn begin_log_anew(&self) {
        self.log.lock().begin_anew();
    }

    fn touch(&self) {
        *self.last_used.lock() = Instant::now();
    }

    /// Whether a request of the group runs here.
    pub(super) fn is_in_use(&self) -> bool {
        self.read().is_in_use()
    }
}

type GroupKey = (NamespaceId, String);

/// All groups of all namespaces.
pub(super) struct Groups {
    index: IndexConfig,
    config: ReplicaConfig,
    metrics: ReplicaMetrics,
    /// Unbounded, because eviction passes over groups in use.
    groups: Mutex<LruCache<GroupKey, Arc<GroupReplica>>>,
    all_tokens: Arc<AtomicU64>,
    /// Signals that a request has joined its group.
    scopes_changed: Arc<Notify>,
}

impl Groups {
    pub(super) fn new(
        config: ReplicaConfig,
        index: IndexConfig,
        metrics: ReplicaMetrics,
        scopes_changed: Arc<Notify>,
    ) -> Self {
        Groups {
            index,
            config,
            metrics,
            groups: Mutex::new(LruCache::unbounded()),
            all_tokens: Arc::default(),
            scopes_changed,
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
        let mut groups = self.groups.lock();
        if groups.len() >= self.config.groups_max && !groups.contains(&key) {
            let idle = groups.iter().rev().find(|(_, group)| !group.is_in_use());
            let Some(idle) = idle.map(|(key, _)| key.clone()) else {
                let rejections = &self.metrics.group_rejections;
                rejections.with_label_values(&[GROUPS_MAX]).inc();
                return None;
            };
            groups.pop(&idle);
            let evictions = &self.metrics.group_evictions;
            evictions.with_label_values(&[GROUP]).inc();
        }
        let group = groups.get_or_insert(key, || self.create());
        let membership = GroupMembership::new(group, document);
        self.scopes_changed.notify_one();
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
        let mut groups = self.groups.try_lock()?;
        if groups.len() >= self.config.groups_max && !groups.contains(&key) {
            return None;
        }
        let group = groups.get_or_insert(key, || self.create());
        let membership = GroupMembership::try_new(group, document)?;
        self.scopes_changed.notify_one();
        Some(membership)
    }

    fn create(&self) -> Arc<GroupReplica> {
        Arc::new(GroupReplica {
            index: Arc::new(LockedIndex::new(self.index.clone())),
            tokens_max: self.config.group_tokens_max,
            all_tokens: self.all_tokens.clone(),
            all_tokens_max: self.config.groups_tokens_max,
            log: Mutex::default(),
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

    /// Removes those of the documents that no request here emits from all groups of a namespace.
    pub(super) fn remove_unless_pinned(&self, namespace: NamespaceId, documents: &[DocumentId]) {
        for group in self.of(namespace) {
            group.write().remove_unless_pinned(documents);
        }
    }

    /// Removes all documents but those of requests that run here from the groups of a namespace. Their logs are read
    /// from the beginning again.
    pub(super) fn reset(&self, namespace: NamespaceId) {
        for group in self.of(namespace) {
            // First the log: what is being applied of it stops there.
            group.begin_log_anew();
            group.write().reset();
        }
    }

    /// Drops the groups of a namespace. Running requests keep theirs through their own references.
    pub(super) fn forget(&self, namespace: NamespaceId) {
        self.groups.lock().retain(|key, _| key.0 != namespace);
    }

    /// Drops idle groups that no request has joined or left for their time to live.
    pub(super) fn expire(&self, now: Instant) {
        let ttl = Duration::from_millis(self.config.group_ttl_ms);
        self.groups.lock().retain(|_, group| {
            now.saturating_duration_since(*group.last_used.lock()) < ttl || group.is_in_use()
        });
    }

    pub(super) fn all(&self) -> Vec<Arc<GroupReplica>> {
        let groups = self.groups.lock();
        groups.iter().map(|(_, group)| group.clone()).collect()
    }

    /// All groups with their names.
    pub(super) fn entries(&self) -> Vec<(GroupKey, Arc<GroupReplica>)> {
        let groups = self.groups.lock();
        let entries = groups
            .iter()
            .map(|(key, group)| (key.clone(), group.clone()));
        entries.collect()
    }

    /// Counts the tokens of all groups, and drops idle groups, the least recently used first, while these are too
    /// many for further ones. Returns the count.
    pub(super) fn recount(&self) -> u64 {
        let mut groups = self.groups.lock();
        let tokens_of = |group: &GroupReplica| group.read().index.tokens();
        let mut tokens: u64 = groups.iter().map(|(_, group)| tokens_of(group)).sum();
        while tokens > self.config.groups_tokens_max / 8 * 7 {
            let idle = groups.iter().rev().find(|(_, group)| !group.is_in_use());
            let Some((key, group)) = idle.map(|(key, group)| (key.clone(), group.clone())) else {
                break;
            };
            tokens -= tokens_of(&group);
            groups.pop(&key);
            let evictions = &self.metrics.group_evictions;
            evictions.with_label_values(&[GROUP]).inc();
        }
        self.all_tokens.store(tokens, Ordering::Relaxed);
        tokens
    }

    fn of(&self, namespace: NamespaceId) -> Vec<Arc<GroupReplica>> {
        let groups = self.groups.lock();
        let of = groups.iter().filter(|(key, _)| key.0 == namespace);
        of.map(|(_, group)| group.clone()).collect()
    }
}

#[cfg(test)]
mod tests;
