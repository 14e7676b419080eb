//! The number of drafts of the head per text that the head has to read first.

use crate::DecayedRatio;

/// Assumed drafts per text before any were observed.
const DRAFTS_PRIOR: f64 = 8.0;
/// Weight of the assumption, in texts.
const PRIOR_TEXTS: f64 = 4.0;

/// Recent drafts of the head per text that it read for them. The time to read a text is charged to so many drafts.
///
/// The number depends on the requests. An output of hundreds of tokens without suffix drafts has a hundred drafts of
/// the head after one prompt. An output of twenty tokens, most of them from suffix drafts, has one, and reading may
/// cost more than it brings. A text counts once, when most of it is read. Tokens that other drafts brought meanwhile
/// are read later and do not count as a text.
#[derive(Clone, Debug)]
pub(super) struct Readings {
    drafts_per_text: DecayedRatio,
}

impl Default for Readings {
    fn default() -> Self {
        Readings {
            drafts_per_text: DecayedRatio::starting_at(DRAFTS_PRIOR, PRIOR_TEXTS),
        }
    }
}

impl Readings {
    /// Adds a draft of the head, which first had to read `unread_tokens` of the text.
    pub(super) fn drafted(&mut self, context_tokens: u32, unread_tokens: u32) {
        let is_text = unread_tokens > context_tokens / 2;
        self.drafts_per_text.add(1.0, f64::from(u8::from(is_text)));
    }

    /// The head is on trial because it was not chosen for long. The figures move towards the assumption, so that old
    /// evidence does not exclude the head for ever.
    pub(super) fn tried(&mut self) {
        self.drafts_per_text.add(DRAFTS_PRIOR, 1.0);
    }

    /// Share of the reading time that is charged to one draft.
    pub(super) fn share(&self) -> f64 {
        let drafts = self.drafts_per_text.value().unwrap_or(DRAFTS_PRIOR);
        1.0 / drafts.max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_charged_to_as_many_drafts_as_texts_serve() {
        let mut readings = Readings::default();
        assert_eq!(readings.share(), 1.0 / 8.0);
        // Each prompt has ten drafts. Before every third one the head reads the tokens that other drafts brought
        // meanwhile.
        for draft in 0..1000 {
            let unread_tokens = match draft % 10 {
                0 => 300,
                3 | 6 | 9 => 60,
                _ => 0,
            };
            readings.drafted(300 + 60 * (draft % 10), unread_tokens);
        }
        assert!(
            (readings.share() * 10.0 - 1.0).abs() < 0.05,
            "{}",
            readings.share()
        );
        // Each text has one draft.
        for _ in 0..1000 {
            readings.drafted(300, 300);
        }
        assert!((readings.share() - 1.0).abs() < 0.01);
        // A text that is read again for each draft is charged in full, never more.
        assert!(readings.share() <= 1.0);
        // A head that is no longer chosen is tried again after some time.
        for _ in 0..200 {
            readings.tried();
        }
        assert!(readings.share() < 0.2, "{}", readings.share());
    }
}
