//! Whether an order other than that of arrival pays, by what has been seen of a model's rollouts.
//!
//! The order by lengths is worth what estimates tell of the differences between lengths. That is their correlation,
//! times how much lengths differ at all. Until both are certain enough, lengths do not count. So where estimates are
//! noise, nothing is lost.
//!
//! There are two estimates. Earlier outputs to the same prompt are known before any request starts. Members of the
//! same group become known during the run, and the first to finish are short ones. A group in which a long member
//! still runs then looks short, so these estimates must tell much more before they are followed.
//!
//! The estimate at the end of a request is no evidence, since the order in which members finish would make any
//! estimate look good. An estimate by earlier outputs is older than the request. Two members of a group are
//! compared when both have finished, and which two was settled when they started.
//!
//! An order in which members of a group run one after the other is worth what drafts gain by finished members. The
//! members of a group are alike in all else, so such an order loses nothing where drafts bring nothing. That is why
//! it is followed from the start, until chunks with and without a finished member have shown their tokens per step.

use super::correlation::Correlation;
use super::references::ReferenceGain;

/// Least spread that estimates by earlier outputs have to tell, as a standard deviation of logarithms.
const HISTORY_SPREAD_MIN: f64 = 0.1;
/// The same for members of a group: differences of a factor of 1.5.
const SIBLINGS_SPREAD_MIN: f64 = 0.4;
/// Least gain in tokens per step by a finished member of the group.
const REFERENCE_GAIN_MIN: f64 = 0.05;
/// An order that is followed has to be worth at least this part of the same.
const STAYS_ABOVE: f64 = 0.5;

/// The orders that pay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pays {
    /// The order by estimated lengths.
    pub(crate) lengths: bool,
    /// The order that lets other members of a group finish first, so that drafts can come from them.
    pub(crate) references: bool,
}

/// The observations so far.
#[derive(Clone, Debug)]
pub(crate) struct Evidence {
    history: Correlation,
    siblings: Correlation,
    references: ReferenceGain,
    pays: Pays,
}

impl Default for Evidence {
    fn default() -> Self {
        Evidence {
            history: Correlation::default(),
            siblings: Correlation::default(),
            references: ReferenceGain::default(),
            pays: Pays {
                lengths: false,
                references: true,
            },
        }
    }
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

    /// A chunk of a member of a group has ended. `had_reference`: another member had finished when it began.
    pub(crate) fn note_chunk(
        &mut self,
        had_reference: bool,
        emitted_tokens: u32,
        accepted_tokens: u32,
    ) {
        self.references
            .note(had_reference, emitted_tokens, accepted_tokens);
        self.decide();
    }

    fn decide(&mut self) {
        let part = |pays: bool| if pays { STAYS_ABOVE } else { 1.0 };
        let (lengths, references) = (part(self.pays.lengths), part(self.pays.references));
        let gain = self.references.value();
        self.pays = Pays {
            lengths: self.history.told_spread() >= lengths * HISTORY_SPREAD_MIN
                || self.siblings.told_spread() >= lengths * SIBLINGS_SPREAD_MIN,
            references: gain.map_or(self.pays.references, |gain| {
                gain >= references * REFERENCE_GAIN_MIN
            }),
        };
    }

    /// The orders that pay.
    pub(crate) fn pays(&self) -> Pays {
        self.pays
    }

    /// How many more tokens per step drafts from a finished member bring, as a share. 0 while it is unknown.
    pub(crate) fn reference_gain(&self) -> f64 {
        self.references.value().unwrap_or(0.0)
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
        assert!(!evidence.pays().lengths);
        for nth in 0..500 {
            evidence.note_history(length(nth), length(nth + 7_777));
            evidence.note_siblings(length(nth), length(nth + 3_333));
        }
        assert!(!evidence.pays().lengths, "{evidence:?}");
        for nth in 0..500 {
            evidence.note_history(length(nth), length(nth) + 10);
        }
        assert!(evidence.pays().lengths, "{evidence:?}");
        for nth in 0..2_000 {
            evidence.note_history(length(nth), length(nth + 7_777));
        }
        assert!(!evidence.pays().lengths, "{evidence:?}");
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
            history.pays().lengths && !siblings.pays().lengths,
            "{history:?} {siblings:?}"
        );
        for nth in 0..600 {
            siblings.note_siblings(length(nth), length(nth));
        }
        assert!(siblings.pays().lengths, "{siblings:?}");
    }

    #[test]
    fn references_pay_where_drafts_gain_by_them_and_lengths_are_not_asked() {
        let mut evidence = Evidence::default();
        let mut note = |accepted_tokens: u32, times: usize| {
            for _ in 0..times {
                evidence.note_chunk(false, 100, 20);
                evidence.note_chunk(true, 100, accepted_tokens);
            }
            let pays = evidence.pays();
            assert!(!pays.lengths);
            pays.references
        };
        // They are followed from the start. A fortieth more keeps it up, and a twentieth begins it again.
        assert!(note(23, 2_000));
        assert!(!note(20, 2_000));
        assert!(!note(23, 2_000));
        assert!(note(26, 2_000));
    }
}
