//! Rebuilding a damaged index of the log.

use std::time::{Duration, Instant};

use crate::log::LogError;
use crate::log::journaled::IndexMode;
use crate::reading::document_text::{self, TextError};
use crate::record::DocumentKey;
use crate::writer::actor::WriterActor;

/// Most documents remembered for which the index was rebuilt.
const REBUILT_FOR_MAX: usize = 4_096;

/// Wait between two rebuilds. It doubles each time, up to the maximum.
const REBUILD_WAIT: Duration = Duration::from_secs(1);
const REBUILD_WAIT_MAX: Duration = Duration::from_secs(600);

impl WriterActor {
    /// Closes a log whose index misread something or could not be written. The next tick opens it, with a rebuilt
    /// index after damage.
    pub(super) fn close_faulty(&mut self) -> bool {
        match self.core.as_ref().and_then(|core| core.log.fault()) {
            Some(LogError::Corrupt(_)) => self.rebuild_index(),
            Some(error) => {
                tracing::error!(%error, "draft store index cannot be written; reopening the log, which has everything");
                self.close_to_reopen(IndexMode::Trust);
            }
            None => {}
        }
        self.core.is_none()
    }

    /// Those of the given documents that are still unreadable. `None` if the index must be rebuilt first for some of
    /// them.
    pub(super) fn still_unreadable(&mut self, keys: Vec<DocumentKey>) -> Option<Vec<DocumentKey>> {
        let mut unreadable = keys;
        let mut new = Vec::new();
        if let Ok(open) = self.shared.read() {
            unreadable.retain(|key| {
                open.catalog.document(*key).is_some()
                    && matches!(
                        document_text::read_document(&open, *key),
                        Err(TextError::Damaged(_))
                    )
            });
            new.extend(unreadable.iter().copied().filter(|key| {
                open.log.can_be_rebuilt()
                    && open.catalog.sealed(*key).is_none()
                    && !self.rebuilt_for.contains(key)
            }));
        }
        if new.is_empty() {
            return Some(unreadable);
        }
        self.remember_rebuilt(new);
        None
    }

    /// Remembers documents for which the index is rebuilt. Beyond the limit an index may be rebuilt in vain.
    fn remember_rebuilt(&mut self, keys: impl IntoIterator<Item = DocumentKey>) {
        if self.rebuilt_for.len() >= REBUILT_FOR_MAX {
            self.rebuilt_for.clear();
        }
        self.rebuilt_for.extend(keys);
    }

    /// Closes the store, unless that happened a moment ago. The next tick opens it with a rebuilt index.
    pub(super) fn rebuild_index(&mut self) {
        let now = Instant::now();
        if now < self.rebuild_not_before {
            return;
        }
        let wait = REBUILD_WAIT.saturating_mul(1 << self.rebuilds.min(10));
        self.rebuild_not_before = now + wait.min(REBUILD_WAIT_MAX);
        self.rebuilds = self.rebuilds.saturating_add(1);
        tracing::error!("draft store index is damaged; rebuilding it");
        self.close_to_reopen(IndexMode::Rebuild);
    }

    /// Closes the store. The next tick opens it.
    fn close_to_reopen(&mut self, index: IndexMode) {
        self.metrics.writer_restarts.inc();
        self.index = index;
        self.shared.set_open(None);
        self.core = None;
    }
}
