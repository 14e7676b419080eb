//! The single writer: takes updates, removals and time, and turns each into one durable commit.
//!
//! The core has no clock, no threads and no actor. It does have the log: what a commit does to the catalog
//! is seen only by who gets the catalog's lock after the commit is durable. After an error both are thrown
//! away and read anew from disk, so nobody ever sees a change that a crash could take back.

pub(crate) mod actor;
pub(crate) mod call;
mod chances;
mod edit;
mod mirror;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::Arc;

use refrain_protocol::document::DocumentUpdate;
use refrain_protocol::{Namespace, NamespaceId};

use crate::catalog::{Catalog, GroupKey};
use crate::config::DraftStoreConfig;
use crate::log::{Batch, LogError, RecordLog};
use crate::record::{DocumentKey, ErasureRecord, SegmentId, StoreRecord};
use crate::segments::Product;
pub(crate) use chances::Told;
use edit::{Edit, Limits};

/// Documents that wait to come to rest at most; past it the oldest are settled at once.
const SETTLING_MAX: usize = 100_000;
/// Times of use that wait to be written at most, and are written per tick.
const USES_MAX: usize = 4_096;
const HOUR_MS: u64 = 3600 * 1000;
const DAY_MS: u64 = 24 * HOUR_MS;
/// How long after its end a document may be sent again by who was not answered.
const REPEATS_MS: u64 = HOUR_MS;

/// Updates of one caller.
#[derive(Clone, Debug)]
pub(crate) struct Append {
    pub(crate) namespace: NamespaceId,
    pub(crate) names: Namespace,
    pub(crate) updates: Vec<DocumentUpdate>,
    pub(crate) by: By,
}

/// Who stores updates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// A worker, which does not know what was erased.
    Worker,
    /// An operator, who wants them stored whatever was erased before; with `is_static`, for good: no budget and no age
    /// removes them.
    Operator { is_static: bool },
}

/// A group as it is registered.
#[derive(Clone, Debug)]
pub(crate) struct Registration {
    pub(crate) group: GroupKey,
    pub(crate) ttl_ms: u64,
    pub(crate) weight_version: u64,
}

/// Why documents were removed; the label of the evictions metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removal {
    Tokens,
    Bytes,
    TenantTokens,
    TenantBytes,
    Age,
    Damage,
    Erased,
}

impl Removal {
    pub(crate) const ALL: [Removal; 7] = [
        Removal::Tokens,
        Removal::Bytes,
        Removal::TenantTokens,
        Removal::TenantBytes,
        Removal::Age,
        Removal::Damage,
        Removal::Erased,
    ];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Removal::Tokens => "tokens",
            Removal::Bytes => "bytes",
            Removal::TenantTokens => "tenant_tokens",
            Removal::TenantBytes => "tenant_bytes",
            Removal::Age => "age",
            Removal::Damage => "damage",
            Removal::Erased => "erased",
        }
    }
}

/// What a commit did.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Per append, per update: the length of the document. `None`: one namespace too many.
    pub(crate) lengths: Vec<Option<Vec<u32>>>,
    /// Per worker that told what drafts are worth: the tables after it. `None`: one namespace too many.
    pub(crate) tables: Vec<Option<Vec<u8>>>,
    /// Namespaces whose feeds went on.
    pub(crate) changed: BTreeSet<NamespaceId>,
    pub(crate) appended_tokens: u64,
    pub(crate) removed: Vec<(DocumentKey, Removal)>,
    /// Updates that a group had no room for.
    pub(crate) group_rejections: u64,
    /// More documents are over a budget or too old than one step may remove.
    pub(crate) more: bool,
    /// The sequence reservation moved: the manifest is to be written again.
    pub(crate) reserved: bool,
    /// Segments that nothing is left of: their files are to be deleted.
    pub(crate) emptied: Vec<SegmentId>,
}

/// See the module.
pub(crate) struct Core {
    log: Arc<dyn RecordLog>,
    /// A log that is about to replace `log`: it gets every commit, too.
    mirror: Option<Arc<dyn RecordLog>>,
    mirrored_bytes: u64,
    config: DraftStoreConfig,
    store: StoreRecord,
    /// Documents with several feed entries, and since when.
    settling: VecDeque<(DocumentKey, u64)>,
    /// Touched documents whose time of use is to be written.
    uses: HashSet<DocumentKey>,
    /// No document was stored before this.
    earliest_ms: u64,
    /// What recovery found, for the first commit.
    repairs: Batch,
    damaged: Vec<DocumentKey>,
    /// Documents for which the log's index was built anew: what is unreadable of them now is lost.
    reread: Arc<HashSet<DocumentKey>>,
}

