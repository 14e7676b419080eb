//! The worker's copy of the drafts: one suffix index per namespace, fed by the requests that run here and
//! by the draft store's feed, which carries everybody else's and survives restarts.
//!
//! The decode loop reads and appends under a lock that is held for microseconds; the follower applies news
//! in small pieces so that it never holds it longer.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use refrain_clients::DraftStore;
use refrain_protocol::document::{
    DocumentUpdate, FeedCursor, FeedEvent, FollowReply, FollowRequest,
};
use refrain_protocol::{DocumentId, NamespaceId, SignedNamespace};
use refrain_suffix_index::{DocumentKey, Index, IndexConfig, IndexError};
use tokio::task::JoinHandle;

use crate::config::MemoryConfig;
use crate::metrics::WorkerMetrics;

/// What can be drafted from in one namespace. No clock, no I/O.
pub(crate) struct Drafts {
    pub(crate) index: Index,
    epochs: HashMap<DocumentId, u64>,
    /// Documents in the order in which they began.
    order: VecDeque<DocumentId>,
    /// Documents of requests that run here: never evicted.
    running: HashSet<DocumentId>,
    tokens_max: u64,
}

impl Drafts {
    pub(crate) fn new(config: IndexConfig, tokens_max: u64) -> Self {
        Drafts {
            index: Index::new(config),
            epochs: HashMap::new(),
            order: VecDeque::new(),
            running: HashSet::new(),
            tokens_max,
        }
    }

    /// Takes a piece of a document from whatever side it comes first: overlaps are cut off, a higher epoch
    /// may shorten, an older one and a piece after a gap are ignored.
    ///
    /// # Errors
    /// The index has no room for more states.
    pub(crate) fn merge(&mut self, update: &DocumentUpdate) -> Result<(), IndexError> {
        let key = DocumentKey(update.document.0);
        let known = self.epochs.get(&update.document).copied();
        if known.is_some_and(|epoch| update.epoch < epoch) {
            return Ok(());
        }
        if !self.index.contains(key) {
            self.index.open(key, &update.head.left_context)?;
            self.order.push_back(update.document);
        }
        let mut len = self.index.len_of(key).unwrap_or(0);
        if known.is_some_and(|epoch| update.epoch > epoch) && update.prev_len < len {
            self.index.shorten(key, update.prev_len)?;
            len = update.prev_len;
        }
        self.epochs.insert(update.document, update.epoch);
        if let Some(new) = len
            .checked_sub(update.prev_len)
            .and_then(|overlap| update.tokens.get(overlap as usize..))
        {
            self.index.append(key, new)?;
        }
        Ok(())
    }

    pub(crate) fn remove(&mut self, documents: &[DocumentId]) {
        let keys: Vec<DocumentKey> = documents
            .iter()
            .map(|document| DocumentKey(document.0))
            .collect();
        self.index.remove(&keys);
        for document in documents {
            self.epochs.remove(document);
        }
        let epochs = &self.epochs;
        self.order.retain(|document| epochs.contains_key(document));
    }

    /// Forgets all but what runs here.
    fn reset(&mut self) {
        let others: Vec<DocumentId> = self
            .order
            .iter()
            .copied()
            .filter(|document| !self.running.contains(document))
            .collect();
        self.remove(&others);
    }

    /// Lets the oldest documents go until the limit holds. Returns how many went.
    fn evict(&mut self) -> usize {
        let mut over = self.index.tokens().saturating_sub(self.tokens_max);
        let mut gone = Vec::new();
        for document in &self.order {
            if over == 0 {
                break;
            }
            if !self.running.contains(document) {
                over = over.saturating_sub(u64::from(
                    self.index.len_of(DocumentKey(document.0)).unwrap_or(0),
                ));
                gone.push(*document);
            }
        }
        if !gone.is_empty() {
            self.remove(&gone);
        }
        gone.len()
    }
}

/// One namespace's drafts and the task that follows the store for it.
pub(crate) struct NamespaceMemory {
    pub(crate) id: NamespaceId,
    drafts: Mutex<Drafts>,
    grant: Mutex<SignedNamespace>,
}

impl NamespaceMemory {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Drafts> {
        self.drafts
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The newest signature seen.
    pub(crate) fn grant(&self) -> SignedNamespace {
        self.grant
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .clone()
    }

    fn renew(&self, signed: &SignedNamespace) {
        let mut grant = self
            .grant
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        if signed.issued_at_s > grant.issued_at_s {
            *grant = signed.clone();
        }
    }

    pub(crate) fn begin(&self, document: DocumentId) {
        self.lock().running.insert(document);
    }

