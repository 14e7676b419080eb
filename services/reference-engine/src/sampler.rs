//! From logits to a token: a pure function of logits, sampling parameters and position.
//!
//! In order: bias, log-probabilities, temperature, top-k, top-p, min-p, draw. The draw inverts the cumulative
//! distribution, in order of token id, at one uniform number that is a hash of (seed, choice, position). So
//! the same position gives the same token however the sequence came to it. (Gumbel noise per token would do
//! as well and costs a logarithm for each of the vocabulary.)

use refrain_protocol::engine::{Sampling, TokenLogprob};
use refrain_protocol::{ApiError, TokenId};

use crate::math::{exp_weights, peak};

/// Most alternatives that log-probabilities may be asked for.
pub const TOP_LOGPROBS_MAX: u32 = 128;

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Drawn {
    pub(crate) token: TokenId,
    pub(crate) logprob: Option<TokenLogprob>,
}

/// Checks parameters against the vocabulary.
///
/// # Errors
/// `InvalidRequest` that names the field.
pub(crate) fn validate(sampling: &Sampling, vocab_size: u32) -> Result<(), ApiError> {
    let fault = |field: &str, rule: &str| {
        Err(ApiError::invalid(
            format!("sampling.{field}"),
            format!("{field} {rule}"),
        ))
    };
    if !(sampling.temperature.is_finite() && sampling.temperature >= 0.0) {
        return fault("temperature", "must be a number from 0 up");
    }
    if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
        return fault("top_p", "must be over 0 and at most 1");
    }
    if !(0.0..=1.0).contains(&sampling.min_p) {
        return fault("min_p", "must be from 0 to 1");
    }
    if sampling
        .logit_bias
        .iter()
        .any(|(token, bias)| *token >= vocab_size || bias.is_nan())
    {
        return fault(
            "logit_bias",
            "must map token ids of the vocabulary to numbers",
        );
    }
    if sampling
        .stop_token_ids
        .iter()
        .any(|token| *token >= vocab_size)
    {
        return fault("stop_token_ids", "must be token ids of the vocabulary");
    }
    if sampling
        .top_logprobs
        .is_some_and(|top| top > TOP_LOGPROBS_MAX)
    {
        return fault("top_logprobs", "must be at most 128");
    }
    Ok(())
}

/// Draws tokens; keeps its buffers between draws.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    biased: Vec<f32>,
    weights: Vec<f32>,
    ranked: Vec<(f32, TokenId)>,
}

impl Sampler {
    /// The token at absolute position `position`, given the logits of the position before it. Logits that are
    /// not numbers are never drawn, unless there is nothing else.
    pub(crate) fn draw(&mut self, logits: &[f32], sampling: &Sampling, position: u32) -> Drawn {
        let mut biased = std::mem::take(&mut self.biased);
        let logits = if sampling.logit_bias.is_empty() {
            logits
        } else {
            biased.clear();
            biased.extend_from_slice(logits);
            for (token, bias) in &sampling.logit_bias {
                if let Some(logit) = biased.get_mut(*token as usize) {
                    *logit += bias;
                }
            }
            &biased
        };
        let token = self.pick(logits, sampling, position);
        let logprob = sampling
            .top_logprobs
            .map(|top| self.logprob(logits, token, top as usize));
        self.biased = biased;
        Drawn { token, logprob }
    }

    fn pick(&mut self, logits: &[f32], sampling: &Sampling, position: u32) -> TokenId {
        let peak = peak(logits);
        // The lowest id among equals. The default is met only if no logit is a number over minus infinity.
        let greedy = logits.iter().position(|logit| *logit == peak).unwrap_or(0) as TokenId;
        // A temperature whose inverse is not finite cannot be told from 0.
        let inverse = 1.0 / sampling.temperature;
        if !(inverse.is_finite() && peak.is_finite()) {
            return greedy;
        }
        self.weights.resize(logits.len(), 0.0);
        exp_weights(logits, peak, inverse, &mut self.weights);
        for weight in &mut self.weights {
            // Of NaN. There is no infinite one: the peak is finite and has weight 1.
            if weight.is_nan() {
                *weight = 0.0;
            }
        }
        self.cut_top_k(sampling.top_k as usize);
        self.cut_top_p(sampling.top_p);
        if sampling.min_p > 0.0 {
            for weight in &mut self.weights {
                // The most likely token has weight 1.
                if *weight < sampling.min_p {
                    *weight = 0.0;
                }
            }
        }
        let total: f64 = self.weights.iter().map(|weight| f64::from(*weight)).sum();
        let target = uniform(sampling.seed, sampling.choice, position) * total;
        let mut below = 0.0;
        let mut last = greedy;
        for (token, weight) in self.weights.iter().enumerate() {
            if *weight > 0.0 {
                last = token as TokenId;
                below += f64::from(*weight);
                if below > target {
                    break;
                }
            }
        }
        last
    }

