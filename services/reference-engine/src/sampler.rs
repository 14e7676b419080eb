//! Samples tokens: a pure function of logits, sampling parameters and position.
//!
//! The order is: the form of the output, bad words, end tokens before `min_tokens`, bias, penalties,
//! log-probabilities, temperature, top-k, top-p, min-p, draw. The penalties depend on the tokens before the position
//! ([`History`]). The draw inverts the cumulative distribution, in order of token id, at one uniform number that is a
//! hash of (seed, choice, position). So a position gets the same token whichever way the sequence reached it. Gumbel
//! noise per token would do too, but it costs a logarithm for each token of the vocabulary.

mod history;

use refrain_output_grammar::TokenMask;
use refrain_protocol::engine::{Sampling, TokenLogprob};
use refrain_protocol::{ApiError, TokenId};
use refrain_speculation::verify::sampled::{Weight, draw, judge};

use crate::kernels::{exp_weights, peak};

pub(crate) use history::History;

/// Maximum number of alternatives that a caller may request with log-probabilities.
const TOP_LOGPROBS_MAX: u32 = 128;

/// Distance of two logits below which another way to sum may change their order: what llama.cpp's sums of 16-bit keys
/// and values were seen to differ by.
const NEAR_TIE: f32 = 0.01;

/// A token that the target emits.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SampledToken {
    pub(crate) token: TokenId,
    pub(crate) logprob: Option<TokenLogprob>,
}

/// A token that a drafter drew at random, and the distribution that it was drawn from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DraftedToken<'a> {
    pub(crate) token: TokenId,
    pub(crate) from: &'a [Weight],
}

/// A drafter's guess for the next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Guess {
    pub(crate) token: TokenId,
    /// The drafter's probability of the token, given the path before it.
    pub(crate) prob: f32,
}

/// Independent streams of noise. The acceptance rule for drawn drafts requires their independence.
#[derive(Clone, Copy)]
enum NoiseStream {
    /// Draws the target's own token.
    Target,
    /// Draws the drafter's token.
    Draft,
    /// Decides whether the drafter's token is accepted.
    Accept,
}

/// Checks sampling parameters.
///
/// # Errors
/// `InvalidRequest`, which names the field.
pub(crate) fn validate(sampling: &Sampling, vocab_size: u32) -> Result<(), ApiError> {
    let is_token = |token: &TokenId| *token < vocab_size;
    let is_bias = |(token, bias): &(TokenId, f32)| is_token(token) && !bias.is_nan();
    let rules = [
        (
            "temperature",
            sampling.temperature.is_finite() && sampling.temperature >= 0.0,
            "must be a number that is at least 0",
        ),
        (
            "top_p",
            sampling.top_p > 0.0 && sampling.top_p <= 1.0,
            "must be greater than 0 and at most 1",
        ),
        (
            "min_p",
            (0.0..=1.0).contains(&sampling.min_p),
            "must be from 0 to 1",
        ),
        (
            "logit_bias",
            sampling.logit_bias.iter().all(is_bias),
            "must map token ids of the vocabulary to numbers",
        ),
        (
            "stop_token_ids",
            sampling.stop_token_ids.iter().all(is_token),
            "must be token ids of the vocabulary",
        ),
        (
            "presence_penalty",
            sampling.presence_penalty.is_finite(),
            "must be a number",
        ),
        (
            "frequency_penalty",
            sampling.frequency_penalty.is_finite(),
            "must be a number",
        ),
        (
            "repetition_penalty",
            sampling.repetition_penalty.is_finite() && sampling.repetition_penalty > 0.0,
            "must be a number that is greater than 0",
        ),
        (
            "bad_tokens",
            sampling
                .bad_tokens
                .iter()
                .all(|word| !word.is_empty() && word.iter().all(is_token)),
            "must be lists of token ids of the vocabulary",
        ),
        (
            "forced_output",
            sampling.forced_output.iter().all(is_token),
            "must be token ids of the vocabulary",
        ),
        (
            "top_logprobs",
            sampling
                .top_logprobs
                .is_none_or(|top| top <= TOP_LOGPROBS_MAX),
            "must be at most 128",
        ),
    ];
    match rules.iter().find(|(_, holds, _)| !holds) {
        Some((field, _, rule)) => Err(ApiError::invalid(
            format!("sampling.{field}"),
            format!("{field} {rule}"),
        )),
        None => Ok(()),
    }
}

