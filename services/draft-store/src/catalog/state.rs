//! The catalog itself: documents by namespace, and the changes that a commit makes to them.

use std::collections::HashMap;
use std::sync::Arc;

use refrain_protocol::history::{OutputLengths, PromptHash};
use refrain_protocol::{DocumentId, Namespace, NamespaceId};

use crate::catalog::acceptance_statistics::StatisticsSizes;
use crate::catalog::document::{BOUNDARIES_MAX, Document, join};
use crate::catalog::erasures::Erasures;
use crate::catalog::exports::Exports;
use crate::catalog::feed::Feed;
use crate::catalog::groups::Groups;
use crate::catalog::history::{PromptLengths, entry_of, short};
use crate::catalog::recency::{RecencyOrder, StoredSize};
use crate::catalog::replication::Replication;
use crate::catalog::tenants::TenantTable;
use crate::catalog::usage::UsageState;
use crate::record::{DocumentKey, MARKS_DOCUMENTS, StateRecord};
use crate::segments::{CountedDocument, Segments};

/// Approximate bytes of the key and value of records that are not counted one by one.
const STATE_BYTES: u64 = 100;
const TOMBSTONE_BYTES: u64 = 57;
const NAMESPACE_BYTES: u64 = 150;
const SEGMENT_BYTES: u64 = 50;
const MARKS_BYTES: u64 = 80;

/// The documents and the feed of one namespace.
pub(super) struct NamespaceEntry {
    /// `None` if the record of its names was damaged, and nobody has called for the namespace since.
    pub(super) names: Option<Namespace>,
    pub(super) tenant: Arc<str>,
    pub(super) documents: HashMap<DocumentId, Document>,
    pub(super) feed: Feed,
    pub(super) lengths: PromptLengths,
}

impl NamespaceEntry {
    /// The entry of a namespace. A new one belongs to this tenant.
    fn of<'a>(
        namespaces: &'a mut HashMap<NamespaceId, NamespaceEntry>,
        id: NamespaceId,
        tenant: &Arc<str>,
    ) -> &'a mut Self {
        namespaces.entry(id).or_insert_with(|| NamespaceEntry {
            names: None,
            tenant: tenant.clone(),
            documents: HashMap::new(),
            feed: Feed::default(),
            lengths: PromptLengths::default(),
        })
    }
}

/// Sums over all documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) documents: u64,
    pub(crate) tokens: u64,
    pub(crate) bytes: u64,
    /// Namespaces that have documents.
    pub(crate) namespaces: u64,
}

/// Everything the store knows about its documents in memory; see the folder's root.
pub(crate) struct Catalog {
    pub(super) generation: u64,
    /// The last sequence in use. One counter serves all namespaces: the numbers of a feed have gaps, and one
    /// reservation on disk covers them all.
    ///
    /// The record of the last change is replaced only by that of a later one. So a cursor above the highest sequence
    /// on disk means that the disk has lost something.
    pub(super) head: u64,
    /// Sequences up to here are not used any more.
    skipped: u64,
    /// The highest sequence that was on disk.
    loaded_head: u64,
    pub(crate) uses: RecencyOrder,
    documents: u64,
    size: StoredSize,
    /// Namespaces that have documents.
    filled_namespaces: u64,
    pub(super) namespaces: HashMap<NamespaceId, NamespaceEntry>,
    /// Erased documents and scopes.
    pub(crate) erasures: Erasures,
    /// Groups of samples. They are not on disk.
    pub(crate) groups: Groups,
    pub(super) segments: Segments,
    /// Exports in progress. They end when the catalog is read again.
    pub(crate) exports: Exports,
    pub(crate) statistics: StatisticsSizes,
    pub(crate) replication: Replication,
    /// The tenants that gateways keep here.
    pub(crate) tenants: TenantTable,
    pub(crate) usage: UsageState,
}

