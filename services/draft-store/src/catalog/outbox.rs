//! The outbox of a replica: the changes that other replicas do not have yet, in the order in which they are sent.
//!
//! An entry names a document and not its text, so a document that changes again before it is sent is sent once. A
//! document that still grows waits until it ends, is silent for a while, or somebody waits for its replication.
//!
//! An entry stays until this replica has applied its messages itself. A removal by another replica may lie between
//! the parts of a long document, and then the whole document has to be sent again.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::record::DocumentKey;
use crate::record::replication::OutboxRecord;

/// An entry as it was when it was read to be sent. An entry that changed since is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryVersion {
    pub(crate) number: u64,
    pub(crate) version: u64,
}

/// The text of a growing document that the stream has from this replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SentText {
    pub(crate) epoch: u64,
    pub(crate) revision: u32,
    pub(crate) len: u32,
}

/// Most growing documents of which only what is new is sent. Beyond it whole documents are sent again.
const SENT_MAX: usize = 65_536;

struct Entry {
    record: OutboxRecord,
    version: u64,
    /// Reads of an earlier version are of no use: the stream has a removal after them.
    whole_since: u64,
    /// A sequence of this replica's feed before the first change that the entry is about.
    before: u64,
    /// The last message of this version in the stream, once the broker has taken it.
    taken_at: Option<u64>,
}

impl Entry {
    fn new(record: OutboxRecord, before: u64) -> Self {
        Entry {
            record,
            version: 0,
            whole_since: 0,
            before,
            taken_at: None,
        }
    }
}

/// The entries of the outbox, by number.
#[derive(Default)]
pub(crate) struct Outbox {
    next: u64,
    entries: BTreeMap<u64, Entry>,
    /// The entries of changed documents.
    documents: HashMap<DocumentKey, u64>,
    /// Entries that may be sent.
    ready: BTreeSet<u64>,
    /// Documents with an entry that still grow.
    growing: BTreeSet<DocumentKey>,
    /// Entries that the broker has taken, by the sequences of their last messages.
    taken: BTreeSet<(u64, u64)>,
    /// The beginnings of growing documents that the stream has.
    sent: HashMap<DocumentKey, SentText>,
}

impl Outbox {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether a document has changes that this replica has not seen in the stream.
    pub(crate) fn has(&self, key: DocumentKey) -> bool {
        self.documents.contains_key(&key)
    }

    /// Adds an entry that was read from the log. A document may be sent once [`Self::release`] says so. Returns the
    /// number of an earlier entry of the document, which is not needed any more. [`Self::restored`] comes after all.
    pub(super) fn restore(&mut self, number: u64, record: OutboxRecord) -> Option<u64> {
        self.next = self.next.max(number + 1);
        let mut earlier = None;
        match (&record, record.key()) {
            (OutboxRecord::Document { .. }, Some(key)) => {
                earlier = self.forget(key);
                self.documents.insert(key, number);
                self.growing.insert(key);
            }
            _ => {
                self.ready.insert(number);
            }
        }
        self.entries.insert(number, Entry::new(record, 0));
        earlier
    }

    /// Notes that all entries are read from the log. Their changes come after the sequence `before` of the feed.
    pub(super) fn restored(&mut self, before: u64) {
        for entry in self.entries.values_mut() {
            entry.before = before;
        }
    }

    /// The changed documents.
    pub(super) fn documents(&self) -> impl Iterator<Item = DocumentKey> {
        self.documents.keys().copied()
    }

    /// Adds an entry that may be sent. Its change comes after the sequence `before` of the feed. Returns its number.
    pub(crate) fn add(&mut self, record: OutboxRecord, before: u64) -> u64 {
        let number = self.next;
        self.next += 1;
        self.entries.insert(number, Entry::new(record, before));
        self.ready.insert(number);
        number
    }