/// Keeps the logits of the tokens that the form of the output allows. Where the parameters leave none of them, the
/// form counts alone, so that the output always has it.
fn keep_allowed(adjusted: &mut [f32], logits: &[f32], allowed: &TokenMask) {
    let mask = |logits: &mut [f32]| {
        // 32 tokens at once: most words of a mask have none of them, or all.
        let mut words = allowed.words().iter();
        for logits in logits.chunks_mut(u32::BITS as usize) {
            match words.next().copied().unwrap_or(0) {
                0 => logits.fill(f32::NEG_INFINITY),
                u32::MAX => {}
                word => {
                    for (bit, logit) in logits.iter_mut().enumerate() {
                        if word >> bit & 1 == 0 {
                            *logit = f32::NEG_INFINITY;
                        }
                    }
                }
            }
        }
    };
    let has_token = |logits: &[f32]| logits.iter().any(|logit| *logit > f32::NEG_INFINITY);
    mask(adjusted);
    if has_token(adjusted) {
        return;
    }
    adjusted.copy_from_slice(logits);
    mask(adjusted);
    if !has_token(adjusted)
        && let Some(first) = allowed.iter().next()
        && let Some(logit) = adjusted.get_mut(first as usize)
    {
        *logit = 0.0;
    }
}

/// Whether another token is about as likely as the likeliest.
fn is_near_tie(logits: &[f32]) -> bool {
    let least = peak(logits) - NEAR_TIE;
    logits.iter().filter(|logit| **logit > least).count() > 1
}

/// Samples tokens. It keeps its buffers between calls.
#[derive(Debug, Default)]
pub(crate) struct Sampler {
    /// Number of near ties since it was last asked for.
    near_ties: u64,
    adjusted: Vec<f32>,
    weights: Vec<f32>,
    ranked: Vec<(f32, TokenId)>,
}

impl Sampler {
    /// Samples the target's token at absolute position `position` from the logits of the position before. A token
    /// whose logit is NaN is never sampled, unless there is no other. `history` has the tokens before the position,
    /// and `allowed` those that the form of the output allows at it. `drafted` is the token that a drafter drew for
    /// the position, if it drew one. Where that token is accepted, it is the one that is returned.
    pub(crate) fn sample(
        &mut self,
        logits: &[f32],
        sampling: &Sampling,
        position: u32,
        history: &History,
        allowed: Option<&TokenMask>,
        drafted: Option<DraftedToken<'_>>,
    ) -> SampledToken {
        let forced = history.forced(sampling);
        let mut adjusted = std::mem::take(&mut self.adjusted);
        let is_adjusted =
            !sampling.logit_bias.is_empty() || sampling.depends_on_text() || allowed.is_some();
        let logits = if forced.is_none() && is_adjusted {
            adjusted.clear();
            adjusted.extend_from_slice(logits);
            history.adjust(sampling, &mut adjusted);
            if let Some(allowed) = allowed {
                keep_allowed(&mut adjusted, logits, allowed);
            }
            &adjusted
        } else {
            logits
        };
        let token = match forced {
            Some(token) => token,
            None => self.pick(logits, sampling, position, drafted),
        };
        if forced.is_none() && sampling.temperature == 0.0 {
            self.near_ties += u64::from(is_near_tie(logits));
        }
        let logprob = sampling
            .top_logprobs
            .map(|top| self.logprob(logits, token, top as usize));
        self.adjusted = adjusted;
        SampledToken { token, logprob }
    }

    /// Number of tokens, since the last call, that were taken as the likeliest while another was about as likely.
    pub(crate) fn take_near_ties(&mut self) -> u64 {
        std::mem::take(&mut self.near_ties)
    }

    /// Draws a drafter's token for `position` from its logits, one for each of `tokens`. Returns it with the
    /// distribution that it was drawn from, or `None` if no logit is a number. Biases and penalties apply only to the
    /// target.
    pub(crate) fn draw_draft(
        &mut self,
        logits: &[f32],
        sampling: &Sampling,
        position: u32,
        tokens: &[TokenId],
    ) -> Option<(Guess, Vec<Weight>)> {
        if !peak(logits).is_finite() {
            return None;
        }
        if let Some(certain) = self.weigh(logits, sampling) {
            let token = *tokens.get(certain as usize)?;
            return Some((Guess { token, prob: 1.0 }, vec![(token, 1.0)]));
        }
        let noise = uniform(NoiseStream::Draft, sampling, position);
        let drawn = draw(&self.weights, noise)? as usize;
        let total: f64 = self.weights.iter().map(|weight| f64::from(*weight)).sum();
        let from = tokens.iter().copied().zip(self.weights.iter().copied());
        let guess = Guess {
            token: *tokens.get(drawn)?,
            prob: (f64::from(self.weights[drawn]) / total) as f32,
        };
        Some((guess, from.filter(|(_, weight)| *weight > 0.0).collect()))
    }

    /// Returns the token that [`Sampler::sample`] samples from adjusted logits.
    fn pick(
        &mut self,
        logits: &[f32],
        sampling: &Sampling,
        position: u32,
        drafted: Option<DraftedToken<'_>>,
    ) -> TokenId {
        if let Some(certain) = self.weigh(logits, sampling) {
            return certain;
        }
        let noise = uniform(NoiseStream::Target, sampling, position);
        let drawn = match drafted {
            None => draw(&self.weights, noise),
            Some(DraftedToken { token, from }) => {
                let keep = uniform(NoiseStream::Accept, sampling, position);
                judge(&mut self.weights, from, token, keep, noise)
            }
        };
        // The most likely token is never cut, so there is always a token to draw.
        drawn.unwrap_or_default()
    }

