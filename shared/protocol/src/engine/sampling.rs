//! How the target samples.

use serde::{Deserialize, Serialize};

use super::OutputForm;
use crate::TokenId;

/// How the target samples. With all fields at their defaults it decodes greedily.
///
/// Noise is keyed by (`seed`, `choice`, absolute position), and all else follows from the tokens before a position.
/// So the output does not depend on chunks, the batch or drafts. Neutral values of the later fields are not sent, so
/// that older peers read the requests that they can serve.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// Temperature; 0 is greedy decoding.
    pub temperature: f32,
    /// Keeps the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the smallest set of tokens whose probabilities sum to at least this.
    pub top_p: f32,
    /// Keeps tokens that are at least this many times as likely as the most likely one.
    pub min_p: f32,
    /// Seed of the noise, fixed by the gateway, so that a continuation on another worker draws the same noise.
    pub seed: u64,
    /// Index among the `n` choices of the client request, which is a part of the noise key.
    pub choice: u32,
    /// Values that are added to the logits before all else.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Tokens that end the output. The stop token is emitted as the last one.
    pub stop_token_ids: Vec<TokenId>,
    /// Number of most likely tokens to report beside each emitted one. `None`: no log-probabilities.
    pub top_logprobs: Option<u32>,
    /// Subtracted from the logit of each token that the output has.
    #[serde(skip_serializing_if = "is_zero")]
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token as many times as the output has it.
    #[serde(skip_serializing_if = "is_zero")]
    pub frequency_penalty: f32,
    /// Divides positive logits, and multiplies negative ones, of tokens that prompt or output have.
    #[serde(skip_serializing_if = "is_one")]
    pub repetition_penalty: f32,
    /// Least length of the output: before it, no stop token is sampled.
    #[serde(skip_serializing_if = "is_none")]
    pub min_tokens: u32,
    /// Whether the output goes on past the end tokens of the model. `stop_token_ids` then has none of them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub ignore_eos: bool,
    /// Texts that the output must not have, for engines that tokenize them themselves.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bad_words: Vec<String>,
    /// The same texts as tokens. The last token of a list is never sampled where the output ends with those before.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bad_tokens: Vec<Vec<TokenId>>,
    /// Tokens that are emitted first, instead of sampled ones: the rest of a prompt whose log-probabilities are
    /// wanted. They are scored as they are, end no output, and count as part of the prompt.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub forced_output: Vec<TokenId>,
    /// The form that the output must have. An engine that cannot hold an output to it refuses the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub form: Option<Box<OutputForm>>,
}

fn is_zero(value: &f32) -> bool {
    *value == 0.0
}

fn is_one(value: &f32) -> bool {
    *value == 1.0
}

fn is_none(count: &u32) -> bool {
    *count == 0
}

impl Sampling {
    /// Whether a token's logit depends on the output before it, and not only on prompt and output together. An engine
    /// that is sent the output so far as a part of its prompt would sample such a request differently.
    pub fn depends_on_output(&self) -> bool {
        self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
            || self.form.is_some()
            || self.bad_tokens.iter().any(|word| word.len() > 1)
    }

    /// Whether a token's logit depends on the tokens before it by more than the model.
    pub fn depends_on_text(&self) -> bool {
        self.depends_on_output()
            || self.repetition_penalty != 1.0
            || self.min_tokens > 0
            || !self.bad_tokens.is_empty()
            || !self.forced_output.is_empty()
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            choice: 0,
            logit_bias: Vec::new(),
            stop_token_ids: Vec::new(),
            top_logprobs: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            min_tokens: 0,
            ignore_eos: false,
            bad_words: Vec::new(),
            bad_tokens: Vec::new(),
            forced_output: Vec::new(),
            form: None,
        }
    }
}
