//! A quotient of two sums in which older entries count less.

/// A quotient of two decayed sums: tokens per second, accepted per drafted, a mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecayedRatio {
    /// Weight that an older entry keeps when one more comes.
    kept: f64,
    of: f64,
    per: f64,
    entries: u64,
}

impl DecayedRatio {
    /// Nothing yet. An entry counts half after `entries` more.
    pub fn with_half_life(entries: f64) -> Self {
        DecayedRatio {
            kept: 0.5f64.powf(1.0 / entries),
            of: 0.0,
            per: 0.0,
            entries: 0,
        }
    }

    /// Takes in `of` for `per`.
    pub fn add(&mut self, of: f64, per: f64) {
        self.of = self.of * self.kept + of;
        self.per = self.per * self.kept + per;
        self.entries += 1;
    }

    /// The quotient, once there was anything to divide by.
    pub fn value(&self) -> Option<f64> {
        (self.per > 0.0).then(|| self.of / self.per)
    }

    /// How often something was added.
    pub fn entries(&self) -> u64 {
        self.entries
    }
}

/// Half after 128 entries: what steps are usually averaged over.
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
        // 10 halved, for 1 halved and 1.
        assert!((ratio.value().unwrap() - 5.0 / 1.5).abs() < 1e-12);
        assert_eq!(ratio.entries(), 5);
    }
}