    pub(crate) fn end(&self, document: DocumentId) {
        self.lock().running.remove(&document);
    }

    /// Takes a piece of a running output. Past the index's capacity it can't be drafted from, no more.
    pub(crate) fn merge(&self, update: &DocumentUpdate) {
        if let Err(error) = self.lock().merge(update) {
            tracing::warn!(%error, "index took no more tokens");
        }
    }
}

/// All namespaces that this worker serves.
pub(crate) struct Memory {
    config: MemoryConfig,
    index: IndexConfig,
    store: Arc<dyn DraftStore>,
    metrics: WorkerMetrics,
    /// Most recently used last.
    namespaces: Mutex<Vec<Followed>>,
}

struct Followed {
    memory: Arc<NamespaceMemory>,
    follower: JoinHandle<()>,
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.follower.abort();
    }
}

impl Memory {
    pub(crate) fn new(
        config: MemoryConfig,
        pattern_tokens_max: u32,
        store: Arc<dyn DraftStore>,
        metrics: WorkerMetrics,
    ) -> Self {
        let index = IndexConfig {
            pattern_tokens_max,
            ..IndexConfig::default()
        };
        Memory {
            config,
            index,
            store,
            metrics,
            namespaces: Mutex::default(),
        }
    }

    /// The drafts of a namespace whose signature has been checked. Follows the store from the first use on.
    pub(crate) fn namespace(
        &self,
        id: NamespaceId,
        signed: &SignedNamespace,
    ) -> Arc<NamespaceMemory> {
        let mut namespaces = self
            .namespaces
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        let followed = match namespaces
            .iter()
            .position(|followed| followed.memory.id == id)
        {
            Some(place) => namespaces.remove(place),
            None => {
                if namespaces.len() >= self.config.namespaces_max {
                    // Its running requests keep their drafts through their own reference; nothing new comes.
                    namespaces.remove(0);
                    self.metrics.index_evictions.inc();
                }
                self.follow(id, signed)
            }
        };
        followed.memory.renew(signed);
        let memory = followed.memory.clone();
        namespaces.push(followed);
        self.metrics.index_namespaces.set(namespaces.len() as i64);
        memory
    }

    fn follow(&self, id: NamespaceId, signed: &SignedNamespace) -> Followed {
        let memory = Arc::new(NamespaceMemory {
            id,
            drafts: Mutex::new(Drafts::new(
                self.index.clone(),
                self.config.namespace_tokens_max,
            )),
            grant: Mutex::new(signed.clone()),
        });
        let follower = Follower {
            memory: memory.clone(),
            store: self.store.clone(),
            config: self.config.clone(),
            metrics: self.metrics.clone(),
        };
        Followed {
            memory,
            follower: tokio::spawn(follower.run()),
        }
    }

    /// Brings the gauges up to date.
    pub(crate) fn observe(&self) {
        let (mut tokens, mut bytes, mut documents) = (0, 0, 0);
        for followed in self
            .namespaces
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .iter()
        {
            let drafts = followed.memory.lock();
            tokens += drafts.index.tokens();
            bytes += drafts.index.bytes();
            documents += drafts.index.documents();
        }
        self.metrics.index_tokens.set(tokens as i64);
        self.metrics.index_bytes.set(bytes as i64);
        self.metrics.index_documents.set(documents as i64);
    }
}

struct Follower {
    memory: Arc<NamespaceMemory>,
    store: Arc<dyn DraftStore>,
    config: MemoryConfig,
    metrics: WorkerMetrics,
}

/// Tokens merged under one hold of the lock: well under a millisecond.
const MERGE_TOKENS: usize = 512;

impl Follower {
    async fn run(self) {
        let mut cursor = FeedCursor::default();
        let mut failures = 0u32;
        loop {
            let request = FollowRequest {
                namespace: self.memory.grant(),
                after: cursor,
                max_tokens: self.config.follow_tokens,
                wait_ms: self.config.follow_wait_ms,
            };
            match self.store.follow(request).await {
                Ok(reply) => {
                    failures = 0;
                    cursor = reply.cursor;
                    self.apply(reply);
                    self.maintain().await;
                }
                Err(error) => {
                    self.metrics.follow_failures.inc();
                    tracing::warn!(%error, "the draft store cannot be followed; trying again");
                    failures = (failures + 1).min(6);
                    tokio::time::sleep(Duration::from_millis(50 << failures)).await;
                }
            }
        }
    }

