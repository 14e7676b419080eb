//! The line through all steps: seconds from tokens and KV tokens, by least squares of the relative error.

/// Seconds of every step before any was seen. It does not depend on the tokens, so that drafts are tried.
pub(super) const UNKNOWN_S: f64 = 1e-3;

/// Decayed moments of all steps, weighted by the inverse square of their seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Line {
    pub(super) steps: f64,
    weight: f64,
    /// Sums of tokens, KV tokens and seconds, of tokens², tokens times KV tokens and KV tokens², and of the products
    /// of either with seconds.
    moments: [f64; 8],
}

/// Seconds = `at_zero` + `per_token` tokens + `per_kv_token` KV tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Fit {
    pub(super) at_zero: f64,
    pub(super) per_token: f64,
    pub(super) per_kv_token: f64,
}

impl Line {
    pub(super) fn add(&mut self, steps: f64, tokens: f64, kv_tokens: f64, seconds: f64) {
        let weight = steps / (seconds * seconds);
        let (of_tokens, of_kv, of_seconds) =
            (weight * tokens, weight * kv_tokens, weight * seconds);
        let more = [
            of_tokens,
            of_kv,
            of_seconds,
            of_tokens * tokens,
            of_tokens * kv_tokens,
            of_kv * kv_tokens,
            of_tokens * seconds,
            of_kv * seconds,
        ];
        self.steps += steps;
        self.weight += weight;
        for (sum, more) in self.moments.iter_mut().zip(more) {
            *sum += more;
        }
    }

    pub(super) fn scale(&mut self, by: f64) {
        self.steps *= by;
        self.weight *= by;
        self.moments = self.moments.map(|sum| sum * by);
    }

    pub(super) fn fit(&self) -> Fit {
        if self.weight <= 0.0 {
            return Fit {
                at_zero: UNKNOWN_S,
                ..Fit::default()
            };
        }
        let means = self.moments.map(|sum| sum / self.weight);
        let [tokens, kv_tokens, seconds, tt, tk, kk, ts, ks] = means;
        let (per_token, per_kv_token) = slopes(
            [
                tt - tokens * tokens,
                tk - tokens * kv_tokens,
                kk - kv_tokens * kv_tokens,
            ],
            [ts - tokens * seconds, ks - kv_tokens * seconds],
            [tt, kk],
        );
        // A step over an edge can tilt the line until it meets zero above zero tokens. Small steps would then be
        // free, and their true times would look held up.
        let sloped = per_token * tokens + per_kv_token * kv_tokens;
        let scale = if sloped > seconds {
            seconds / sloped
        } else {
            1.0
        };
        Fit {
            at_zero: (seconds - sloped).max(0.0),
            per_token: per_token * scale,
            per_kv_token: per_kv_token * scale,
        }
    }
}

/// The two slopes, neither below 0, of least squares with these (co)variances; drawn towards 0 where the data hardly
/// vary beside their `sizes`, the means of their squares.
pub(super) fn slopes(of: [f64; 3], with: [f64; 2], sizes: [f64; 2]) -> (f64, f64) {
    const RIDGE: f64 = 1e-4;
    let a = of[0].max(0.0) + RIDGE * sizes[0];
    let b = of[2].max(0.0) + RIDGE * sizes[1];
    let alone = |with: f64, of: f64| if of > 0.0 { (with / of).max(0.0) } else { 0.0 };
    let determinant = a * b - of[1] * of[1];
    if a > 0.0 && b > 0.0 && determinant > 0.0 {
        let first = (with[0] * b - with[1] * of[1]) / determinant;
        let second = (with[1] * a - with[0] * of[1]) / determinant;
        if first >= 0.0 && second >= 0.0 {
            return (first, second);
        }
        if first < 0.0 {
            return (0.0, alone(with[1], b));
        }
    }
    (alone(with[0], a), 0.0)
}
