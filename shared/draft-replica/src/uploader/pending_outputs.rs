//! The outputs that the store has not acknowledged in full, and the messages that they make. A plain value, without
//! clock or I/O.
//!
//! The simple idea: keep each running output whole, and send what comes after the acknowledged length. Two facts
//! complicate it. Outputs are cut and go on under a higher epoch, here or on another worker. And the store may
//! restart with less than it acknowledged, so acknowledged tokens are kept until their document has ended.

use std::collections::{BTreeMap, HashMap, HashSet};

use refrain_protocol::document::{
    AppendReply, AppendRequest, DocumentHead, DocumentUpdate, FENCED_LEN, FinishReason,
    TouchRequest,
};
use refrain_protocol::{DocumentId, NamespaceId, SignedNamespace};
use refrain_service_kit::trace::TraceLink;

use crate::update::DocumentUpdateRef;

#[cfg(test)]
mod tests;

/// The outputs on their way to the store.
#[derive(Default)]
pub(crate) struct PendingOutputs {
    /// By their order: the oldest first.
    documents: BTreeMap<u64, PendingOutput>,
    by_id: HashMap<OutputKey, u64>,
    touched: HashMap<NamespaceId, (SignedNamespace, HashSet<DocumentId>)>,
    /// Numbers documents, and the moments at which each began to wait.
    next_order: u64,
    /// Length of all texts together.
    tokens: usize,
    /// The caller's time, in milliseconds from any moment.
    now_ms: u64,
}

/// Messages to the store.
pub(crate) struct UploadBatch {
    pub(crate) requests: Vec<(NamespaceId, AppendRequest)>,
    /// Everything that was to be sent fitted.
    pub(crate) is_complete: bool,
}

/// Tokens that will never reach the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GivenUp {
    /// Those of outputs whose beginning neither the store nor this process has.
    pub(crate) lost: usize,
    /// Those that the store dropped, since it has a newer attempt at their output.
    pub(crate) fenced: usize,
}

type OutputKey = (NamespaceId, DocumentId);

struct PendingOutput {
    key: OutputKey,
    namespace: SignedNamespace,
    head: DocumentHead,
    /// Its request in a trace.
    trace: Option<TraceLink>,
    epoch: u64,
    /// Output tokens before `text`. It is not zero where a request was continued without [`PendingOutputs::adopt`].
    base: u32,
    text: Vec<u32>,
    /// Output length that the store has acknowledged, at least `base`.
    acknowledged: u32,
    finish: Option<FinishReason>,
    /// Whether the store knows the newest epoch and finish.
    is_end_known: bool,
    /// Its position among the outputs that the store lacks something of. It got it when the store first lacked
    /// something.
    waits_since: u64,
    /// When the first token that the store lacks came, or a moment before that, by the caller's time.
    lacks_since_ms: u64,
    /// No more updates come, because the request goes on elsewhere or its chunk ended.
    is_released: bool,
}

/// Unsent tokens of an output that are urgent, however early they come.
const GROWN_TOKENS: usize = 256;
/// Most documents remembered as touched between two messages.
const TOUCHED_MAX: usize = 4096;
/// Most updates of one message. The store takes more, so that its limit can be lowered without harm.
const UPDATES_MAX: usize = 1024;
/// Weight of an update without tokens, in tokens: its ids, lengths and head.
const UPDATE_WEIGHT_TOKENS: usize = 64;

impl PendingOutput {
    fn new(key: OutputKey, namespace: &SignedNamespace, update: DocumentUpdateRef<'_>) -> Self {
        PendingOutput {
            key,
            namespace: namespace.clone(),
            head: update.head.clone(),
            trace: update.trace.cloned(),
            epoch: update.epoch,
            base: update.prev_len,
            text: Vec::new(),
            acknowledged: update.prev_len,
            finish: None,
            is_end_known: true,
            waits_since: 0,
            lacks_since_ms: 0,
            is_released: false,
        }
    }

    fn len(&self) -> u32 {
        self.base + self.text.len() as u32
    }

    /// Whether the store has all of it.
    fn is_acknowledged(&self) -> bool {
        self.is_end_known && self.acknowledged >= self.len()
    }

    fn unacknowledged(&self) -> usize {
        self.len().saturating_sub(self.acknowledged) as usize
    }

    /// Whether other requests may be waiting for the tokens that the store lacks.
    fn is_urgent(&self) -> bool {
        self.finish.is_some()
            || self.is_released
            || self.head.group.is_some()
            || self.unacknowledged() >= GROWN_TOKENS
    }

    /// The update that brings the store what it lacks.
    fn next_update(&self) -> DocumentUpdate {
        let from = (self.acknowledged - self.base) as usize;
        DocumentUpdate {
            document: self.key.1,
            epoch: self.epoch,
            prev_len: self.acknowledged,
            tokens: self.text.get(from..).unwrap_or_default().to_vec(),
            head: self.head.clone(),
            finish: self.finish,
        }
    }

