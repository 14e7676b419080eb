//! Verify calls: how an engine that generates by itself is made to judge a draft, and what its answers say.
//!
//! No such engine takes a draft as a draft. Two kinds of call make it judge one all the same:
//!
//! * **Fan-out**: one call with a prompt per node, the text and the path to the node, for one token each. The tokens are the
//!   engine's own draws at the nodes, so whatever stateless sampler it has, walking them is exact.
//! * **Chain**: one call whose prompt is the text with the draft behind it, for the log-probabilities of the prompt. The best
//!   token of each place is what greedy decoding would have said there. A place whose best token is not known for sure
//!   (not computed, not a number, a tie) is left open.
//!
//! Both come to the same: for the end of the text and for each node, the token that the engine says next. Where it would
//! end by itself, with a token that the request does not know for an end, the place is left open: only a stream ends so.

use refrain_protocol::engine::{Draft, Sampling};
use refrain_protocol::{ApiError, TokenId};

use super::client::no_engine;
use super::streaming::GenerateRequest;

/// How an engine can be made to judge a draft in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VerifyWay {
    /// The draft stands in the prompt: greedy decoding, drafts that do not branch.
    Chain,
    /// A prompt for each node.
    FanOut,
}

impl VerifyWay {
    /// The label of metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            VerifyWay::Chain => "chain",
            VerifyWay::FanOut => "fan_out",
        }
    }
}

/// What was found out of an engine's verify calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifyAbilities {
    /// It takes chains.
    pub chain: bool,
    /// It takes several prompts in a call.
    pub fan_out: bool,
}

impl VerifyAbilities {
    /// Whether it can judge drafts at all.
    pub fn any(&self) -> bool {
        self.chain || self.fan_out
    }

    /// How drafts of a request can be judged, the better way first. None where an answer would lack what the request
    /// asks for, or where the engine would not sample in a call as it does in a stream.
    pub fn ways(&self, sampling: &Sampling) -> impl Iterator<Item = VerifyWay> {
        // Log-probabilities come with streams alone.
        let plain = sampling.top_logprobs.is_none();
        // Those of prompts are raw: without bias, and before truncation.
        let greedy = sampling.temperature == 0.0 && sampling.logit_bias.is_empty();
        let chain = self.chain && plain && greedy;
        let fan_out = self.fan_out && plain;
        let ways = [(chain, VerifyWay::Chain), (fan_out, VerifyWay::FanOut)];
        ways.into_iter().filter_map(|(can, way)| can.then_some(way))
    }
}

/// A draft to be judged.
#[derive(Clone, Debug, PartialEq)]
pub struct VerifyRequest {
    /// The text so far, and how to sample behind it.
    pub text: GenerateRequest,
    /// What may follow it; a chain for [`VerifyWay::Chain`].
    pub draft: Draft,
    /// How.
    pub way: VerifyWay,
}

/// What an engine says of a draft.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// The token that it says at the end of the text, then at each node of the draft; `None` where it is not known.
    pub drawn: Vec<Option<TokenId>>,
}

impl VerifyRequest {
    /// A prompt for the end of the text and for each node, in the order of [`Verified::drawn`].
    pub(super) fn prompts(&self) -> Vec<Vec<TokenId>> {
        let text = &self.text.tokens;
        let mut prompts = Vec::with_capacity(1 + self.draft.tokens.len());
        prompts.push(text.clone());
        for (token, parent) in self.draft.tokens.iter().zip(&self.draft.parents) {
            // Parents stand before their children.
            let above: &[TokenId] = prompts
                .get(parent.map_or(0, |parent| parent as usize + 1))
                .map_or(&[], Vec::as_slice);
            let mut prompt = Vec::with_capacity(above.len() + 1);
            prompt.extend_from_slice(above);
            prompt.push(*token);
            prompts.push(prompt);
        }
        prompts
    }

    /// The text with a chain behind it.
    pub(super) fn chained(&self) -> Vec<TokenId> {
        [&*self.text.tokens, &*self.draft.tokens].concat()
    }
}

/// What an engine said where it was asked for one token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Said {
    /// The token, if it told.
    pub(super) token: Option<TokenId>,
    /// It took that for the end of the output, rather than for the one token that there was room for.
    pub(super) is_end: bool,
}

impl Said {
    /// The token that is known to come next.
    fn known(self, request: &VerifyRequest) -> Option<TokenId> {
        let stop_ids = &request.text.sampling.stop_token_ids;
        self.token
            .filter(|token| !self.is_end || stop_ids.contains(token))
    }
}

