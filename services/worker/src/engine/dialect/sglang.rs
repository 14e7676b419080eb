//! SGLang, over its own `/generate`: token ids in both directions, a KV cache per namespace, aborts by request id.
//!
//! This follows its published schemas.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use refrain_protocol::engine::{TextForm, TokenLogprob};
use refrain_protocol::engine_order::{EngineOrder, PauseMode};
use refrain_protocol::{ApiError, TokenId};
use serde::Deserialize;
use serde_json::{Value, json};

use super::completions::{logit_bias, penalties};
use super::{Decoder, Dialect, end_of, error_event, no_words, pass_on, tag_of};
use crate::engine::client::{parse, unexpected_response};
use crate::engine::forms::{FormAbilities, any_object, choice_as_ebnf};
use crate::engine::generate::{GenerateRequest, Generated, GeneratedEnd};
use crate::engine::load::{CapacitySeries, LoadSeries};
use crate::engine::order_calls::{OrderCall, no_order};
use crate::engine::streaming::{LOGPROB_MIN, StreamingCapabilities, TOP_LOGPROBS_MAX};

/// An SGLang server.
pub(crate) struct SgLang;

impl Dialect for SgLang {
    fn capabilities(&self) -> StreamingCapabilities {
        StreamingCapabilities {
            // It counts the output only, and this penalty counts the prompt as well.
            repetition_penalty: false,
            forms: FormAbilities::ALL_BUT_LARK,
            ..StreamingCapabilities::of_dialect(Some(TOP_LOGPROBS_MAX))
        }
    }

    fn path(&self) -> &'static str {
        "/generate"
    }

    fn tokens_field(&self) -> Option<&'static str> {
        Some("input_ids")
    }

    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        let sampling = &request.sampling;
        let mut parameters = json!({
            "max_new_tokens": request.tokens_max,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": if sampling.top_k > 0 { i64::from(sampling.top_k) } else { -1 },
            "min_p": sampling.min_p,
            "stop_token_ids": sampling.stop_token_ids,
            // SGLang ignores the seed unless inference is deterministic. It is a signed 32-bit number.
            "sampling_seed": request.engine_seed() >> 33,
            "no_stop_trim": true,
            "skip_special_tokens": false,
        });
        for (name, value) in penalties(sampling) {
            parameters[name] = json!(value);
        }
        if request.min_tokens_left() > 0 {
            parameters["min_new_tokens"] = json!(request.min_tokens_left());
        }
        if sampling.ignore_eos {
            parameters["ignore_eos"] = json!(true);
        }
        if !sampling.logit_bias.is_empty() {
            parameters["logit_bias"] = logit_bias(sampling);
        }
        if let Some(form) = &sampling.form {
            let (name, value) = constraint(&form.text)?;
            parameters[name] = json!(value);
        }
        if let Some(fields) = request.plugin_fields() {
            parameters["custom_params"] = fields;
        }
        let mut body = json!({
            "rid": request.name(),
            "sampling_params": parameters,
            "stream": true,
            "extra_key": request.namespace.to_string(),
        });
        if let Some(top) = sampling.top_logprobs {
            body["return_logprob"] = json!(true);
            body["top_logprobs_num"] = json!(top);
        }
        Ok(body)
    }

    fn introduction(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        let mut body = self.body(request)?;
        body["sampling_params"]["ignore_eos"] = json!(true);
        Ok(body)
    }

    fn decoder(&self, request: &GenerateRequest) -> Box<dyn Decoder> {
        Box::new(SgLangDecoder {
            top: request.sampling.top_logprobs,
            version: None,
            seen: 0,
            has_told_cached: false,
        })
    }

    /// Its `/health` generates a token, takes a second for that, and fails in a pause.
    fn health(&self) -> Option<&'static str> {
        None
    }

    fn order_calls(&self, order: &EngineOrder) -> Result<Vec<OrderCall>, ApiError> {
        let pause = |mode| OrderCall::new("/pause_generation", json!({ "mode": mode }));
        // Its scheduler takes a moment to notice that nothing runs any more.
        let flush = || OrderCall::new("/flush_cache?timeout=5", json!({}));
        Ok(match order {
            EngineOrder::Report => Vec::new(),
            EngineOrder::Pause { mode, clears_cache } => match (mode, clears_cache) {
                (PauseMode::Abort, false) => vec![pause("abort")],
                (PauseMode::Abort, true) => vec![pause("abort"), flush()],
                // Whoever waits has seen all requests end.
                (PauseMode::Keep | PauseMode::Wait, false) => vec![pause("in_place")],
                // It gives up the KV caches of its requests, and computes them again later. Unlike in place, it also
                // comes to the end of its last step, before which no cache is emptied.
                (PauseMode::Keep | PauseMode::Wait, true) => {
                    let mut empty = OrderCall::new("/flush_cache", json!({}));
                    // Up to some version between 0.5.16 and 0.5.23 it empties no cache while requests wait. They are
                    // given up here, and each is sent again after the pause.
                    let give_up = OrderCall::new("/abort_request", json!({ "abort_all": true }));
                    empty.otherwise = vec![give_up, flush()];
                    vec![pause("retract"), empty]
                }
            },
            EngineOrder::Resume => vec![OrderCall::new("/continue_generation", json!({}))],
            EngineOrder::FlushCache => vec![flush()],
            EngineOrder::LoadWeights { directory, version } => {
                let mut body = json!({
                    "model_path": directory,
                    "flush_cache": true,
                    "abort_all_requests": false,
                });
                if let Some(version) = version {
                    body["weight_version"] = json!(version.to_string());
                }
                vec![OrderCall::new("/update_weights_from_disk", body)]
            }
            EngineOrder::SetVersion { version } => {
                let body =
                    json!({ "new_version": version.to_string(), "abort_all_requests": false });
                vec![OrderCall::new("/update_weight_version", body)]
            }
            EngineOrder::PassOn(_) => return Err(no_order("SGLang", order)),
        })
    }

    fn is_renamed_by_weights(&self) -> bool {
        true
    }

    fn abort(&self, request: &GenerateRequest) -> Option<(&'static str, Value)> {
        Some(("/abort_request", json!({ "rid": request.name() })))
    }

    fn load(&self) -> Option<LoadSeries> {
        Some(LoadSeries {
            path: "/metrics",
            running: "sglang:num_running_reqs",
            waiting: "sglang:num_queue_reqs",
            kv_usage: Some("sglang:token_usage"),
            kv_capacity: Some(CapacitySeries::Tokens("sglang:max_total_num_tokens")),
            prefill: None,
        })
    }
}