    /// Whether both can be beginnings of the same output.
    fn agrees_with(&self, output: &[u32]) -> bool {
        output
            .get(self.base as usize..)
            .is_some_and(|rest| rest.iter().zip(&self.text).all(|(a, b)| a == b))
    }
}

impl PendingOutputs {
    /// Notes the time, for [`AppendRequest::waited_ms`].
    pub(crate) fn set_time(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
    }

    /// Whether outputs of groups grow here.
    pub(crate) fn has_groups(&self) -> bool {
        let mut pending = self.documents.values();
        pending.any(|pending| pending.head.group.is_some() && !pending.is_released)
    }

    /// Takes an update. Updates of one document come in order.
    pub(crate) fn push(
        &mut self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        update: DocumentUpdateRef<'_>,
    ) {
        self.change(namespace_id, namespace, update, |pending, update| {
            if update.prev_len < pending.base || update.prev_len > pending.len() {
                // Another attempt at the same output, which begins at another length, replaces this one.
                pending.text.clear();
                pending.base = update.prev_len;
                pending.acknowledged = update.prev_len;
            }
            let kept = (update.prev_len - pending.base) as usize;
            pending.text.truncate(kept);
            pending.text.extend_from_slice(update.tokens);
            pending.acknowledged = pending.acknowledged.min(update.prev_len);
            pending.is_end_known = false;
        });
    }

    /// Takes over an output that goes on here; `update` holds all of it so far.
    ///
    /// The store is assumed to have everything that this worker does not know it to lack, so nothing is sent twice in
    /// the normal case. Otherwise the store's answer to the next update tells its length, and everything is sent from
    /// there.
    pub(crate) fn adopt(
        &mut self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        update: DocumentUpdateRef<'_>,
    ) {
        self.change(namespace_id, namespace, update, |pending, update| {
            let len = update.tokens.len() as u32;
            // This worker had the request before, and has not sent all of it.
            let is_unsent = !pending.is_acknowledged() && pending.agrees_with(update.tokens);
            if is_unsent {
                pending.acknowledged = pending.acknowledged.min(len);
            } else {
                pending.acknowledged = len;
                pending.is_end_known = true;
            }
            pending.base = 0;
            pending.text = update.tokens.to_vec();
        });
    }

