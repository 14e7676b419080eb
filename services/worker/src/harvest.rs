//! Outputs on their way to the draft store: gathered as they grow, sent in batches, sent again until they
//! are acknowledged. The decode loop never waits for any of it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use refrain_clients::DraftStore;
use refrain_protocol::document::{
    AppendReply, AppendRequest, DocumentHead, DocumentUpdate, FinishReason, TouchRequest,
};
use refrain_protocol::{DocumentId, ErrorKind, NamespaceId, SignedNamespace};
use tokio::sync::Notify;

use crate::config::HarvestConfig;
use crate::metrics::WorkerMetrics;

/// The outputs that the store has not acknowledged in full. A plain value: no clock, no I/O.
#[derive(Default)]
pub(crate) struct Gathered {
    documents: BTreeMap<u64, Pending>,
    by_id: HashMap<(NamespaceId, DocumentId), u64>,
    touched: HashMap<NamespaceId, (SignedNamespace, HashSet<DocumentId>)>,
    next_order: u64,
    tokens: usize,
}

struct Pending {
    namespace_id: NamespaceId,
    namespace: SignedNamespace,
    document: DocumentId,
    head: DocumentHead,
    epoch: u64,
    /// Output tokens before `text`: a worker that continues somebody else's request holds its own part only.
    base: u32,
    text: Vec<u32>,
    /// Output length that the store has acknowledged.
    acknowledged: u32,
    finish: Option<FinishReason>,
    /// Whether the store knows of the newest epoch and finish.
    settled: bool,
    /// Its request went on elsewhere: nothing more comes.
    released: bool,
}

impl Pending {
    fn len(&self) -> u32 {
        self.base + self.text.len() as u32
    }
}

/// Most documents remembered as touched between two messages.
const TOUCHED_MAX: usize = 4096;

impl Gathered {
    /// Takes a piece of an output, or its end. Pieces of one document come in order.
    pub(crate) fn push(
        &mut self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        update: DocumentUpdate,
    ) {
        let key = (namespace_id, update.document);
        let order = *self.by_id.entry(key).or_insert_with(|| {
            self.next_order += 1;
            self.documents.insert(
                self.next_order,
                Pending {
                    namespace_id,
                    namespace: namespace.clone(),
                    document: update.document,
                    head: update.head.clone(),
                    epoch: update.epoch,
                    base: update.prev_len,
                    text: Vec::new(),
                    acknowledged: update.prev_len,
                    finish: None,
                    settled: false,
                    released: false,
                },
            );
            self.next_order
        });
        let Some(pending) = self.documents.get_mut(&order) else {
            return;
        };
        if update.prev_len < pending.base || update.prev_len > pending.len() {
            // Another attempt at the same output, which begins elsewhere: it replaces this one.
            self.tokens -= pending.text.len();
            pending.text.clear();
            pending.base = update.prev_len;
            pending.acknowledged = update.prev_len;
        }
        let keep = (update.prev_len - pending.base) as usize;
        self.tokens -= pending.text.len() - keep;
        pending.text.truncate(keep);
        pending.acknowledged = pending.acknowledged.min(update.prev_len);
        pending.text.extend_from_slice(&update.tokens);
        self.tokens += update.tokens.len();
        pending.epoch = update.epoch;
        pending.finish = update.finish;
        pending.settled = false;
        pending.released = false;
    }

    /// Notes that a document's draft was accepted.
    pub(crate) fn touch(
        &mut self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        document: DocumentId,
    ) {
        let (_, documents) = self
            .touched
            .entry(namespace_id)
            .or_insert_with(|| (namespace.clone(), HashSet::new()));
        if documents.len() < TOUCHED_MAX {
            documents.insert(document);
        }
    }

    /// The next messages: oldest documents first, about `tokens_max` tokens in all.
    pub(crate) fn batch(&self, tokens_max: usize) -> Vec<(NamespaceId, AppendRequest)> {
        let mut requests: Vec<(NamespaceId, AppendRequest)> = Vec::new();
        let mut places: HashMap<NamespaceId, usize> = HashMap::new();
        let mut tokens = 0;
        for pending in self.documents.values() {
            if tokens >= tokens_max {
                break;
            }
            if pending.settled && pending.acknowledged >= pending.len() {
                continue;
            }
            let from = pending.acknowledged.max(pending.base);
            let update = DocumentUpdate {
                document: pending.document,
                epoch: pending.epoch,
                prev_len: from,
                tokens: pending.text[(from - pending.base) as usize..].to_vec(),
                head: pending.head.clone(),
                finish: pending.finish,
            };
            tokens += update.tokens.len();
            let place = *places.entry(pending.namespace_id).or_insert_with(|| {
                requests.push((
                    pending.namespace_id,
                    AppendRequest {
                        namespace: pending.namespace.clone(),
                        updates: Vec::new(),
                    },
                ));
                requests.len() - 1
            });
            requests[place].1.updates.push(update);
        }
        requests
    }

