//! Row-wise arithmetic: norm, activation, softmax, rotary positions. Each is a fixed function of one row, so
//! a row's bits never depend on its neighbours.

use crate::simd::vectorised;

/// Partial sums a row is folded into: element i goes to sum i mod 16, whatever the vector width.
const SUMS: usize = 16;

/// Adds the partial sums pairwise, halving each time.
#[inline(always)]
fn fold(mut sums: [f32; SUMS]) -> f32 {
    let mut width = SUMS / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

/// e^x to about 1 ulp for x <= 0 (and up to 88); 0 below -87. Own code, because a call of libm per element
/// would dominate attention, and because libms differ between systems.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.0, 88.0);
    let n = (clamped * std::f32::consts::LOG2_E + ROUND) - ROUND;
    // ln 2 in two parts, the first exact in the product.
    let r = (clamped - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let mut poly = 1.987_569_1e-4;
    poly = poly * r + 1.398_199_9e-3;
    poly = poly * r + 8.333_452e-3;
    poly = poly * r + 4.166_579_6e-2;
    poly = poly * r + 1.666_666_5e-1;
    poly = poly * r + 0.5;
    let value = poly * r * r + r + 1.0;
    let scale = f32::from_bits(((n as i32 + 127) << 23).cast_unsigned());
    if x < -87.0 { 0.0 } else { value * scale }
}

vectorised! {
    /// `out = weight * x / sqrt(mean(x^2) + eps)`; all of one length.
    fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let mut sums = [0.0f32; SUMS];
        let whole = x.chunks_exact(SUMS);
        for (sum, value) in sums.iter_mut().zip(whole.remainder()) {
            *sum += value * value;
        }
        for chunk in x.chunks_exact(SUMS) {
            for (sum, value) in sums.iter_mut().zip(chunk) {
                *sum += value * value;
            }
        }
        let scale = 1.0 / (fold(sums) / x.len() as f32 + eps).sqrt();
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = weight * (x * scale);
        }
    }
}

vectorised! {
    /// `out = gate * sigmoid(gate) * up`; all of one length.
    fn silu_product(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + exp(-gate)) * up;
        }
    }
}

vectorised! {
    /// Turns attention scores, in order of position, into `exp(scale * (score - max))`; gives their sum.
    fn softmax_weights(scores: &mut [f32], scale: f32) -> f32 {
        let mut peaks = [f32::NEG_INFINITY; SUMS];
        for chunk in scores.chunks(SUMS) {
            for (peak, score) in peaks.iter_mut().zip(chunk) {
                *peak = if *score > *peak { *score } else { *peak };
            }
        }
        let peak = peaks.iter().fold(f32::NEG_INFINITY, |peak, value| if *value > peak { *value } else { peak });
        let mut sums = [0.0f32; SUMS];
        for chunk in scores.chunks_mut(SUMS) {
            for (sum, score) in sums.iter_mut().zip(chunk) {
                *score = exp(scale * (*score - peak));
                *sum += *score;
            }
        }
        fold(sums)
    }
}

vectorised! {
    /// `weights[i] = exp((logits[i] - peak) * inverse_temperature)`, for sampling.
    fn exp_weights(logits: &[f32], peak: f32, inverse_temperature: f32, weights: &mut [f32]) {
        for (weight, logit) in weights.iter_mut().zip(logits) {
            *weight = exp((logit - peak) * inverse_temperature);
        }
    }
}

vectorised! {
    /// Largest value; NaN counts as minus infinity.
    fn peak(values: &[f32]) -> f32 {
        let mut peaks = [f32::NEG_INFINITY; SUMS];
        for chunk in values.chunks(SUMS) {
            for (peak, value) in peaks.iter_mut().zip(chunk) {
                *peak = if *value > *peak { *value } else { *peak };
            }
        }
        peaks.iter().fold(f32::NEG_INFINITY, |peak, value| if *value > peak { *value } else { peak })
    }
}

vectorised! {
    /// `x += y`.
    fn add(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

vectorised! {
    /// Turns one head by its position: the first half of the head pairs with the second.
    fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
        let (first, second) = head.split_at_mut(cos.len());
        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
            let (x, y) = (*a, *b);
            *a = x * cos - y * sin;
            *b = y * cos + x * sin;
        }
    }
}

/// cos and sin of every position so far, made as positions are reached.
#[derive(Debug)]
pub(crate) struct RopeTable {
    /// Turns per position of each pair, `head_dim / 2` of them.
    frequencies: Vec<f32>,
    /// `[position][cos of each pair, sin of each pair]`.
    rows: Vec<f32>,
}

impl RopeTable {
    /// An empty table.
    pub(crate) fn new(frequencies: Vec<f32>) -> Self {
        RopeTable {
            frequencies,
            rows: Vec::new(),
        }
    }

    /// Makes the rows of all positions below `positions`.
    pub(crate) fn reach(&mut self, positions: usize) {
        let width = 2 * self.frequencies.len();
        for position in self.rows.len() / width..positions {
            // The angle is rounded to f32 first, as the training code does; cos and sin are of that angle.
            let angles: Vec<f64> = self
                .frequencies
                .iter()
                .map(|frequency| f64::from(position as f32 * frequency))
                .collect();
            self.rows
                .extend(angles.iter().map(|angle| angle.cos() as f32));
            self.rows
                .extend(angles.iter().map(|angle| angle.sin() as f32));
        }
    }

    /// (cos, sin) of a position below the last [`RopeTable::reach`].
    pub(crate) fn row(&self, position: usize) -> (&[f32], &[f32]) {
        let half = self.frequencies.len();
        self.rows[position * 2 * half..][..2 * half].split_at(half)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_and_never_odd() {
        for i in -8700..=800 {
            let x = i as f32 / 100.0;
            let (ours, theirs) = (f64::from(exp(x)), f64::from(x).exp());
            assert!(
                (ours / theirs - 1.0).abs() < 3e-7,
                "exp({x}) = {ours}, not {theirs}"
            );
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
    }

    #[test]
    fn softmax_sums_by_position_only() {
        let scores: Vec<f32> = (0..77).map(|i| (i as f32 * 0.37).sin() * 5.0).collect();
        let mut weights = scores.clone();
        let sum = softmax_weights(&mut weights, 0.5);
        let truth: f64 = weights.iter().map(|w| f64::from(*w)).sum();
        assert!((f64::from(sum) - truth).abs() < 1e-5);
        assert_eq!(weights.iter().copied().fold(0.0, f32::max), 1.0);
    }

    #[test]
    fn rotation_keeps_length_and_position_zero_is_identity() {
        let mut table = RopeTable::new(vec![1.0, 0.01]);
        table.reach(9);
        let head = [1.0, 2.0, 3.0, 4.0];
        let mut turned = head;
        let (cos, sin) = table.row(0);
        rotate(&mut turned, cos, sin);
        assert_eq!(turned, head);
        let (cos, sin) = table.row(8);
        rotate(&mut turned, cos, sin);
        let length = |v: &[f32]| v.iter().map(|x| x * x).sum::<f32>();
        assert!((length(&turned) - length(&head)).abs() < 1e-4);
        assert_ne!(turned, head);
    }
}
