//! One length for all drafts of a step, for engines that verify as many places of every request. It is chosen before
//! the drafts of the step exist.

/// The part of a draft's path probabilities that the next draft is not expected to keep.
///
/// A draft of a step ago tells little of the next one of a single request: a match may end, or a new one begin. With
/// 0.25 to 1 a replay of one request at a time verifies more places, and is 1 to 8 % quicker than with 0; for 16
/// requests and more all are alike.
const CHANGE: f32 = 0.25;
/// The part that one draft moves the mean by.
const MEAN_RATE: f32 = 0.01;

/// The expectation of the next step's drafts, by the present ones. A draft is given by its path probabilities: that
/// its first token is accepted, that its first two are, and so on.
#[derive(Clone, Debug, Default)]
pub struct Outlook {
    /// The mean path probability of each place over the drafts that were seen, 0 where a draft had no token.
    mean: Vec<f32>,
}

impl Outlook {
    /// Learns from the first `places` tokens of each draft.
    pub fn learn(&mut self, drafts: &[impl AsRef<[f32]>], places: usize) {
        self.mean.resize(places, 0.0);
        for draft in drafts {
            for (place, mean) in self.mean.iter_mut().enumerate() {
                let path = draft.as_ref().get(place).copied().unwrap_or_default();
                *mean += MEAN_RATE * (path - *mean);
            }
        }
    }

    /// The path probabilities of the next draft of the request that had this one, for as many places as were learnt.
    pub fn next(&self, draft: &[f32]) -> impl Iterator<Item = f32> {
        let present = draft.iter().copied().chain(std::iter::repeat(0.0));
        let both = present.zip(&self.mean);
        both.map(|(present, mean)| (1.0 - CHANGE) * present + CHANGE * mean)
    }

    /// Accepted tokens that are expected of `length` places of the request that had this draft.
    pub(super) fn expected(&self, draft: &[f32], length: u32) -> f32 {
        self.next(draft).take(length as usize).sum()
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
        let draft: Vec<f32> = (1..=16).map(|depth| probability.powi(depth)).collect();
        let mut outlook = Outlook::default();
        outlook.learn(&vec![draft.clone(); 2_000], 16);
        let worth = |length| f64::from(batch) * f64::from(1.0 + outlook.expected(&draft, length));
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
    fn a_request_without_a_draft_may_have_one_in_the_next_step() {
        let mut outlook = Outlook::default();
        assert_eq!(outlook.expected(&[], 4), 0.0);
        outlook.learn(&vec![vec![1.0, 0.5]; 2_000], 4);
        assert!((outlook.expected(&[], 4) - 1.5 * CHANGE).abs() < 1e-3);
        assert!((outlook.expected(&[], 1) - CHANGE).abs() < 1e-3);
        assert!((outlook.expected(&[1.0, 0.5], 4) - 1.5).abs() < 1e-3);
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
