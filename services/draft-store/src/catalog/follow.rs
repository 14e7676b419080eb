//! Reading changes in order, for followers of a namespace or a group.

use std::collections::HashSet;

use refrain_protocol::document::{FeedCursor, StreamPosition};
use refrain_protocol::{DocumentId, NamespaceId};

use crate::catalog::feed::{self, FeedChange};
use crate::catalog::groups::{GroupKey, GroupReader};
use crate::catalog::state::Catalog;
use crate::record::FeedRecord;

impl Catalog {
    /// The first change of a namespace after `sequence`, without the growth of documents that are the reader's own.
    pub(crate) fn next_change(
        &self,
        namespace: NamespaceId,
        after: u64,
        own: &HashSet<DocumentId>,
    ) -> Option<(u64, FeedChange)> {
        let entry = self.namespaces.get(&namespace)?;
        let mut later = entry.feed.after(after);
        let (sequence, document, start) =
            later.find(|(_, document, start)| start.is_none() || !own.contains(document))?;
        let Some(start) = start else {
            return Some((sequence, FeedChange::Removed(document)));
        };
        let known = entry.documents.get(&document)?;
        Some((sequence, known.range(document, sequence, start)))
    }

    /// The first change of a group's documents after `sequence`, without those that the reader writes itself. The
    /// cost is a look at each document of the group.
    pub(crate) fn next_group_change(
        &self,
        reader: &GroupReader<'_>,
        after: u64,
    ) -> Option<(u64, FeedChange)> {
        let documents = &self.namespaces.get(&reader.group.0)?.documents;
        let others = self.groups.members(reader.group);
        let changed = others
            .filter(|document| !reader.own.contains(document))
            .filter_map(|document| {
                let known = documents.get(&document)?;
                let (sequence, start) = known.boundary_after(after)?;
                Some((sequence, known.range(document, sequence, start)))
            });
        let departed = self.groups.next_departure(reader, after);
        let departed =
            departed.map(|(sequence, document)| (sequence, FeedChange::Removed(document)));
        changed
            .chain(departed)
            .min_by_key(|(sequence, _)| *sequence)
    }

    /// Sequence of the last change of a group's documents, or 0 before the first. A reader that is past it does not
    /// get its own documents once they are others'.
    pub(crate) fn group_end(&self, group: &GroupKey) -> u64 {
        let Some(entry) = self.namespaces.get(&group.0) else {
            return 0;
        };
        let members = self.groups.members(group);
        let known = members.filter_map(|document| entry.documents.get(&document));
        known.map(|known| known.state.sequence).max().unwrap_or(0)
    }

    /// The cursor of a position in a group's log.
    pub(crate) fn group_cursor(&self, group: &GroupKey, sequence: u64) -> FeedCursor {
        self.groups.cursor(self.generation, group, sequence)
    }

    /// The position of a cursor in a group's log. `None` if the cursor is not valid here.
    pub(crate) fn group_position(&self, group: &GroupKey, cursor: FeedCursor) -> Option<u64> {
        self.groups
            .position(self.generation, self.head, group, cursor)
    }

    /// Sequence of the last change of a namespace, or 0 before the first. It does not depend on other namespaces.
    pub(crate) fn last_change(&self, namespace: NamespaceId) -> u64 {
        let entry = self.namespaces.get(&namespace);
        entry.map_or(0, |entry| entry.feed.last())
    }

    fn feed_record(&self, namespace: NamespaceId) -> FeedRecord {
        let entry = self.namespaces.get(&namespace);
        entry.map(|entry| entry.feed.record()).unwrap_or_default()
    }

    /// The cursor of a position in a namespace's feed.
    pub(crate) fn cursor(&self, namespace: NamespaceId, sequence: u64) -> FeedCursor {
        feed::cursor(self.generation, self.feed_record(namespace), sequence)
    }

    /// The position of a cursor in a namespace's feed. `None` if the cursor is not valid here.
    pub(crate) fn position(&self, namespace: NamespaceId, cursor: FeedCursor) -> Option<u64> {
        let record = self.feed_record(namespace);
        if cursor.generation != self.cursor(namespace, 0).generation {
            return self.position_from_elsewhere(namespace, cursor.seen);
        }
        let position = feed::position(self.generation, record, self.head, cursor)?;
        // A reader of changes that were lost has to drop them.
        (!self.is_lost(position)).then_some(position)
    }

    /// The position of a reader who followed another replica so far.
    fn position_from_elsewhere(&self, namespace: NamespaceId, seen: StreamPosition) -> Option<u64> {
        let here = self.replication.position?;
        if seen.stream == 0 || seen.stream != here.stream {
            return None;
        }
        let moves = &self.replication.moves;
        let position = moves.resume(namespace, seen.sequence, self.settled_head())?;
        // Tombstones before the floor are lost, and reading from the beginning is no resumption.
        let is_kept = position >= self.feed_record(namespace).floor;
        (position > 0 && is_kept).then_some(position)
    }

    /// The last sequence, or the one before the oldest change that is not in the stream.
    pub(crate) fn settled_head(&self) -> u64 {
        let unsent = self.replication.outbox.before();
        unsent.map_or(self.head, |before| before.min(self.head))
    }

    /// The message of the stream up to which a reader has everything who is at the end of a namespace's feed.
    pub(crate) fn seen(&self, namespace: NamespaceId) -> StreamPosition {
        let replication = &self.replication;
        let position = replication.position.filter(|position| position.stream != 0);
        position.map_or_else(StreamPosition::default, |position| StreamPosition {
            stream: position.stream,
            sequence: replication.moves.seen(namespace),
        })
    }
}
