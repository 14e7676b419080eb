//! The score policy: SuffixDecoding's hybrid rule for a request by itself.
//!
//! The rule (section 3 of the paper) verifies the suffix draft if SCORE > tau, and else asks the model-based
//! speculator. Here the speculator, an EAGLE-3 head or a draft model, may be absent, may not pay, or may be on trial.
//! tau follows it: a head that brings three tokens a step is only beaten by drafts that promise more.

use super::decision::{Asked, Decision, HeadState, Route, RouteReason};
use crate::draft::Setting;

/// The accepted length that a fallback in use is credited with before its own was measured.
///
/// A trained head brings two tokens a step and more. A higher prior would win over good suffix drafts unseen; a lower
/// one only delays the measurement a little.
pub const ACCEPTED_LENGTH_PRIOR: f32 = 2.0;

/// Tokens of a step without a draft. Every SCORE exceeds it.
const PLAIN_LENGTH: f32 = 1.0;

/// tau: the SCORE that a suffix draft must exceed where the router has a choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Threshold {
    /// A constant. 0 turns the fallback off: suffix drafts or none.
    Fixed(f32),
    /// The tokens that the alternative brings: the break-even of the fallback while it is in use, else 1 for plain
    /// decoding.
    Auto,
}

impl From<Setting> for Threshold {
    fn from(setting: Setting) -> Self {
        match setting {
            Setting::Auto => Threshold::Auto,
            Setting::Fixed(score) => Threshold::Fixed(score),
        }
    }
}

impl Threshold {
    /// The SCORE that a suffix draft must exceed, where a step of the alternative brings as much as one with
    /// `break_even` tokens; `None` for a fallback that was not measured yet. It is NaN only if it was fixed at NaN.
    pub fn in_force(self, break_even: Option<f32>) -> f32 {
        match self {
            Threshold::Fixed(score) => score,
            Threshold::Auto => break_even
                .filter(|length| length.is_finite())
                .map_or(ACCEPTED_LENGTH_PRIOR, |length| length.max(PLAIN_LENGTH)),
        }
    }

    /// Whether `auto` requests may use the fallback at all.
    pub fn allows_fallback(self) -> bool {
        self != Threshold::Fixed(0.0)
    }
}

/// The state of the fallback in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fallback {
    /// There is none.
    Absent,
    /// This step cannot use it: it ends a prompt, and the head has read nothing yet.
    Blind,
    /// It is slower than plain decoding here.
    NotPaying,
    /// It is not in use, and is tried for a few steps.
    Probed,
    /// It is in use.
    InUse {
        /// Tokens, the target's own included, that a step with a suffix draft must bring to be worth as much as one
        /// of the fallback. It is the fallback's accepted length times the ratio of the times that the two steps
        /// take; `None` until it is measured.
        break_even: Option<f32>,
    },
    /// It is in use, and is left out for a few steps to measure plain decoding again.
    Paused {
        /// See [`Fallback::InUse`].
        break_even: Option<f32>,
    },
}

impl Fallback {
    /// The state for a request, where this is the state for requests that the head can draft for.
    pub(super) fn of(self, head: HeadState) -> Fallback {
        match head {
            HeadState::Absent => Fallback::Absent,
            HeadState::Blind => Fallback::Blind,
            HeadState::Ready { .. } => self,
        }
    }

    /// The threshold in this state.
    pub(super) fn threshold(self, threshold: Threshold) -> f32 {
        threshold.in_force(match self {
            Fallback::InUse { break_even } | Fallback::Paused { break_even } => break_even,
            Fallback::Absent | Fallback::Blind | Fallback::NotPaying | Fallback::Probed => {
                Some(PLAIN_LENGTH)
            }
        })
    }
}

/// The result of the search for a suffix draft.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Found {
    /// No draft was found.
    Nothing,
    /// A draft with this SCORE, in which the root counts 1.
    Score(f32),
    /// A draft was found, of which no token is worth its price.
    Unpaid,
    /// There was no search: suffix drafts do not pay at this batch size.
    Withheld,
}

