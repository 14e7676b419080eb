//! Sealed documents that are taken back to the live part, because they are going to grow.
//!
//! The live part takes a text token by token, so a long text is appended in parts. Between two parts, others get the
//! lock. An update of the document comes after its whole text, so it appends what is left at once.

use std::time::Instant;

use refrain_protocol::DocumentId;
use refrain_suffix_index::IndexError;

use super::{DraftIndex, LiveState, Revival, key};
use crate::update::MERGED_AT_ONCE;

impl DraftIndex {
    /// Begins to take a sealed document back, with the first part of its text. Without capacity for that it stays as
    /// it is. [`revive_part`](Self::revive_part) goes on.
    pub(super) fn begin_revival(&mut self, document: DocumentId, now: Instant) {
        let key = key(document);
        let Some(output) = self.index.sealed_output(key) else {
            return;
        };
        let done = output.len().min(MERGED_AT_ONCE);
        let tokens = output[done..].to_vec();
        let taken_back = match tokens.is_empty() {
            true => self.index.append(key, &[]),
            false => self.index.shorten(key, done as u32),
        };
        if let Err(error) = taken_back {
            tracing::warn!(%error, "the index has no capacity to take an output back; it stays sealed while it runs");
            return;
        }
        let live = LiveState {
            changed: now,
            ended: false,
        };
        self.live.insert(document, live);
        if !tokens.is_empty() {
            let revival = Revival { tokens, done: 0 };
            self.reviving.insert(document, revival);
        }
    }

    /// Appends a part of a text that is taken back. Returns whether more is left, of this text or another.
    pub(in crate::replica) fn revive_part(&mut self) -> bool {
        if let Some(document) = self.reviving.keys().next().copied()
            && let Err(error) = self.revive(document, MERGED_AT_ONCE)
        {
            tracing::warn!(%error, "the index has no capacity to take all of an output back");
        }
        !self.reviving.is_empty()
    }

    /// Appends up to `tokens_max` tokens of what is left of a text that is taken back.
    pub(super) fn revive(
        &mut self,
        document: DocumentId,
        tokens_max: usize,
    ) -> Result<(), IndexError> {
        let Some(mut revival) = self.reviving.remove(&document) else {
            return Ok(());
        };
        let left = &revival.tokens[revival.done..];
        let part = &left[..left.len().min(tokens_max)];
        self.index.append(key(document), part)?;
        revival.done += part.len();
        if revival.done < revival.tokens.len() {
            self.reviving.insert(document, revival);
        }
        Ok(())
    }
}
