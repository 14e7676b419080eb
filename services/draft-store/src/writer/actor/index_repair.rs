//! Rebuilding a damaged index of the log.

use std::time::{Duration, Instant};

use crate::log::journaled::IndexMode;
use crate::reading::document_text;
use crate::reading::document_text::TextError;
use crate::record::DocumentKey;
use crate::writer::actor::WriterActor;

/// Documents that are remembered at most for having had the index built anew.
const REREAD_MAX: usize = 4_096;

/// Between two indexes that are built anew; doubled each time, up to the most.
const REBUILD_WAIT: Duration = Duration::from_secs(1);
const REBUILD_WAIT_MAX: Duration = Duration::from_secs(600);

impl WriterActor {
    /// Closes a log whose index a reader could not read. The next tick opens it with an index built anew.
    pub(super) fn close_suspect(&mut self) -> bool {
        let is_suspect = self
            .shared
            .read()
            .as_ref()
            .is_some_and(|open| open.log.is_suspect());
        if is_suspect {
            self.rebuild_index();
        }
        self.core.is_none()
    }

    /// Answers which of the documents that a reader could not read cannot be read now. `None`: for some of them the index is
    /// to be built anew first.
    pub(super) fn still_unreadable(&mut self, keys: Vec<DocumentKey>) -> Option<Vec<DocumentKey>> {
        let mut unreadable = keys;
        let mut new = Vec::new();
        if let Some(open) = self.shared.read().as_ref() {
            unreadable.retain(|key| {
                open.catalog.document(*key).is_some()
                    && matches!(document_text::whole(open, *key), Err(TextError::Damaged(_)))
            });
            new.extend(unreadable.iter().copied().filter(|key| {
                open.log.can_be_rebuilt()
                    && open.catalog.sealed(*key).is_none()
                    && !self.reread.contains(key)
            }));
        }
        if new.is_empty() {
            return Some(unreadable);
        }
        self.note_reread(new);
        None
    }

    /// Remembers for which documents the index is built anew. Past the bound one may be built in vain.
    fn note_reread(&mut self, keys: impl IntoIterator<Item = DocumentKey>) {
        if self.reread.len() >= REREAD_MAX {
            self.reread.clear();
        }
        self.reread.extend(keys);
    }

    /// Closes the store, unless that was done a moment ago. The next tick opens it with an index built anew.
    pub(super) fn rebuild_index(&mut self) {
        let now = Instant::now();
        if now < self.rebuild_not_before {
            return;
        }
        let wait = REBUILD_WAIT.saturating_mul(1 << self.rebuilds.min(10));
        self.rebuild_not_before = now + wait.min(REBUILD_WAIT_MAX);
        self.rebuilds = self.rebuilds.saturating_add(1);
        tracing::error!("draft store index is damaged, building it anew");
        self.metrics.writer_restarts.inc();
        self.index = IndexMode::Rebuild;
        self.shared.set_open(None);
        self.core = None;
    }
}