    /// Notes a change of a document, after the sequence `before` of the feed. Returns the number of its entry if that
    /// is new.
    pub(crate) fn change(&mut self, key: DocumentKey, is_ready: bool, before: u64) -> Option<u64> {
        let known = self.documents.get(&key).copied();
        let number = match known {
            Some(number) => number,
            None => {
                let number = self.add(OutboxRecord::document(key), before);
                self.documents.insert(key, number);
                self.ready.remove(&number);
                self.growing.insert(key);
                number
            }
        };
        if let Some(entry) = self.entries.get_mut(&number) {
            entry.version += 1;
            if entry.taken_at.take().is_some() {
                self.growing.insert(key);
            }
        }
        if is_ready {
            self.release(key);
        }
        known.is_none().then_some(number)
    }

    /// Lets the change of a document be sent, finished or not.
    pub(crate) fn release(&mut self, key: DocumentKey) {
        if let Some(number) = self.documents.get(&key)
            && self.awaits_broker(key)
        {
            self.growing.remove(&key);
            self.ready.insert(*number);
        }
    }

    /// Whether a document has changes that the broker has not taken.
    pub(crate) fn awaits_broker(&self, key: DocumentKey) -> bool {
        let number = self.documents.get(&key);
        let entry = number.and_then(|number| self.entries.get(number));
        entry.is_some_and(|entry| entry.taken_at.is_none())
    }

    /// The documents with an entry that still grow.
    pub(crate) fn growing(&self) -> impl Iterator<Item = DocumentKey> {
        self.growing.iter().copied()
    }

    /// Drops the entry of a document that was removed. Returns its number.
    pub(crate) fn forget(&mut self, key: DocumentKey) -> Option<u64> {
        self.sent.remove(&key);
        let number = self.documents.remove(&key)?;
        self.drop_entry(number);
        Some(number)
    }

    /// Makes sure that a document is sent again as a whole, after what is on the way.
    pub(crate) fn renew(&mut self, key: DocumentKey) {
        self.sent.remove(&key);
        if let Some(entry) = self
            .documents
            .get(&key)
            .and_then(|number| self.entries.get_mut(number))
        {
            entry.version += 1;
            entry.whole_since = entry.version;
        }
    }

    /// Notes what the stream has of a document that still grows, as it was read with the entry.
    pub(crate) fn note_sent(&mut self, key: DocumentKey, read: EntryVersion, text: SentText) {
        let entry = self.entries.get_mut(&read.number);
        let Some(entry) = entry.filter(|entry| read.version >= entry.whole_since) else {
            return;
        };
        entry.whole_since = 0;
        if self.sent.len() >= SENT_MAX {
            self.sent.clear();
        }
        self.sent.insert(key, text);
    }

    /// The beginning of a document that the stream has already.
    pub(crate) fn sent(&self, key: DocumentKey) -> Option<SentText> {
        self.sent.get(&key).copied()
    }

    /// A sequence of the feed before the first change that others do not have; `None` if they have all.
    pub(crate) fn before(&self) -> Option<u64> {
        // Entries are numbered in the order in which they were added, and `before` never falls.
        self.entries.values().next().map(|entry| entry.before)
    }

    /// Notes that the broker has taken an entry, with its last message at `sequence`. One that changed since it was
    /// read is sent again.
    pub(crate) fn taken(&mut self, sent: EntryVersion, sequence: u64) {
        let entry = self.entries.get_mut(&sent.number);
        let Some(entry) = entry.filter(|entry| entry.version == sent.version) else {
            return;
        };
        entry.taken_at = Some(sequence);
        if let (OutboxRecord::Document { .. }, Some(key)) = (&entry.record, entry.record.key()) {
            self.growing.remove(&key);
        }
        self.ready.remove(&sent.number);
        self.taken.insert((sequence, sent.number));
    }

