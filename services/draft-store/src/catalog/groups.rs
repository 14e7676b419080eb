//! Groups of samples of one prompt: which documents are members, and which have left.
//!
//! A group's log consists of the updates of its documents, in the order of the namespace's feed. So there is no
//! second log. A group knows its documents, a reader merges their feed entries by sequence, and only the departures
//! are recorded. Groups live in memory only. After a restart they are registered again, and their logs begin with
//! what is appended from then on.

use std::collections::HashMap;

use refrain_protocol::document::FeedCursor;
use refrain_protocol::{DocumentId, NamespaceId};

use crate::record::DocumentKey;

/// Departures that a group remembers. Beyond it the group's followers start over.
const DEPARTURES_MAX: usize = 4_096;

/// A group's name within the store.
pub(crate) type GroupKey = (NamespaceId, String);

struct Member {
    weight_version: u64,
    tokens: u32,
}

struct Group {
    /// The sequence at its registration. Cursors of an earlier group of this name are invalid.
    born: u64,
    expires_ms: u64,
    /// Weight version of the newest document. Documents of older weights have left.
    weight_version: u64,
    tokens: u64,
    members: HashMap<DocumentId, Member>,
    /// Departures by sequence, in order.
    departures: Vec<(u64, DocumentId)>,
}

/// The result of adding an update to a group.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Enrolment {
    /// Documents that must leave, each with a sequence of its own.
    pub(crate) leaving: Vec<DocumentKey>,
    /// The group has no room for the document.
    pub(crate) is_full: bool,
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

    pub(crate) fn contains(&self, key: &GroupKey) -> bool {
        self.groups.contains_key(key)
    }

    /// Registers a group, or renews it. Returns the documents whose weights are now too old for it.
    pub(crate) fn register(
        &mut self,
        key: GroupKey,
        sequence: u64,
        expires_ms: u64,
        weight_version: u64,
    ) -> Vec<DocumentKey> {
        let namespace = key.0;
        let group = self.groups.entry(key).or_insert_with(|| Group {
            born: sequence,
            expires_ms,
            weight_version,
            tokens: 0,
            members: HashMap::new(),
            departures: Vec::new(),
        });
        group.expires_ms = expires_ms;
        group.renew(namespace, weight_version)
    }

    /// Records that a document of a group now has `tokens` tokens.
    pub(crate) fn enrol(
        &mut self,
        key: DocumentKey,
        group: &str,
        weight_version: u64,
        tokens: u32,
        tokens_max: u64,
    ) -> Enrolment {
        let name: GroupKey = (key.namespace, group.to_owned());
        let Some(group) = self.groups.get_mut(&name) else {
            return Enrolment::default();
        };
        // A document stays in the group that it began in.
        let elsewhere = self
            .by_document
            .get(&key)
            .is_some_and(|other| *other != name.1);
        if elsewhere || weight_version < group.weight_version {
            return Enrolment::default();
        }
        let mut enrolment = Enrolment {
            leaving: group.renew(key.namespace, weight_version),
            is_full: false,
        };
        enrolment.leaving.retain(|leaving| *leaving != key);
        let before = group
            .members
            .get(&key.document)
            .map(|member| member.tokens)
            .unwrap_or(0);
        let left: u64 = enrolment
            .leaving
            .iter()
            .filter_map(|key| group.members.get(&key.document))
            .map(|member| u64::from(member.tokens))
            .sum();
        let after = group.tokens - u64::from(before) + u64::from(tokens);
        if after - left > tokens_max {
            enrolment.is_full = true;
            if group.members.contains_key(&key.document) {
                enrolment.leaving.push(key);
            }
            return enrolment;
        }
        group.tokens = after;
        let member = Member {
            weight_version,
            tokens,
        };
        group.members.insert(key.document, member);
        self.by_document.insert(key, name.1);
        enrolment
    }

    /// Records that followers were told to drop a document, as the change numbered `sequence`. Unless it is gone for
    /// good, it stays a member.
    pub(crate) fn depart(&mut self, key: DocumentKey, sequence: u64, for_good: bool) {
        let Some(name) = self.by_document.get(&key) else {
            return;
        };
        let name = (key.namespace, name.clone());
        if for_good {
            self.by_document.remove(&key);
        }
        let Some(group) = self.groups.get_mut(&name) else {
            return;
        };
        if for_good && let Some(member) = group.members.remove(&key.document) {
            group.tokens -= u64::from(member.tokens);
        }
        group.departures.push((sequence, key.document));
        if group.departures.len() > DEPARTURES_MAX {
            group.departures.clear();
            group.born = sequence;
        }
    }

    /// Drops groups whose time to live is over.
    pub(crate) fn expire(&mut self, now_ms: u64) {
        let before = self.groups.len();
        self.groups.retain(|_, group| group.expires_ms > now_ms);
        if self.groups.len() < before {
            let groups = &self.groups;
            self.by_document
                .retain(|key, name| groups.contains_key(&(key.namespace, name.clone())));
        }
    }

    fn live(&self, key: &GroupKey, now_ms: u64) -> Option<&Group> {
        self.groups
            .get(key)
            .filter(|group| group.expires_ms > now_ms)
    }

    /// Whether a group is registered, and its time to live is not over.
    pub(crate) fn is_live(&self, key: &GroupKey, now_ms: u64) -> bool {
        self.live(key, now_ms).is_some()
    }

    /// The documents of a group.
    pub(super) fn members(&self, key: &GroupKey) -> impl Iterator<Item = DocumentId> {
        self.groups
            .get(key)
            .into_iter()
            .flat_map(|group| group.members.keys().copied())
    }

    /// The first departure after `sequence`.
    pub(super) fn next_departure(&self, key: &GroupKey, after: u64) -> Option<(u64, DocumentId)> {
        let departures = &self.groups.get(key)?.departures;
        let at = departures.partition_point(|(sequence, _)| *sequence <= after);
        departures.get(at).copied()
    }

    /// The cursor of a position in a group's log.
    pub(super) fn cursor(&self, generation: u64, key: &GroupKey, sequence: u64) -> FeedCursor {
        let born = self.groups.get(key).map_or(0, |group| group.born);
        FeedCursor {
            generation: generation.wrapping_add(born),
            sequence,
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
        let ours = cursor.generation == generation.wrapping_add(born);
        (ours && cursor.sequence <= head).then_some(cursor.sequence)
    }
}

impl Group {
    /// Adopts newer weights. Returns the members with older ones.
    fn renew(&mut self, namespace: NamespaceId, weight_version: u64) -> Vec<DocumentKey> {
        if weight_version <= self.weight_version {
            return Vec::new();
        }
        self.weight_version = weight_version;
        let mut old: Vec<DocumentKey> = self
            .members
            .iter()
            .filter(|(_, member)| member.weight_version < weight_version)
            .map(|(document, _)| DocumentKey::new(namespace, *document))
            .collect();
        old.sort_unstable();
        old
    }
}