impl Verified {
    /// Of the answers to the prompts of a fan-out: the place of each and what was said there.
    ///
    /// # Errors
    /// Answers to other prompts than those that were sent.
    pub(super) fn of_fan_out(
        request: &VerifyRequest,
        answers: impl IntoIterator<Item = (usize, Said)>,
    ) -> Result<Self, ApiError> {
        let mut drawn = vec![None; 1 + request.draft.tokens.len()];
        for (place, said) in answers {
            let slot: &mut Option<TokenId> = drawn
                .get_mut(place)
                .ok_or_else(|| no_engine("an answer to a prompt that was not sent"))?;
            *slot = said.known(request);
        }
        Ok(Verified { drawn })
    }

    /// Of a chain: the best tokens of its last places, as far as they are known, and what was said behind the draft.
    pub(super) fn of_chain(
        request: &VerifyRequest,
        best: impl DoubleEndedIterator<Item = Option<TokenId>>,
        last: Said,
    ) -> Self {
        let places = request.draft.tokens.len();
        let mut drawn: Vec<Option<TokenId>> = best.rev().take(places).collect();
        drawn.resize(places, None);
        drawn.reverse();
        drawn.push(last.known(request));
        Verified { drawn }
    }
}

/// How much likelier the best token of a place must be than the second, natural logarithm. Prompts and single tokens are
/// computed by different kernels, which round differently: closer than this, decoding might have said the other one.
const MARGIN_MIN: f32 = 0.05;

/// The best token of a place, by (token, log-probability) of some of its best ones. `None` where two are as good, and
/// where something is no log-probability: a place that was not computed.
pub(super) fn sure_best(best: impl IntoIterator<Item = (TokenId, f32)>) -> Option<TokenId> {
    let best: Vec<(TokenId, f32)> = best.into_iter().collect();
    // A bit above 0 comes of rounding.
    if best
        .iter()
        .any(|(_, logprob)| logprob.is_nan() || *logprob > 1e-3)
    {
        return None;
    }
    let (token, top) = *best.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    let is_sure =
        |(other, logprob): &(TokenId, f32)| *other == token || top - logprob >= MARGIN_MIN;
    best.iter().all(is_sure).then_some(token)
}

#[cfg(test)]
mod tests {
    use super::super::dialect::verify_request;
    use super::*;

    #[test]
    fn every_node_has_its_path_as_a_prompt() {
        let verify = |tokens: &[TokenId], parents: &[Option<u32>]| {
            verify_request(VerifyWay::FanOut, tokens, parents, Sampling::default())
        };
        let tree = verify(&[5, 6, 7, 8], &[None, None, Some(0), Some(2)]);
        let prompts = [
            vec![1, 2],
            vec![1, 2, 5],
            vec![1, 2, 6],
            vec![1, 2, 5, 7],
            vec![1, 2, 5, 7, 8],
        ];
        assert_eq!(tree.prompts(), prompts);
        let chain = verify(&[5, 6], &[None, Some(0)]);
        assert_eq!(chain.chained(), [1, 2, 5, 6]);
    }

    #[test]
    fn a_best_token_is_known_only_if_there_is_one() {
        type Case<'a> = (&'a [(TokenId, f32)], Option<TokenId>);
        let cases: [Case<'_>; 8] = [
            (&[(5, -1.0), (6, -0.5), (7, -3.0)], Some(6)),
            (&[(5, -0.5), (6, -0.5), (7, -3.0)], None),
            (&[(5, -0.7), (6, -0.7), (7, -0.5)], Some(7)),
            (&[(5, -0.51), (6, -0.5)], None),
            // The drafted token is told beside the best, though it is the best.
            (&[(5, -0.5), (5, -0.5)], Some(5)),
            (&[(5, f32::NAN), (6, -0.5)], None),
            (&[(5, 3.5), (6, -0.5)], None),
            (&[], None),
        ];
        for (best, known) in cases {
            assert_eq!(sure_best(best.iter().copied()), known, "{best:?}");
        }
    }

    #[test]
    fn requests_are_judged_by_ways_that_serve_them_whole() {
        let able = VerifyAbilities {
            chain: true,
            fan_out: true,
        };
        let ways = |able: VerifyAbilities, sampling: Sampling| -> Vec<VerifyWay> {
            able.ways(&sampling).collect()
        };
        let greedy = Sampling::default();
        let both = [VerifyWay::Chain, VerifyWay::FanOut];
        assert_eq!(ways(able, greedy.clone()), both);
        let sampled = Sampling {
            temperature: 0.7,
            ..greedy.clone()
        };
        assert_eq!(ways(able, sampled), [VerifyWay::FanOut]);
        let biased = Sampling {
            logit_bias: vec![(1, 1.0)],
            ..greedy.clone()
        };
        assert_eq!(ways(able, biased), [VerifyWay::FanOut]);
        let scored = Sampling {
            top_logprobs: Some(0),
            ..greedy.clone()
        };
        assert_eq!(ways(able, scored), []);
        assert_eq!(ways(VerifyAbilities::default(), greedy), []);
    }
}
