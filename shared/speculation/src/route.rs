//! The hybrid rule: is the suffix draft good enough?

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// Verify the suffix draft.
    Suffix,
    /// Leave the step to the fallback: a draft model where there is one, else plain decoding.
    Plain,
}

/// Why; the label of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RouteReason {
    /// Nothing was found to draft.
    NoMatch,
    /// The score does not exceed the threshold.
    BelowThreshold,
    /// It does.
    AboveThreshold,
}

impl RouteReason {
    /// The label.
    pub fn as_str(self) -> &'static str {
        match self {
            RouteReason::NoMatch => "no_match",
            RouteReason::BelowThreshold => "below_threshold",
            RouteReason::AboveThreshold => "above_threshold",
        }
    }
}

/// A route and its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What to do.
    pub route: Route,
    /// Why.
    pub reason: RouteReason,
}

/// The suffix draft iff SCORE > tau (SuffixDecoding, section 3, with the root in SCORE as there).
///
/// tau is best near the mean accepted length of the fallback; 0 takes any suffix draft there is.
pub fn route(candidate_score: Option<f32>, score_threshold: f32) -> Decision {
    match candidate_score {
        None => Decision {
            route: Route::Plain,
            reason: RouteReason::NoMatch,
        },
        Some(score) if score > score_threshold => Decision {
            route: Route::Suffix,
            reason: RouteReason::AboveThreshold,
        },
        Some(_) => Decision {
            route: Route::Plain,
            reason: RouteReason::BelowThreshold,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_of_decisions() {
        use RouteReason::{AboveThreshold, BelowThreshold, NoMatch};
        let cases = [
            (None, 0.0, Route::Plain, NoMatch),
            (None, -1.0, Route::Plain, NoMatch),
            (Some(1.1), 0.0, Route::Suffix, AboveThreshold),
            (Some(3.0), 3.0, Route::Plain, BelowThreshold),
            (Some(3.1), 3.0, Route::Suffix, AboveThreshold),
            (Some(9.0), f32::INFINITY, Route::Plain, BelowThreshold),
            // A threshold that is not a number must not turn drafting on.
            (Some(9.0), f32::NAN, Route::Plain, BelowThreshold),
            (Some(f32::NAN), 1.0, Route::Plain, BelowThreshold),
        ];
        for (score, threshold, route_expected, reason) in cases {
            let expected = Decision {
                route: route_expected,
                reason,
            };
            assert_eq!(
                route(score, threshold),
                expected,
                "{score:?} against {threshold}"
            );
        }
    }
}
