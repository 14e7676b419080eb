//! A quotient of two sums in which older entries count less.

/// A quotient of two decayed sums: tokens per second, accepted per drafted, a mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecayedRatio {
    /// Weight that an older entry keeps when one more is added.
    kept: f64,
    of: f64,
    per: f64,
}

impl DecayedRatio {
    /// A ratio without entries. An entry counts half after `entries` more.
    pub(crate) fn with_half_life(entries: f64) -> Self {
        DecayedRatio {
            kept: 0.5f64.powf(1.0 / entries),
            of: 0.0,
            per: 0.0,
        }
    }

    /// Adds `of` to the numerator and `per` to the denominator.
    pub fn add(&mut self, of: f64, per: f64) {
        self.of = self.of * self.kept + of;
        self.per = self.per * self.kept + per;
    }

    /// The quotient; `None` while the denominator is 0.
    pub fn value(&self) -> Option<f64> {
        (self.per > 0.0).then(|| self.of / self.per)
    }

    /// A ratio that begins at `value`, as if a denominator of `weight` had been seen.
    pub(crate) fn starting_at(value: f64, weight: f64) -> Self {
        let mut ratio = DecayedRatio::default();
        ratio.add(value * weight, weight);
        ratio
    }
}

/// An entry counts half after 128 more, the usual half-life for averages over steps.
impl Default for DecayedRatio {
    fn default() -> Self {
        DecayedRatio::with_half_life(128.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_counts_half_after_its_half_life() {
        let mut ratio = DecayedRatio::with_half_life(4.0);
        assert_eq!(ratio.value(), None);
        ratio.add(10.0, 1.0);
        assert_eq!(ratio.value(), Some(10.0));
        for _ in 0..3 {
            ratio.add(0.0, 0.0);
        }
        ratio.add(0.0, 1.0);
        // The sums are 10 halved, and 1 halved plus 1.
        assert!((ratio.value().unwrap() - 5.0 / 1.5).abs() < 1e-12);
    }
}