/// Decides a step of one request.
///
/// A score or threshold that is not a number turns no draft on.
pub(super) fn route_by_score(
    asked: Asked,
    suffix: Found,
    threshold: Threshold,
    fallback: Fallback,
) -> Decision {
    let (route, reason) = match asked {
        Asked::Off => (Route::Plain, RouteReason::Off),
        Asked::Suffix => match suffix {
            Found::Score(_) => (Route::Suffix, RouteReason::Asked),
            Found::Unpaid => (Route::Plain, RouteReason::OverBudget),
            Found::Nothing | Found::Withheld => (Route::Plain, RouteReason::NoMatch),
        },
        Asked::Fallback => match fallback {
            Fallback::Absent => (Route::Plain, RouteReason::NoFallback),
            Fallback::Blind => (Route::Plain, RouteReason::Prompt),
            Fallback::NotPaying
            | Fallback::Probed
            | Fallback::InUse { .. }
            | Fallback::Paused { .. } => (Route::Fallback, RouteReason::Asked),
        },
        Asked::Auto => {
            let without_suffix = match suffix {
                Found::Score(score) if score > fallback.threshold(threshold) => {
                    return Decision {
                        route: Route::Suffix,
                        reason: RouteReason::AboveThreshold,
                    };
                }
                Found::Score(_) => RouteReason::BelowThreshold,
                Found::Nothing => RouteReason::NoMatch,
                Found::Unpaid => RouteReason::OverBudget,
                Found::Withheld => RouteReason::SuffixNotPaying,
            };
            match fallback {
                _ if !threshold.allows_fallback() => (Route::Plain, without_suffix),
                Fallback::Absent => (Route::Plain, without_suffix),
                Fallback::Blind => (Route::Plain, RouteReason::Prompt),
                Fallback::NotPaying => (Route::Plain, RouteReason::NotPaying),
                Fallback::Probed => (Route::Fallback, RouteReason::Probe),
                Fallback::InUse { .. } => (Route::Fallback, without_suffix),
                Fallback::Paused { .. } => (Route::Plain, RouteReason::Pause),
            }
        }
    };
    Decision { route, reason }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Asked::{Auto, Off, Suffix};
    use Fallback::{Absent, Blind, InUse, NotPaying, Paused, Probed};
    use Found::{Nothing, Score, Unpaid, Withheld};

    const FALLBACKS: [Fallback; 8] = [
        Absent,
        Blind,
        NotPaying,
        Probed,
        InUse { break_even: None },
        InUse {
            break_even: Some(3.0),
        },
        Paused { break_even: None },
        Paused {
            break_even: Some(3.0),
        },
    ];

    /// `label of the route: label of the reason`, for every state of the fallback in their order above.
    fn row(asked: Asked, found: Found, threshold: Threshold) -> [String; 8] {
        FALLBACKS.map(|fallback| {
            let decision = route_by_score(asked, found, threshold, fallback);
            format!("{}: {}", decision.route.as_str(), decision.reason.as_str())
        })
    }

    /// All eight alike.
    fn all(cell: &str) -> [String; 8] {
        std::array::from_fn(|_| cell.to_owned())
    }

    fn cells(cells: [&str; 8]) -> [String; 8] {
        cells.map(str::to_owned)
    }

    #[test]
    fn table_of_decisions() {
        let suffix = "suffix: above_threshold";
        let fallback_where_there_is_one = |without: &str, in_use: &str| {
            cells([
                without,
                "plain: prompt",
                "plain: not_paying",
                "fallback: probe",
                in_use,
                in_use,
                "plain: pause",
                "plain: pause",
            ])
        };
        let no_match = fallback_where_there_is_one("plain: no_match", "fallback: no_match");
        let below =
            fallback_where_there_is_one("plain: below_threshold", "fallback: below_threshold");
        let fixed = Threshold::Fixed;
        let table = [
            // auto: tau is 1 without a fallback in use, 2 while it is not measured, 3 once it is.
            (Auto, Nothing, Threshold::Auto, no_match.clone()),
            (
                Auto,
                Score(1.5),
                Threshold::Auto,
                cells([
                    suffix,
                    suffix,
                    suffix,
                    suffix,
                    "fallback: below_threshold",
                    "fallback: below_threshold",
                    "plain: pause",
                    "plain: pause",
                ]),
            ),
            (
                Auto,
                Score(2.5),
                Threshold::Auto,
                cells([
                    suffix,
                    suffix,
                    suffix,
                    suffix,
                    suffix,
                    "fallback: below_threshold",
                    suffix,
                    "plain: pause",
                ]),
            ),
            (Auto, Score(3.1), Threshold::Auto, all(suffix)),
            // Withheld or unpaid is as good as not found, and says so.
            (
                Auto,
                Unpaid,
                Threshold::Auto,
                fallback_where_there_is_one("plain: over_budget", "fallback: over_budget"),
            ),
            (
                Auto,
                Withheld,
                Threshold::Auto,
                fallback_where_there_is_one(
                    "plain: suffix_not_paying",
                    "fallback: suffix_not_paying",
                ),
            ),
            // A number holds whatever the fallback brings.
            (Auto, Nothing, fixed(4.0), no_match),
            (Auto, Score(4.0), fixed(4.0), below.clone()),
            (Auto, Score(4.1), fixed(4.0), all(suffix)),
            (Auto, Score(1.2), fixed(1.0), all(suffix)),
            (Auto, Score(9.0), fixed(f32::INFINITY), below.clone()),
            // 0: suffix or plain.
            (Auto, Nothing, fixed(0.0), all("plain: no_match")),
            (Auto, Nothing, fixed(-0.0), all("plain: no_match")),
            (Auto, Score(1.1), fixed(0.0), all(suffix)),
            // A score or threshold that is not a number turns no draft on.
            (Auto, Score(9.0), fixed(f32::NAN), below.clone()),
            (Auto, Score(f32::NAN), fixed(1.0), below.clone()),
            (
                Auto,
                Score(f32::NAN),
                fixed(0.0),
                all("plain: below_threshold"),
            ),
            (Auto, Score(f32::NAN), Threshold::Auto, below),
            // A request that asks for a route gets it, without a gate or a threshold.
            (Suffix, Nothing, Threshold::Auto, all("plain: no_match")),
            (Suffix, Unpaid, Threshold::Auto, all("plain: over_budget")),
            (Suffix, Score(1.1), Threshold::Auto, all("suffix: asked")),
            (Suffix, Score(1.1), fixed(9.0), all("suffix: asked")),
            (Off, Nothing, Threshold::Auto, all("plain: off")),
            (Off, Score(9.0), fixed(1.0), all("plain: off")),
        ];
        for (asked, found, threshold, expected) in table {
            assert_eq!(
                row(asked, found, threshold),
                expected,
                "{asked:?} {found:?} {threshold:?}"
            );
        }
        let asked = "fallback: asked";
        for found in [
            Nothing,
            Score(1.1),
            Score(9.0),
            Score(f32::NAN),
            Unpaid,
            Withheld,
        ] {
            for threshold in [Threshold::Auto, fixed(0.0), fixed(4.0)] {
                let mut expected = all(asked);
                expected[0] = "plain: no_fallback".into();
                expected[1] = "plain: prompt".into();
                assert_eq!(row(Asked::Fallback, found, threshold), expected);
            }
        }
    }

    #[test]
    fn the_threshold_in_force_is_a_number_of_tokens() {
        let in_use = |length| InUse { break_even: length };
        let auto = |fallback: Fallback| fallback.threshold(Threshold::Auto);
        assert_eq!(auto(in_use(Some(3.5))), 3.5);
        assert_eq!(auto(in_use(None)), ACCEPTED_LENGTH_PRIOR);
        assert_eq!(auto(in_use(Some(f32::NAN))), ACCEPTED_LENGTH_PRIOR);
        assert_eq!(auto(in_use(Some(0.2))), 1.0);
        assert_eq!(auto(NotPaying), 1.0);
        assert_eq!(in_use(Some(3.5)).threshold(Threshold::Fixed(7.0)), 7.0);
    }
}
