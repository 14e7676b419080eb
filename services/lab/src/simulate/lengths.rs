//! A model of output lengths: log-normal, cut at a limit, and correlated within a group.
//!
//! The logarithm of a length is `location + sigma * (sqrt(r) * group + sqrt(1 - r) * own)`, with normal draws for the
//! group and for the sample; `r` is the correlation of the logarithms within a group. Longer outputs have the limit
//! as their length, as a run that stops at a limit has. The location is solved for, so that the mean after the cut is
//! the wanted one.

use super::random::Random;

/// The distribution of lengths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LengthModel {
    /// Mean length after the cut, tokens.
    pub(super) mean: f64,
    /// The limit, tokens.
    pub(super) max: u32,
    /// Standard deviation of the logarithm.
    pub(super) sigma: f64,
    /// Correlation of the logarithms within a group, from 0 to 1.
    pub(super) correlation: f64,
}

/// Points of the normal distribution at which the mean is summed.
const POINTS: usize = 2_001;

impl LengthModel {
    /// The lengths of `samples` outputs of a group.
    pub(super) fn group(&self, location: f64, samples: usize, random: &mut Random) -> Vec<u32> {
        let (of_group, of_sample) = (self.correlation.sqrt(), (1.0 - self.correlation).sqrt());
        let group = random.normal();
        (0..samples)
            .map(|_| {
                let draw = of_group * group + of_sample * random.normal();
                let length = (location + self.sigma * draw).exp();
                (length.round() as u32).clamp(1, self.max)
            })
            .collect()
    }

    /// The location at which the mean is the wanted one.
    pub(super) fn location(&self) -> f64 {
        let (mut low, mut high) = (-10.0, f64::from(self.max).ln() + 4.0 * self.sigma + 10.0);
        for _ in 0..80 {
            let middle = (low + high) / 2.0;
            if self.mean_at(middle) < self.mean {
                low = middle;
            } else {
                high = middle;
            }
        }
        (low + high) / 2.0
    }

    fn mean_at(&self, location: f64) -> f64 {
        let (mut sum, mut weights) = (0.0, 0.0);
        for point in 0..POINTS {
            let draw = -8.0 + 16.0 * point as f64 / (POINTS - 1) as f64;
            let weight = (-draw * draw / 2.0).exp();
            sum += weight
                * (location + self.sigma * draw)
                    .exp()
                    .clamp(1.0, f64::from(self.max));
            weights += weight;
        }
        sum / weights
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mean_limit_and_correlation_are_the_wanted_ones() {
        let model = LengthModel {
            mean: 20_000.0,
            max: 65_536,
            sigma: 1.0,
            correlation: 0.7,
        };
        let (mut random, location) = (Random::new(3, 0), model.location());
        let groups: Vec<Vec<u32>> = (0..4_000)
            .map(|_| model.group(location, 2, &mut random))
            .collect();
        let all = groups.iter().flatten().copied();
        assert!(all.clone().all(|length| (1..=65_536).contains(&length)));
        let mean = all.clone().map(f64::from).sum::<f64>() / 8_000.0;
        assert!((mean / 20_000.0 - 1.0).abs() < 0.03, "{mean}");
        // Below the limit the logarithms correlate as they should; the cut takes a little of it.
        let logs = all.map(|length| f64::from(length).ln());
        let middle = logs.clone().sum::<f64>() / 8_000.0;
        let variance = logs.map(|log| (log - middle).powi(2)).sum::<f64>() / 8_000.0;
        let pairs = groups.iter().map(|pair| {
            let [a, b] = [pair[0], pair[1]].map(|length| f64::from(length).ln() - middle);
            a * b
        });
        let correlation = pairs.sum::<f64>() / 4_000.0 / variance;
        assert!((correlation - 0.68).abs() < 0.05, "{correlation}");
    }
}
