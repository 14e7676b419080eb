//! Verify calls: how a streaming engine is made to judge a draft, and how its response is read.
//!
//! No such engine accepts a draft as a draft. Two kinds of call make it judge one all the same:
//!
//! * **Fan-out**: one call with a prompt per node (the text and the path to the node), for one token each. The tokens
//!   are the engine's own draws at the nodes. So walking them is exact for every stateless sampler.
//! * **Chain**: one call whose prompt is the text followed by the draft, for the log-probabilities of the prompt. The
//!   best token at each position is the one that greedy decoding would emit there. A position without a certain best
//!   token (not computed, not a number, a tie) is left open.
//!
//! Both give the engine's next token at the end of the text and at each node. A position is also left open where the
//! engine would end with a token that the request does not know as an end: only a stream can end that way.

use refrain_protocol::engine::{Draft, Sampling};
use refrain_protocol::{ApiError, TokenId};

use super::client::unexpected_response;
use super::generate::GenerateRequest;

/// A kind of call by which an engine judges a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VerifyMethod {
    /// The draft is a part of the prompt. For greedy decoding and drafts without branches.
    Chain,
    /// One prompt per node.
    FanOut,
}

impl VerifyMethod {
    /// All methods.
    pub(crate) const ALL: [VerifyMethod; 2] = [VerifyMethod::Chain, VerifyMethod::FanOut];

    /// The label in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            VerifyMethod::Chain => "chain",
            VerifyMethod::FanOut => "fan_out",
        }
    }
}

/// The kinds of verify calls that an engine supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifyAbilities {
    /// The engine supports chains.
    pub chain: bool,
    /// The engine supports several prompts in one call.
    pub fan_out: bool,
}

impl VerifyAbilities {
    /// Whether the engine can judge drafts at all.
    pub fn any(&self) -> bool {
        self.chain || self.fan_out
    }

    /// The methods that can judge drafts of a request, the better one first. A method is left out if its response
    /// would lack something that the request asks for, or if the engine would sample differently than in a stream.
    pub fn methods(&self, sampling: &Sampling) -> impl Iterator<Item = VerifyMethod> {
        // Only streams carry log-probabilities of the output.
        // A draft in the prompt is no output, so what depends on the text would be sampled differently.
        let plain = sampling.top_logprobs.is_none() && !sampling.depends_on_text();
        // Log-probabilities of prompts are raw: without biases, and before truncation.
        let greedy = sampling.temperature == 0.0 && sampling.logit_bias.is_empty();
        let chain = self.chain && plain && greedy;
        let fan_out = self.fan_out && plain;
        [
            (chain, VerifyMethod::Chain),
            (fan_out, VerifyMethod::FanOut),
        ]
        .into_iter()
        .filter_map(|(can, method)| can.then_some(method))
    }
}

/// A draft to be judged.
#[derive(Clone, Debug, PartialEq)]
pub struct VerifyRequest {
    /// The text so far, and how to sample after it.
    pub text: GenerateRequest,
    /// The draft that may follow the text; without branches for [`VerifyMethod::Chain`].
    pub draft: Draft,
    /// The method.
    pub method: VerifyMethod,
}

/// An engine's judgement of a draft.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DraftVerdict {
    /// The engine's next token at the end of the text, then at each node of the draft; `None` where it is left open.
    pub next_tokens: Vec<Option<TokenId>>,
}

impl VerifyRequest {
    /// A prompt for the end of the text and for each node, in the order of [`DraftVerdict::next_tokens`].
    pub(super) fn prompts(&self) -> Vec<Vec<TokenId>> {
        let text = &self.text.tokens;
        let mut prompts = Vec::with_capacity(1 + self.draft.tokens.len());
        prompts.push(text.clone());
        for (token, parent) in self.draft.tokens.iter().zip(&self.draft.parents) {
            // Parents come before their children.
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

    /// The text followed by the draft, as one prompt.
    pub(super) fn chained_prompt(&self) -> Vec<TokenId> {
        [&*self.text.tokens, &*self.draft.tokens].concat()
    }
}

/// The response to a prompt that asked for a single token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SingleToken {
    /// The token, if the engine reported it.
    pub(super) token: Option<TokenId>,
    /// The engine ended the output with this token, instead of stopping at the limit of one token.
    pub(super) is_end: bool,
}

impl SingleToken {
    /// The next token; `None` where only a stream can tell it.
    fn next_token(self, request: &VerifyRequest) -> Option<TokenId> {
        let stop_ids = &request.text.sampling.stop_token_ids;
        self.token
            .filter(|token| !self.is_end || stop_ids.contains(token))
    }
}

impl DraftVerdict {
    /// Reads the responses to the prompts of a fan-out: the index of each prompt and its token.
    ///
    /// # Errors
    /// A response belongs to a prompt that was not sent.
    pub(super) fn from_fan_out(
        request: &VerifyRequest,
        responses: impl IntoIterator<Item = (usize, SingleToken)>,
    ) -> Result<Self, ApiError> {
        let mut next_tokens = vec![None; 1 + request.draft.tokens.len()];
        for (index, response) in responses {
            let next: &mut Option<TokenId> = next_tokens
                .get_mut(index)
                .ok_or_else(|| unexpected_response("a response to a prompt that was not sent"))?;
            *next = response.next_token(request);
        }
        Ok(DraftVerdict { next_tokens })
    }