    /// Drops the entries of which this replica has applied the last message, which is at most `sequence`. Returns
    /// their numbers.
    pub(crate) fn settle(&mut self, sequence: u64) -> Vec<u64> {
        let later = self.taken.split_off(&(sequence + 1, 0));
        let mut settled = Vec::new();
        for (taken_at, number) in std::mem::replace(&mut self.taken, later) {
            let entry = self.entries.get(&number);
            let Some(entry) = entry.filter(|entry| entry.taken_at == Some(taken_at)) else {
                continue;
            };
            if let OutboxRecord::Document { .. } = entry.record
                && let Some(key) = entry.record.key()
            {
                self.documents.remove(&key);
            }
            self.drop_entry(number);
            settled.push(number);
        }
        settled
    }

    fn drop_entry(&mut self, number: u64) {
        if let Some(entry) = self.entries.remove(&number)
            && let OutboxRecord::Document { .. } = entry.record
            && let Some(key) = entry.record.key()
        {
            self.growing.remove(&key);
        }
        self.ready.remove(&number);
    }

    /// The entries that may be sent, in order.
    pub(crate) fn to_send(&self) -> impl Iterator<Item = (EntryVersion, &OutboxRecord)> {
        self.ready.iter().filter_map(|number| {
            let entry = self.entries.get(number)?;
            let version = EntryVersion {
                number: *number,
                version: entry.version,
            };
            Some((version, &entry.record))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_protocol::{DocumentId, NamespaceId};

    fn key(document: u128) -> DocumentKey {
        DocumentKey::new(NamespaceId(1), DocumentId(document))
    }

    fn numbers(outbox: &Outbox) -> Vec<u64> {
        outbox.to_send().map(|(entry, _)| entry.number).collect()
    }

    #[test]
    fn a_growing_document_waits_and_a_changed_one_is_sent_again() {
        let mut outbox = Outbox::default();
        assert_eq!(outbox.change(key(1), false, 3), Some(0));
        assert_eq!(outbox.change(key(2), true, 5), Some(1));
        assert_eq!(numbers(&outbox), [1]);
        assert_eq!(outbox.change(key(1), true, 7), None);
        assert_eq!(numbers(&outbox), [0, 1]);
        let sent: Vec<EntryVersion> = outbox.to_send().map(|(entry, _)| entry).collect();
        outbox.renew(key(1));
        outbox.taken(sent[0], 11);
        outbox.taken(sent[1], 12);
        assert_eq!(numbers(&outbox), [0], "it changed on the way");
        assert!(outbox.has(key(2)) && !outbox.awaits_broker(key(2)));
        assert_eq!(outbox.settle(11), [0; 0]);
        assert_eq!(outbox.settle(12), [1]);
        assert_eq!(outbox.before(), Some(3));
        assert_eq!(outbox.forget(key(1)), Some(0));
        assert_eq!((outbox.len(), outbox.growing().count()), (0, 0));
        assert_eq!(outbox.before(), None);
    }

    #[test]
    fn a_removal_does_not_stop_the_document_from_waiting() {
        let mut outbox = Outbox::default();
        let removal = outbox.add(OutboxRecord::removal(key(1), false), 0);
        outbox.change(key(1), false, 3);
        let sent = EntryVersion {
            number: removal,
            version: 0,
        };
        outbox.taken(sent, 5);
        assert_eq!(outbox.settle(5), [removal]);
        assert!(outbox.has(key(1)));
        assert_eq!(outbox.growing().collect::<Vec<_>>(), [key(1)]);
    }

    #[test]
    fn a_document_that_changes_before_its_messages_come_back_is_sent_again() {
        let mut outbox = Outbox::default();
        outbox.change(key(1), true, 0);
        let (sent, _) = outbox.to_send().next().unwrap();
        outbox.taken(sent, 5);
        outbox.release(key(1));
        assert_eq!(numbers(&outbox), [0; 0], "the broker has it");
        outbox.change(key(1), false, 9);
        assert_eq!(outbox.growing().collect::<Vec<_>>(), [key(1)]);
        assert_eq!(outbox.settle(5), [0; 0]);
        outbox.release(key(1));
        assert_eq!((numbers(&outbox), outbox.before()), (vec![0], Some(0)));
    }
}
