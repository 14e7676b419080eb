//! The correlation of estimated and true lengths, as far as it has been seen.

/// Weight of the newest pair, once there are many.
const STEP_MIN: f64 = 1.0 / 256.0;
/// Fewer pairs tell nothing.
const PAIRS_MIN: u32 = 8;
/// The true correlation is above the lower bound in 95 % of cases: so many standard errors below the measured one.
const STANDARD_ERRORS: f64 = 1.645;

/// Moving moments of the logarithms of estimates and lengths. Logarithms, since a few very long outputs would decide
/// everything otherwise.
#[derive(Clone, Debug, Default)]
pub(crate) struct Correlation {
    pairs: u32,
    mean: [f64; 2],
    variance: [f64; 2],
    covariance: f64,
}

impl Correlation {
    /// Notes an estimate and the true length.
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
    }

    /// From -1 to 1. It is 0 while all estimates or all lengths are equal.
    pub(crate) fn value(&self) -> f64 {
        let scale = (self.variance[0] * self.variance[1]).sqrt();
        if scale < 1e-9 {
            return 0.0;
        }
        (self.covariance / scale).clamp(-1.0, 1.0)
    }

    /// The spread of lengths that estimates tell for certain: the standard deviation of the logarithms of lengths,
    /// times a lower bound of the correlation (by Fisher's transformation). At least 0.
    pub(crate) fn told_spread(&self) -> f64 {
        if self.pairs < PAIRS_MIN {
            return 0.0;
        }
        // As many pairs as a plain mean of the same variance has.
        let pairs = f64::from(self.pairs).min(2.0 / STEP_MIN);
        let transformed = self.value().clamp(-0.999, 0.999).atanh();
        let bound = (transformed - STANDARD_ERRORS / (pairs - 3.0).sqrt()).tanh();
        bound.max(0.0) * self.variance[1].sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(nth: u32) -> u32 {
        nth.wrapping_mul(2_654_435_761) >> 16 & 0x3ff
    }

    #[test]
    fn certainty_grows_with_pairs_and_stays_below_the_spread_of_lengths() {
        let mut correlation = Correlation::default();
        let mut told = Vec::new();
        // The same ten pairs again and again.
        for nth in (0..200).map(|nth| nth % 10) {
            correlation.note(100 + noise(nth), 120 + noise(nth));
            told.push(correlation.told_spread());
        }
        assert!(correlation.value() > 0.9, "{}", correlation.value());
        assert_eq!(told[6], 0.0);
        assert!(0.0 < told[9] && told[9] < told[199], "{told:?}");
        assert!(told[199] < correlation.variance[1].sqrt(), "{told:?}");
        // Lengths that hardly differ leave nothing to tell.
        let mut alike = Correlation::default();
        for nth in 0..200 {
            alike.note(100 + noise(nth), 10_000 + noise(nth));
        }
        assert!(alike.value() > 0.8, "{}", alike.value());
        assert!(alike.told_spread() < 0.05, "{}", alike.told_spread());
    }

    #[test]
    fn noise_and_equal_lengths_tell_nothing() {
        let (mut random, mut equal) = (Correlation::default(), Correlation::default());
        for nth in 0..500 {
            random.note(100 + noise(nth), 100 + noise(nth + 7_777));
            equal.note(50, 60);
        }
        assert!(random.value().abs() < 0.15, "{}", random.value());
        assert!(random.told_spread() < 0.05, "{}", random.told_spread());
        assert_eq!((equal.value(), equal.told_spread()), (0.0, 0.0));
    }
}
