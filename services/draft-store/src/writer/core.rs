//! The writer's core: what one commit does, without clock, threads or actor.
//!
//! It does use the log. A change of the catalog is seen only by those who get the catalog's lock after the commit is
//! durable.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use refrain_protocol::NamespaceId;
use refrain_protocol::acceptance::AcceptanceStatsReply;
use refrain_protocol::tenants::TenantChange;

use crate::background::seal::NewSegment;
use crate::catalog::{Catalog, TenantRefusal};
use crate::config::DraftStoreConfig;
use crate::log::{Batch, LogError, RecordLog};
use crate::metrics::RemovalReason;
use crate::record::{DocumentKey, ErasureRecord, StoreRecord};
use crate::writer::edit::Edit;
use crate::writer::edit::acceptance_statistics::read;
use crate::writer::edit::pending_writes::PendingWrites;
use crate::writer::edit::tenants::set_tenant;
use crate::writer::outcome::CommitOutcome;
use crate::writer::remains::Remains;
use crate::writer::requests::{Append, GroupRegistration, StatisticsUpdate};

/// Erasures remembered at once. Further ones get 429.
const ERASURES_MAX: usize = 1_024;

/// Erased documents remembered, so that no worker brings them back. Beyond it the earliest are forgotten.
const ERASED_DOCUMENTS_MAX: usize = 1_000_000;

/// How long erasures and erased documents are remembered: longer than any request runs.
const ERASURE_MEMORY_MS: u64 = 48 * HOUR_MS;

/// A document that is unchanged for this long is described to new followers by one event.
const SETTLE_MS: u64 = 60 * 1_000;

/// Most documents that wait to be settled. Beyond it the oldest are settled at once.
const SETTLING_MAX: usize = 100_000;

/// Most times of use that wait to be written with the next tick.
const USES_MAX: usize = 4_096;

pub(super) const HOUR_MS: u64 = 3600 * 1000;

pub(super) const DAY_MS: u64 = 24 * HOUR_MS;

/// How long after its end a document may be sent again by a worker that got no answer.
const REPEATS_MS: u64 = HOUR_MS;

/// The writer's state; see the module.
pub(crate) struct WriterCore {
    pub(super) log: Arc<dyn RecordLog>,
    pub(crate) remains: Remains,
    pub(super) config: DraftStoreConfig,
    /// The store's identity and reservation.
    pub(crate) store: StoreRecord,
    /// Documents with several feed entries, and since when they have them.
    settling: VecDeque<(DocumentKey, u64)>,
    /// Touched documents whose time of use is to be written.
    uses: HashSet<DocumentKey>,
    /// Uses that other replicas have not been told.
    pub(super) uses_to_send: HashMap<DocumentKey, u64>,
    /// No document was stored before this time, in Unix milliseconds.
    earliest_ms: u64,
    /// Writes that may wait for the next commit: repairs from when the store was opened, and what was sent since.
    pub(super) repairs: Batch,
    damaged: Vec<DocumentKey>,
}

impl WriterCore {
    pub(crate) fn new(
        log: Arc<dyn RecordLog>,
        config: DraftStoreConfig,
        store: StoreRecord,
        repairs: Batch,
        damaged: Vec<DocumentKey>,
    ) -> Self {
        WriterCore {
            log,
            remains: Remains::of_opened(false),
            config,
            store,
            settling: VecDeque::new(),
            uses: HashSet::new(),
            uses_to_send: HashMap::new(),
            earliest_ms: 0,
            repairs,
            damaged,
        }
    }

    /// Stores updates and statistics updates of any number of callers in one commit. It is durable when this returns.
    pub(crate) fn append(
        &mut self,
        catalog: &mut Catalog,
        appends: &[Append],
        statistics: &[StatisticsUpdate],
        now_ms: u64,
    ) -> Result<CommitOutcome, LogError> {
        let namespaces_max = self.config.namespaces_max;
        // The store's time may be far behind that of documents from before a restart.
        self.note_oldest(Some(now_ms));
        let mut edit = self.edit(catalog, now_ms);
        for update in statistics {
            let has_room = edit.catalog.has_room_for(update.namespace, namespaces_max);
            let saved = match has_room {
                true => Some(edit.save_statistics(update)?),
                false => None,
            };
            edit.outcome.statistics.push(saved);
        }
        for append in appends {
            let (id, names) = (append.namespace, &append.names);
            if !edit.catalog.has_room_for(id, namespaces_max)
                || !edit.catalog.has_room_for_part(id, names, namespaces_max)
            {
                edit.outcome.lengths.push(None);
                continue;
            }
            edit.introduce(append.namespace, &append.names);
            let mut lengths = Vec::with_capacity(append.updates.len());
            for update in &append.updates {
                lengths.push(edit.apply(append, update)?);
            }
            edit.outcome.lengths.push(Some(lengths));
        }
        self.within_budgets(&mut edit)?;
        self.commit(edit, now_ms)
    }