impl Catalog {
    pub(crate) fn new(generation: u64, head: u64) -> Self {
        Catalog {
            generation,
            head,
            skipped: 0,
            loaded_head: 0,
            uses: RecencyOrder::default(),
            documents: 0,
            size: StoredSize::default(),
            filled_namespaces: 0,
            namespaces: HashMap::new(),
            erasures: Erasures::default(),
            groups: Groups::default(),
            segments: Segments::default(),
            exports: Exports::default(),
            statistics: StatisticsSizes::default(),
            replication: Replication::default(),
            tenants: TenantTable::default(),
            usage: UsageState::default(),
        }
    }

    pub(crate) fn totals(&self) -> Totals {
        Totals {
            documents: self.documents,
            tokens: self.size.tokens,
            bytes: self.size.bytes,
            namespaces: self.filled_namespaces,
        }
    }

    /// Approximate bytes of all records in the log.
    pub(crate) fn live_bytes(&self) -> u64 {
        let tombstones: usize = self
            .namespaces
            .values()
            .map(|entry| entry.feed.tombstones())
            .sum();
        let (documents, bytes) = self.segments.unsealed_totals();
        let sealed_documents = self.documents - documents;
        bytes
            + self.statistics.bytes()
            + self.tenants.bytes()
            + self.usage.bytes()
            + documents * STATE_BYTES
            + self.segments.len() as u64 * SEGMENT_BYTES
            + sealed_documents / u64::from(MARKS_DOCUMENTS) * MARKS_BYTES
            + tombstones as u64 * TOMBSTONE_BYTES
            + self.namespaces.len() as u64 * NAMESPACE_BYTES
    }

    /// Whether a namespace is known, or there is room for one more.
    pub(crate) fn has_room_for(&self, namespace: NamespaceId, namespaces_max: usize) -> bool {
        self.namespaces.len() < namespaces_max || self.namespaces.contains_key(&namespace)
    }

    /// Whether a part of a tenant is known, or its tenant may have one more: all parts of a tenant have a quarter of
    /// the namespaces.
    pub(crate) fn has_room_for_part(
        &self,
        namespace: NamespaceId,
        names: &Namespace,
        namespaces_max: usize,
    ) -> bool {
        let is_same = |entry: &&NamespaceEntry| *entry.tenant == *names.tenant_name();
        !names.is_partition()
            || self.namespaces.contains_key(&namespace)
            || self.namespaces.values().filter(is_same).count() < namespaces_max.div_ceil(4)
    }

    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    /// A number that no other store has.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Skips all sequences up to `sequence`: some of them may have been used, and lost.
    pub(super) fn skip_to(&mut self, sequence: u64) {
        self.skipped = sequence;
        self.loaded_head = self.head;
    }

    /// Whether a sequence was given before the last opening, and the disk has lost it since.
    pub(super) fn is_lost(&self, sequence: u64) -> bool {
        sequence > self.loaded_head && sequence <= self.skipped
    }

    /// The next sequence.
    pub(crate) fn advance(&mut self) -> u64 {
        self.head = self.head.max(self.skipped) + 1;
        self.head
    }

    pub(crate) fn document(&self, key: DocumentKey) -> Option<&Document> {
        self.namespaces
            .get(&key.namespace)?
            .documents
            .get(&key.document)
    }

    pub(crate) fn document_mut(&mut self, key: DocumentKey) -> Option<&mut Document> {
        self.namespaces
            .get_mut(&key.namespace)?
            .documents
            .get_mut(&key.document)
    }

    /// All namespaces, with their names if those are known.
    pub(crate) fn namespaces(&self) -> Vec<(NamespaceId, Option<Namespace>)> {
        let mut all: Vec<_> = self
            .namespaces
            .iter()
            .map(|(id, entry)| (*id, entry.names.clone()))
            .collect();
        all.sort_unstable_by_key(|(id, _)| *id);
        all
    }

