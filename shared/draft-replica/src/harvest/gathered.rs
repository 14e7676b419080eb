//! The outputs that the store has not acknowledged in full, and which messages they make. A plain value: no
//! clock, no I/O.
//!
//! Naively: keep each running output whole, and send what comes after the acknowledged length. Two things
//! bend that. Outputs are cut and go on under a higher epoch, here or on another worker; and the store may
//! come back with less than it acknowledged, so what was acknowledged is kept until its document has ended.

use std::collections::{BTreeMap, HashMap, HashSet};

use refrain_protocol::document::{
    AppendReply, AppendRequest, DocumentHead, DocumentUpdate, FinishReason, TouchRequest,
};
use refrain_protocol::{DocumentId, NamespaceId, SignedNamespace};

use super::Piece;

#[cfg(test)]
mod tests;

/// See the module.
#[derive(Default)]
pub(crate) struct Gathered {
    /// Oldest first.
    documents: BTreeMap<u64, Pending>,
    by_id: HashMap<Key, u64>,
    touched: HashMap<NamespaceId, (SignedNamespace, HashSet<DocumentId>)>,
    /// Counts documents, and when each began to wait.
    next_order: u64,
    /// Sum of all texts.
    tokens: usize,
}

/// Messages to the store.
pub(crate) struct Batch {
    pub(crate) requests: Vec<(NamespaceId, AppendRequest)>,
    /// Nothing that was wanted was left out for want of room.
    pub(crate) is_complete: bool,
}

type Key = (NamespaceId, DocumentId);

struct Pending {
    key: Key,
    namespace: SignedNamespace,
    head: DocumentHead,
    epoch: u64,
    /// Output tokens before `text`: not zero where a request was continued that was not adopted.
    base: u32,
    text: Vec<u32>,
    /// Output length that the store has acknowledged, not below `base`.
    acknowledged: u32,
    finish: Option<FinishReason>,
    /// Whether the store knows of the newest epoch and finish.
    settled: bool,
    /// Its place among those that the store lacks something of, from when it did first.
    waits_since: u64,
    /// Its request went on elsewhere: nothing more comes.
    released: bool,
}

/// Unsent tokens of an output that are sent however early.
const GROWN_TOKENS: usize = 256;
/// Most documents remembered as touched between two messages.
const TOUCHED_MAX: usize = 4096;
/// Most updates of one message; the store takes more, so that its limit can be lowered without harm.
const UPDATES_MAX: usize = 1024;
/// What an update weighs beside its tokens: ids, lengths and head.
const UPDATE_WEIGHT_TOKENS: usize = 64;

impl Pending {
    fn new(key: Key, namespace: &SignedNamespace, piece: Piece<'_>) -> Self {
        Pending {
            key,
            namespace: namespace.clone(),
            head: piece.head.clone(),
            epoch: piece.epoch,
            base: piece.prev_len,
            text: Vec::new(),
            acknowledged: piece.prev_len,
            finish: None,
            settled: true,
            waits_since: 0,
            released: false,
        }
    }

    fn len(&self) -> u32 {
        self.base + self.text.len() as u32
    }

    /// Whether the store has it all.
    fn is_settled(&self) -> bool {
        self.settled && self.acknowledged >= self.len()
    }

    fn unacknowledged(&self) -> usize {
        self.len().saturating_sub(self.acknowledged) as usize
    }

    /// Whether somebody may be waiting for what the store lacks of it.
    fn is_pressing(&self) -> bool {
        self.finish.is_some()
            || self.released
            || self.head.group.is_some()
            || self.unacknowledged() >= GROWN_TOKENS
    }

    /// What the store lacks.
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

    /// Whether both can be beginnings of one output.
    fn agrees_with(&self, output: &[u32]) -> bool {
        output
            .get(self.base as usize..)
            .is_some_and(|rest| rest.iter().zip(&self.text).all(|(a, b)| a == b))
    }
}

impl Gathered {
    /// Takes a piece of an output, or its end. Pieces of one document come in order.
    pub(crate) fn push(
        &mut self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        piece: Piece<'_>,
    ) {
        self.change(namespace_id, namespace, piece, |pending, piece| {
            if piece.prev_len < pending.base || piece.prev_len > pending.len() {
                // Another attempt at the same output, which begins elsewhere: it replaces this one.
                pending.text.clear();
                pending.base = piece.prev_len;
                pending.acknowledged = piece.prev_len;
            }
            let kept = (piece.prev_len - pending.base) as usize;
            pending.text.truncate(kept);
            pending.text.extend_from_slice(piece.tokens);
            pending.acknowledged = pending.acknowledged.min(piece.prev_len);
            pending.settled = false;
        });
    }

    /// Takes over an output that runs on here: `piece` holds all of it. The store is taken to have what this
    /// worker does not know it to lack, so that nothing is sent twice where all is well; where it is not, the
    /// store's answer to the next piece says so, and everything is sent from there.
    pub(crate) fn adopt(
        &mut self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        piece: Piece<'_>,
    ) {
        self.change(namespace_id, namespace, piece, |pending, piece| {
            let len = piece.tokens.len() as u32;
            // This worker had the request before, and has something yet to send of it.
            let is_owed = !pending.is_settled() && pending.agrees_with(piece.tokens);
            if is_owed {
                pending.acknowledged = pending.acknowledged.min(len);
            } else {
                pending.acknowledged = len;
                pending.settled = true;
            }
            pending.base = 0;
            pending.text = piece.tokens.to_vec();
        });
    }

