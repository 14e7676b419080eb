//! Fan-outs over OpenAI's `/v1/completions`, as vLLM and TensorRT-LLM serve it.

use refrain_protocol::ApiError;
use serde_json::{Map, Value, json};

use crate::drive::verify::{DraftVerdict, SingleToken, VerifyRequest};
use crate::engine::dialect::completions::{CompletionEvent, extended_body};

/// The body of a fan-out: the fields of [`extended_body`], with several prompts.
pub(super) fn fan_out_body(model: &str, request: &VerifyRequest) -> Map<String, Value> {
    let mut body = extended_body(model, &request.text);
    body.remove("stream_options");
    // One seed for all prompts would draw the same noise at each node.
    body.remove("seed");
    let mut set = |key: &str, value: Value| body.insert(key.to_owned(), value);
    set("stream", json!(false));
    set("max_tokens", json!(1));
    set("prompt", json!(request.prompts()));
    body
}

/// Reads the response to a fan-out.
pub(super) fn fan_out_verdict(
    request: &VerifyRequest,
    response: &[u8],
) -> Result<DraftVerdict, ApiError> {
    let choices = CompletionEvent::parse(response)?.choices()?;
    let responses = choices.into_iter().map(|choice| {
        let stop_id = choice.stop_id();
        let token = choice.token_ids.as_deref().and_then(<[_]>::first).copied();
        let response = SingleToken {
            token: token.or(stop_id),
            is_end: choice.finish_reason.as_deref() == Some("stop"),
        };
        (choice.index, response)
    });
    DraftVerdict::from_fan_out(request, responses)
}