    /// Registers a group, or renews it. `false` if no more groups can be registered.
    pub(crate) fn register_group(
        &mut self,
        catalog: &mut Catalog,
        registration: GroupRegistration,
        now_ms: u64,
    ) -> bool {
        let GroupRegistration { group, ttl_ms } = registration;
        let groups = &mut catalog.groups;
        if groups.len() >= self.config.tuning.groups_max && !groups.contains(&group) {
            groups.expire(now_ms);
            if groups.len() >= self.config.tuning.groups_max {
                return false;
            }
        }
        let head = catalog.head();
        catalog
            .groups
            .register(group, head, now_ms.saturating_add(ttl_ms));
        true
    }

    /// Removes the given documents, as far as they exist.
    pub(crate) fn remove(
        &mut self,
        catalog: &mut Catalog,
        keys: &[DocumentKey],
        removal: RemovalReason,
        now_ms: u64,
    ) -> Result<CommitOutcome, LogError> {
        let mut edit = self.edit(catalog, now_ms);
        for key in keys {
            let Some(document) = edit.catalog.document(*key) else {
                continue;
            };
            let state = document.state;
            edit.remove(*key, removal)?;
            // A worker may still be writing it, or repeat an append that was not answered.
            let awaited = state.finish == 0 || state.used_ms + REPEATS_MS > now_ms;
            if removal == RemovalReason::Erased && awaited {
                edit.remember_erased(*key);
            }
        }
        self.commit(edit, now_ms)
    }

    /// Remembers an erasure: its scope is refused from now on. `None` if no more erasures can be remembered.
    pub(crate) fn mark(
        &mut self,
        catalog: &mut Catalog,
        mut mark: ErasureRecord,
        now_ms: u64,
    ) -> Result<(Option<ErasureRecord>, CommitOutcome), LogError> {
        let erasures = &catalog.erasures;
        if erasures.marks() >= ERASURES_MAX && !erasures.has_mark(mark.id()) {
            return Ok((None, CommitOutcome::default()));
        }
        mark.at_ms = now_ms;
        catalog.end_exports(&mark);
        let mut edit = self.edit(catalog, now_ms);
        edit.erase_statistics(|names| mark.hits_namespace(names));
        let mark = edit.mark(mark);
        Ok((Some(mark), self.commit(edit, now_ms)?))
    }

    /// Changes a tenant. Returns the version of the change.
    pub(crate) fn change_tenant(
        &mut self,
        catalog: &mut Catalog,
        change: &TenantChange,
        now_ms: u64,
    ) -> Result<(Result<u64, TenantRefusal>, CommitOutcome), LogError> {
        let most = self.config.tuning.tenant_records_max;
        let version = match catalog.tenants.version_of(change, most, now_ms) {
            Ok(version) => version,
            refused => return Ok((refused, CommitOutcome::default())),
        };
        // They may remove what is left of a damaged tenant of this name.
        let repairs = std::mem::take(&mut self.repairs);
        let mut edit = self.edit(catalog, now_ms);
        edit.writes.batch.merge(repairs);
        set_tenant(&mut edit.catalog.tenants, &mut edit.writes, change, version);
        Ok((Ok(version), self.commit(edit, now_ms)?))
    }

    /// Marks documents as used. The time is written later, and only if the stored one is old.
    pub(crate) fn touch(&mut self, catalog: &mut Catalog, keys: &[DocumentKey], now_ms: u64) {
        let before_ms = now_ms.saturating_sub(self.config.tuning.use_interval_s * 1000);
        for key in keys {
            // Beyond the limit a restart loses some of the order of use, which is harmless.
            if catalog.touch(*key, now_ms, before_ms) && self.uses.len() < USES_MAX {
                self.uses.insert(*key);
            }
            if catalog.replication.is_on && self.uses_to_send.len() < USES_MAX {
                self.uses_to_send.insert(*key, now_ms);
            }
        }
    }

    /// Does what is due over time: repairs, retention, budgets, settling, times of use.
    pub(crate) fn tick(
        &mut self,
        catalog: &mut Catalog,
        now_ms: u64,
    ) -> Result<CommitOutcome, LogError> {
        self.settle(catalog, now_ms);
        catalog.groups.expire(now_ms);
        self.forget_stream_erasures(catalog, now_ms);
        let repairs = std::mem::take(&mut self.repairs);
        let damaged = std::mem::take(&mut self.damaged);
        let uses = std::mem::take(&mut self.uses);
        let mut edit = self.edit(catalog, now_ms);
        edit.writes.batch.merge(repairs);
        for key in damaged {
            edit.remove(key, RemovalReason::Damage)?;
        }
        for key in uses {
            edit.write_state(key);
        }
        edit.forget_erased(
            now_ms.saturating_sub(ERASURE_MEMORY_MS),
            ERASED_DOCUMENTS_MAX,
            self.config.tuning.eviction_step,
        );
        self.remove_expired(&mut edit, now_ms)?;
        edit.outcome.more |= self.expire_usage(&mut edit, now_ms)?;
        self.within_budgets(&mut edit)?;
        self.commit(edit, now_ms)
    }