    /// Sets `weights` to the tokens' probabilities, up to a common factor. If only one token is possible, returns it
    /// instead.
    fn weigh(&mut self, logits: &[f32], sampling: &Sampling) -> Option<TokenId> {
        let peak = peak(logits);
        // A temperature whose inverse is not finite counts as 0.
        let inverse = 1.0 / sampling.temperature;
        if !(inverse.is_finite() && peak.is_finite()) {
            // The lowest id wins among equals. The default applies only if no logit is above minus infinity.
            let greedy = logits.iter().position(|logit| *logit == peak);
            return Some(greedy.unwrap_or(0) as TokenId);
        }
        self.weights.resize(logits.len(), 0.0);
        exp_weights(logits, peak, inverse, &mut self.weights);
        for weight in &mut self.weights {
            // The logit was NaN. No weight is infinite, because the peak is finite and has weight 1.
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

    /// Keeps exactly the `k` likeliest tokens, or all if `k` is 0. Among equals, lower ids stay.
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

    /// Keeps the smallest set of likeliest tokens that has at least the share `p` of the remaining weight.
    fn cut_top_p(&mut self, p: f32) {
        if p >= 1.0 {
            return;
        }
        self.rank_all();
        let weights = self.ranked.iter().map(|(weight, _)| f64::from(*weight));
        let total: f64 = weights.sum();
        let wanted = f64::from(p) * total;
        // The nucleus is usually small, so the likeliest few are sorted first, and more only if they do not suffice.
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
        let weights = (0..).zip(&self.weights);
        let possible = weights.filter(|(_, weight)| **weight > 0.0);
        self.ranked.clear();
        self.ranked
            .extend(possible.map(|(token, weight)| (*weight, token)));
    }

    fn keep_ranked(&mut self) {
        self.weights.fill(0.0);
        for (weight, token) in &self.ranked {
            self.weights[*token as usize] = *weight;
        }
    }

    /// Returns the log-probability of `token` and of the `top` likeliest tokens.
    fn logprob(&mut self, logits: &[f32], token: TokenId, top: usize) -> TokenLogprob {
        let peak = peak(logits);
        self.weights.resize(logits.len(), 0.0);
        exp_weights(logits, peak, 1.0, &mut self.weights);
        let finite = self.weights.iter().filter(|weight| weight.is_finite());
        let total: f64 = finite.map(|weight| f64::from(*weight)).sum();
        let log_total = total.ln() as f32;
        // JSON has no infinity. OpenAI shows -9999 for a token that is next to impossible.
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
            let numbers = (0..).zip(logits).filter(|(_, logit)| !logit.is_nan());
            self.ranked
                .extend(numbers.map(|(token, logit)| (*logit, token)));
            let count = top.min(self.ranked.len());
            if count > 0 && count < self.ranked.len() {
                self.ranked.select_nth_unstable_by(count - 1, heavier);
            }
            self.ranked.truncate(count);
            self.ranked.sort_unstable_by(heavier);
        }
        let top = self.ranked.iter();
        TokenLogprob {
            logprob: logprob_of(token),
            top: top.map(|(_, token)| (*token, logprob_of(*token))).collect(),
        }
    }
}

/// Orders by weight, heaviest first, and then by id.
fn heavier(left: &(f32, TokenId), right: &(f32, TokenId)) -> std::cmp::Ordering {
    right.0.total_cmp(&left.0).then(left.1.cmp(&right.1))
}

/// Returns a number in [0, 1) that depends only on stream, seed, choice and position.
fn uniform(stream: NoiseStream, sampling: &Sampling, position: u32) -> f64 {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    let offset = GOLDEN.wrapping_mul(1 + stream as u64);
    let key = mix(sampling.seed.wrapping_add(offset));
    let bits = mix(key ^ (u64::from(sampling.choice) << 32 | u64::from(position)));
    // Neighbouring positions differ in one bit, so the position goes through two rounds of mixing.
    (mix(bits.wrapping_add(key)) >> 11) as f64 / (1u64 << 53) as f64
}

/// Mixes bits with the finaliser of splitmix64.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If streams were correlated, a drawn draft would be accepted with other probabilities than the rule's.
    #[test]
    fn streams_of_noise_are_not_correlated() {
        const DRAWS: u32 = 20_000;
        let sampling = Sampling {
            seed: 3,
            ..Sampling::default()
        };
        let pairs = [
            (NoiseStream::Target, NoiseStream::Draft),
            (NoiseStream::Target, NoiseStream::Accept),
            (NoiseStream::Draft, NoiseStream::Accept),
        ];
        for (one, other) in pairs {
            let products = (0..DRAWS).map(|position| {
                let centred = |noise| uniform(noise, &sampling, position) - 0.5;
                centred(one) * centred(other)
            });
            // The variance of each stream is 1/12.
            let correlation = 12.0 * products.sum::<f64>() / f64::from(DRAWS);
            assert!(correlation.abs() < 0.03, "{correlation}");
        }
    }
}
