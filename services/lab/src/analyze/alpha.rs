//! The alpha that a worker should have for one workload, by modelled goodput.

use refrain_speculation::draft::Setting;
use serde::Serialize;

/// Fixed values that are tried beside `auto`, the smallest first.
pub(super) const ALPHAS: [f32; 4] = [2.0, 4.0, 8.0, 16.0];
/// The gain over `auto` above which a fixed alpha is recommended. A smaller one may be that of these calls alone, and
/// `auto` goes on following what it learns.
const GAIN_MIN: f64 = 0.01;

/// The goodput of each `worker.speculation.alpha` at one number of requests, under the router `goodput`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AlphaChoice {
    /// Requests at once.
    pub concurrency: usize,
    /// Output tokens per second of modelled engine time with `auto`.
    pub auto_tokens_per_s: Option<f64>,
    /// The fixed values that were tried.
    pub fixed: Vec<FixedAlpha>,
    /// The fixed value with the highest goodput; of equal ones, the smallest.
    pub best: Option<FixedAlpha>,
    /// Goodput of the best fixed value over that of `auto`, less 1.
    pub gain: Option<f64>,
    /// The value to set: the best fixed one if it gains more than 1 % over `auto`, else `auto`.
    pub recommended: Setting,
}

/// A fixed alpha that was tried.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct FixedAlpha {
    /// Its value.
    pub alpha: f32,
    /// Output tokens per second of modelled engine time.
    pub goodput_tokens_per_s: Option<f64>,
}

impl AlphaChoice {
    /// Compares fixed values, the smallest first, with `auto`.
    pub(super) fn new(
        concurrency: usize,
        auto_tokens_per_s: Option<f64>,
        fixed: Vec<FixedAlpha>,
    ) -> Self {
        let goodput = |of: &FixedAlpha| of.goodput_tokens_per_s.unwrap_or(0.0);
        let better = |best: FixedAlpha, next: FixedAlpha| match goodput(&next) > goodput(&best) {
            true => next,
            false => best,
        };
        let best = fixed.iter().copied().reduce(better);
        let gain = best
            .and_then(|best| best.goodput_tokens_per_s)
            .zip(auto_tokens_per_s)
            .map(|(best, auto)| best / auto - 1.0);
        let recommended = match (best, gain) {
            (Some(best), Some(gain)) if gain > GAIN_MIN => Setting::Fixed(best.alpha),
            _ => Setting::Auto,
        };
        AlphaChoice {
            concurrency,
            auto_tokens_per_s,
            fixed,
            best,
            gain,
            recommended,
        }
    }

    /// Whether a fixed value is recommended.
    pub(super) fn is_fixed(&self) -> bool {
        self.recommended != Setting::Auto
    }

    /// The line to set in `[worker.speculation]`.
    pub fn config_line(&self) -> String {
        match self.recommended {
            Setting::Auto => "alpha = \"auto\"".into(),
            Setting::Fixed(alpha) => format!("alpha = {alpha}"),
        }
    }

    /// The recommended value.
    pub(super) fn value(&self) -> String {
        match self.recommended {
            Setting::Auto => "auto".into(),
            Setting::Fixed(alpha) => alpha.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fixed_value_has_to_beat_auto_by_a_percent() {
        let choice = |auto: f64, fixed: &[(f32, f64)]| {
            let fixed = fixed.iter().map(|&(alpha, goodput)| FixedAlpha {
                alpha,
                goodput_tokens_per_s: Some(goodput),
            });
            AlphaChoice::new(16, Some(auto), fixed.collect())
        };
        let found = choice(100.0, &[(1.0, 90.0), (4.0, 104.0), (8.0, 103.0)]);
        assert_eq!(found.best.map(|best| best.alpha), Some(4.0));
        assert_eq!(found.recommended, Setting::Fixed(4.0));
        assert_eq!(found.config_line(), "alpha = 4");
        // The smallest of equal ones is the best, and a gain of less than 1 % is not worth a setting.
        let found = choice(100.0, &[(1.0, 100.9), (4.0, 100.9)]);
        assert_eq!(found.best.map(|best| best.alpha), Some(1.0));
        assert_eq!(found.recommended, Setting::Auto);
        let found = choice(100.0, &[(1.0, 60.0), (32.0, 95.0)]);
        assert_eq!(found.recommended, Setting::Auto);
        assert_eq!(found.config_line(), "alpha = \"auto\"");
    }

    #[test]
    fn without_a_step_nothing_is_recommended_but_auto() {
        let fixed = vec![FixedAlpha {
            alpha: 1.0,
            goodput_tokens_per_s: None,
        }];
        let found = AlphaChoice::new(1, None, fixed);
        assert_eq!((found.gain, found.recommended), (None, Setting::Auto));
    }
}
