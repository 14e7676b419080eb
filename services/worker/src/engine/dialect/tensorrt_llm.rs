//! TensorRT-LLM's `trtllm-serve`, over `/v1/completions` without its detokenizer, so that it answers with token ids.
//!
//! This follows its published schemas, which forbid unknown fields. It was never tested against a real server.

use refrain_protocol::ApiError;
use refrain_protocol::engine::TextForm;
use refrain_protocol::engine_order::EngineOrder;
use serde_json::{Map, Value, json};

use super::completions::{CompletionsDecoder, extended_body};
use super::{Decoder, Dialect, no_words, tag_of};
use crate::engine::forms::{FormAbilities, checked_schema, choice_as_ebnf};
use crate::engine::generate::GenerateRequest;
use crate::engine::load::LoadSeries;
use crate::engine::order_calls::{OrderCall, no_order};
use crate::engine::streaming::StreamingCapabilities;

/// A TensorRT-LLM server.
pub(crate) struct TensorRtLlm {
    pub(crate) model: String,
}

impl Dialect for TensorRtLlm {
    fn capabilities(&self) -> StreamingCapabilities {
        // It names alternatives by their text, and two tokens may have the same text.
        StreamingCapabilities {
            forms: FormAbilities::ALL_BUT_LARK,
            ..StreamingCapabilities::of_dialect(None)
        }
    }

    fn path(&self) -> &'static str {
        "/v1/completions"
    }

    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        let mut body = extended_body(&self.model, request);
        let sampling = &request.sampling;
        if sampling.presence_penalty != 0.0 || sampling.frequency_penalty != 0.0 {
            // By default these penalties count the prompt as well.
            let prompt = json!(request.prompt_len);
            body.insert("prompt_ignore_length".to_owned(), prompt);
        }
        if let Some(form) = &sampling.form {
            body.insert("response_format".to_owned(), response_format(&form.text)?);
        }
        Ok(token_ids_only(body))
    }

    fn order_calls(&self, order: &EngineOrder) -> Result<Vec<OrderCall>, ApiError> {
        Err(no_order("trtllm-serve", order))
    }

    fn decoder(&self, request: &GenerateRequest) -> Box<dyn Decoder> {
        Box::new(CompletionsDecoder::new(&request.sampling))
    }

    fn load(&self) -> Option<LoadSeries> {
        Some(LoadSeries {
            path: "/prometheus/metrics",
            running: "trtllm_num_requests_running",
            waiting: "trtllm_num_requests_waiting",
            kv_usage: Some("trtllm_kv_cache_utilization"),
            kv_capacity: None,
            prefill: None,
        })
    }
}

/// Requests token ids instead of text.
fn token_ids_only(mut body: Map<String, Value>) -> Value {
    body.insert("detokenize".to_owned(), json!(false));
    body.insert("add_special_tokens".to_owned(), json!(false));
    body.into()
}

/// A form. A server without `guided_decoding_backend` in its configuration cannot hold an output to one.
fn response_format(form: &TextForm) -> Result<Value, ApiError> {
    Ok(match form {
        TextForm::JsonObject => json!({"type": "json_object"}),
        TextForm::JsonSchema(text) => json!({"type": "json", "schema": checked_schema(text)?}),
        TextForm::Regex(pattern) => json!({"type": "regex", "regex": pattern}),
        TextForm::Choice(texts) => json!({"type": "ebnf", "ebnf": choice_as_ebnf(texts)}),
        TextForm::Ebnf(grammar) => json!({"type": "ebnf", "ebnf": grammar}),
        TextForm::Lark(_) => return Err(no_words("EBNF")),
        TextForm::Calls(_) | TextForm::AnyOf(_) => tag_of(form)?,
    })
}
