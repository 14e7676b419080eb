//! The wire formats of third-party engines: request bodies out of requests, and pieces out of events.
//!
//! A dialect is pure: it does no I/O and has no clock.

mod completions;
mod llama_cpp;
mod sglang;
mod tensorrt_llm;
#[cfg(test)]
pub(super) mod tests;
mod text_only;
mod vllm;

use std::collections::VecDeque;

use refrain_protocol::engine::{TextForm, TokenLogprob};
use refrain_protocol::engine_order::EngineOrder;
use refrain_protocol::{ApiError, ErrorKind, TokenId};
use serde_json::Value;

use super::client::status_error;
use super::forms::structural_tag;
use super::generate::{GenerateRequest, Generated, GeneratedEnd};
use super::load::LoadSeries;
use super::order_calls::OrderCall;
use super::slots::PrimerCalls;
use super::streaming::StreamingCapabilities;
use super::words::unsupported;

pub(super) use llama_cpp::LlamaCpp;
pub(super) use sglang::{SgLang, version_number as sglang_version};
pub(super) use tensorrt_llm::TensorRtLlm;
pub(super) use text_only::TextOnly;
pub(super) use vllm::Vllm;

/// The wire format of one kind of engine.
pub(super) trait Dialect: Send + Sync {
    /// The capabilities of the engine. The connection fills in `model`, `tokenizer` and `max_context`.
    fn capabilities(&self) -> StreamingCapabilities;

    /// The route that generates.
    fn path(&self) -> &'static str;

    /// The field of the body for the token ids of the text; `None` if [`Dialect::body`] has the text itself.
    fn tokens_field(&self) -> Option<&'static str> {
        Some("prompt")
    }

    /// The body of a call to that route, without the token ids of the text.
    ///
    /// # Errors
    /// This wire format cannot express the request.
    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError>;

    /// The body of a request that introduces a namespace to an engine with the Refrain plugin inside. It must
    /// generate exactly as many tokens as it asks for.
    ///
    /// # Errors
    /// As for [`Dialect::body`].
    fn introduction(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        self.body(request)
    }

    /// A decoder for the response to one call.
    fn decoder(&self, request: &GenerateRequest) -> Box<dyn Decoder>;

    /// Path and body of an abort, for engines that go on after the connection has closed.
    fn abort(&self, _request: &GenerateRequest) -> Option<(&'static str, Value)> {
        None
    }

    /// A route that succeeds when the engine is ready; `None`: the list of models shows it.
    fn health(&self) -> Option<&'static str> {
        Some("/health")
    }

    /// The metrics of the engine's load.
    fn load(&self) -> Option<LoadSeries> {
        None
    }

    /// Path and body of a call that converts tokens to text, and the field of the response that holds the text.
    fn detokenize(&self, _tokens: &[TokenId]) -> Option<(&'static str, Value, &'static str)> {
        None
    }

    /// Path and JSON pointer of the context length, for engines that do not report it in their list of models.
    fn context(&self) -> Option<(&'static str, &'static str)> {
        None
    }

    /// The calls that fill the table from which the engine drafts, if it has one that can be filled.
    fn primer(&self) -> Option<PrimerCalls> {
        None
    }

    /// The calls that carry out an order of a trainer, one after the other. [`EngineOrder::PassOn`] is none of them.
    ///
    /// # Errors
    /// The engine has no words for it.
    fn order_calls(&self, order: &EngineOrder) -> Result<Vec<OrderCall>, ApiError>;

    /// The call that brings back the weights of this directory, for engines that lose theirs where others cannot be
    /// loaded.
    fn restore_call(&self, _directory: &str) -> Option<OrderCall> {
        None
    }

    /// Whether the engine's name for its model is the directory of the weights that it was told to load last.
    fn is_renamed_by_weights(&self) -> bool {
        false
    }
}

/// Decodes the events of one response.
pub(super) trait Decoder: Send {
    /// Decodes the data of one event (never `[DONE]`).
    ///
    /// # Errors
    /// The data does not fit the wire format, or it is an error of the engine.
    fn decode(&mut self, data: &[u8], out: &mut VecDeque<Generated>) -> Result<(), ApiError>;

    /// Handles `[DONE]`.
    fn done(&mut self, _out: &mut VecDeque<Generated>) {}
}

/// Converts an error in the middle of a stream.
fn error_event(error: &Value) -> ApiError {
    let status = error["code"].as_u64();
    let status = status.and_then(|status| u16::try_from(status).ok());
    status_error(status.unwrap_or(500), error.to_string().as_bytes())
}

/// Converts a `finish_reason`; all engines share these words.
fn end_of(reason: &str) -> Result<GeneratedEnd, ApiError> {
    match reason {
        "stop" => Ok(GeneratedEnd::Stop),
        "length" => Ok(GeneratedEnd::Length),
        "abort" | "cancelled" => Ok(GeneratedEnd::Aborted),
        other => Err(ApiError::new(
            ErrorKind::Upstream,
            "the engine ended the output in an unknown way",
        )
        .with_detail(format!("finish reason {other}"))),
    }
}

/// A form as a structural tag.
///
/// # Errors
/// There is no such tag. The worker's check of the engine's abilities refuses such a request before.
fn tag_of(form: &TextForm) -> Result<Value, ApiError> {
    structural_tag(form).ok_or_else(|| no_words("structural tags"))
}

/// The error of a form for which an engine has no words.
fn no_words(language: &str) -> ApiError {
    unsupported(format!(
        "the form of the output cannot be said in {language}"
    ))
}

/// Passes on the tokens of an event and the engine's end. `stop_id` ended the output; some engines omit it from the
/// tokens.
fn pass_on(
    out: &mut VecDeque<Generated>,
    mut tokens: Vec<TokenId>,
    logprobs: Option<Vec<TokenLogprob>>,
    end: Option<GeneratedEnd>,
    stop_id: Option<TokenId>,
) {
    if end == Some(GeneratedEnd::Stop)
        && let Some(id) = stop_id
        && tokens.last() != Some(&id)
    {
        tokens.push(id);
    }
    if !tokens.is_empty() {
        out.push_back(Generated::Tokens { tokens, logprobs });
    }
    out.extend(end.map(Generated::End));
}
