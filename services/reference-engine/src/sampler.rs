//! From logits to a token: a pure function of logits, sampling parameters and position.
//!
//! In order: bias, log-probabilities, temperature, top-k, top-p, min-p, draw. The draw inverts the cumulative
//! distribution, in order of token id, at one uniform number that is a hash of (seed, choice, position). So
//! the same position gives the same token however the sequence came to it. (Gumbel noise per token would do
//! as well and costs a logarithm for each of the vocabulary.)

use refrain_protocol::engine::{Sampling, TokenLogprob};
use refrain_protocol::{ApiError, TokenId};

use refrain_speculation::sampled::{Weight, draw, judge};

use crate::math::{exp_weights, peak};

/// Most alternatives that log-probabilities may be asked for.
pub const TOP_LOGPROBS_MAX: u32 = 128;

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Drawn {
    pub(crate) token: TokenId,
    pub(crate) logprob: Option<TokenLogprob>,
}

/// A token that a drafter drew, and what it was drawn from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Proposal<'a> {
    pub(crate) token: TokenId,
    pub(crate) from: &'a [Weight],
}

/// What a drafter draws.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Proposed {
    pub(crate) token: TokenId,
    pub(crate) from: Vec<Weight>,
    /// Of the token.
    pub(crate) prob: f32,
}

/// What noise is for. Streams know nothing of each other, as the rule for drawn drafts demands.
#[derive(Clone, Copy)]
enum Noise {
    /// The target's own token.
    Target,
    /// The drafter's token.
    Draft,
    /// Whether that is kept.
    Keep,
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
        self.with_bias(logits, sampling, |sampler, logits| {
            sampler.pick(logits, sampling, position, None)
        })
    }

    /// The same where a drafter drew a token for that position: its token if it is kept.
    pub(crate) fn judge(
        &mut self,
        logits: &[f32],
        sampling: &Sampling,
        position: u32,
        proposal: Proposal<'_>,
    ) -> Drawn {
        self.with_bias(logits, sampling, |sampler, logits| {
            sampler.pick(logits, sampling, position, Some(proposal))
        })
    }

    /// A drafter's token for `position` by its own logits, one for each of `tokens`. `None` if no logit is a number. A bias is the target's alone.
    pub(crate) fn propose(
        &mut self,
        logits: &[f32],
        sampling: &Sampling,
        position: u32,
        tokens: &[TokenId],
    ) -> Option<Proposed> {
        if !peak(logits).is_finite() {
            return None;
        }
        if let Some(certain) = self.weigh(logits, sampling) {
            let token = *tokens.get(certain as usize)?;
            return Some(Proposed {
                token,
                from: vec![(token, 1.0)],
                prob: 1.0,
            });
        }
        let drawn = draw(&self.weights, uniform(Noise::Draft, sampling, position))? as usize;
        let total: f64 = self.weights.iter().map(|weight| f64::from(*weight)).sum();
        let from = tokens.iter().copied().zip(self.weights.iter().copied());
        Some(Proposed {
            token: *tokens.get(drawn)?,
            from: from.filter(|(_, weight)| *weight > 0.0).collect(),
            prob: (f64::from(self.weights[drawn]) / total) as f32,
        })
    }

    /// Lets `pick` have the logits with the bias, and adds log-probabilities.
    fn with_bias(
        &mut self,
        logits: &[f32],
        sampling: &Sampling,
        pick: impl FnOnce(&mut Self, &[f32]) -> TokenId,
    ) -> Drawn {
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
        let token = pick(self, logits);
        let logprob = sampling
            .top_logprobs
            .map(|top| self.logprob(logits, token, top as usize));
        self.biased = biased;
        Drawn { token, logprob }
    }

    fn pick(
        &mut self,
        logits: &[f32],
        sampling: &Sampling,
        position: u32,
        proposal: Option<Proposal<'_>>,
    ) -> TokenId {
        if let Some(certain) = self.weigh(logits, sampling) {
            return certain;
        }
        let noise = uniform(Noise::Target, sampling, position);
        let drawn = match proposal {
            None => draw(&self.weights, noise),
            Some(Proposal { token, from }) => {
                let keep = uniform(Noise::Keep, sampling, position);
                judge(&mut self.weights, from, token, keep, noise)
            }
        };
        // The most likely token has weight 1, whatever is cut.
        drawn.unwrap_or_default()
    }

    /// Leaves in `weights` what the tokens weigh, up to a factor; gives the token where there is only one.
    fn weigh(&mut self, logits: &[f32], sampling: &Sampling) -> Option<TokenId> {
        let peak = peak(logits);
        // A temperature whose inverse is not finite cannot be told from 0.
        let inverse = 1.0 / sampling.temperature;
        if !(inverse.is_finite() && peak.is_finite()) {
            // The lowest id among equals. The default is met only if no logit is a number over minus infinity.
            let greedy = logits.iter().position(|logit| *logit == peak);
            return Some(greedy.unwrap_or(0) as TokenId);
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
        None
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

/// A number in [0, 1) that depends on stream, seed, choice and position alone.
fn uniform(noise: Noise, sampling: &Sampling, position: u32) -> f64 {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let stream = GOLDEN.wrapping_mul(1 + noise as u64);
    let key = mix(sampling.seed.wrapping_add(stream));
    let bits = mix(key ^ (u64::from(sampling.choice) << 32 | u64::from(position)));
    // Two rounds after the position, since neighbouring positions differ in one bit.
    (mix(bits.wrapping_add(key)) >> 11) as f64 / (1u64 << 53) as f64
}

/// The finaliser of splitmix64.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of streams that went together, a drawn draft would be kept by other chances than the rule's.
    #[test]
    fn streams_of_noise_know_nothing_of_each_other() {
        const DRAWS: u32 = 20_000;
        let sampling = Sampling {
            seed: 3,
            ..Sampling::default()
        };
        let pairs = [
            (Noise::Target, Noise::Draft),
            (Noise::Target, Noise::Keep),
            (Noise::Draft, Noise::Keep),
        ];
        for (one, other) in pairs {
            let products = (0..DRAWS).map(|position| {
                let centred = |noise| uniform(noise, &sampling, position) - 0.5;
                centred(one) * centred(other)
            });
            // The variance of either is 1/12.
            let correlation = 12.0 * products.sum::<f64>() / f64::from(DRAWS);
            assert!(correlation.abs() < 0.03, "{correlation}");
        }
    }
}
