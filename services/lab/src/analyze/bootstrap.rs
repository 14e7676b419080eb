//! How sure a figure is: its range when sessions are drawn anew.

use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Times that the sessions are drawn anew.
const DRAWS: u64 = 400;
/// Share of the draws that is cut off at either end of a range.
const TAIL: f64 = 0.05;

/// A figure, and the range in which it lies in nine of ten draws of as many sessions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Range {
    /// The figure of the sessions themselves.
    pub estimate: f64,
    /// 5 % of the draws are below.
    pub low: f64,
    /// 5 % of the draws are above.
    pub high: f64,
}

impl Range {
    /// A figure without a doubt.
    pub(super) fn exact(estimate: f64) -> Self {
        Range {
            estimate,
            low: estimate,
            high: estimate,
        }
    }

    /// The range as a speed-up, such as `2.4x to 2.9x`.
    pub(super) fn words(&self) -> String {
        let of = |digits: usize| [self.low, self.high].map(|end| format!("{end:.digits$}x"));
        match (of(1), of(2)) {
            ([low, high], _) if low != high => format!("{low} to {high}"),
            (_, [low, high]) if low != high => format!("{low} to {high}"),
            (_, [low, _]) => low,
        }
    }

    /// The high end over the low one.
    pub(super) fn width(&self) -> f64 {
        self.high / self.low
    }
}

/// The range of the sum of all first values over the sum of all second ones; each pair is of one session. The same
/// pairs give the same range. `None` if a sum is zero.
pub(super) fn ratio_range(pairs: &[(f64, f64)]) -> Option<Range> {
    let ratio = |sum: (f64, f64)| (sum.0 > 0.0 && sum.1 > 0.0).then(|| sum.0 / sum.1);
    let add = |sum: (f64, f64), pair: &(f64, f64)| (sum.0 + pair.0, sum.1 + pair.1);
    let estimate = ratio(pairs.iter().fold((0.0, 0.0), add))?;
    let draw = |number: u64| {
        let picks = (0..pairs.len() as u64).map(|at| {
            let random = xxh3_64_with_seed(&at.to_le_bytes(), number);
            &pairs[(random % pairs.len() as u64) as usize]
        });
        ratio(picks.fold((0.0, 0.0), add)).unwrap_or(estimate)
    };
    let mut drawn: Vec<f64> = (0..DRAWS).map(draw).collect();
    drawn.sort_by(f64::total_cmp);
    let cut = (TAIL * DRAWS as f64) as usize;
    Some(Range {
        estimate,
        low: drawn[cut],
        high: drawn[drawn.len() - 1 - cut],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_narrows_with_the_number_of_sessions() {
        let pairs = |count: usize| -> Vec<(f64, f64)> {
            (0..count)
                .map(|at| (if at % 2 == 0 { 3.0 } else { 1.0 }, 1.0))
                .collect()
        };
        let range = |count| ratio_range(&pairs(count)).expect("there are sessions");
        let (few, many) = (range(10), range(1000));
        assert_eq!((few.estimate, many.estimate), (2.0, 2.0));
        // Each session adds a deviation of one, so 1.645 deviations of the mean are at either side.
        for (range, count) in [(few, 10.0f64), (many, 1000.0)] {
            let aside = 1.645 / count.sqrt();
            assert!(
                (range.low - (2.0 - aside)).abs() < 0.25 * aside,
                "{range:?}"
            );
            assert!(
                (range.high - (2.0 + aside)).abs() < 0.25 * aside,
                "{range:?}"
            );
        }
        assert_eq!(range(10), few);
        let words = Range {
            low: 1.94,
            high: 2.06,
            ..many
        }
        .words();
        assert_eq!(words, "1.9x to 2.1x");
    }

    #[test]
    fn equal_sessions_leave_no_doubt_and_none_no_figure() {
        let same = ratio_range(&[(3.0, 2.0); 20]).expect("there are sessions");
        assert_eq!((same.low, same.high, same.width()), (1.5, 1.5, 1.0));
        assert_eq!(same.words(), "1.50x");
        assert_eq!(ratio_range(&[]), None);
        assert_eq!(ratio_range(&[(1.0, 0.0)]), None);
    }
}
