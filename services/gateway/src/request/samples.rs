//! Prompts with sampling parameters, as the native interfaces of engines have them: trainers send their rollouts so.

use refrain_protocol::ApiError;
use refrain_protocol::openai::{Parameters, Prompt};
use refrain_protocol::scheduling::RequestClass;
use serde_json::{Map, Value};

use super::body::{CompletionFields, NoFields, ReadFields, RequestBody};
use super::faults;
use super::other_fields::{OtherFields, check_supported};
use super::output_form::FormFields;
use super::refusal::invalid;
use super::{ParsedRequest, RequestReader};

/// Largest number of likely tokens that an answer shows in each place.
const TOP_LOGPROBS_MAX: u32 = 20;

/// The sampling parameters of a body.
pub struct SamplingFields {
    parameters: Parameters,
    form: FormFields,
    others: OtherFields,
}

impl SamplingFields {
    /// Reads an object whose fields have the names of OpenAI's API. `place` is its name.
    ///
    /// # Errors
    /// `InvalidRequest` for a field that is not what it should be, or that would change the output and cannot be
    /// carried out: those that other interfaces refuse, and those in `unsupported`.
    pub fn read(
        place: &str,
        mut fields: Map<String, Value>,
        unsupported: &[&str],
    ) -> Result<Self, ApiError> {
        check_supported(&format!("{place}."), &fields, unsupported)?;
        // The rest of them change nothing.
        fields.retain(|name, _| !unsupported.contains(&name.as_str()));
        let read = serde_path_to_error::deserialize(Value::Object(fields));
        let read: ReadFields<NoFields> = read.map_err(|error| {
            let path = error.path().to_string();
            faults::fault(&format!("{place}.{path}"), error.inner())
        })?;
        Ok(SamplingFields {
            parameters: read.parameters,
            form: read.form,
            others: read.others.inside(place),
        })
    }

    /// The parameters, for what stands beside them in the body.
    pub fn parameters(&mut self) -> &mut Parameters {
        &mut self.parameters
    }
}

/// Prompts and how to sample their outputs.
pub struct SampleBody {
    /// The prompts.
    pub prompt: Prompt,
    /// How to sample.
    pub sampling: SamplingFields,
    /// Most likely tokens in each place of the output that the answer shows. `None`: it has no log-probabilities.
    pub top_logprobs: Option<u32>,
}

impl ParsedRequest {
    /// Makes rollouts of a body. Without an output limit they may fill the context.
    ///
    /// # Errors
    /// As [`ParsedRequest::completion`].
    pub fn samples(body: SampleBody, reader: &RequestReader<'_>) -> Result<Self, ApiError> {
        if body.top_logprobs.is_some_and(|top| top > TOP_LOGPROBS_MAX) {
            let fault = format!("at most {TOP_LOGPROBS_MAX} likely tokens can be shown");
            return invalid("logprobs", fault);
        }
        let SamplingFields {
            mut parameters,
            form,
            others,
        } = body.sampling;
        parameters.class = Some(RequestClass::Rollout.into());
        let read = RequestBody {
            parameters,
            required: body.prompt,
            own: CompletionFields::default(),
            form,
            others,
        };
        let mut request = ParsedRequest::of_prompts(read, body.top_logprobs, reader, None)?;
        // The answer shows each token, and the version that sampled it.
        request.output.has_token_ids = true;
        Ok(request)
    }
}