impl Core {
    pub(crate) fn new(
        log: Arc<dyn RecordLog>,
        config: DraftStoreConfig,
        store: StoreRecord,
        repairs: Batch,
        damaged: Vec<DocumentKey>,
    ) -> Self {
        Core {
            log,
            mirror: None,
            mirrored_bytes: 0,
            config,
            store,
            settling: VecDeque::new(),
            uses: HashSet::new(),
            earliest_ms: 0,
            repairs,
            damaged,
            reread: Arc::default(),
        }
    }

    /// Names the documents for which the log's index was built anew.
    pub(crate) fn set_reread(&mut self, reread: Arc<HashSet<DocumentKey>>) {
        self.reread = reread;
    }

    /// Identity and reservation, for the manifest.
    pub(crate) fn store(&self) -> StoreRecord {
        self.store
    }

    /// Stores updates of any number of callers, and what others told of drafts, in one commit. Durable when it returns.
    pub(crate) fn take_in(
        &mut self,
        catalog: &mut Catalog,
        appends: &[Append],
        told: &[Told],
        now_ms: u64,
    ) -> Result<Outcome, LogError> {
        let namespaces_max = self.config.namespaces_max;
        let mut edit = self.edit(catalog, now_ms);
        for told in told {
            let has_room = edit.catalog.has_room_for(told.namespace, namespaces_max);
            let tables = match has_room {
                true => Some(edit.tell_chances(told)?),
                false => None,
            };
            edit.outcome.tables.push(tables);
        }
        for append in appends {
            if !edit.catalog.has_room_for(append.namespace, namespaces_max) {
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

    /// Removes documents, those that are there.
    pub(crate) fn remove(
        &mut self,
        catalog: &mut Catalog,
        keys: &[DocumentKey],
        removal: Removal,
        now_ms: u64,
    ) -> Result<Outcome, LogError> {
        let mut edit = self.edit(catalog, now_ms);
        for key in keys {
            let Some(document) = edit.catalog.document(*key) else {
                continue;
            };
            let state = document.state;
            edit.remove(*key, removal)?;
            // A worker may be writing it, or repeat what it was not answered.
            let awaited = state.finish == 0 || state.used_ms + REPEATS_MS > now_ms;
            if removal == Removal::Erased && awaited {
                edit.remember_erased(*key);
            }
        }
        self.commit(edit, now_ms)
    }

    /// Remembers an erasure: what it hits is refused from now on. `None` when no more can be remembered.
    pub(crate) fn mark(
        &mut self,
        catalog: &mut Catalog,
        mut mark: ErasureRecord,
        now_ms: u64,
    ) -> Result<(Option<ErasureRecord>, Outcome), LogError> {
        let erasures = catalog.erasures();
        if erasures.marks() >= self.config.erasures_max && !erasures.has_mark(mark.id()) {
            return Ok((None, Outcome::default()));
        }
        mark.at_ms = now_ms;
        catalog.end_exports(&mark);
        let mut edit = self.edit(catalog, now_ms);
        edit.erase_chances(|names| mark.hits_namespace(names));
        edit.mark(mark.clone());
        Ok((Some(mark), self.commit(edit, now_ms)?))
    }

    /// Marks documents as used. Written later, and only when the stored time is old.
    pub(crate) fn touch(&mut self, catalog: &mut Catalog, keys: &[DocumentKey], now_ms: u64) {
        let before_ms = now_ms.saturating_sub(self.config.use_interval_s * 1000);
        for key in keys {
            // Past the bound a restart loses some of the order, no more.
            if catalog.touch(*key, now_ms, before_ms) && self.uses.len() < USES_MAX {
                self.uses.insert(*key);
            }
        }
    }

    /// What time brings: repairs, ages, budgets, documents at rest, times of use.
    pub(crate) fn tick(&mut self, catalog: &mut Catalog, now_ms: u64) -> Result<Outcome, LogError> {
        self.settle(catalog, now_ms);
        catalog.groups_mut().expire(now_ms);
        let repairs = std::mem::take(&mut self.repairs);
        let damaged = std::mem::take(&mut self.damaged);
        let uses = std::mem::take(&mut self.uses);
        let mut edit = self.edit(catalog, now_ms);
        edit.adopt(repairs);
        for key in damaged {
            edit.remove(key, Removal::Damage)?;
        }
        for key in uses {
            edit.write_state(key);
        }
        edit.forget_erased(
            now_ms.saturating_sub(self.config.erasure_memory_h * HOUR_MS),
            self.config.erased_documents_max,
            self.config.eviction_step,
        );
        let mut edit = self.without_expired(edit, now_ms)?;
        self.within_budgets(&mut edit)?;
        self.commit(edit, now_ms)
    }

    /// Registers a group, or renews it. `false` when no more can be known.
    pub(crate) fn register_group(
        &mut self,
        catalog: &mut Catalog,
        registration: Registration,
        now_ms: u64,
    ) -> Result<(bool, Outcome), LogError> {
        let groups = catalog.groups_mut();
        groups.expire(now_ms);
        if groups.len() >= self.config.groups_max && !groups.contains(&registration.group) {
            return Ok((false, Outcome::default()));
        }
        let mut edit = self.edit(catalog, now_ms);
        edit.register_group(registration);
        Ok((true, self.commit(edit, now_ms)?))
    }

    /// Names a segment that was made.
    pub(crate) fn install(
        &mut self,
        catalog: &mut Catalog,
        product: Product,
        now_ms: u64,
    ) -> Result<Outcome, LogError> {
        let mut edit = self.edit(catalog, now_ms);
        for key in &product.damaged {
            if edit.catalog.document(*key).is_some() {
                edit.remove_damaged(*key)?;
            }
        }
        edit.install(product)?;
        self.commit(edit, now_ms)
    }

    fn edit<'a>(&self, catalog: &'a mut Catalog, now_ms: u64) -> Edit<'a> {
        Edit::new(
            catalog,
            self.log.clone(),
            self.store,
            Limits {
                reread: self.reread.clone(),
                tombstones_max: self.config.tombstones_max,
                group_tokens_max: self.config.group_tokens_max,
            },
            now_ms,
        )
    }

    fn commit(&mut self, edit: Edit<'_>, now_ms: u64) -> Result<Outcome, LogError> {
        let (mut batch, store, split, mut outcome) = edit.finish()?;
        if !batch.is_empty() {
            self.log.commit(&batch)?;
            self.mirror(&mut batch);
        }
        outcome.reserved = store != self.store;
        self.store = store;
        self.settling
            .extend(split.into_iter().map(|key| (key, now_ms)));
        Ok(outcome)
    }

    /// Removes the least recently used documents while a budget is exceeded, at most a step.
    fn within_budgets(&self, edit: &mut Edit<'_>) -> Result<(), LogError> {
        let config = &self.config;
        while let Some((key, removal)) = {
            let totals = edit.catalog.totals();
            let quota = |tenant: &str| config.quota(tenant);
            if let Some((key, in_tokens)) = edit.catalog.tenant_victim(quota) {
                let removal = match in_tokens {
                    true => Removal::TenantTokens,
                    false => Removal::TenantBytes,
                };
                Some((key, removal))
            } else if totals.tokens > config.tokens_max {
                edit.catalog.oldest().map(|key| (key, Removal::Tokens))
            } else if totals.bytes > config.bytes_max {
                edit.catalog.oldest().map(|key| (key, Removal::Bytes))
            } else {
                None
            }
        } {
            if edit.outcome.removed.len() >= config.eviction_step {
                edit.outcome.more = true;
                break;
            }
            edit.remove(key, removal)?;
        }
        Ok(())
    }

    fn without_expired<'a>(
        &mut self,
        mut edit: Edit<'a>,
        now_ms: u64,
    ) -> Result<Edit<'a>, LogError> {
        let before_ms = now_ms.saturating_sub(u64::from(self.config.retention_days) * DAY_MS);
        // A look at all documents, but only when one of them is due.
        if self.earliest_ms < before_ms {
            let room = self
                .config
                .eviction_step
                .saturating_sub(edit.outcome.removed.len());
            let (expired, earliest_ms) = edit.catalog.expired(before_ms, room);
            for key in expired {
                edit.remove(key, Removal::Age)?;
            }
            self.earliest_ms = earliest_ms.unwrap_or(now_ms);
            edit.outcome.more |= self.earliest_ms < before_ms;
        }
        Ok(edit)
    }

    fn settle(&mut self, catalog: &mut Catalog, now_ms: u64) {
        let settle_ms = self.config.settle_s * 1000;
        for _ in 0..self.settling.len() {
            let overfull = self.settling.len() > SETTLING_MAX;
            let Some((key, since_ms)) = self.settling.front().copied() else {
                break;
            };
            if since_ms + settle_ms > now_ms && !overfull {
                break;
            }
            self.settling.pop_front();
            let Some(document) = catalog.document(key) else {
                continue;
            };
            let running = document.state.finish == 0
                && document.state.used_ms.saturating_add(settle_ms) > now_ms;
            if running && !overfull {
                self.settling.push_back((key, now_ms));
            } else {
                catalog.settle(key);
            }
        }
    }
}