    fn apply(&self, reply: FollowReply) {
        if reply.reset {
            self.memory.lock().reset();
        }
        let mut gone = Vec::new();
        for event in reply.events {
            match event {
                FeedEvent::Remove(document) => gone.push(document),
                FeedEvent::Update(update) => {
                    if !gone.is_empty() {
                        self.memory.lock().remove(&std::mem::take(&mut gone));
                    }
                    for piece in pieces(update) {
                        self.memory.merge(&piece);
                    }
                }
            }
        }
        if !gone.is_empty() {
            self.memory.lock().remove(&gone);
        }
    }

    /// Keeps the limit, and gives dead memory back.
    async fn maintain(&self) {
        let rebuild = {
            let mut drafts = self.memory.lock();
            self.metrics.index_evictions.inc_by(drafts.evict() as u64);
            if !drafts.index.needs_rebuild() {
                return;
            }
            drafts.index.begin_rebuild()
        };
        let outcome = match tokio::task::spawn_blocking(move || rebuild.run()).await {
            Ok(rebuilt) => {
                rebuilt.and_then(|rebuilt| self.memory.lock().index.finish_rebuild(rebuilt))
            }
            Err(error) => {
                tracing::error!(%error, "index rebuild broke off");
                return;
            }
        };
        if let Err(error) = outcome {
            tracing::warn!(%error, "index was not rebuilt");
        }
    }
}

/// An update in pieces. One without tokens stays whole: it may still shorten.
fn pieces(update: DocumentUpdate) -> Vec<DocumentUpdate> {
    if update.tokens.len() <= MERGE_TOKENS {
        return vec![update];
    }
    let mut prev_len = update.prev_len;
    let mut pieces = Vec::new();
    for tokens in update.tokens.chunks(MERGE_TOKENS) {
        pieces.push(DocumentUpdate {
            document: update.document,
            epoch: update.epoch,
            prev_len,
            tokens: tokens.to_vec(),
            head: update.head.clone(),
            finish: update.finish,
        });
        prev_len += tokens.len() as u32;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_protocol::document::DocumentHead;

    fn update(document: u128, epoch: u64, prev_len: u32, tokens: &[u32]) -> DocumentUpdate {
        DocumentUpdate {
            document: DocumentId(document),
            epoch,
            prev_len,
            tokens: tokens.to_vec(),
            head: DocumentHead::default(),
            finish: None,
        }
    }

    fn drafts(tokens_max: u64) -> Drafts {
        Drafts::new(IndexConfig::default(), tokens_max)
    }

    fn len(drafts: &Drafts, document: u128) -> Option<u32> {
        drafts.index.len_of(DocumentKey(document))
    }

    #[test]
    fn the_same_piece_from_two_sides_counts_once() {
        let mut drafts = drafts(100);
        for piece in [
            update(1, 1, 0, &[1, 2, 3]),
            update(1, 1, 0, &[1, 2]),
            update(1, 1, 2, &[3, 4]),
        ] {
            drafts.merge(&piece).unwrap();
        }
        assert_eq!(len(&drafts, 1), Some(4));
        assert_eq!(drafts.index.tokens(), 4);
    }

    #[test]
    fn gaps_and_old_epochs_are_ignored_and_new_epochs_shorten() {
        let mut drafts = drafts(100);
        drafts.merge(&update(1, 5, 0, &[1, 2, 3])).unwrap();
        drafts.merge(&update(1, 5, 9, &[7])).unwrap();
        drafts.merge(&update(1, 4, 3, &[8])).unwrap();
        assert_eq!(len(&drafts, 1), Some(3));
        drafts.merge(&update(1, 6, 1, &[9])).unwrap();
        assert_eq!(len(&drafts, 1), Some(2));
    }

    #[test]
    fn the_oldest_documents_leave_first_and_running_ones_stay() {
        let mut drafts = drafts(4);
        drafts.running.insert(DocumentId(1));
        for document in 1..=3 {
            drafts.merge(&update(document, 1, 0, &[1, 2])).unwrap();
        }
        assert_eq!(drafts.evict(), 1);
        assert_eq!(
            [len(&drafts, 1), len(&drafts, 2), len(&drafts, 3)],
            [Some(2), None, Some(2)]
        );
        drafts.reset();
        assert_eq!([len(&drafts, 1), len(&drafts, 3)], [Some(2), None]);
    }

    #[test]
    fn long_updates_are_merged_in_pieces() {
        let tokens: Vec<u32> = (0..2 * MERGE_TOKENS as u32 + 5).collect();
        let mut drafts = drafts(10_000);
        for piece in pieces(update(1, 1, 0, &tokens)) {
            assert!(piece.tokens.len() <= MERGE_TOKENS);
            drafts.merge(&piece).unwrap();
        }
        assert_eq!(len(&drafts, 1), Some(tokens.len() as u32));
    }
}
