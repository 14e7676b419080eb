//! A worker that follows one replica, and goes on at another one.

use std::collections::BTreeMap;

use refrain_protocol::TokenId;
use refrain_protocol::document::{DocumentUpdate, FeedCursor, FeedEvent};

use crate::reading::feed::read_feed;
use crate::record::DocumentKey;
use crate::shared_store::SharedStore;
use crate::writer::tests::names;

/// A namespace as a worker has it.
#[derive(Default)]
struct Copy {
    cursor: FeedCursor,
    /// Documents of several replicas are here.
    is_mixed: bool,
    /// Epoch and text of each document.
    documents: BTreeMap<DocumentKey, (u64, Vec<TokenId>)>,
}

/// A worker with its copies of two namespaces.
pub(super) struct Reader {
    /// The replica that it follows.
    pub(super) replica: usize,
    copies: [Copy; 2],
    /// How often it had to begin anew, and changes that it has read.
    pub(super) resets: usize,
    pub(super) events: usize,
}

impl Reader {
    pub(super) fn at(replica: usize) -> Self {
        Reader {
            replica,
            copies: Default::default(),
            resets: 0,
            events: 0,
        }
    }

    /// Whether it has read from the store with this generation last.
    pub(super) fn is_at(&self, generation: u64) -> bool {
        self.copies
            .iter()
            .any(|copy| copy.cursor.generation == generation)
    }

    /// Reads on in both namespaces. Returns whether it has reached both ends.
    pub(super) fn follow(&mut self, shared: &SharedStore, tokens_max: usize) -> bool {
        let mut caught_up = true;
        for (copy, tenant) in self.copies.iter_mut().zip(["a", "b"]) {
            let namespace = names(tenant).id();
            let read = read_feed(
                shared,
                namespace,
                copy.cursor,
                &Default::default(),
                tokens_max,
            )
            .unwrap();
            assert!(read.damaged.is_empty());
            let reply = read.delta;
            self.events += reply.events.len();
            if reply.reset {
                self.resets += usize::from(copy.cursor != FeedCursor::default());
                copy.documents.clear();
                copy.is_mixed = false;
            }
            let before = std::mem::replace(&mut copy.cursor, reply.cursor);
            let has_moved = before != FeedCursor::default()
                && before.generation != reply.cursor.generation
                && !reply.reset;
            copy.is_mixed |= has_moved;
            for event in reply.events {
                match event {
                    FeedEvent::Remove(document) => {
                        copy.documents
                            .remove(&DocumentKey::new(namespace, document));
                    }
                    FeedEvent::Update(update) => {
                        copy.merge(DocumentKey::new(namespace, update.document), &update);
                    }
                }
            }
            if has_moved {
                let open = shared.read().unwrap();
                let is_known = |key: &DocumentKey| open.catalog.document(*key).is_some();
                copy.documents.retain(|key, _| is_known(key));
            }
            caught_up &= reply.caught_up;
        }
        caught_up
    }

    /// Checks that it has the documents of its store, by their epochs and texts. A reader who moved may have a later
    /// state of one: it was only in a store that has removed it since, or lost it.
    pub(super) fn check(&self, stored: &BTreeMap<DocumentKey, (u64, Vec<TokenId>)>) {
        let copies = self.copies.iter();
        let documents = copies.flat_map(|copy| {
            let documents = copy.documents.iter();
            documents.map(|(key, document)| (*key, (copy.is_mixed, document)))
        });
        let read: BTreeMap<_, _> = documents.collect();
        assert!(read.keys().eq(stored.keys()), "{read:?} of {stored:?}");
        for (key, (is_mixed, (epoch, text))) in read {
            let (stored_epoch, stored) = &stored[&key];
            let is_later = match is_mixed {
                true => epoch > stored_epoch || epoch == stored_epoch && text.starts_with(stored),
                false => false,
            };
            assert!(
                is_later || (epoch, text) == (stored_epoch, stored),
                "{key:?}: {epoch} {text:?}, and the store has {stored_epoch} {stored:?}"
            );
        }
    }
}

impl Copy {
    /// Takes an update as workers do.
    fn merge(&mut self, key: DocumentKey, update: &DocumentUpdate) {
        let known = self.documents.get(&key).map(|(epoch, _)| *epoch);
        if known.is_some_and(|epoch| update.epoch < epoch) || known.is_none() && update.prev_len > 0
        {
            return;
        }
        let (epoch, text) = self.documents.entry(key).or_default();
        let start = update.prev_len as usize;
        let overlap = text.get(start..).unwrap_or_default().iter();
        let agreeing = overlap.zip(&update.tokens).take_while(|(a, b)| a == b);
        let kept = start + agreeing.count();
        let is_other = self.is_mixed && kept < text.len().min(start + update.tokens.len());
        if update.epoch > *epoch {
            text.truncate(start);
        } else if is_other {
            text.truncate(kept);
        }
        *epoch = update.epoch;
        let new = text.len().checked_sub(start);
        if let Some(tokens) = new.and_then(|at| update.tokens.get(at..)) {
            text.extend_from_slice(tokens);
        }
    }
}
