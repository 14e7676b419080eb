//! Whether estimates tell anything: the correlation of estimated and true lengths.

/// Weight of the newest pair, once there are many.
const STEP_MIN: f64 = 1.0 / 128.0;
/// Pairs before the correlation counts. Until then estimates are trusted: a wrong order is no worse than a random
/// one.
const PAIRS_MIN: u32 = 24;
/// Estimates with less correlation are not trusted.
const DISTRUST_BELOW: f64 = 0.15;
/// Estimates that were not trusted are trusted again above this.
const TRUST_ABOVE: f64 = 0.3;

/// Moving moments of the logarithms of estimates and lengths. Logarithms, since a few very long outputs would decide
/// everything otherwise.
#[derive(Clone, Debug, Default)]
pub(crate) struct Correlation {
    pairs: u32,
    mean: [f64; 2],
    variance: [f64; 2],
    covariance: f64,
    distrusted: bool,
}

impl Correlation {
    /// Notes the estimate by which a request was ordered and its length.
    pub(crate) fn note(&mut self, estimated_tokens: u32, tokens: u32) {
        let log = |tokens: u32| f64::from(tokens.max(1)).ln();
        let deviation = [
            log(estimated_tokens) - self.mean[0],
            log(tokens) - self.mean[1],
        ];
        self.pairs = self.pairs.saturating_add(1);
        let step = (1.0 / f64::from(self.pairs)).max(STEP_MIN);
        let kept = 1.0 - step;
        for (side, deviation) in deviation.iter().enumerate() {
            self.mean[side] += step * deviation;
            self.variance[side] = kept * (self.variance[side] + step * deviation * deviation);
        }
        self.covariance = kept * (self.covariance + step * deviation[0] * deviation[1]);
        if self.pairs >= PAIRS_MIN {
            let value = self.value();
            self.distrusted = match self.distrusted {
                true => value <= TRUST_ABOVE,
                false => value < DISTRUST_BELOW,
            };
        }
    }

    /// From -1 to 1. It is 0 while all estimates or all lengths are equal.
    pub(crate) fn value(&self) -> f64 {
        let scale = (self.variance[0] * self.variance[1]).sqrt();
        if scale < 1e-9 {
            return 0.0;
        }
        self.covariance / scale
    }

    pub(crate) fn is_trusted(&self) -> bool {
        !self.distrusted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(nth: u32) -> u32 {
        nth.wrapping_mul(2_654_435_761) >> 16 & 0x3ff
    }

    #[test]
    fn estimates_are_trusted_until_they_prove_worthless_and_again_when_they_tell() {
        let mut correlation = Correlation::default();
        assert!(correlation.is_trusted());
        for nth in 0..500 {
            correlation.note(100 + noise(nth), 100 + noise(nth + 7_777));
        }
        assert!(correlation.value().abs() < 0.15, "{}", correlation.value());
        assert!(!correlation.is_trusted());
        for nth in 0..500 {
            correlation.note(100 + noise(nth), 120 + noise(nth));
        }
        assert!(correlation.value() > 0.9, "{}", correlation.value());
        assert!(correlation.is_trusted());
    }

    #[test]
    fn equal_lengths_correlate_with_nothing() {
        let mut correlation = Correlation::default();
        for _ in 0..100 {
            correlation.note(50, 60);
        }
        assert_eq!(correlation.value(), 0.0);
    }
}
