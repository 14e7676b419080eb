//! Arithmetic on single rows: norm, activation, softmax, rotation. A row's bits never depend on its neighbours.

use super::instruction_set::vectorised;

/// Number of partial sums of a row. Element i goes to sum i mod 16, for every vector width.
const SUMS: usize = 16;

/// Adds the partial sums pairwise, halving their number each time.
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

/// Returns e^x, to about 1 ulp for x from -87 to 88, and 0 below -87.
///
/// It replaces libm's function because a call per element would dominate attention, and because libms differ.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.0, 88.0);
    let rounded = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    // ln 2 is subtracted in two parts, of which the first is exact in the product.
    let r = (clamped - n * 0.693_359_4) - n * -2.121_944_4e-4;
    let mut poly = 1.987_569_1e-4;
    poly = poly * r + 1.398_199_9e-3;
    poly = poly * r + 8.333_452e-3;
    poly = poly * r + 4.166_579_6e-2;
    poly = poly * r + 1.666_666_5e-1;
    poly = poly * r + 0.5;
    let value = poly * r * r + r + 1.0;
    // Floats of this size are one apart, so their bits count as they do. A cast would handle NaN and overflow, for
    // which the compiler leaves the vector and takes one element at a time.
    let exponent = rounded
        .to_bits()
        .wrapping_sub(ROUND.to_bits())
        .wrapping_add(127);
    let scale = f32::from_bits(exponent << 23);
    if x < -87.0 { 0.0 } else { value * scale }
}

/// Turns some attention scores into weights, and adds these to the partial sums.
#[inline(always)]
fn add_weights(scores: &mut [f32; SUMS], scale: f32, peak: f32, sums: &mut [f32; SUMS]) {
    for (score, sum) in scores.iter_mut().zip(sums) {
        *score = exp(scale * (*score - peak));
        *sum += *score;
    }
}

/// Returns the largest value. NaN counts as minus infinity.
#[inline(always)]
fn largest(values: &[f32]) -> f32 {
    let larger = |peak: f32, value: &f32| if *value > peak { *value } else { peak };
    let mut peaks = [f32::NEG_INFINITY; SUMS];
    let (chunks, rest) = values.as_chunks::<SUMS>();
    for chunk in chunks {
        for (peak, value) in peaks.iter_mut().zip(chunk) {
            *peak = larger(*peak, value);
        }
    }
    peaks.iter().chain(rest).fold(f32::NEG_INFINITY, larger)
}

vectorised! {
    /// Computes `out = weight * x / sqrt(mean(x^2) + eps)`. All slices have one length.
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
    /// Computes `out = gate * sigmoid(gate) * up`. All slices have one length.
    fn silu_product(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + exp(-gate)) * up;
        }
    }
}

vectorised! {
    /// Turns attention scores, in order of position, into `exp(scale * (score - max))`, and returns their sum.
    fn softmax_weights(scores: &mut [f32], scale: f32) -> f32 {
        let peak = largest(scores);
        let mut sums = [0.0f32; SUMS];
        let (chunks, rest) = scores.as_chunks_mut::<SUMS>();
        for chunk in chunks {
            add_weights(chunk, scale, peak, &mut sums);
        }
        // Chunks of one size are computed as whole vectors. The last one is filled up, which adds 0 to its sums.
        let mut last = [f32::NEG_INFINITY; SUMS];
        last[..rest.len()].copy_from_slice(rest);
        add_weights(&mut last, scale, peak, &mut sums);
        rest.copy_from_slice(&last[..rest.len()]);
        fold(sums)
    }
}

vectorised! {
    /// Computes `weights[i] = exp((logits[i] - peak) * inverse_temperature)`, for sampling.
    fn exp_weights(logits: &[f32], peak: f32, inverse_temperature: f32, weights: &mut [f32]) {
        for (weight, logit) in weights.iter_mut().zip(logits) {
            *weight = exp((logit - peak) * inverse_temperature);
        }
    }
}

vectorised! {
    /// Returns the largest value. NaN counts as minus infinity.
    fn peak(values: &[f32]) -> f32 {
        largest(values)
    }
}

vectorised! {
    /// Adds `y` to `x`, element by element.
    fn add(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

vectorised! {
    /// Rotates one head by its position. Element i of the first half pairs with element i of the second.
    fn rotate(head: &mut [f32], cos: &[f32], sin: &[f32]) {
        let (first, second) = head.split_at_mut(cos.len());
        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
            let (x, y) = (*a, *b);
            *a = x * cos - y * sin;
            *b = y * cos + x * sin;
        }
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
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn softmax_of_any_length_is_that_of_its_elements() {
        for len in 1..=3 * SUMS {
            let scores: Vec<f32> = (0..len).map(|i| (i as f32 * 0.7).cos() * 9.0).collect();
            let peak = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let truth: Vec<f32> = scores.iter().map(|s| exp(0.3 * (s - peak))).collect();
            let mut sums = [0.0f32; SUMS];
            for (i, weight) in truth.iter().enumerate() {
                sums[i % SUMS] += weight;
            }
            let mut weights = scores;
            let sum = softmax_weights(&mut weights, 0.3);
            assert_eq!(sum.to_bits(), fold(sums).to_bits(), "{len}");
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&weights), bits(&truth), "{len}");
        }
    }

    #[test]
    fn softmax_sums_by_position_only() {
        let scores: Vec<f32> = (0..77).map(|i| (i as f32 * 0.37).sin() * 5.0).collect();
        let mut weights = scores;
        let sum = softmax_weights(&mut weights, 0.5);
        let truth: f64 = weights.iter().map(|w| f64::from(*w)).sum();
        assert!((f64::from(sum) - truth).abs() < 1e-5);
        assert_eq!(weights.iter().copied().fold(0.0, f32::max), 1.0);
    }
}
