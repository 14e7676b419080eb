//! One length for all drafts of a step, for engines that verify as many places of every request.

/// The expectation of the draft of a request.
#[derive(Clone, Debug, Default)]
pub struct UniformDraft {
    /// The probability that the first draft token is accepted, that the first two are, and so on: never rising.
    pub path_probabilities: Vec<f32>,
}

impl UniformDraft {
    /// Accepted tokens that are expected of the first `length` ones.
    pub(super) fn expected(&self, length: u32) -> f32 {
        self.path_probabilities.iter().take(length as usize).sum()
    }
}

/// The length with the highest worth. `worth(length)` is what the step's tokens are worth, bonus tokens included, and
/// `seconds(length)` how long the step takes, in the same unit per second as `rate`. Without a rate, tokens per
/// second are compared. Among equals the shortest wins; without lengths there are no drafts.
pub(super) fn best_length(
    lengths: &[u32],
    rate: Option<f64>,
    worth: impl Fn(u32) -> f64,
    seconds: impl Fn(u32) -> f64,
) -> u32 {
    let merit = |length: u32| match rate {
        Some(rate) => worth(length) - rate * seconds(length),
        None => worth(length) / seconds(length),
    };
    let mut best: Option<(f64, u32)> = None;
    for &length in lengths {
        let merit = merit(length);
        if best.is_none_or(|(most, _)| merit > most) {
            best = Some((merit, length));
        }
    }
    best.map_or(0, |(_, length)| length)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The best length where each of `batch` requests accepts a token with this probability, and a step takes 10 ms
    /// and 0.1 ms for each token beyond 16.
    fn best(batch: u32, probability: f32) -> u32 {
        let paths = (1..=16).map(|depth| probability.powi(depth));
        let draft = UniformDraft {
            path_probabilities: paths.collect(),
        };
        let worth = |length| f64::from(batch) * f64::from(1.0 + draft.expected(length));
        let seconds =
            |length: u32| 0.01 + 0.0001 * f64::from((batch * (1 + length)).saturating_sub(16));
        best_length(&[0, 2, 4, 8, 16], None, worth, seconds)
    }

    #[test]
    fn drafts_are_long_where_tokens_are_free_and_short_where_they_are_not() {
        assert_eq!(best(1, 0.9), 16);
        assert_eq!(best(64, 0.9), 4);
        assert_eq!(best(64, 0.7), 2);
        assert_eq!(best(256, 0.1), 0);
        assert_eq!(best(1, 0.0), 0);
    }

    #[test]
    fn a_rate_prices_the_time_of_the_step() {
        let worth = f64::from;
        let seconds = |length: u32| 0.01 * f64::from(length);
        assert_eq!(best_length(&[0, 4], Some(99.0), worth, seconds), 4);
        assert_eq!(best_length(&[0, 4], Some(101.0), worth, seconds), 0);
        assert_eq!(best_length(&[], None, worth, seconds), 0);
    }
}
