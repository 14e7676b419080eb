//! Whether an order by lengths pays, by what has been seen of a model's rollouts.
//!
//! The order by lengths is worth what estimates tell of the differences between lengths. That is their correlation,
//! times how much lengths differ at all. Both are measured while requests are served in order of arrival, and until
//! they are certain enough, that order stays. So where estimates are noise, nothing is lost.
//!
//! There are two estimates. Earlier outputs to the same prompt are known before any request starts. Members of the
//! same group become known during the run, and the first to finish are short ones. A group in which a long member
//! still runs then looks short, so these estimates must tell much more before they are followed.
//!
//! The estimate at the end of a request is no evidence, since the order in which members finish would make any
//! estimate look good. An estimate by earlier outputs is older than the request. Two members of a group are
//! compared when both have finished, and which two was settled when they started.

use super::correlation::Correlation;

/// Least spread that estimates by earlier outputs have to tell, as a standard deviation of logarithms.
const HISTORY_SPREAD_MIN: f64 = 0.1;
/// The same for members of a group: differences of a factor of 1.7.
const SIBLINGS_SPREAD_MIN: f64 = 0.55;
/// Estimates that are followed have to tell at least this part of the same spread.
const STAYS_ABOVE: f64 = 0.5;

/// The observations so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Evidence {
    history: Correlation,
    siblings: Correlation,
    pays: bool,
}

impl Evidence {
    /// A request has finished for whose prompt earlier outputs were known.
    pub(crate) fn note_history(&mut self, expected_tokens: u32, tokens: u32) {
        self.history.note(expected_tokens, tokens);
        self.decide();
    }

    /// Two members of a group have finished. The one that started first comes first.
    pub(crate) fn note_siblings(&mut self, first_tokens: u32, second_tokens: u32) {
        self.siblings.note(first_tokens, second_tokens);
        self.decide();
    }

    fn decide(&mut self) {
        let part = if self.pays { STAYS_ABOVE } else { 1.0 };
        self.pays = self.history.told_spread() >= part * HISTORY_SPREAD_MIN
            || self.siblings.told_spread() >= part * SIBLINGS_SPREAD_MIN;
    }

    /// Whether an order by lengths pays.
    pub(crate) fn pays(&self) -> bool {
        self.pays
    }

    /// The correlations of lengths with those of earlier outputs, and of two members of a group.
    pub(crate) fn correlations(&self) -> [f64; 2] {
        [self.history.value(), self.siblings.value()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lengths from 64 to 4,096 without a pattern.
    fn length(nth: u32) -> u32 {
        64 << ((nth.wrapping_mul(2_654_435_761) >> 16 & 0x3ff) % 7)
    }

    #[test]
    fn the_order_by_lengths_waits_for_evidence_and_ends_with_it() {
        let mut evidence = Evidence::default();
        assert!(!evidence.pays());
        for nth in 0..500 {
            evidence.note_history(length(nth), length(nth + 7_777));
            evidence.note_siblings(length(nth), length(nth + 3_333));
        }
        assert!(!evidence.pays(), "{evidence:?}");
        for nth in 0..500 {
            evidence.note_history(length(nth), length(nth) + 10);
        }
        assert!(evidence.pays(), "{evidence:?}");
        for nth in 0..2_000 {
            evidence.note_history(length(nth), length(nth + 7_777));
        }
        assert!(!evidence.pays(), "{evidence:?}");
    }

    #[test]
    fn members_of_a_group_have_to_tell_more_than_earlier_outputs() {
        // Lengths that differ by a tenth.
        let close = |nth: u32| 1_000 + length(nth) / 10;
        let (mut history, mut siblings) = (Evidence::default(), Evidence::default());
        for nth in 0..200 {
            history.note_history(close(nth), close(nth));
            siblings.note_siblings(close(nth), close(nth));
        }
        assert!(
            history.pays() && !siblings.pays(),
            "{history:?} {siblings:?}"
        );
        for nth in 0..600 {
            siblings.note_siblings(length(nth), length(nth));
        }
        assert!(siblings.pays(), "{siblings:?}");
    }
}
