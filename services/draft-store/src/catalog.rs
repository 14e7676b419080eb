//! What is known of every document, in memory: the feed's order, the order of use, and the sums that budgets
//! are held against. The text itself stays on disk.
//!
//! Some 350 bytes per document; a store of ten million documents of 500 tokens needs 3.5 GB here and is
//! past what one process of this design should hold.

mod feed;
mod load;

use std::collections::HashMap;
use std::sync::Arc;

use lru::LruCache;
use refrain_protocol::document::FeedCursor;
use refrain_protocol::{DocumentId, Namespace, NamespaceId};

pub(crate) use feed::{Change, Feed};
pub(crate) use load::{Loaded, load};

use crate::placement::Text;
use crate::record::{DocumentKey, StateRecord};

/// Most feed entries of one document. A document that grows in more steps gives up the oldest half of its
/// boundaries; who is behind them gets that part again, whole.
const BOUNDARIES_MAX: usize = 64;

/// One document.
#[derive(Clone, Debug)]
pub(crate) struct Document {
    pub(crate) state: StateRecord,
    /// `used_ms` as stored; the order of use is written only now and then.
    pub(crate) used_ms_stored: u64,
    /// Feed entries, oldest first: (sequence, start). An entry reaches to the start of the next one, the
    /// last one to the end; the last one's sequence is `state.sequence`. Sequences and starts both grow, so
    /// a follower that reads in order of sequence never meets a gap.
    boundaries: Vec<(u64, u32)>,
}

impl Document {
    pub(crate) fn new(state: StateRecord) -> Self {
        Document {
            used_ms_stored: state.used_ms,
            state,
            boundaries: Vec::new(),
        }
    }

    pub(crate) fn text(&self) -> Text {
        Text {
            epoch: self.state.epoch,
            epoch_start: self.state.epoch_start,
            len: self.state.len,
        }
    }

    /// Whether it has more feed entries than one.
    pub(crate) fn is_split(&self) -> bool {
        self.boundaries.len() > 1
    }
}

/// One namespace.
struct NamespaceEntry {
    /// `None` when its record was damaged and nobody has called for it since.
    names: Option<Namespace>,
    tenant: Arc<str>,
    documents: HashMap<DocumentId, Document>,
    feed: Feed,
}

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

/// Sums over all documents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) documents: u64,
    pub(crate) tokens: u64,
    pub(crate) bytes: u64,
    /// Namespaces that have documents.
    pub(crate) namespaces: u64,
}

/// See the module.
pub(crate) struct Catalog {
    generation: u64,
    /// The last sequence given out. One counter for all namespaces: a feed's numbers have gaps, and one
    /// reservation on disk covers them all.
    ///
    /// The record of the last change is replaced by none but that of a later one. So after a restart a
    /// cursor past the highest sequence on disk means that the disk has lost something.
    head: u64,
    /// Sequences up to here are not given out any more.
    skipped: u64,
    uses: u64,
    totals: Totals,
    namespaces: HashMap<NamespaceId, NamespaceEntry>,
    tenants: HashMap<Arc<str>, Tenant>,
}

impl Catalog {
    pub(crate) fn new(generation: u64, head: u64) -> Self {
        Catalog {
            generation,
            head,
            skipped: 0,
            uses: 0,
            totals: Totals::default(),
            namespaces: HashMap::new(),
            tenants: HashMap::new(),
        }
    }

    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// Whether a namespace is known, or one more may be.
    pub(crate) fn has_room_for(&self, namespace: NamespaceId, namespaces_max: usize) -> bool {
        self.namespaces.len() < namespaces_max || self.namespaces.contains_key(&namespace)
    }

    pub(crate) fn head(&self) -> u64 {
        self.head
    }