    /// Puts a new segment into use.
    pub(crate) fn install(
        &mut self,
        catalog: &mut Catalog,
        segment: NewSegment,
        now_ms: u64,
    ) -> Result<CommitOutcome, LogError> {
        let mut edit = self.edit(catalog, now_ms);
        for key in &segment.damaged {
            if edit.catalog.document(*key).is_some() {
                edit.remove(*key, RemovalReason::Damage)?;
            }
        }
        edit.install(segment)?;
        self.commit(edit, now_ms)
    }

    pub(super) fn edit<'a>(&self, catalog: &'a mut Catalog, now_ms: u64) -> Edit<'a> {
        Edit::new(
            catalog,
            self.log.clone(),
            self.store,
            self.config.tuning.tombstones_max,
            self.config.tuning.group_tokens_max,
            now_ms,
        )
    }

    pub(super) fn commit(
        &mut self,
        edit: Edit<'_>,
        now_ms: u64,
    ) -> Result<CommitOutcome, LogError> {
        let (batch, store, split, mut outcome) = edit.finish()?;
        if outcome.leaves_remains {
            self.remains.note_removal();
        }
        self.log.commit(&batch)?;
        outcome.reserved = store != self.store;
        self.store = store;
        self.settling
            .extend(split.into_iter().map(|key| (key, now_ms)));
        Ok(outcome)
    }

    /// Evicts the least recently used documents while a budget is exceeded, at most one step of them.
    pub(super) fn within_budgets(&self, edit: &mut Edit<'_>) -> Result<(), LogError> {
        while let Some((key, removal)) = self.next_victim(edit.catalog) {
            if edit.outcome.removed.len() >= self.config.tuning.eviction_step {
                edit.outcome.more = true;
                break;
            }
            edit.remove(key, removal)?;
        }
        Ok(())
    }

    /// The document to evict next, if a budget is exceeded.
    fn next_victim(&self, catalog: &Catalog) -> Option<(DocumentKey, RemovalReason)> {
        let (config, totals) = (&self.config, catalog.totals());
        if let Some((key, in_tokens)) = catalog.uses.victim(|tenant| config.quota(tenant)) {
            return Some(match in_tokens {
                true => (key, RemovalReason::TenantTokens),
                false => (key, RemovalReason::TenantBytes),
            });
        }
        let removal = if totals.tokens > config.tokens_max {
            RemovalReason::Tokens
        } else if totals.bytes > config.bytes_max {
            RemovalReason::Bytes
        } else {
            return None;
        };
        Some((catalog.uses.oldest()?, removal))
    }

    /// Removes documents beyond the retention, at most one step of them.
    fn remove_expired(&mut self, edit: &mut Edit<'_>, now_ms: u64) -> Result<(), LogError> {
        let before_ms = now_ms.saturating_sub(u64::from(self.config.retention_days) * DAY_MS);
        // This looks at all documents, so it runs only if one of them is due.
        if self.earliest_ms < before_ms {
            let room = self
                .config
                .tuning
                .eviction_step
                .saturating_sub(edit.outcome.removed.len());
            let (expired, earliest_ms) = edit.catalog.expired(before_ms, room);
            for key in expired {
                edit.remove(key, RemovalReason::Age)?;
            }
            self.earliest_ms = earliest_ms.unwrap_or(now_ms);
            edit.outcome.more |= self.earliest_ms < before_ms;
        }
        Ok(())
    }

    /// Notes a document that may be due earlier than all others.
    pub(super) fn note_oldest(&mut self, stored_ms: Option<u64>) {
        self.earliest_ms = self.earliest_ms.min(stored_ms.unwrap_or(u64::MAX));
    }

    fn settle(&mut self, catalog: &mut Catalog, now_ms: u64) {
        for _ in 0..self.settling.len() {
            let overfull = self.settling.len() > SETTLING_MAX;
            let Some((key, since_ms)) = self.settling.front().copied() else {
                break;
            };
            if since_ms + SETTLE_MS > now_ms && !overfull {
                break;
            }
            self.settling.pop_front();
            let Some(document) = catalog.document(key) else {
                continue;
            };
            let running = document.state.finish == 0
                && document.state.used_ms.saturating_add(SETTLE_MS) > now_ms;
            if running && !overfull {
                self.settling.push_back((key, now_ms));
            } else {
                catalog.settle(key);
            }
        }
    }

    /// The acceptance statistics of a namespace, if there are any.
    pub(crate) fn statistics(
        &self,
        namespace: NamespaceId,
    ) -> Result<Option<AcceptanceStatsReply>, LogError> {
        read(&PendingWrites::new(self.log.clone()), namespace)
    }
}
