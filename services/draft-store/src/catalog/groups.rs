//! Groups of samples of one prompt: which documents are members, and which have left.
//!
//! A group's log consists of the updates of its documents, in the order of the namespace's feed. So there is no
//! second log. A group knows its documents, a reader merges their feed entries by sequence, and only the departures
//! are recorded. Groups live in memory only. After a restart they are registered again, and their logs begin with
//! what is appended from then on.

use std::collections::{HashMap, HashSet};

use refrain_protocol::document::{FeedCursor, StreamPosition};
use refrain_protocol::{DocumentId, NamespaceId};

use crate::metrics::Limit;
use crate::record::DocumentKey;

/// Departures that a group remembers. Beyond it the group's followers start over.
const DEPARTURES_MAX: usize = 4_096;

/// Most documents of a group, since a reader looks at all of them for each change.
const DOCUMENTS_MAX: usize = 1_024;

/// A group's name within the store.
pub(crate) type GroupKey = (NamespaceId, String);

/// A reader of a group's log.
pub(crate) struct GroupReader<'a> {
    pub(crate) group: &'a GroupKey,
    /// Documents that it writes itself, and does not read.
    pub(crate) own: &'a HashSet<DocumentId>,
}

/// An update of a document that names a group.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GroupUpdate {
    /// Length of the document after the update.
    pub(crate) len: u32,
    /// Sequence of the update.
    pub(crate) sequence: u64,
    /// When the oldest token of the update was emitted, by the store's clock, in Unix milliseconds.
    pub(crate) emitted_ms: u64,
}

struct Group {
    /// The last sequence at its registration. Cursors of an earlier group of this name are invalid.
    born: u64,
    expires_ms: u64,
    tokens: u64,
    members: HashMap<DocumentId, GroupUpdate>,
    /// Departures by sequence, in order.
    departures: Vec<(u64, DocumentId)>,
}

/// The result of adding an update to a group.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Enrolment {
    /// The document if it has to leave, since the group has no room for it any more.
    pub(crate) leaving: Option<DocumentKey>,
    /// The document has just become a member. Readers have none of it, whatever their positions are.
    pub(crate) is_new: bool,
    /// The limit for which the group has no room for the document.
    pub(crate) refused: Option<Limit>,
}

/// All registered groups.
#[derive(Default)]
pub(crate) struct Groups {
    groups: HashMap<GroupKey, Group>,
    by_document: HashMap<DocumentKey, String>,
}

impl Groups {
    pub(crate) fn len(&self) -> usize {
        self.groups.len()
    }

    /// Number of documents of all groups.
    pub(crate) fn documents(&self) -> usize {
        self.by_document.len()
    }

    pub(crate) fn contains(&self, key: &GroupKey) -> bool {
        self.groups.contains_key(key)
    }

    /// Registers a group, or renews it. `sequence` is the last one in use.
    pub(crate) fn register(&mut self, key: GroupKey, sequence: u64, expires_ms: u64) {
        let group = self.groups.entry(key).or_insert_with(|| Group {
            born: sequence,
            expires_ms,
            tokens: 0,
            members: HashMap::new(),
            departures: Vec::new(),
        });
        group.expires_ms = group.expires_ms.max(expires_ms);
    }

    /// Records an update of a document that names a group.
    pub(crate) fn enrol(
        &mut self,
        key: DocumentKey,
        group: &str,
        update: GroupUpdate,
        tokens_max: u64,
    ) -> Enrolment {
        let name: GroupKey = (key.namespace, group.to_owned());
        let Some(group) = self.groups.get_mut(&name) else {
            return Enrolment::default();
        };
        // A document stays in the group that it began in.
        let known = self.by_document.get(&key);
        let is_elsewhere = known.is_some_and(|other| *other != name.1);
        if is_elsewhere {
            return Enrolment::default();
        }
        let mut enrolment = Enrolment::default();
        let tokens_of = |document: &DocumentId| {
            let member = group.members.get(document);
            member.map_or(0, |member| u64::from(member.len))
        };
        let others = group.tokens - tokens_of(&key.document);
        let is_member = group.members.contains_key(&key.document);
        let documents = group.members.len();
        enrolment.refused = if others + u64::from(update.len) > tokens_max {
            Some(Limit::GroupTokens)
        } else if !is_member && documents >= DOCUMENTS_MAX {
            Some(Limit::GroupDocuments)
        } else {
            None
        };
        if enrolment.refused.is_some() {
            enrolment.leaving = is_member.then_some(key);
            return enrolment;
        }
        group.tokens = group.tokens - tokens_of(&key.document) + u64::from(update.len);
        enrolment.is_new = group.members.insert(key.document, update).is_none();
        self.by_document.insert(key, name.1);
        enrolment
    }

