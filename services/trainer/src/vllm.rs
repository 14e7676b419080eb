//! vLLM's `/inference/v1/generate`: its body as a request.

use refrain_gateway::{ParsedRequest, RequestReader, SampleBody, SamplingFields};
use refrain_protocol::ApiError;
use refrain_protocol::openai::{ListedPrompt, Prompt};
use serde_json::{Map, Value};

use super::body::{TrainerBody, UNSUPPORTED};

/// Reads a body. Returns the request and the name that the trainer gave it.
///
/// # Errors
/// As [`ParsedRequest::samples`].
pub(super) fn read(
    body: &[u8],
    reader: &RequestReader<'_>,
    model: &str,
) -> Result<(ParsedRequest, Option<String>), ApiError> {
    let mut body = TrainerBody::read(body)?;
    let ListedPrompt { prompt, is_list } = body.take_prompt("token_ids")?;
    if is_list || !matches!(prompt, Prompt::Tokens(_)) {
        let message = "token_ids: must be a list of token ids, which is one prompt";
        return Err(ApiError::invalid("token_ids", message));
    }
    let name = body.take_names("request_id")?.pop();
    let asked_model = body.take::<String>("model", "a text")?;
    let stream = body.take::<bool>("stream", "true or false")?;
    let priority = body.fields.remove("priority");
    let sampling = body.take::<Map<String, Value>>("sampling_params", "an object")?;
    body.check_rest()?;
    let mut sampling = sampling.unwrap_or_default();
    let top_logprobs = match sampling.remove("logprobs") {
        None | Some(Value::Null) => None,
        Some(value) => Some(serde_json::from_value(value).map_err(|_| {
            let message = "sampling_params.logprobs: must be a whole number that is not negative";
            ApiError::invalid("sampling_params.logprobs", message)
        })?),
    };
    if let Some(priority) = priority {
        sampling.insert("priority".to_owned(), priority);
    }
    let mut sampling = SamplingFields::read("sampling_params", sampling, UNSUPPORTED)?;
    let parameters = sampling.parameters();
    parameters.stream = stream;
    parameters.model = asked_model.unwrap_or_else(|| model.to_owned());
    let body = SampleBody {
        prompt,
        sampling,
        top_logprobs,
    };
    let request = ParsedRequest::samples(body, reader)?;
    Ok((request, name))
}