    /// The documents of a namespace, in no particular order.
    pub(crate) fn documents(
        &self,
        namespace: NamespaceId,
    ) -> impl Iterator<Item = (DocumentId, &Document)> {
        self.namespaces
            .get(&namespace)
            .into_iter()
            .flat_map(|entry| &entry.documents)
            .map(|(id, document)| (*id, document))
    }

    /// Records the names of a namespace. Returns whether they were unknown before.
    pub(crate) fn introduce(&mut self, id: NamespaceId, names: &Namespace) -> bool {
        // The budget of a tenant is for all of its parts.
        let tenant: Arc<str> = names.tenant_name().into();
        let entry = NamespaceEntry::of(&mut self.namespaces, id, &tenant);
        if entry.names.is_some() {
            return false;
        }
        entry.names = Some(names.clone());
        let before = std::mem::replace(&mut entry.tenant, tenant.clone());
        if before != tenant {
            let documents = entry.documents.iter();
            let documents =
                documents.map(|(document, known)| known.counted(DocumentKey::new(id, *document)));
            self.uses.move_to(&before, &tenant, documents);
        }
        true
    }

    /// A namespace whose names are unknown so far. Its documents count for a tenant without a name.
    pub(super) fn introduce_nameless(&mut self, id: NamespaceId) -> &mut NamespaceEntry {
        NamespaceEntry::of(&mut self.namespaces, id, &Arc::default())
    }

    pub(super) fn tenant_of(&mut self, namespace: NamespaceId) -> Arc<str> {
        self.introduce_nameless(namespace).tenant.clone()
    }

    /// Stores the state of a document, new or known, and makes it the most recently used. `changed_from` is the
    /// position where its text changed, or `None` if followers need not be told.
    pub(crate) fn put(&mut self, key: DocumentKey, state: StateRecord, changed_from: Option<u32>) {
        let entry = self.introduce_nameless(key.namespace);
        let known = entry.documents.get(&key.document);
        let before = known.map(|known| known.counted(key));
        let document = entry
            .documents
            .entry(key.document)
            .or_insert_with(|| Document::new(state));
        let listed = entry_of(document);
        document.state = state;
        entry.lengths.change(listed, entry_of(document));
        if let Some(start) = changed_from {
            let kept = document.boundaries.partition_point(|(_, at)| *at < start);
            for (sequence, _) in document.boundaries.drain(kept..) {
                entry.feed.withdraw(sequence);
            }
            document.boundaries.push((state.sequence, start));
            entry.feed.put(state.sequence, key.document, start);
            if document.boundaries.len() > BOUNDARIES_MAX {
                join(&mut entry.feed, key.document, document, BOUNDARIES_MAX / 2);
            }
        }
        let after = document.counted(key);
        let is_first = before.is_none() && entry.documents.len() == 1;
        self.filled_namespaces += u64::from(is_first);
        self.recount(before, Some(after));
        let tenant = self.tenant_of(key.namespace);
        self.uses.touch(&tenant, key, state.is_static());
    }

    /// Removes a document. This alone does not tell followers; see [`Self::add_tombstone`].
    pub(crate) fn take(&mut self, key: DocumentKey) -> Option<Document> {
        let entry = self.namespaces.get_mut(&key.namespace)?;
        let document = entry.documents.remove(&key.document)?;
        for (sequence, _) in &document.boundaries {
            entry.feed.withdraw(*sequence);
        }
        entry.lengths.change(entry_of(&document), None);
        self.filled_namespaces -= u64::from(entry.documents.is_empty());
        self.recount(Some(document.counted(key)), None);
        let tenant = self.tenant_of(key.namespace);
        self.uses.remove(&tenant, key);
        Some(document)
    }