    /// Reads the response to a chain: the best tokens of its last positions, as far as they are certain, and the
    /// token after the draft.
    pub(super) fn from_chain(
        request: &VerifyRequest,
        best: impl DoubleEndedIterator<Item = Option<TokenId>>,
        last: SingleToken,
    ) -> Self {
        let positions = request.draft.tokens.len();
        let mut next_tokens: Vec<Option<TokenId>> = best.rev().take(positions).collect();
        next_tokens.resize(positions, None);
        next_tokens.reverse();
        next_tokens.push(last.next_token(request));
        DraftVerdict { next_tokens }
    }
}

/// Margin by which the best token of a position must beat the second one, natural logarithm. Prompts and single
/// tokens are computed by different kernels with different rounding: with a smaller margin, decoding might choose the
/// other token.
const MARGIN_MIN: f32 = 0.05;

/// The best token of a position, given the log-probabilities of some of its best tokens. `None` if two are about
/// equal, or if a value is no log-probability, which means that the position was not computed.
pub(super) fn certain_best(best: impl IntoIterator<Item = (TokenId, f32)>) -> Option<TokenId> {
    let best: Vec<(TokenId, f32)> = best.into_iter().collect();
    // Rounding can give values slightly above 0.
    if best
        .iter()
        .any(|(_, logprob)| logprob.is_nan() || *logprob > 1e-3)
    {
        return None;
    }
    let (token, top) = *best.iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    let is_beaten =
        |(other, logprob): &(TokenId, f32)| *other == token || top - logprob >= MARGIN_MIN;
    best.iter().all(is_beaten).then_some(token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::dialect::tests::test_verify_request;

    #[test]
    fn every_node_has_its_path_as_a_prompt() {
        let request = |tokens: &[TokenId], parents: &[Option<u32>]| {
            test_verify_request(VerifyMethod::FanOut, tokens, parents, Sampling::default())
        };
        let tree = request(&[5, 6, 7, 8], &[None, None, Some(0), Some(2)]);
        let prompts = [
            vec![1, 2],
            vec![1, 2, 5],
            vec![1, 2, 6],
            vec![1, 2, 5, 7],
            vec![1, 2, 5, 7, 8],
        ];
        assert_eq!(tree.prompts(), prompts);
        let chain = request(&[5, 6], &[None, Some(0)]);
        assert_eq!(chain.chained_prompt(), [1, 2, 5, 6]);
    }

    #[test]
    fn ties_and_values_that_were_not_computed_have_no_best_token() {
        type Case<'a> = (&'a [(TokenId, f32)], Option<TokenId>);
        let cases: [Case<'_>; 8] = [
            (&[(5, -1.0), (6, -0.5), (7, -3.0)], Some(6)),
            (&[(5, -0.5), (6, -0.5), (7, -3.0)], None),
            (&[(5, -0.7), (6, -0.7), (7, -0.5)], Some(7)),
            (&[(5, -0.51), (6, -0.5)], None),
            // The engine lists the drafted token beside the best ones, even if it is the best.
            (&[(5, -0.5), (5, -0.5)], Some(5)),
            (&[(5, f32::NAN), (6, -0.5)], None),
            (&[(5, 3.5), (6, -0.5)], None),
            (&[], None),
        ];
        for (best, expected) in cases {
            assert_eq!(certain_best(best.iter().copied()), expected, "{best:?}");
        }
    }

    #[test]
    fn methods_are_left_out_where_they_would_change_or_lack_something() {
        let able = VerifyAbilities {
            chain: true,
            fan_out: true,
        };
        let methods = |able: VerifyAbilities, sampling: Sampling| -> Vec<VerifyMethod> {
            able.methods(&sampling).collect()
        };
        let greedy = Sampling::default();
        let both = [VerifyMethod::Chain, VerifyMethod::FanOut];
        assert_eq!(methods(able, greedy.clone()), both);
        let sampled = Sampling {
            temperature: 0.7,
            ..greedy.clone()
        };
        assert_eq!(methods(able, sampled), [VerifyMethod::FanOut]);
        let biased = Sampling {
            logit_bias: vec![(1, 1.0)],
            ..greedy.clone()
        };
        assert_eq!(methods(able, biased), [VerifyMethod::FanOut]);
        let penalized = Sampling {
            repetition_penalty: 1.1,
            ..greedy.clone()
        };
        assert_eq!(methods(able, penalized), []);
        let scored = Sampling {
            top_logprobs: Some(0),
            ..greedy.clone()
        };
        assert_eq!(methods(able, scored), []);
        assert_eq!(methods(VerifyAbilities::default(), greedy), []);
    }
}
