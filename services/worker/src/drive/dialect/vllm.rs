//! Verify calls of vLLM: fan-outs over `/v1/completions`, and chains over `/inference/v1/generate`.
//!
//! A server has the route for chains with `--enable-scale-out`, and must report what it found in its cache
//! (`--enable-prompt-tokens-details`).

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use refrain_protocol::{ApiError, TokenId};
use serde::Deserialize;
use serde_json::{Value, json};

use super::VerifyDialect;
use super::completions::{fan_out_body, fan_out_verdict};
use crate::drive::verify::{DraftVerdict, SingleToken, VerifyMethod, VerifyRequest, certain_best};
use crate::engine::dialect::completions::Usage;
use crate::engine::dialect::{Vllm, priority_field};
use crate::engine::{parse, unexpected_response};

impl VerifyDialect for Vllm {
    fn verify_call(&self, request: &VerifyRequest) -> Option<(&'static str, Value)> {
        let own = [
            ("request_id", json!(request.text.name())),
            ("cache_salt", json!(request.text.namespace.to_string())),
        ];
        match request.method {
            VerifyMethod::FanOut => {
                let mut body = fan_out_body(&self.model, request);
                body.insert("return_token_ids".to_owned(), json!(true));
                body.extend(own.map(|(key, value)| (key.to_owned(), value)));
                body.extend(priority_field(&request.text));
                Some(("/v1/completions", body.into()))
            }
            VerifyMethod::Chain => {
                let mut body = json!({
                    "model": self.model,
                    "token_ids": request.chained_prompt(),
                    "sampling_params": {
                        "temperature": 0,
                        "max_tokens": 1,
                        // The two best, to tell a tie from a certain best.
                        "prompt_logprobs": 2,
                        // Otherwise vLLM computes the whole text again.
                        "skip_reading_prefix_cache": false,
                        // With the detokenizer, some versions fail for good once a cached prompt is scored.
                        "detokenize": false,
                    },
                });
                for (key, value) in own {
                    body[key] = value;
                }
                if let (Some(body), Some((key, rank))) =
                    (body.as_object_mut(), priority_field(&request.text))
                {
                    body.insert(key, rank);
                }
                Some(("/inference/v1/generate", body))
            }
        }
    }

    fn verdict(&self, request: &VerifyRequest, response: &[u8]) -> Result<DraftVerdict, ApiError> {
        match request.method {
            VerifyMethod::FanOut => fan_out_verdict(request, response),
            VerifyMethod::Chain => chain_verdict(request, parse(response)?),
        }
    }
}

/// The response of `/inference/v1/generate`.
#[derive(Debug, Deserialize)]
struct ScoredPrompt {
    choices: Vec<ScoredChoice>,
    /// The best tokens at each position of the prompt. Some versions leave out the first positions.
    #[serde(default)]
    prompt_logprobs: Vec<Option<HashMap<TokenId, Score>>>,
    #[serde(default)]
    usage: Option<Usage>,
}

#[derive(Debug, Deserialize)]
struct ScoredChoice {
    #[serde(default)]
    token_ids: Vec<TokenId>,
    #[serde(default)]
    finish_reason: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Score {
    logprob: f32,
}

/// Reads the greedy tokens at the positions of the draft.
///
/// The score of a position comes from the forward pass over the token before it. Tokens that were found in the cache
/// have no such pass, and their rows hold leftovers. So a row counts only if the token before it was computed.
fn chain_verdict(
    request: &VerifyRequest,
    response: ScoredPrompt,
) -> Result<DraftVerdict, ApiError> {
    let text_len = request.text.tokens.len();
    let len = text_len + request.draft.tokens.len();
    let rows = response.prompt_logprobs;
    let missing = len
        .checked_sub(rows.len())
        .ok_or_else(|| unexpected_response("more scores than positions of the prompt"))?;
    let cached = response.usage.as_ref().and_then(Usage::cached_tokens);
    let computed_from = cached.map(|cached| cached as usize + 1);
    let best = rows.iter().enumerate().map(|(at, row)| {
        let is_computed = computed_from.is_some_and(|from| at + missing >= from);
        let row = row.as_ref().filter(|_| is_computed)?;
        certain_best(row.iter().map(|(token, score)| (*token, score.logprob)))
    });
    let last = response.choices.first();
    let last = last.map(|choice| SingleToken {
        token: choice.token_ids.first().copied(),
        is_end: choice.finish_reason.as_deref() == Some("stop"),
    });
    Ok(DraftVerdict::from_chain(
        request,
        best,
        last.unwrap_or_default(),
    ))
}
