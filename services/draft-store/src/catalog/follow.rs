//! Reading changes in order, for followers of a namespace or a group.

use refrain_protocol::NamespaceId;
use refrain_protocol::document::FeedCursor;

use crate::catalog::feed::{self, FeedChange};
use crate::catalog::groups::GroupKey;
use crate::catalog::state::Catalog;

impl Catalog {
    /// The first change of a namespace after `sequence`.
    pub(crate) fn next_change(
        &self,
        namespace: NamespaceId,
        after: u64,
    ) -> Option<(u64, FeedChange)> {
        let entry = self.namespaces.get(&namespace)?;
        let (sequence, document, start) = entry.feed.after(after)?;
        let Some(start) = start else {
            return Some((sequence, FeedChange::Removed(document)));
        };
        let known = entry.documents.get(&document)?;
        Some((sequence, known.range(document, sequence, start)))
    }

    /// The first change of a group's documents after `sequence`.
    pub(crate) fn next_group_change(
        &self,
        group: &GroupKey,
        after: u64,
    ) -> Option<(u64, FeedChange)> {
        let documents = &self.namespaces.get(&group.0)?.documents;
        let changed = self.groups.members(group).filter_map(|document| {
            let known = documents.get(&document)?;
            let at = known
                .boundaries
                .partition_point(|(sequence, _)| *sequence <= after);
            let (sequence, start) = known.boundaries.get(at)?;
            Some((*sequence, known.range(document, *sequence, *start)))
        });
        let departed = self
            .groups
            .next_departure(group, after)
            .map(|(sequence, document)| (sequence, FeedChange::Removed(document)));
        changed
            .chain(departed)
            .min_by_key(|(sequence, _)| *sequence)
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

    /// The cursor of a position in a namespace's feed.
    pub(crate) fn cursor(&self, namespace: NamespaceId, sequence: u64) -> FeedCursor {
        let record = self
            .namespaces
            .get(&namespace)
            .map(|entry| entry.feed.record())
            .unwrap_or_default();
        feed::cursor(self.generation, record, sequence)
    }

    /// The position of a cursor in a namespace's feed. `None` if the cursor is not valid here.
    pub(crate) fn position(&self, namespace: NamespaceId, cursor: FeedCursor) -> Option<u64> {
        let record = self
            .namespaces
            .get(&namespace)
            .map(|entry| entry.feed.record())
            .unwrap_or_default();
        feed::position(self.generation, record, self.head, cursor)
    }
}
