//! vLLM, over `/v1/completions` with token ids.
//!
//! A server must report what it found in its cache (`--enable-prompt-tokens-details`).

#[cfg(test)]
mod tests;

use refrain_protocol::chunk::Priority;
use refrain_protocol::engine::TextForm;
use refrain_protocol::engine_order::{EngineOrder, PauseMode};
use refrain_protocol::{ApiError, TokenId};
use serde_json::{Value, json};

use super::completions::{CompletionsDecoder, extended_body};
use super::{Decoder, Dialect, tag_of};
use crate::engine::forms::FormAbilities;
use crate::engine::generate::GenerateRequest;
use crate::engine::load::{CapacitySeries, LoadSeries, PrefillSeries};
use crate::engine::order_calls::{OrderCall, no_order};
use crate::engine::streaming::StreamingCapabilities;

/// The default of vLLM's `--max-logprobs`.
const TOP_LOGPROBS_MAX: u32 = 20;

/// A vLLM server.
pub(crate) struct Vllm {
    pub(crate) model: String,
}

impl Dialect for Vllm {
    fn capabilities(&self) -> StreamingCapabilities {
        // A vLLM with speculation of its own refuses min_p above 0 and logit_bias, and names them in its error.
        StreamingCapabilities {
            bad_words: true,
            forms: FormAbilities {
                lark: true,
                ..FormAbilities::ALL_BUT_LARK
            },
            ..StreamingCapabilities::of_dialect(Some(TOP_LOGPROBS_MAX))
        }
    }

    fn path(&self) -> &'static str {
        "/v1/completions"
    }

    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        let mut body = extended_body(&self.model, request);
        body.extend(priority_field(request));
        let mut set = |key: &str, value: Value| body.insert(key.to_owned(), value);
        set("return_token_ids", json!(true));
        // Only requests of the same namespace share blocks of the KV cache.
        set("cache_salt", json!(request.namespace.to_string()));
        set("request_id", json!(request.name()));
        if !request.sampling.bad_words.is_empty() {
            set("bad_words", json!(request.sampling.bad_words));
        }
        if let Some(form) = &request.sampling.form {
            set("structured_outputs", structured_outputs(&form.text)?);
        }
        if let Some(fields) = request.plugin_fields() {
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

    fn order_calls(&self, order: &EngineOrder) -> Result<Vec<OrderCall>, ApiError> {
        Ok(match order {
            // vLLM has no number for its weights, so the worker counts them.
            EngineOrder::Report | EngineOrder::SetVersion { .. } => Vec::new(),
            EngineOrder::Pause { mode, clears_cache } => {
                let mode = match mode {
                    PauseMode::Abort => "abort",
                    PauseMode::Wait => "wait",
                    PauseMode::Keep => "keep",
                };
                let path = format!("/pause?mode={mode}&clear_cache={clears_cache}");
                vec![OrderCall::new(path, json!({}))]
            }
            EngineOrder::Resume => vec![OrderCall::new("/resume", json!({}))],
            EngineOrder::FlushCache => vec![OrderCall::new("/reset_prefix_cache", json!({}))],
            EngineOrder::LoadWeights { directory, .. } => {
                // The servers of some trainers take a folder here. Plain vLLM reloads by a call to its workers.
                let mut call =
                    OrderCall::new("/update_weights", json!({ "weight_dir": directory }));
                call.otherwise = vec![reload(directory)];
                vec![call]
            }
            EngineOrder::PassOn(_) => return Err(no_order("vLLM", order)),
        })
    }

    /// It lets go of its weights before it looks for the others, and its next step would end its process. Without a
    /// directory it would look for those others again.
    fn restore_call(&self, directory: &str) -> Option<OrderCall> {
        Some(reload(directory))
    }

    fn load(&self) -> Option<LoadSeries> {
        Some(LoadSeries {
            path: "/metrics",
            running: "vllm:num_requests_running",
            waiting: "vllm:num_requests_waiting",
            kv_usage: Some("vllm:kv_cache_usage_perc"),
            kv_capacity: Some(CapacitySeries::Blocks {
                series: "vllm:cache_config_info",
                blocks: "num_gpu_blocks",
                block_tokens: "block_size",
            }),
            prefill: Some(PrefillSeries {
                seconds: "vllm:request_prefill_time_seconds_sum",
                tokens: "vllm:prompt_tokens_total",
                cached_tokens: Some("vllm:prefix_cache_hits_total"),
            }),
        })
    }

    fn detokenize(&self, tokens: &[TokenId]) -> Option<(&'static str, Value, &'static str)> {
        let body = json!({ "model": self.model, "tokens": tokens });
        Some(("/detokenize", body, "prompt"))
    }
}

/// The call by which plain vLLM reads the weights of a directory.
fn reload(directory: &str) -> OrderCall {
    let body = json!({
        "method": "reload_weights",
        "kwargs": { "weights_path": directory },
    });
    OrderCall::new("/collective_rpc", body)
}

/// A form. Schemas stay text, so that their properties keep their order.
fn structured_outputs(form: &TextForm) -> Result<Value, ApiError> {
    Ok(match form {
        TextForm::JsonObject => json!({"json_object": true}),
        TextForm::JsonSchema(schema) => json!({"json": schema}),
        TextForm::Regex(pattern) => json!({"regex": pattern}),
        TextForm::Choice(texts) => json!({"choice": texts}),
        TextForm::Ebnf(grammar) | TextForm::Lark(grammar) => json!({"grammar": grammar}),
        TextForm::Calls(_) | TextForm::AnyOf(_) => {
            json!({"structural_tag": tag_of(form)?.to_string()})
        }
    })
}

/// The field for the priority: requests with a lower number go first. Without `--scheduling-policy priority`, vLLM
/// 0.32 accepts any number and ignores it, although its documentation says that it refuses all but 0.
fn priority_field(request: &GenerateRequest) -> Option<(String, Value)> {
    let rank = match request.priority? {
        Priority::High => -1,
        Priority::Normal => 0,
        Priority::Low => 1,
    };
    Some(("priority".to_owned(), json!(rank)))
}