    fn change(
        &mut self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        update: DocumentUpdateRef<'_>,
        change: impl FnOnce(&mut PendingOutput, DocumentUpdateRef<'_>),
    ) {
        let key = (namespace_id, update.document);
        let order = *self.by_id.entry(key).or_insert_with(|| {
            self.next_order += 1;
            self.documents
                .insert(self.next_order, PendingOutput::new(key, namespace, update));
            self.next_order
        });
        let Some(pending) = self.documents.get_mut(&order) else {
            return;
        };
        self.tokens -= pending.text.len();
        if pending.is_acknowledged() {
            self.next_order += 1;
            pending.waits_since = self.next_order;
            pending.lacks_since_ms = self.now_ms;
        }
        pending.epoch = update.epoch;
        pending.finish = update.finish;
        // It runs here, maybe again: an acknowledgement must not end it.
        pending.is_released = false;
        change(pending, update);
        self.tokens += pending.text.len();
    }

    /// Notes that draft tokens from a document were accepted.
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

    /// The next messages, of about `tokens_max` tokens in all. Outputs that have waited longest come first, each
    /// document once. Outputs that merely grow are among them if `growing`.
    pub(crate) fn batch(&self, tokens_max: usize, growing: bool) -> UploadBatch {
        let wanted = |pending: &&PendingOutput| {
            !pending.is_acknowledged() && (growing || pending.is_urgent())
        };
        let mut waiting: Vec<&PendingOutput> = self.documents.values().filter(wanted).collect();
        waiting.sort_unstable_by_key(|pending| pending.waits_since);
        let mut requests: Vec<(NamespaceId, AppendRequest)> = Vec::new();
        // The position of the message of each namespace that is being filled.
        let mut positions: HashMap<NamespaceId, usize> = HashMap::new();
        let mut weight = 0;
        let mut is_complete = true;
        for pending in waiting {
            if weight >= tokens_max {
                is_complete = false;
                break;
            }
            let (namespace_id, _) = pending.key;
            let position = match positions.get(&namespace_id) {
                Some(&position) if requests[position].1.updates.len() < UPDATES_MAX => position,
                _ => {
                    let request = AppendRequest {
                        namespace: pending.namespace.clone(),
                        updates: Vec::new(),
                        waited_ms: 0,
                        acknowledgement: None,
                    };
                    requests.push((namespace_id, request));
                    positions.insert(namespace_id, requests.len() - 1);
                    requests.len() - 1
                }
            };
            let update = pending.next_update();
            weight += update.tokens.len() + UPDATE_WEIGHT_TOKENS;
            let request = &mut requests[position].1;
            if update.head.group.is_some() && !update.tokens.is_empty() {
                let waited_ms = self.now_ms.saturating_sub(pending.lacks_since_ms);
                let waited_ms = u32::try_from(waited_ms).unwrap_or(u32::MAX);
                request.waited_ms = request.waited_ms.max(waited_ms);
            }
            request.updates.push(update);
        }
        UploadBatch {
            requests,
            is_complete,
        }
    }

    /// The requests of a message in their traces.
    pub(crate) fn traces(
        &self,
        namespace_id: NamespaceId,
        request: &AppendRequest,
    ) -> Vec<TraceLink> {
        let updates = request.updates.iter();
        let pending = updates.filter_map(|update| {
            let order = self.by_id.get(&(namespace_id, update.document))?;
            self.documents.get(order)
        });
        pending
            .filter_map(|pending| pending.trace.clone())
            .collect()
    }

    /// Takes the store's answer to a message that was sent at `sent_ms`. Returns the tokens that are given up.
    pub(crate) fn acknowledge(
        &mut self,
        namespace_id: NamespaceId,
        request: &AppendRequest,
        reply: &AppendReply,
        sent_ms: u64,
    ) -> GivenUp {
        let mut given_up = GivenUp::default();
        for (update, &length) in request.updates.iter().zip(&reply.lengths) {
            let key = (namespace_id, update.document);
            // Tokens that came since it was sent have waited less than outputs that were not sent at all.
            self.next_order += 1;
            let waits_since = self.next_order;
            let pending = self.get_mut(key);
            let Some(pending) = pending.filter(|pending| pending.epoch == update.epoch) else {
                continue;
            };
            if length == FENCED_LEN {
                // The tokens that came here since have the same epoch.
                given_up.fenced += self.forget(key);
                continue;
            }
            let sent_len = update.prev_len + update.tokens.len() as u32;
            // `ERASED_LEN` is longer than all of it, so nothing of an erased output is sent again.
            // A length below `prev_len` means that the store lost the beginning. It gets what there is again.
            pending.acknowledged = length.min(sent_len).clamp(pending.base, pending.len());
            pending.is_end_known = pending.finish == update.finish && length >= sent_len;
            pending.waits_since = waits_since;
            pending.lacks_since_ms = sent_ms;
            let is_done =
                pending.is_acknowledged() && (pending.finish.is_some() || pending.is_released);
            // A store of an earlier version that takes nothing of an update that fits knows a newer attempt.
            let is_superseded = length == update.prev_len && !update.tokens.is_empty();
            // The store lacks tokens that were never here. The rest would be sent again for ever.
            let is_unplaceable = length < pending.base;
            if is_done || is_superseded {
                self.forget(key);
            } else if is_unplaceable {
                given_up.lost += self.forget(key);
            }
        }
        given_up
    }

    /// Drops the oldest documents, finished ones first, until at most `tokens_max` tokens are held. Returns the
    /// number of tokens lost.
    pub(crate) fn shed(&mut self, tokens_max: usize) -> usize {
        let mut lost = 0;
        while self.tokens > tokens_max {
            let mut documents = self.documents.values();
            let finished = documents.find(|pending| pending.finish.is_some());
            let Some(oldest) = finished.or_else(|| self.documents.values().next()) else {
                break;
            };
            lost += self.forget(oldest.key);
        }
        lost
    }

    /// Notes that no more updates of a document come.
    pub(crate) fn release(&mut self, namespace_id: NamespaceId, document: DocumentId) {
        let key = (namespace_id, document);
        let Some(pending) = self.get_mut(key) else {
            return;
        };
        pending.is_released = true;
        if pending.is_acknowledged() {
            self.forget(key);
        }
    }

    /// Drops the documents of a message that the store will never accept. Returns the number of tokens lost.
    pub(crate) fn give_up(&mut self, namespace_id: NamespaceId, request: &AppendRequest) -> usize {
        request
            .updates
            .iter()
            .map(|update| self.forget((namespace_id, update.document)))
            .sum()
    }

    /// Tokens held, with those that the store has of documents that still grow.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether the store has everything.
    pub(crate) fn is_acknowledged(&self) -> bool {
        self.documents.values().all(PendingOutput::is_acknowledged)
    }

    /// Whether documents were touched since the last call of [`take_touched`](Self::take_touched).
    pub(crate) fn has_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    /// The documents that were touched since the last call.
    pub(crate) fn take_touched(&mut self) -> Vec<TouchRequest> {
        self.touched
            .drain()
            .map(|(_, (namespace, documents))| TouchRequest {
                namespace,
                documents: documents.into_iter().collect(),
            })
            .collect()
    }

    fn get_mut(&mut self, key: OutputKey) -> Option<&mut PendingOutput> {
        self.documents.get_mut(self.by_id.get(&key)?)
    }

    /// Drops a document. Returns the number of its tokens that the store has not acknowledged.
    fn forget(&mut self, key: OutputKey) -> usize {
        let Some(pending) = self
            .by_id
            .remove(&key)
            .and_then(|order| self.documents.remove(&order))
        else {
            return 0;
        };
        self.tokens -= pending.text.len();
        pending.unacknowledged()
    }
}
