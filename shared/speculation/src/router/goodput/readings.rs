//! How many drafts of the head a text serves that it has to read first.

use crate::DecayedRatio;

/// Drafts that a text is taken to serve until that was seen,
const DRAFTS_PRIOR: f64 = 8.0;
/// and for how many texts this counts.
const PRIOR_TEXTS: f64 = 4.0;

/// Drafts of the head lately, per text that it read for them: what a text takes to read is charged to so many of
/// them.
///
/// It depends on what is asked for. An output of hundreds of tokens that nothing else is found for has a hundred
/// drafts after one prompt; one of twenty tokens, most of them found, has one, and reading may cost more than that
/// brings. A text counts once, when most of it is read; what other drafts brought meanwhile is read for the rest of
/// those drafts.
#[derive(Clone, Debug)]
pub(super) struct Readings {
    drafts_per_text: DecayedRatio,
}

impl Default for Readings {
    fn default() -> Self {
        let mut drafts_per_text = DecayedRatio::default();
        drafts_per_text.add(DRAFTS_PRIOR * PRIOR_TEXTS, PRIOR_TEXTS);
        Readings { drafts_per_text }
    }
}

impl Readings {
    /// The head drafted for a text, some of which it had to read first.
    pub(super) fn drafted(&mut self, context_tokens: u32, unread_tokens: u32) {
        let is_text = unread_tokens > context_tokens / 2;
        self.drafts_per_text.add(1.0, f64::from(u8::from(is_text)));
    }

    /// The head is on trial: it was not chosen for long, and what was seen when it was is not held against it for
    /// ever.
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
        // Ten drafts after each prompt, and before every third what other drafts brought meanwhile.
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
        // One each.
        for _ in 0..1000 {
            readings.drafted(300, 300);
        }
        assert!((readings.share() - 1.0).abs() < 0.01);
        // A text that is read again for each draft is charged in full, never more.
        assert!(readings.share() <= 1.0);
        // Not chosen any more, it is given another chance some time.
        for _ in 0..200 {
            readings.tried();
        }
        assert!(readings.share() < 0.2, "{}", readings.share());
    }
}
