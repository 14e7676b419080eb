//! Reading the changes of a namespace in order, for its followers.

use refrain_protocol::NamespaceId;
use refrain_protocol::document::FeedCursor;

use crate::catalog::feed::{self, FeedChange};
use crate::catalog::state::Catalog;
use crate::record::FeedRecord;

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
        feed::position(
            self.generation,
            self.feed_record(namespace),
            self.head,
            cursor,
        )
    }
}