    fn change(
        &mut self,
        namespace_id: NamespaceId,
        namespace: &SignedNamespace,
        piece: Piece<'_>,
        change: impl FnOnce(&mut Pending, Piece<'_>),
    ) {
        let key = (namespace_id, piece.document);
        let order = *self.by_id.entry(key).or_insert_with(|| {
            self.next_order += 1;
            self.documents
                .insert(self.next_order, Pending::new(key, namespace, piece));
            self.next_order
        });
        let Some(pending) = self.documents.get_mut(&order) else {
            return;
        };
        self.tokens -= pending.text.len();
        if pending.is_settled() {
            self.next_order += 1;
            pending.waits_since = self.next_order;
        }
        pending.epoch = piece.epoch;
        pending.finish = piece.finish;
        // It runs here (again): an acknowledgement must not end it.
        pending.released = false;
        change(pending, piece);
        self.tokens += pending.text.len();
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

    /// The next messages: what has waited longest first, each document once, until they weigh about `tokens_max` tokens.
    /// Outputs that merely grow are among them if `growing`.
    pub(crate) fn batch(&self, tokens_max: usize, growing: bool) -> Batch {
        let wanted =
            |pending: &&Pending| !pending.is_settled() && (growing || pending.is_pressing());
        let mut waiting: Vec<&Pending> = self.documents.values().filter(wanted).collect();
        waiting.sort_unstable_by_key(|pending| pending.waits_since);
        let mut requests: Vec<(NamespaceId, AppendRequest)> = Vec::new();
        // The message of each namespace that is being filled.
        let mut places: HashMap<NamespaceId, usize> = HashMap::new();
        let mut weight = 0;
        let mut is_complete = true;
        for pending in waiting {
            if weight >= tokens_max {
                is_complete = false;
                break;
            }
            let (namespace_id, _) = pending.key;
            let place = match places.get(&namespace_id) {
                Some(&place) if requests[place].1.updates.len() < UPDATES_MAX => place,
                _ => {
                    let request = AppendRequest {
                        namespace: pending.namespace.clone(),
                        updates: Vec::new(),
                    };
                    requests.push((namespace_id, request));
                    places.insert(namespace_id, requests.len() - 1);
                    requests.len() - 1
                }
            };
            let update = pending.next_update();
            weight += update.tokens.len() + UPDATE_WEIGHT_TOKENS;
            requests[place].1.updates.push(update);
        }
        Batch {
            requests,
            is_complete,
        }
    }

    /// What the store answered to one message. Returns the tokens lost.
    pub(crate) fn acknowledge(
        &mut self,
        namespace_id: NamespaceId,
        request: &AppendRequest,
        reply: &AppendReply,
    ) -> usize {
        let mut lost = 0;
        for (update, &length) in request.updates.iter().zip(&reply.lengths) {
            let key = (namespace_id, update.document);
            let Some(pending) = self
                .by_id
                .get(&key)
                .and_then(|order| self.documents.get_mut(order))
                .filter(|pending| pending.epoch == update.epoch)
            else {
                continue;
            };
            let sent_len = update.prev_len + update.tokens.len() as u32;
            // Less than `prev_len`: the store lost the beginning, and gets what there is again.
            pending.acknowledged = length.min(sent_len).clamp(pending.base, pending.len());
            pending.settled = pending.finish == update.finish && length >= sent_len;
            // What came since it was sent has waited for less long than what was not sent at all.
            self.next_order += 1;
            pending.waits_since = self.next_order;
            let is_done = pending.is_settled() && (pending.finish.is_some() || pending.released);
            // A store that takes nothing of a piece that fits knows of a newer attempt.
            let is_superseded = length == update.prev_len && !update.tokens.is_empty();
            // What the store lacks was never here. Sending the rest again would be for ever.
            let is_unplaceable = length < pending.base;
            if is_done || is_superseded {
                self.forget(key);
            } else if is_unplaceable {
                lost += self.forget(key);
            }
        }
        lost
    }

    /// Lets go of documents, finished ones first and the oldest of them, until at most `tokens_max` are held.
    /// Returns the tokens lost.
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

    /// Nothing more comes of a document here: its request went on elsewhere, or its chunk ended.
    pub(crate) fn release(&mut self, namespace_id: NamespaceId, document: DocumentId) {
        let key = (namespace_id, document);
        let Some(pending) = self
            .by_id
            .get(&key)
            .and_then(|order| self.documents.get_mut(order))
        else {
            return;
        };
        pending.released = true;
        if pending.is_settled() {
            self.forget(key);
        }
    }

    /// Gives up on the documents of a message that the store will never take. Returns the tokens lost.
    pub(crate) fn give_up(&mut self, namespace_id: NamespaceId, request: &AppendRequest) -> usize {
        request
            .updates
            .iter()
            .map(|update| self.forget((namespace_id, update.document)))
            .sum()
    }

    /// Tokens held: of a document that still grows, also those that the store has.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Whether the store has everything.
    pub(crate) fn is_settled(&self) -> bool {
        self.documents.values().all(Pending::is_settled)
    }

    /// Whether there are touches since the last call of [`Gathered::take_touched`].
    pub(crate) fn has_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    /// The touches since the last call.
    pub(crate) fn take_touched(&mut self) -> Vec<TouchRequest> {
        self.touched
            .drain()
            .map(|(_, (namespace, documents))| TouchRequest {
                namespace,
                documents: documents.into_iter().collect(),
            })
            .collect()
    }

    /// Returns the tokens that the store has not acknowledged.
    fn forget(&mut self, key: Key) -> usize {
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