/// A form, as one of the sampling parameters. They are all text.
fn constraint(form: &TextForm) -> Result<(&'static str, String), ApiError> {
    Ok(match form {
        TextForm::JsonObject => ("json_schema", any_object().to_string()),
        TextForm::JsonSchema(schema) => ("json_schema", schema.clone()),
        TextForm::Regex(pattern) => ("regex", pattern.clone()),
        TextForm::Choice(texts) => ("ebnf", choice_as_ebnf(texts)),
        TextForm::Ebnf(grammar) => ("ebnf", grammar.clone()),
        TextForm::Lark(_) => return Err(no_words("EBNF")),
        TextForm::Calls(_) | TextForm::AnyOf(_) => ("structural_tag", tag_of(form)?.to_string()),
    })
}

/// An event of `/generate`.
#[derive(Debug, Deserialize)]
struct SgLangEvent {
    #[serde(default)]
    output_ids: Vec<TokenId>,
    meta_info: Option<SgLangMeta>,
    /// Replaces all other fields.
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct SgLangMeta {
    #[serde(default)]
    finish_reason: Option<FinishReason>,
    completion_tokens: usize,
    #[serde(default)]
    cached_tokens: Option<u32>,
    #[serde(default)]
    weight_version: Option<Value>,
    #[serde(default)]
    output_token_logprobs: Option<Vec<ScoredToken>>,
    /// The best tokens at each output position.
    #[serde(default)]
    output_top_logprobs: Option<Vec<Option<Vec<ScoredToken>>>>,
}

/// (logprob, id, text).
type ScoredToken = (Option<f32>, TokenId, Value);

#[derive(Debug, Deserialize)]
struct FinishReason {
    #[serde(rename = "type")]
    kind: String,
    /// The stop id or stop string that matched.
    #[serde(default)]
    matched: Value,
}

/// The number of a version, which SGLang keeps as text. The weights that it started with have the name `default`, and
/// other names say nothing.
pub(crate) fn version_number(version: &Value) -> Option<u64> {
    match version {
        Value::String(name) if name == "default" => Some(0),
        Value::String(name) => name.parse().ok(),
        number => number.as_u64(),
    }
}

impl FinishReason {
    /// The stop id that ended the output.
    fn stop_id(&self) -> Option<TokenId> {
        TokenId::try_from(self.matched.as_u64()?).ok()
    }
}

struct SgLangDecoder {
    top: Option<u32>,
    /// The version of the weights that it told last.
    version: Option<u64>,
    /// Number of output tokens so far.
    seen: usize,
    has_told_cached: bool,
}

impl Decoder for SgLangDecoder {
    fn decode(&mut self, data: &[u8], out: &mut VecDeque<Generated>) -> Result<(), ApiError> {
        let event: SgLangEvent = parse(data)?;
        if let Some(error) = &event.error {
            return Err(error_event(error));
        }
        let meta = event
            .meta_info
            .ok_or_else(|| unexpected_response("no meta_info"))?;
        if let Some(tokens) = meta.cached_tokens
            && !std::mem::replace(&mut self.has_told_cached, true)
        {
            out.push_back(Generated::Cached { tokens });
        }
        let version = meta.weight_version.as_ref().and_then(version_number);
        if let Some(version) = version.filter(|_| version != self.version) {
            self.version = Some(version);
            out.push_back(Generated::Weights { version });
        }
        let finish = meta.finish_reason.as_ref();
        let end = finish.map(|reason| end_of(&reason.kind)).transpose()?;
        let stop_id = finish.and_then(FinishReason::stop_id);
        // Depending on how the server was started, an event holds the whole output or the new tokens only. The count
        // of tokens tells how many are new.
        let fresh = meta.completion_tokens.saturating_sub(self.seen);
        let tokens = newest(event.output_ids, fresh);
        if tokens.len() != fresh {
            // The event of an abort replaces those that were not sent yet, and has one token at most.
            if let Some(GeneratedEnd::Aborted) = end {
                out.push_back(Generated::End(GeneratedEnd::Aborted));
                return Ok(());
            }
            return Err(unexpected_response("fewer tokens than it counts"));
        }
        let logprobs = match self.top {
            Some(top) if fresh > 0 => Some(logprobs(&meta, fresh, top)?),
            _ => None,
        };
        self.seen += fresh;
        let stop_id = stop_id.filter(|_| fresh > 0 && self.top.is_none());
        pass_on(out, tokens, logprobs, end, stop_id);
        Ok(())
    }
}

/// The last `count` elements.
fn newest<T>(mut all: Vec<T>, count: usize) -> Vec<T> {
    all.drain(..all.len().saturating_sub(count));
    all
}

fn logprobs(meta: &SgLangMeta, fresh: usize, top: u32) -> Result<Vec<TokenLogprob>, ApiError> {
    let own = meta.output_token_logprobs.as_deref().unwrap_or_default();
    let best = meta.output_top_logprobs.as_deref().unwrap_or_default();
    if own.len() < fresh {
        return Err(unexpected_response("not one log-probability per token"));
    }
    let clip = |logprob: Option<f32>| logprob.unwrap_or(LOGPROB_MIN).max(LOGPROB_MIN);
    // The lists end with the newest token, whether they are whole or not.
    let at = |back: usize| TokenLogprob {
        logprob: clip(own[own.len() - back].0),
        top: best
            .len()
            .checked_sub(back)
            .and_then(|place| best[place].as_ref())
            .map(|scored| {
                let best = scored.iter().take(top as usize);
                best.map(|(logprob, id, _)| (*id, clip(*logprob))).collect()
            })
            .unwrap_or_default(),
    };
    Ok((1..=fresh).rev().map(at).collect())
}
