//! SGLang's `/generate`: its body as a request, and what its answer has.

use refrain_gateway::{ParsedRequest, RequestReader, SampleBody, SamplingFields};
use refrain_protocol::ApiError;
use refrain_protocol::openai::ListedPrompt;
use serde_json::{Map, Value};

use super::body::{OneOrMore, TrainerBody, UNSUPPORTED};

/// The names of SGLang for parameters, and those of OpenAI's API or vLLM.
const RENAMED: [(&str, &str); 4] = [
    ("max_new_tokens", "max_tokens"),
    ("min_new_tokens", "min_tokens"),
    ("sampling_seed", "seed"),
    ("no_stop_trim", "include_stop_str_in_output"),
];

/// The shape of the answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct SglangShape {
    /// The names that the trainer gave the request, or its prompts.
    pub(super) names: Vec<String>,
    /// Whether the answer is a list.
    pub(super) is_list: bool,
    /// The first token of the prompt whose log-probability is told, where any is.
    pub(super) prompt_start: usize,
}

/// Reads a body.
///
/// # Errors
/// As [`ParsedRequest::samples`].
pub(super) fn read(
    body: &[u8],
    reader: &RequestReader<'_>,
    model: &str,
) -> Result<(ParsedRequest, SglangShape), ApiError> {
    let mut body = TrainerBody::read(body)?;
    let ListedPrompt { prompt, is_list } = body.take_prompt("input_ids, or text")?;
    let names = body.take_names("rid")?;
    let shape = "an object";
    let sampling = body.take::<OneOrMore<Map<String, Value>>>("sampling_params", shape)?;
    let sampling = sampling
        .map(|one| one.only("sampling_params"))
        .transpose()?;
    let returns = body.take::<OneOrMore<bool>>("return_logprob", "true or false")?;
    let returns = returns.map(|one| one.only("return_logprob")).transpose()?;
    let whole = "a whole number";
    let top = body.take::<OneOrMore<u32>>("top_logprobs_num", whole)?;
    let top = top.map(|one| one.only("top_logprobs_num")).transpose()?;
    let start = body.take::<OneOrMore<i64>>("logprob_start_len", whole)?;
    let start = start.map(|one| one.only("logprob_start_len")).transpose()?;
    let stream = body.take::<bool>("stream", "true or false")?;
    let priority = body.fields.remove("priority");
    body.check_rest()?;
    let mut sampling = sampling.unwrap_or_default();
    for (theirs, ours) in RENAMED {
        if let Some(value) = sampling.remove(theirs) {
            sampling.insert(ours.to_owned(), value);
        }
    }
    if let Some(priority) = priority {
        sampling.insert("priority".to_owned(), priority);
    }
    let mut sampling = SamplingFields::read("sampling_params", sampling, UNSUPPORTED)?;
    let returns = returns.unwrap_or(false);
    let top = returns.then(|| top.unwrap_or(0));
    let parameters = sampling.parameters();
    parameters.stream = stream;
    model.clone_into(&mut parameters.model);
    // -1 scores nothing of the prompt. Engines score whole prompts, and the answer has the part that is asked for.
    let start = start.filter(|_| returns);
    let prompt_start = start.and_then(|start| usize::try_from(start).ok());
    parameters.prompt_logprobs = prompt_start.map(|_| u64::from(top.unwrap_or(0)));
    let has_several = parameters.n.is_some_and(|n| n > 1);
    let body = SampleBody {
        prompt,
        sampling,
        top_logprobs: top,
    };
    let request = ParsedRequest::samples(body, reader)?;
    let shape = SglangShape {
        names,
        is_list: is_list || has_several,
        prompt_start: prompt_start.unwrap_or(0),
    };
    Ok((request, shape))
}
