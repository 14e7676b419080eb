//! vLLM, over `/v1/completions` with token ids; drafts as chains over `/inference/v1/generate`, where it serves that
//! (`--enable-scale-out`) and says what it found in its cache (`--enable-prompt-tokens-details`).

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use refrain_protocol::chunk::Priority;
use refrain_protocol::{ApiError, TokenId};
use serde::Deserialize;
use serde_json::{Value, json};

use super::client::{no_engine, parse};
use super::completions::{CompletionsDecoder, Usage, extended_body, fan_out_answer, fan_out_body};
use super::dialect::{Decoder, Dialect};
use super::load::LoadSeries;
use super::streaming::{GenerateRequest, StreamingCapabilities};
use super::verify::{Said, Verified, VerifyRequest, VerifyWay, sure_best};

/// `max_logprobs` of a server that was told nothing.
const TOP_LOGPROBS_MAX: u32 = 20;

pub(super) struct Vllm {
    pub(super) model: String,
}

impl Dialect for Vllm {
    fn capabilities(&self) -> StreamingCapabilities {
        // With speculation of its own it refuses a min_p above 0 and logit_bias itself, by name.
        StreamingCapabilities::of_dialect(Some(TOP_LOGPROBS_MAX))
    }

    fn path(&self) -> &'static str {
        "/v1/completions"
    }

    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        let mut body = extended_body(&self.model, request);
        body.extend(priority(request));
        let mut set = |key: &str, value: Value| body.insert(key.to_owned(), value);
        set("return_token_ids", json!(true));
        // Blocks of its KV cache are found again within the namespace only.
        set("cache_salt", json!(request.namespace.to_string()));
        set("request_id", json!(request.name()));
        if let Some(keeping) = &request.keeping {
            // What refrain_client reads inside the engine.
            let mut fields = json!({
                "refrain_namespace": keeping.token,
                "refrain_document": keeping.document,
                "refrain_epoch": keeping.epoch,
                "refrain_written": request.tokens.len() as u64 - u64::from(request.prompt_len),
            });
            if let Some(group) = &keeping.group {
                fields["refrain_group"] = json!(group);
            }
            set("vllm_xargs", fields);
        }
        if let Some(top) = request.sampling.top_logprobs {
            set("logprobs", json!(top));
            set("return_tokens_as_token_ids", json!(true));
        }
        Ok(body.into())
    }

    fn introduction(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        let mut body = self.body(request)?;
        body["ignore_eos"] = json!(true);
        Ok(body)
    }

    fn decoder(&self, request: &GenerateRequest) -> Box<dyn Decoder> {
        Box::new(CompletionsDecoder::new(&request.sampling))
    }

    fn load(&self) -> Option<LoadSeries> {
        Some(LoadSeries {
            path: "/metrics",
            running: "vllm:num_requests_running",
            waiting: "vllm:num_requests_waiting",
            kv_usage: Some("vllm:kv_cache_usage_perc"),
        })
    }

    fn verify(&self, request: &VerifyRequest) -> Option<(&'static str, Value)> {
        let own = [
            ("request_id", json!(request.text.name())),
            ("cache_salt", json!(request.text.namespace.to_string())),
        ];
        match request.way {
            VerifyWay::FanOut => {
                let mut body = fan_out_body(&self.model, request);
                body.insert("return_token_ids".to_owned(), json!(true));
                body.extend(own.map(|(key, value)| (key.to_owned(), value)));
                body.extend(priority(&request.text));
                Some(("/v1/completions", body.into()))
            }
            VerifyWay::Chain => {
                let mut body = json!({
                    "model": self.model,
                    "token_ids": request.chained(),
                    "sampling_params": {
                        "temperature": 0,
                        "max_tokens": 1,
                        // The two best, to know a tie from a best one.
                        "prompt_logprobs": 2,
                        // Else it reads the whole text anew.
                        "skip_reading_prefix_cache": false,
                        // With it some versions fail for good once a cached prompt is scored.
                        "detokenize": false,
                    },
                });
                for (key, value) in own {
                    body[key] = value;
                }
                if let (Some(body), Some((key, rank))) =
                    (body.as_object_mut(), priority(&request.text))
                {
                    body.insert(key, rank);
                }
                Some(("/inference/v1/generate", body))
            }
        }
    }

    fn verified(&self, request: &VerifyRequest, answer: &[u8]) -> Result<Verified, ApiError> {
        match request.way {
            VerifyWay::FanOut => fan_out_answer(request, answer),
            VerifyWay::Chain => scored(request, parse(answer)?),
        }
    }

    fn detokenize(&self, tokens: &[TokenId]) -> Option<(&'static str, Value, &'static str)> {
        let body = json!({ "model": self.model, "tokens": tokens });
        Some(("/detokenize", body, "prompt"))
    }
}

/// Its own field: requests of a lower number go first. Without `--scheduling-policy priority` vLLM 0.32 takes any, and goes by
/// arrival; its documentation says that it refuses all but 0.
fn priority(request: &GenerateRequest) -> Option<(String, Value)> {
    let rank = match request.priority? {
        Priority::High => -1,
        Priority::Normal => 0,
        Priority::Low => 1,
    };
    Some(("priority".to_owned(), json!(rank)))
}

/// The answer of `/inference/v1/generate`.
#[derive(Debug, Deserialize)]
struct Scored {
    choices: Vec<ScoredChoice>,
    /// By place of the prompt, some of its first ones left out or not: what the model held of its token.
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

/// What greedy decoding would have said in place of the draft.
///
/// A place of the prompt is scored by the pass over the token before it. Those found in the cache are not passed over,
/// and what stands in their rows is left from something else: a row counts only if the token before it was computed.
fn scored(request: &VerifyRequest, answer: Scored) -> Result<Verified, ApiError> {
    let text_len = request.text.tokens.len();
    let len = text_len + request.draft.tokens.len();
    let rows = answer.prompt_logprobs;
    let missing = len
        .checked_sub(rows.len())
        .ok_or_else(|| no_engine("more scores than places of the prompt"))?;
    let cached = answer.usage.as_ref().and_then(Usage::cached_tokens);
    let computed_from = cached.map(|cached| cached as usize + 1);
    let best = rows.iter().enumerate().map(|(at, row)| {
        let is_computed = computed_from.is_some_and(|from| at + missing >= from);
        let row = row.as_ref().filter(|_| is_computed)?;
        sure_best(row.iter().map(|(token, score)| (*token, score.logprob)))
    });
    let last = answer.choices.first();
    let last = last.map(|choice| Said {
        token: choice.token_ids.first().copied(),
        is_end: choice.finish_reason.as_deref() == Some("stop"),
    });
    let last = last.unwrap_or_default();
    Ok(Verified::of_chain(request, best, last))
}