    /// What the store answered to one message.
    pub(crate) fn acknowledge(
        &mut self,
        namespace_id: NamespaceId,
        request: &AppendRequest,
        reply: &AppendReply,
    ) {
        for (update, &length) in request.updates.iter().zip(&reply.lengths) {
            let key = (namespace_id, update.document);
            let Some(order) = self.by_id.get(&key) else {
                continue;
            };
            let Some(pending) = self.documents.get_mut(order) else {
                continue;
            };
            let sent_len = update.prev_len + update.tokens.len() as u32;
            if pending.epoch == update.epoch {
                pending.acknowledged = if length < update.prev_len {
                    // The store lost the beginning: it gets what there is, again.
                    length.max(pending.base)
                } else {
                    length.min(sent_len)
                };
                pending.settled = pending.finish == update.finish && length >= sent_len;
                // A store that lacks what another worker wrote cannot place this part, and one that did not
                // take a piece that fits knows of a newer attempt: sending it again would be for ever.
                let refused = length == update.prev_len && !update.tokens.is_empty();
                let unplaceable = length < pending.base || refused;
                let done = pending.settled
                    && (pending.finish.is_some() || pending.released)
                    && pending.acknowledged >= pending.len();
                if done || unplaceable {
                    self.forget(key);
                }
            }
        }
    }

    /// Lets go of finished documents, oldest first, until `tokens_max` holds. Returns the tokens lost.
    pub(crate) fn shed(&mut self, tokens_max: usize) -> usize {
        let before = self.tokens;
        while self.tokens > tokens_max {
            let oldest = self
                .documents
                .values()
                .find(|pending| pending.finish.is_some());
            let Some(oldest) = oldest.or_else(|| self.documents.values().next()) else {
                break;
            };
            let key = (oldest.namespace_id, oldest.document);
            self.forget(key);
        }
        before - self.tokens
    }

    /// Nothing more comes of a document here: its request went on elsewhere, or its chunk ended.
    pub(crate) fn release(&mut self, namespace_id: NamespaceId, document: DocumentId) {
        let key = (namespace_id, document);
        let Some(order) = self.by_id.get(&key) else {
            return;
        };
        let Some(pending) = self.documents.get_mut(order) else {
            return;
        };
        pending.released = true;
        if pending.settled && pending.acknowledged >= pending.len() {
            self.forget(key);
        }
    }

    /// Gives up on the documents of a message that the store will never take. Returns the tokens lost.
    pub(crate) fn give_up(&mut self, namespace_id: NamespaceId, request: &AppendRequest) -> usize {
        let before = self.tokens;
        for update in &request.updates {
            self.forget((namespace_id, update.document));
        }
        before - self.tokens
    }

    /// Unacknowledged tokens and those held with them.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether something waits to be sent.
    pub(crate) fn is_settled(&self) -> bool {
        self.documents
            .values()
            .all(|pending| pending.settled && pending.acknowledged >= pending.len())
    }

    fn take_touched(&mut self) -> Vec<TouchRequest> {
        self.touched
            .drain()
            .map(|(_, (namespace, documents))| TouchRequest {
                namespace,
                documents: documents.into_iter().collect(),
            })
            .collect()
    }

    fn forget(&mut self, key: (NamespaceId, DocumentId)) {
        if let Some(pending) = self
            .by_id
            .remove(&key)
            .and_then(|order| self.documents.remove(&order))
        {
            self.tokens -= pending.text.len();
        }
    }
}

/// The handle: the decode loop pushes, a task sends.
#[derive(Clone)]
pub(crate) struct Harvest {
    inner: Arc<HarvestInner>,
}

struct HarvestInner {
    gathered: Mutex<Gathered>,
    config: HarvestConfig,
    metrics: WorkerMetrics,
    flushed: Notify,
}

