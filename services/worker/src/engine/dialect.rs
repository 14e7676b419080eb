//! How one kind of engine of another maker is spoken to: bodies out of requests, pieces out of events.

use std::collections::VecDeque;

#[cfg(test)]
use refrain_protocol::engine::{Draft, Sampling};
use refrain_protocol::{ApiError, ErrorKind, TokenId};
#[cfg(test)]
use refrain_protocol::{NamespaceId, RequestId};
use serde_json::Value;

use super::client::{no_engine, refusal};
use super::load::LoadSeries;
#[cfg(test)]
use super::sse::SseParser;
use super::streaming::{GenerateRequest, Generated, GeneratedEnd, StreamingCapabilities};
#[cfg(test)]
use super::verify::VerifyWay;
use super::verify::{Verified, VerifyRequest};

/// How one kind of engine is spoken to. Pure: bodies out of requests, pieces out of events.
pub(super) trait Dialect: Send + Sync {
    /// What it can do. `model`, `tokenizer` and `max_context` are filled in by who connects.
    fn capabilities(&self) -> StreamingCapabilities;

    /// Where generation is asked for.
    fn path(&self) -> &'static str;

    /// What is asked.
    ///
    /// # Errors
    /// The request cannot be put in its words.
    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError>;

    /// What is asked on behalf of a namespace that an engine with the drafts inside is to be told of. It must say as many
    /// tokens as it is asked for.
    ///
    /// # Errors
    /// As for [`Dialect::body`].
    fn introduction(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        self.body(request)
    }

    /// Reads one answer.
    fn decoder(&self, request: &GenerateRequest) -> Box<dyn Decoder>;

    /// How generation is aborted, where closing the connection is not enough.
    fn abort(&self, _request: &GenerateRequest) -> Option<(&'static str, Value)> {
        None
    }

    /// Answers with success when the engine is ready; `None`: its list of models says it.
    fn health(&self) -> Option<&'static str> {
        Some("/health")
    }

    /// Its figures of load.
    fn load(&self) -> Option<LoadSeries> {
        None
    }

    /// Asks for the text of tokens: path, body, and the field of the answer that holds it.
    fn detokenize(&self, _tokens: &[TokenId]) -> Option<(&'static str, Value, &'static str)> {
        None
    }

    /// How a draft is judged: path and body. `None`: not in this way.
    fn verify(&self, _request: &VerifyRequest) -> Option<(&'static str, Value)> {
        None
    }

    /// Reads the answer to [`Dialect::verify`].
    ///
    /// # Errors
    /// It is nothing that such an engine says.
    fn verified(&self, _request: &VerifyRequest, _answer: &[u8]) -> Result<Verified, ApiError> {
        Err(no_engine("a verdict on a draft that was not sent"))
    }

    /// Longest text that it takes, if it says so elsewhere than in its list of models: path and JSON pointer.
    fn context(&self) -> Option<(&'static str, &'static str)> {
        None
    }
}

/// Reads the events of one answer.
pub(super) trait Decoder: Send {
    /// Takes an event's data (never `[DONE]`).
    ///
    /// # Errors
    /// It is nothing that such an engine says.
    fn decode(&mut self, data: &[u8], out: &mut VecDeque<Generated>) -> Result<(), ApiError>;

    /// Takes `[DONE]`.
    fn done(&mut self, _out: &mut VecDeque<Generated>) {}
}

/// An error in the middle of a stream.
pub(super) fn error_event(error: &Value) -> ApiError {
    let status = error["code"].as_u64();
    let status = status.and_then(|status| u16::try_from(status).ok());
    refusal(status.unwrap_or(500), error.to_string().as_bytes())
}

/// `finish_reason`, in the words that all of them share.
pub(super) fn end_of(reason: &str) -> Result<GeneratedEnd, ApiError> {
    match reason {
        "stop" => Ok(GeneratedEnd::Stop),
        "length" => Ok(GeneratedEnd::Length),
        other => Err(
            ApiError::new(ErrorKind::Upstream, "the engine gave the request up")
                .with_detail(format!("finish reason {other}")),
        ),
    }
}

/// What a decoder makes of a recorded answer, up to its first error.
#[cfg(test)]
pub(super) fn read_recorded(
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

/// A verify call for tests: a draft behind 1 2.
#[cfg(test)]
pub(super) fn verify_request(
    way: VerifyWay,
    tokens: &[TokenId],
    parents: &[Option<u32>],
    sampling: Sampling,
) -> VerifyRequest {
    VerifyRequest {
        text: request(&[1, 2], sampling),
        draft: Draft {
            tokens: tokens.to_vec(),
            parents: parents.to_vec(),
        },
        way,
    }
}

/// A request for tests.
#[cfg(test)]
pub(super) fn request(tokens: &[TokenId], sampling: Sampling) -> GenerateRequest {
    GenerateRequest {
        request: RequestId(0xab),
        call: 0xef,
        namespace: NamespaceId(0xcd),
        tokens: tokens.to_vec(),
        prompt_len: tokens.len() as u32,
        tokens_max: 7,
        sampling,
        priority: None,
        keeping: None,
    }
}