    /// Records that followers were told to drop a document, as the change numbered `sequence`. Unless it is gone for
    /// good, it stays a member.
    pub(crate) fn depart(&mut self, key: DocumentKey, sequence: u64, is_for_good: bool) {
        let Some(name) = self.by_document.get(&key) else {
            return;
        };
        let name = (key.namespace, name.clone());
        if is_for_good {
            self.by_document.remove(&key);
        }
        let Some(group) = self.groups.get_mut(&name) else {
            return;
        };
        if is_for_good && let Some(member) = group.members.remove(&key.document) {
            group.tokens -= u64::from(member.len);
        }
        group.departures.push((sequence, key.document));
        if group.departures.len() > DEPARTURES_MAX {
            group.departures.clear();
            group.born = sequence;
        }
    }

    /// Drops groups whose time to live is over.
    pub(crate) fn expire(&mut self, now_ms: u64) {
        let by_document = &mut self.by_document;
        self.groups.retain(|(namespace, _), group| {
            let is_live = group.expires_ms > now_ms;
            if !is_live {
                for document in group.members.keys() {
                    by_document.remove(&DocumentKey::new(*namespace, *document));
                }
            }
            is_live
        });
    }

    /// Whether a group is registered, and its time to live is not over.
    pub(crate) fn is_live(&self, key: &GroupKey, now_ms: u64) -> bool {
        let group = self.groups.get(key);
        group.is_some_and(|group| group.expires_ms > now_ms)
    }

    /// When the oldest token of the update numbered `sequence` was emitted, if that is the newest of its document.
    pub(crate) fn emitted_ms(&self, key: &GroupKey, sequence: u64) -> Option<u64> {
        let mut members = self.groups.get(key)?.members.values();
        let newest = members.find(|member| member.sequence == sequence)?;
        Some(newest.emitted_ms)
    }

    /// The documents of a group.
    pub(super) fn members(&self, key: &GroupKey) -> impl Iterator<Item = DocumentId> {
        self.groups
            .get(key)
            .into_iter()
            .flat_map(|group| group.members.keys().copied())
    }

    /// The first departure after `sequence`.
    pub(super) fn next_departure(
        &self,
        reader: &GroupReader<'_>,
        after: u64,
    ) -> Option<(u64, DocumentId)> {
        let departures = &self.groups.get(reader.group)?.departures;
        let at = departures.partition_point(|(sequence, _)| *sequence <= after);
        let mut later = departures[at..].iter().copied();
        later.find(|(_, document)| !reader.own.contains(document))
    }

    /// The cursor of a position in a group's log.
    pub(super) fn cursor(&self, generation: u64, key: &GroupKey, sequence: u64) -> FeedCursor {
        let born = self.groups.get(key).map_or(0, |group| group.born);
        FeedCursor {
            generation: generation.wrapping_add(born),
            sequence,
            seen: StreamPosition::default(),
        }
    }

    /// The position of a cursor. `None` if the cursor is not valid here, or no longer.
    pub(super) fn position(
        &self,
        generation: u64,
        head: u64,
        key: &GroupKey,
        cursor: FeedCursor,
    ) -> Option<u64> {
        let born = self.groups.get(key)?.born;
        let is_ours = cursor.generation == generation.wrapping_add(born);
        (is_ours && cursor.sequence <= head).then_some(cursor.sequence)
    }
}