impl Harvest {
    /// Starts the task that sends.
    pub(crate) fn start(
        config: HarvestConfig,
        store: Arc<dyn DraftStore>,
        metrics: WorkerMetrics,
    ) -> Self {
        let harvest = Harvest {
            inner: Arc::new(HarvestInner {
                gathered: Mutex::default(),
                config,
                metrics,
                flushed: Notify::new(),
            }),
        };
        // The task holds a weak reference: it ends with the worker.
        let weak = Arc::downgrade(&harvest.inner);
        tokio::spawn(async move {
            let mut failures = 0u32;
            while let Some(inner) = weak.upgrade() {
                failures = if inner.flush(&*store).await {
                    0
                } else {
                    failures + 1
                };
                let wait_ms = (inner.config.interval_ms << failures.min(6))
                    .min(5_000.max(inner.config.interval_ms));
                drop(inner);
                tokio::time::sleep(Duration::from_millis(wait_ms)).await;
            }
        });
        harvest
    }

    pub(crate) fn push(
        &self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        update: DocumentUpdate,
    ) {
        let mut gathered = self.inner.lock();
        gathered.push(namespace_id, namespace, update);
        let lost = gathered.shed(self.inner.config.pending_tokens_max);
        self.inner
            .metrics
            .harvest_pending_tokens
            .set(gathered.tokens() as i64);
        drop(gathered);
        if lost > 0 {
            self.inner
                .metrics
                .harvest_dropped_tokens
                .inc_by(lost as u64);
        }
    }

    pub(crate) fn touch(
        &self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        document: DocumentId,
    ) {
        self.inner.lock().touch(namespace_id, namespace, document);
    }

    pub(crate) fn release(&self, namespace_id: NamespaceId, document: DocumentId) {
        self.inner.lock().release(namespace_id, document);
    }

    /// Waits until the store has everything, at most `grace`. Returns whether it has.
    pub(crate) async fn drain(&self, grace: Duration) -> bool {
        let settled = async {
            loop {
                let flushed = self.inner.flushed.notified();
                if self.inner.lock().is_settled() {
                    return;
                }
                flushed.await;
            }
        };
        tokio::time::timeout(grace, settled).await.is_ok()
    }
}

