//! Where an update belongs in its document: the rule that makes repeated, overlapping and late updates harmless. A
//! pure function.
//!
//! The basic rule: an update of a lower epoch is dropped, one of a higher epoch cuts the text to `prev_len`, and
//! tokens beyond the end are added unless something before them is missing.
//!
//! One case needs more. The first update of a new epoch may be overtaken by a later one of that epoch, which then
//! cuts too late and leaves tokens of the older epoch in front of it. So a document remembers the position from which
//! its text is known to be of its epoch. An update of the same epoch that starts before that position overwrites the
//! text there.

use refrain_protocol::document::DocumentUpdate;

use crate::record::StateRecord;

/// The effect of an update on a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// The text does not change: the update follows a gap, or has nothing new. Its finish reason may be new.
    Nothing {
        /// The update ends where the text ends, in the same epoch, so its finish reason counts.
        at_end: bool,
    },
    /// The update has tokens that the text lacks, and an older epoch. They are dropped, which its sender is told.
    Fenced,
    /// The text is cut to `to`, and the tokens from `skip` on are added. `to` is the text's length unless a higher
    /// epoch shortens it.
    Write {
        /// Length to cut to.
        to: u32,
        /// Tokens of the update that are there already.
        skip: usize,
        /// Start of the text of the update's epoch.
        epoch_start: u32,
    },
    /// A late update of the same epoch. It lies before `epoch_start`, where text of an older epoch may be. Differing
    /// tokens are overwritten.
    Overwrite {
        /// Start of the text of the epoch afterwards.
        epoch_start: u32,
    },
}

/// Decides what an update does. `text` is the document's state, or `None` for an unknown document.
pub(crate) fn place(text: Option<&StateRecord>, update: &DocumentUpdate) -> Placement {
    let start = update.prev_len;
    let added = u32::try_from(update.tokens.len()).unwrap_or(u32::MAX);
    let end = start.saturating_add(added);
    let Some(text) = text else {
        // An empty document is not worth a record; the first tokens bring everything that is needed.
        return if start == 0 && added > 0 {
            Placement::Write {
                to: 0,
                skip: 0,
                epoch_start: 0,
            }
        } else {
            Placement::Nothing { at_end: false }
        };
    };
    if update.epoch < text.epoch && added > 0 && end > text.len {
        return Placement::Fenced;
    }
    if update.epoch < text.epoch || start > text.len {
        return Placement::Nothing { at_end: false };
    }
    if update.epoch > text.epoch {
        return Placement::Write {
            to: start,
            skip: 0,
            epoch_start: start,
        };
    }
    if start < text.epoch_start && added > 0 {
        let epoch_start = if end >= text.epoch_start {
            start
        } else {
            text.epoch_start
        };
        return Placement::Overwrite { epoch_start };
    }
    if end <= text.len {
        return Placement::Nothing {
            at_end: end == text.len,
        };
    }
    Placement::Write {
        to: text.len,
        skip: (text.len - start) as usize,
        epoch_start: text.epoch_start,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use refrain_protocol::DocumentId;
    use refrain_protocol::document::DocumentHead;

    fn placed(
        text: Option<(u64, u32, u32)>,
        epoch: u64,
        prev_len: u32,
        tokens: usize,
    ) -> Placement {
        let update = DocumentUpdate {
            document: DocumentId(1),
            epoch,
            prev_len,
            tokens: vec![1; tokens],
            head: DocumentHead::default(),
            finish: None,
        };
        let state = text.map(|(epoch, epoch_start, len)| StateRecord {
            epoch,
            epoch_start,
            len,
            ..StateRecord::default()
        });
        place(state.as_ref(), &update)
    }

    #[test]
    fn the_placement_rule_case_by_case() {
        use Placement::*;
        let nothing = Nothing { at_end: false };
        assert_eq!(
            placed(None, 1, 0, 4),
            Write {
                to: 0,
                skip: 0,
                epoch_start: 0
            }
        );
        assert_eq!(placed(None, 1, 3, 4), nothing);
        assert_eq!(placed(None, 1, 0, 0), nothing);
        let text = Some((1, 0, 10));
        assert_eq!(
            placed(text, 1, 10, 2),
            Write {
                to: 10,
                skip: 0,
                epoch_start: 0
            }
        );
        assert_eq!(
            placed(text, 1, 8, 4),
            Write {
                to: 10,
                skip: 2,
                epoch_start: 0
            }
        );
        assert_eq!(placed(text, 1, 2, 4), nothing);
        assert_eq!(placed(text, 1, 6, 4), Nothing { at_end: true });
        assert_eq!(placed(text, 1, 11, 4), nothing);
        assert_eq!(placed(text, 0, 10, 4), Fenced);
        assert_eq!(placed(text, 0, 8, 4), Fenced);
        assert_eq!(placed(text, 0, 12, 4), Fenced);
        assert_eq!(placed(text, 0, 6, 4), nothing);
        assert_eq!(placed(text, 0, 12, 0), nothing);
        assert_eq!(
            placed(text, 2, 7, 4),
            Write {
                to: 7,
                skip: 0,
                epoch_start: 7
            }
        );
        assert_eq!(placed(text, 2, 11, 4), nothing);
        let cut_late = Some((2, 8, 10));
        assert_eq!(placed(cut_late, 2, 5, 3), Overwrite { epoch_start: 5 });
        assert_eq!(placed(cut_late, 2, 5, 2), Overwrite { epoch_start: 8 });
        assert_eq!(placed(cut_late, 2, u32::MAX, 9), nothing);
    }
}
