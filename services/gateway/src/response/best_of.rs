//! The choice of the best among several outputs of a prompt.

use crate::relay::OutputToken;

/// The mean log-probability of the tokens of an output. An output without tokens counts as the least likely.
pub(super) fn mean_logprob(tokens: &[OutputToken]) -> f64 {
    let of = |token: &OutputToken| {
        let entry = token.logprob.as_ref();
        entry.map_or(f64::NEG_INFINITY, |entry| f64::from(entry.logprob))
    };
    match tokens.len() {
        0 => f64::NEG_INFINITY,
        count => tokens.iter().map(of).sum::<f64>() / count as f64,
    }
}

/// The `keep` largest of the values, the largest first: their places. Equal ones keep their order.
pub(super) fn best(values: &[f64], keep: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..values.len()).collect();
    // Nothing is as bad as a value that is no number.
    let key = |place: &usize| match values[*place] {
        value if value.is_nan() => f64::NEG_INFINITY,
        value => value,
    };
    places.sort_by(|one, other| key(other).total_cmp(&key(one)));
    places.truncate(keep);
    places
}

#[cfg(test)]
mod tests {
    use refrain_protocol::engine::TokenLogprob;

    use super::*;

    #[test]
    fn the_likeliest_come_first_and_equal_ones_stay_in_their_order() {
        let inf = f64::NEG_INFINITY;
        assert_eq!(best(&[-2.0, -0.5, -1.0], 2), [1, 2]);
        assert_eq!(best(&[-1.0, -1.0, -0.5, -1.0], 3), [2, 0, 1]);
        assert_eq!(best(&[f64::NAN, inf, -9.0], 3), [2, 0, 1]);
        assert_eq!(best(&[], 3), [0usize; 0]);
    }

    #[test]
    fn length_does_not_matter() {
        let output = |logprobs: &[f32]| -> Vec<OutputToken> {
            let token = |logprob: &f32| OutputToken {
                id: 1,
                logprob: Some(TokenLogprob {
                    logprob: *logprob,
                    top: Vec::new(),
                }),
                weight_version: 0,
            };
            logprobs.iter().map(token).collect()
        };
        assert_eq!(mean_logprob(&output(&[-1.0, -2.0])), -1.5);
        assert!(mean_logprob(&output(&[-1.0; 9])) > mean_logprob(&output(&[-1.25])));
        assert_eq!(mean_logprob(&[]), f64::NEG_INFINITY);
        let unscored = OutputToken {
            id: 1,
            logprob: None,
            weight_version: 0,
        };
        assert_eq!(mean_logprob(&[unscored]), f64::NEG_INFINITY);
    }
}