impl HarvestInner {
    fn lock(&self) -> MutexGuard<'_, Gathered> {
        self.gathered
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Sends what there is. Returns whether the store took it.
    async fn flush(&self, store: &dyn DraftStore) -> bool {
        let (batch, touched) = {
            let mut gathered = self.lock();
            (
                gathered.batch(self.config.batch_tokens),
                gathered.take_touched(),
            )
        };
        let mut all_taken = true;
        for (namespace_id, request) in batch {
            match store.append(request.clone()).await {
                Ok(reply) => {
                    let mut gathered = self.lock();
                    gathered.acknowledge(namespace_id, &request, &reply);
                    self.metrics
                        .harvest_pending_tokens
                        .set(gathered.tokens() as i64);
                }
                Err(error)
                    if matches!(
                        error.kind,
                        ErrorKind::InvalidRequest | ErrorKind::Unauthorized
                    ) =>
                {
                    let lost = self.lock().give_up(namespace_id, &request);
                    self.metrics.harvest_failures.inc();
                    self.metrics.harvest_dropped_tokens.inc_by(lost as u64);
                    tracing::error!(%error, lost, "the draft store refuses outputs for good; dropped");
                }
                Err(error) => {
                    self.metrics.harvest_failures.inc();
                    tracing::warn!(%error, "the draft store did not take outputs; trying again");
                    all_taken = false;
                }
            }
        }
        for request in touched {
            // Losing one costs a document its place in the order of eviction, no more.
            if let Err(error) = store.touch(request).await {
                tracing::debug!(%error, "the draft store did not take touches");
            }
        }
        self.flushed.notify_waiters();
        all_taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_protocol::Namespace;

    const ID: NamespaceId = NamespaceId(1);

    fn signed() -> SignedNamespace {
        let namespace = Namespace {
            tenant: "t".into(),
            model: "m".into(),
            tokenizer: "k".into(),
        };
        SignedNamespace {
            namespace,
            issued_at_s: 0,
            signature: String::new(),
        }
    }

    fn piece(prev_len: u32, tokens: &[u32], finish: Option<FinishReason>) -> DocumentUpdate {
        DocumentUpdate {
            document: DocumentId(7),
            epoch: 1,
            prev_len,
            tokens: tokens.to_vec(),
            head: DocumentHead::default(),
            finish,
        }
    }

    /// Sends everything to a store that answers with the given length.
    fn exchange(gathered: &mut Gathered, length: u32) -> Option<(u32, Vec<u32>)> {
        let (id, request) = gathered.batch(1000).into_iter().next()?;
        let sent = (
            request.updates[0].prev_len,
            request.updates[0].tokens.clone(),
        );
        gathered.acknowledge(
            id,
            &request,
            &AppendReply {
                lengths: vec![length],
            },
        );
        Some(sent)
    }

    #[test]
    fn pieces_are_sent_once_and_forgotten_at_the_end() {
        let mut gathered = Gathered::default();
        gathered.push(ID, &signed(), piece(0, &[1, 2], None));
        assert_eq!(exchange(&mut gathered, 2), Some((0, vec![1, 2])));
        assert_eq!(exchange(&mut gathered, 2), None);
        gathered.push(ID, &signed(), piece(2, &[3], Some(FinishReason::Stop)));
        assert_eq!(exchange(&mut gathered, 3), Some((2, vec![3])));
        assert_eq!((gathered.tokens(), gathered.documents.len()), (0, 0));
    }

    #[test]
    fn a_store_that_lost_the_beginning_gets_it_again() {
        let mut gathered = Gathered::default();
        gathered.push(ID, &signed(), piece(0, &[1, 2], None));
        exchange(&mut gathered, 2);
        gathered.push(ID, &signed(), piece(2, &[3], None));
        assert_eq!(exchange(&mut gathered, 0), Some((2, vec![3])));
        assert_eq!(exchange(&mut gathered, 3), Some((0, vec![1, 2, 3])));
        assert!(gathered.is_settled());
    }

    #[test]
    fn what_the_store_knows_better_is_not_sent_for_ever() {
        let mut gathered = Gathered::default();
        gathered.push(ID, &signed(), piece(0, &[1, 2], None));
        // The store has one token of a newer attempt and ignores this one.
        assert_eq!(exchange(&mut gathered, 1), Some((0, vec![1, 2])));
        assert_eq!(exchange(&mut gathered, 1), Some((1, vec![2])));
        assert_eq!(exchange(&mut gathered, 1), None);
        assert_eq!(gathered.documents.len(), 0);
    }

    #[test]
    fn a_cut_shortens_what_is_sent() {
        let mut gathered = Gathered::default();
        gathered.push(ID, &signed(), piece(0, &[1, 2, 3], None));
        let mut cut = piece(1, &[], Some(FinishReason::Stop));
        cut.epoch = 2;
        gathered.push(ID, &signed(), cut);
        let (_, request) = gathered.batch(1000).remove(0);
        assert_eq!(
            (request.updates[0].epoch, &request.updates[0].tokens[..]),
            (2, &[1][..])
        );
    }

    #[test]
    fn what_came_while_a_message_was_under_way_is_not_forgotten() {
        let mut gathered = Gathered::default();
        gathered.push(ID, &signed(), piece(0, &[1], None));
        let (id, request) = gathered.batch(1000).remove(0);
        gathered.push(ID, &signed(), piece(1, &[2], Some(FinishReason::Stop)));
        gathered.acknowledge(id, &request, &AppendReply { lengths: vec![1] });
        assert_eq!(exchange(&mut gathered, 2), Some((1, vec![2])));
        assert_eq!(gathered.documents.len(), 0);
    }

    #[test]
    fn shedding_takes_finished_documents_first() {
        let mut gathered = Gathered::default();
        gathered.push(ID, &signed(), piece(0, &[1, 2], None));
        let mut finished = piece(0, &[3, 4, 5], Some(FinishReason::Stop));
        finished.document = DocumentId(8);
        gathered.push(ID, &signed(), finished);
        assert_eq!(gathered.shed(2), 3);
        assert_eq!(gathered.documents.len(), 1);
    }

    #[test]
    fn a_released_document_leaves_once_the_store_has_it() {
        let mut gathered = Gathered::default();
        gathered.push(ID, &signed(), piece(0, &[1], None));
        gathered.release(ID, DocumentId(7));
        assert_eq!(exchange(&mut gathered, 1), Some((0, vec![1])));
        assert_eq!(gathered.documents.len(), 0);
    }
}