    /// Keeps exactly the `k` heaviest (lower ids first among equals); 0 keeps all.
    fn cut_top_k(&mut self, k: usize) {
        if k == 0 || k >= self.weights.len() {
            return;
        }
        self.rank_all();
        if self.ranked.len() > k {
            self.ranked.select_nth_unstable_by(k - 1, heavier);
            self.ranked.truncate(k);
            self.keep_ranked();
        }
    }

    /// Keeps the fewest heaviest tokens that together have at least `p` of what is left.
    fn cut_top_p(&mut self, p: f32) {
        if p >= 1.0 {
            return;
        }
        self.rank_all();
        let total: f64 = self
            .ranked
            .iter()
            .map(|(weight, _)| f64::from(*weight))
            .sum();
        let wanted = f64::from(p) * total;
        // The nucleus is mostly small: order the heaviest few, and more only while they do not suffice.
        let (mut ordered, mut sum, mut chunk) = (0, 0.0, 64);
        while ordered < self.ranked.len() {
            let rest = &mut self.ranked[ordered..];
            let count = chunk.min(rest.len());
            if count < rest.len() {
                rest.select_nth_unstable_by(count - 1, heavier);
            }
            rest[..count].sort_unstable_by(heavier);
            for (at, (weight, _)) in rest[..count].iter().enumerate() {
                sum += f64::from(*weight);
                if sum >= wanted {
                    self.ranked.truncate(ordered + at + 1);
                    return self.keep_ranked();
                }
            }
            ordered += count;
            chunk *= 4;
        }
    }

    fn rank_all(&mut self) {
        self.ranked.clear();
        let weights = self
            .weights
            .iter()
            .enumerate()
            .filter(|(_, weight)| **weight > 0.0);
        self.ranked
            .extend(weights.map(|(token, weight)| (*weight, token as TokenId)));
    }

    fn keep_ranked(&mut self) {
        self.weights.fill(0.0);
        for (weight, token) in &self.ranked {
            self.weights[*token as usize] = *weight;
        }
    }

    /// Log-probability of `token` and the `top` best tokens.
    fn logprob(&mut self, logits: &[f32], token: TokenId, top: usize) -> TokenLogprob {
        let peak = peak(logits);
        self.weights.resize(logits.len(), 0.0);
        exp_weights(logits, peak, 1.0, &mut self.weights);
        let total: f64 = self
            .weights
            .iter()
            .filter(|w| w.is_finite())
            .map(|w| f64::from(*w))
            .sum();
        let log_total = total.ln() as f32;
        // JSON has no infinity; -9999 is what OpenAI shows for "next to impossible".
        let logprob_of = |token: TokenId| {
            let value = logits[token as usize] - peak - log_total;
            if value.is_finite() {
                value.max(-9999.0)
            } else {
                -9999.0
            }
        };
        self.ranked.clear();
        if top > 0 {
            let numbers = logits
                .iter()
                .enumerate()
                .filter(|(_, logit)| !logit.is_nan());
            self.ranked
                .extend(numbers.map(|(token, logit)| (*logit, token as TokenId)));
            let count = top.min(self.ranked.len());
            if count > 0 && count < self.ranked.len() {
                self.ranked.select_nth_unstable_by(count - 1, heavier);
            }
            self.ranked.truncate(count);
            self.ranked.sort_unstable_by(heavier);
        }
        let top = self
            .ranked
            .iter()
            .map(|(_, token)| (*token, logprob_of(*token)))
            .collect();
        TokenLogprob {
            logprob: logprob_of(token),
            top,
        }
    }
}

/// Heaviest first, then lowest id: a total order.
fn heavier(left: &(f32, TokenId), right: &(f32, TokenId)) -> std::cmp::Ordering {
    right.0.total_cmp(&left.0).then(left.1.cmp(&right.1))
}

/// A number in [0, 1) that depends on its key alone.
fn uniform(seed: u64, choice: u32, position: u32) -> f64 {
    let key = mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15));
    let bits = mix(key ^ (u64::from(choice) << 32 | u64::from(position)));
    // Two rounds after the position, since neighbouring positions differ in one bit.
    (mix(bits.wrapping_add(key)) >> 11) as f64 / (1u64 << 53) as f64
}

/// The finaliser of splitmix64.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