    /// Gives out no sequence up to `sequence` any more: some of them may have been, and lost.
    fn skip_to(&mut self, sequence: u64) {
        self.skipped = sequence;
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

    /// Makes a namespace known by name. Says whether its names were not known before.
    pub(crate) fn introduce(&mut self, id: NamespaceId, names: &Namespace) -> bool {
        let tenant: Arc<str> = names.tenant.as_str().into();
        let entry = self.namespaces.entry(id).or_insert_with(|| NamespaceEntry {
            names: None,
            tenant: tenant.clone(),
            documents: HashMap::new(),
            feed: Feed::default(),
        });
        if entry.names.is_some() {
            return false;
        }
        entry.names = Some(names.clone());
        let before = std::mem::replace(&mut entry.tenant, tenant.clone());
        if before != tenant {
            self.move_tenant(id, &before, &tenant);
        }
        true
    }

    /// A namespace whose names are not known (yet): its documents count for a tenant without a name.
    fn introduce_nameless(&mut self, id: NamespaceId) -> &mut NamespaceEntry {
        self.namespaces.entry(id).or_insert_with(|| NamespaceEntry {
            names: None,
            tenant: "".into(),
            documents: HashMap::new(),
            feed: Feed::default(),
        })
    }

    fn move_tenant(&mut self, id: NamespaceId, from: &Arc<str>, to: &Arc<str>) {
        let Some(entry) = self.namespaces.get(&id) else {
            return;
        };
        let mut uses = Vec::new();
        let source = self.tenants.entry(from.clone()).or_default();
        for (document, known) in &entry.documents {
            let key = DocumentKey {
                namespace: id,
                document: *document,
            };
            if let Some(stamp) = source.order.pop(&key) {
                source.tokens -= u64::from(known.state.len);
                uses.push((stamp, key, u64::from(known.state.len)));
            }
        }
        uses.sort_unstable();
        let target = self.tenants.entry(to.clone()).or_default();
        for (stamp, key, tokens) in uses {
            target.tokens += tokens;
            target.order.push(key, stamp);
        }
    }

    fn tenant_of(&mut self, namespace: NamespaceId) -> &mut Tenant {
        let name = self.introduce_nameless(namespace).tenant.clone();
        self.tenants.entry(name).or_default()
    }

    /// Puts in the state of a document, new or known, and makes it the most recently used. `changed_from` is
    /// the position where its text changed; `None` when followers need not hear of it.
    pub(crate) fn put(&mut self, key: DocumentKey, state: StateRecord, changed_from: Option<u32>) {
        let entry = self.introduce_nameless(key.namespace);
        let before = entry.documents.get(&key.document).map(|known| known.state);
        let document = entry
            .documents
            .entry(key.document)
            .or_insert_with(|| Document::new(state));
        document.state = state;
        if let Some(start) = changed_from {
            while document
                .boundaries
                .last()
                .is_some_and(|(_, at)| *at >= start)
            {
                if let Some((sequence, _)) = document.boundaries.pop() {
                    entry.feed.withdraw(sequence);
                }
            }
            document.boundaries.push((state.sequence, start));
            entry.feed.put(state.sequence, key.document, start);
            if document.boundaries.len() > BOUNDARIES_MAX {
                join(&mut entry.feed, key.document, document, BOUNDARIES_MAX / 2);
            }
        }
        let (tokens, bytes) = before.map_or((0, 0), |state| (state.len, state.bytes));
        self.totals.namespaces += u64::from(before.is_none() && entry.documents.len() == 1);
        self.totals.documents += u64::from(before.is_none());
        self.totals.tokens = self.totals.tokens + u64::from(state.len) - u64::from(tokens);
        self.totals.bytes = self.totals.bytes + u64::from(state.bytes) - u64::from(bytes);
        self.uses += 1;
        let stamp = self.uses;
        let tenant = self.tenant_of(key.namespace);
        tenant.tokens = tenant.tokens + u64::from(state.len) - u64::from(tokens);
        tenant.order.push(key, stamp);
    }

    /// Takes a document out. Followers do not hear of it by this alone; see [`Self::bury`].
    pub(crate) fn take(&mut self, key: DocumentKey) -> Option<Document> {
        let entry = self.namespaces.get_mut(&key.namespace)?;
        let document = entry.documents.remove(&key.document)?;
        for (sequence, _) in &document.boundaries {
            entry.feed.withdraw(*sequence);
        }
        self.totals.namespaces -= u64::from(entry.documents.is_empty());
        self.totals.documents -= 1;
        self.totals.tokens -= u64::from(document.state.len);
        self.totals.bytes -= u64::from(document.state.bytes);
        let tenant = self.tenant_of(key.namespace);
        tenant.tokens -= u64::from(document.state.len);
        tenant.order.pop(&key);
        Some(document)
    }

    /// Tells followers that a document is gone, as the change numbered `sequence`.
    pub(crate) fn bury(&mut self, key: DocumentKey, sequence: u64) {
        self.introduce_nameless(key.namespace)
            .feed
            .bury(sequence, key.document);
    }

    /// The feed of a namespace, for what is stored of it.
    pub(crate) fn feed_mut(&mut self, namespace: NamespaceId) -> &mut Feed {
        &mut self.introduce_nameless(namespace).feed
    }

    /// Makes a document the most recently used. Says whether the stored time of use is older than `before_ms`
    /// now.
    pub(crate) fn touch(&mut self, key: DocumentKey, now_ms: u64, before_ms: u64) -> bool {
        let Some(document) = self.document_mut(key) else {
            return false;
        };
        document.state.used_ms = now_ms;
        let stale = document.used_ms_stored < before_ms;
        self.uses += 1;
        let stamp = self.uses;
        self.tenant_of(key.namespace).order.push(key, stamp);
        stale
    }

    /// Joins a document's feed entries into the last one. Who has all of it but the last entry gets it once
    /// more, whole; nobody misses anything.
    pub(crate) fn settle(&mut self, key: DocumentKey) {
        if let Some(entry) = self.namespaces.get_mut(&key.namespace)
            && let Some(document) = entry.documents.get_mut(&key.document)
        {
            let count = document.boundaries.len();
            join(&mut entry.feed, key.document, document, count);
        }
    }

    /// The least recently used document of a tenant that holds more than `tokens_max`.
    pub(crate) fn tenant_victim(&self, tokens_max: u64) -> Option<DocumentKey> {
        let tenant = self
            .tenants
            .values()
            .find(|tenant| tenant.tokens > tokens_max)?;
        tenant.order.peek_lru().map(|(key, _)| *key)
    }

    /// The least recently used document of all.
    pub(crate) fn oldest(&self) -> Option<DocumentKey> {
        // One look per tenant instead of a second list of all documents (84 bytes each). A store has some
        // thousand tenants at most, and evicts far more seldom than it appends.
        self.tenants
            .values()
            .filter_map(|tenant| tenant.order.peek_lru())
            .min_by_key(|(_, stamp)| **stamp)
            .map(|(key, _)| *key)
    }

    /// Documents first stored before `before_ms`, at most `limit`, and the earliest time of the others.
    pub(crate) fn expired(&self, before_ms: u64, limit: usize) -> (Vec<DocumentKey>, Option<u64>) {
        let mut expired = Vec::new();
        let mut earliest: Option<u64> = None;
        for (namespace, entry) in &self.namespaces {
            for (document, known) in &entry.documents {
                let stored_ms = known.state.stored_ms;
                if stored_ms < before_ms && expired.len() < limit {
                    expired.push(DocumentKey {
                        namespace: *namespace,
                        document: *document,
                    });
                } else {
                    earliest = Some(earliest.map_or(stored_ms, |earliest| earliest.min(stored_ms)));
                }
            }
        }
        (expired, earliest)
    }

    /// The first change of a namespace after `sequence`.
    pub(crate) fn next_change(&self, namespace: NamespaceId, after: u64) -> Option<(u64, Change)> {
        let entry = self.namespaces.get(&namespace)?;
        let (sequence, document, start) = entry.feed.after(after)?;
        let Some(start) = start else {
            return Some((sequence, Change::Removed(document)));
        };
        let known = entry.documents.get(&document)?;
        let at = known
            .boundaries
            .partition_point(|(other, _)| *other <= sequence);
        let (end, last) = match known.boundaries.get(at) {
            Some((_, next)) => (*next, false),
            None => (known.state.len, true),
        };
        Some((
            sequence,
            Change::Range {
                document,
                start,
                end,
                last,
            },
        ))
    }

    /// The cursor of a position in a namespace's feed.
    pub(crate) fn cursor(&self, namespace: NamespaceId, sequence: u64) -> FeedCursor {
        let record = self
            .namespaces
            .get(&namespace)
            .map(|entry| entry.feed.record())
            .unwrap_or_default();
        feed::cursor(self.generation, record, sequence)
    }

    /// The position of a cursor, `None` when it means nothing here.
    pub(crate) fn position(&self, namespace: NamespaceId, cursor: FeedCursor) -> Option<u64> {
        let record = self
            .namespaces
            .get(&namespace)
            .map(|entry| entry.feed.record())
            .unwrap_or_default();
        feed::position(self.generation, record, self.head, cursor)
    }
}

/// Joins the first `count` feed entries of a document into the last of them.
fn join(feed: &mut Feed, id: DocumentId, document: &mut Document, count: usize) {
    if count < 2 {
        return;
    }
    for (sequence, _) in document.boundaries.drain(..count - 1) {
        feed.withdraw(sequence);
    }
    if let Some(first) = document.boundaries.first_mut() {
        first.1 = 0;
        feed.put(first.0, id, 0);
    }
    document.boundaries.shrink_to_fit();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(tenant: &str) -> Namespace {
        Namespace {
            tenant: tenant.into(),
            model: "m".into(),
            tokenizer: "t".into(),
        }
    }

    fn key(namespace: NamespaceId, document: u128) -> DocumentKey {
        DocumentKey {
            namespace,
            document: DocumentId(document),
        }
    }

    fn state(catalog: &mut Catalog, len: u32) -> StateRecord {
        StateRecord {
            epoch: 1,
            epoch_start: 0,
            len,
            finish: 0,
            sequence: catalog.advance(),
            stored_ms: 0,
            used_ms: 0,
            tail_start: 0,
            tail_pieces: 0,
            bytes: len,
        }
    }

    fn changes(catalog: &Catalog, namespace: NamespaceId, mut after: u64) -> Vec<(u32, u32, bool)> {
        let mut seen = Vec::new();
        while let Some((sequence, change)) = catalog.next_change(namespace, after) {
            after = sequence;
            if let Change::Range {
                start, end, last, ..
            } = change
            {
                seen.push((start, end, last));
            }
        }
        seen
    }

    #[test]
    fn a_growing_document_is_told_in_steps_and_settles_into_one() {
        let mut catalog = Catalog::new(1, 0);
        let id = names("a").id();
        catalog.introduce(id, &names("a"));
        for len in [10, 20, 30] {
            let state = state(&mut catalog, len);
            catalog.put(key(id, 1), state, Some(len - 10));
        }
        assert_eq!(
            changes(&catalog, id, 0),
            [(0, 10, false), (10, 20, false), (20, 30, true)]
        );
        assert_eq!(changes(&catalog, id, 2), [(20, 30, true)]);
        let cut = state(&mut catalog, 18);
        catalog.put(key(id, 1), cut, Some(15));
        assert_eq!(
            changes(&catalog, id, 0),
            [(0, 10, false), (10, 15, false), (15, 18, true)]
        );
        catalog.settle(key(id, 1));
        assert_eq!(changes(&catalog, id, 0), [(0, 18, true)]);
        assert_eq!(changes(&catalog, id, 4), []);
        for step in 0..200 {
            let state = state(&mut catalog, 19 + step);
            catalog.put(key(id, 1), state, Some(18 + step));
        }
        let seen = changes(&catalog, id, 0);
        assert!(seen.len() <= BOUNDARIES_MAX);
        assert!(
            seen.windows(2).all(|pair| pair[0].1 == pair[1].0),
            "no gaps: {seen:?}"
        );
    }

    #[test]
    fn victims_are_the_least_recently_used() {
        let mut catalog = Catalog::new(1, 0);
        let (a, b) = (names("a").id(), names("b").id());
        catalog.introduce(a, &names("a"));
        catalog.introduce(b, &names("b"));
        for (namespace, document) in [(a, 1), (b, 2), (a, 3)] {
            let state = state(&mut catalog, 10);
            catalog.put(key(namespace, document), state, Some(0));
        }
        assert_eq!(catalog.oldest(), Some(key(a, 1)));
        catalog.touch(key(a, 1), 5, 0);
        assert_eq!(catalog.oldest(), Some(key(b, 2)));
        assert_eq!(catalog.tenant_victim(15), Some(key(a, 3)));
        assert_eq!(catalog.tenant_victim(20), None);
        catalog.take(key(b, 2));
        assert_eq!(
            catalog.totals(),
            Totals {
                documents: 2,
                tokens: 20,
                bytes: 20,
                namespaces: 1
            }
        );
    }

    #[test]
    fn a_nameless_namespace_gets_its_tenant_back() {
        let mut catalog = Catalog::new(1, 0);
        let id = names("a").id();
        let state = state(&mut catalog, 10);
        catalog.put(key(id, 1), state, Some(0));
        assert_eq!(catalog.tenant_victim(5), Some(key(id, 1)));
        assert!(catalog.introduce(id, &names("a")));
        assert!(!catalog.introduce(id, &names("a")));
        assert_eq!(&*catalog.namespaces[&id].tenant, "a");
        assert_eq!(catalog.tenants["a"].tokens, 10);
        assert_eq!(catalog.tenants[""].tokens, 0);
    }
}