    /// Brings all sums up to date for a document. `None` stands for a document that does not exist.
    pub(super) fn recount(
        &mut self,
        before: Option<CountedDocument>,
        after: Option<CountedDocument>,
    ) {
        let changes = [(before, false), (after, true)];
        for (counted, comes) in changes {
            let Some(counted) = counted else { continue };
            let tenant = self.tenant_of(counted.key.namespace);
            self.uses.size_mut(&tenant).count(counted, comes);
            self.segments.count(counted, comes);
            self.size.count(counted, comes);
        }
        self.documents = self.documents + u64::from(after.is_some()) - u64::from(before.is_some());
    }

    /// Records the prompt of a document.
    pub(crate) fn set_prompt(&mut self, key: DocumentKey, prompt: PromptHash) {
        let Some(entry) = self.namespaces.get_mut(&key.namespace) else {
            return;
        };
        if let Some(document) = entry.documents.get_mut(&key.document) {
            let before = entry_of(document);
            document.prompt = short(prompt);
            entry.lengths.change(before, entry_of(document));
        }
    }

    /// The lengths of the newest complete outputs to a prompt.
    pub(crate) fn output_lengths(
        &self,
        namespace: NamespaceId,
        prompt: PromptHash,
    ) -> OutputLengths {
        let entry = self.namespaces.get(&namespace);
        entry.map_or_else(OutputLengths::default, |entry| entry.lengths.newest(prompt))
    }

    /// Tells followers that a document is gone, as the change numbered `sequence`.
    pub(crate) fn add_tombstone(&mut self, key: DocumentKey, sequence: u64) {
        self.introduce_nameless(key.namespace)
            .feed
            .add_tombstone(sequence, key.document);
        let is_gone = self.document(key).is_none();
        self.groups.depart(key, sequence, is_gone);
    }

    /// The feed of a namespace, to be changed.
    pub(crate) fn feed_mut(&mut self, namespace: NamespaceId) -> &mut Feed {
        &mut self.introduce_nameless(namespace).feed
    }

    /// Makes a document the most recently used. Returns whether its stored time of use is older than `before_ms`.
    pub(crate) fn touch(&mut self, key: DocumentKey, now_ms: u64, before_ms: u64) -> bool {
        let Some(document) = self.document_mut(key) else {
            return false;
        };
        document.state.used_ms = now_ms;
        let stale = document.used_ms_stored < before_ms;
        let is_static = document.state.is_static();
        let tenant = self.tenant_of(key.namespace);
        self.uses.touch(&tenant, key, is_static);
        stale
    }

    /// Joins a document's feed entries into the last one. A follower that has all but the last entry gets the
    /// document again as a whole; nobody misses anything.
    pub(crate) fn settle(&mut self, key: DocumentKey) {
        if let Some(entry) = self.namespaces.get_mut(&key.namespace)
            && let Some(document) = entry.documents.get_mut(&key.document)
        {
            let count = document.boundaries.len();
            join(&mut entry.feed, key.document, document, count);
        }
    }

    /// When a document was last used, in Unix milliseconds.
    pub(crate) fn last_used_ms(&self) -> Option<u64> {
        let documents = self
            .namespaces
            .values()
            .flat_map(|entry| entry.documents.values());
        documents.map(|known| known.state.used_ms).max()
    }

    /// Documents first stored before `before_ms`, at most `limit`, and the earliest time of the others.
    pub(crate) fn expired(&self, before_ms: u64, limit: usize) -> (Vec<DocumentKey>, Option<u64>) {
        let mut expired = Vec::new();
        let mut earliest: Option<u64> = None;
        for (namespace, entry) in &self.namespaces {
            for (document, known) in &entry.documents {
                let stored_ms = known.state.stored_ms;
                if known.state.is_static() {
                    continue;
                }
                if stored_ms < before_ms && expired.len() < limit {
                    expired.push(DocumentKey::new(*namespace, *document));
                } else {
                    earliest = Some(earliest.map_or(stored_ms, |earliest| earliest.min(stored_ms)));
                }
            }
        }
        (expired, earliest)
    }
}
