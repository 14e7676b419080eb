//! The wire formats of third-party engines: request bodies out of requests, and pieces out of events.
//!
//! A dialect is pure: it does no I/O and has no clock.

pub(crate) mod completions;
mod llama_cpp;
mod sglang;
mod tensorrt_llm;
#[cfg(test)]
mod tests;
mod text_only;
mod vllm;

use std::collections::VecDeque;

#[cfg(test)]
use refrain_protocol::engine::Sampling;
use refrain_protocol::{ApiError, ErrorKind, TokenId};
#[cfg(test)]
use refrain_protocol::{NamespaceId, RequestId};
use serde_json::Value;

use super::client::status_error;
use super::generate::{GenerateRequest, Generated, GeneratedEnd};
use super::load::LoadSeries;
#[cfg(test)]
use super::sse::SseParser;
use super::streaming::StreamingCapabilities;

pub(crate) use llama_cpp::LlamaCpp;
pub(crate) use sglang::{SgLang, SgLangEvent};
pub(crate) use tensorrt_llm::{TensorRtLlm, token_ids_only};
pub(crate) use text_only::TextOnly;
pub(crate) use vllm::{Vllm, priority_field};

/// The wire format of one kind of engine.
pub(crate) trait Dialect: Send + Sync {
    /// The capabilities of the engine. The connection fills in `model`, `tokenizer` and `max_context`.
    fn capabilities(&self) -> StreamingCapabilities;

    /// The route that generates.
    fn path(&self) -> &'static str;

    /// The body of a call to that route.
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
}

/// Decodes the events of one response.
pub(crate) trait Decoder: Send {
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
        other => Err(
            ApiError::new(ErrorKind::Upstream, "the engine aborted the request")
                .with_detail(format!("finish reason {other}")),
        ),
    }
}

/// The pieces of a recorded response, up to its first error.
#[cfg(test)]
fn decode_recorded(
    mut decoder: Box<dyn Decoder>,
    recorded: &str,
) -> Result<Vec<Generated>, ApiError> {
    let mut parser = SseParser::default();
    parser.push(recorded.as_bytes());
    let mut pieces = VecDeque::new();
    while let Some(data) = parser.next().expect("events of ordinary length") {
        if data == b"[DONE]" {
            decoder.done(&mut pieces);
        } else {
            decoder.decode(data, &mut pieces)?;
        }
    }
    Ok(pieces.into())
}

/// A request for tests.
#[cfg(test)]
pub(crate) fn test_request(tokens: &[TokenId], sampling: Sampling) -> GenerateRequest {
    GenerateRequest {
        request: RequestId(0xab),
        call: 0xef,
        namespace: NamespaceId(0xcd),
        tokens: tokens.to_vec(),
        prompt_len: tokens.len() as u32,
        tokens_max: 7,
        sampling,
        priority: None,
        attached: None,
    }
}
