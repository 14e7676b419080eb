//! The checks of single fields of a request.

use refrain_protocol::chunk::{Priority, Urgency};
use refrain_protocol::engine::Sampling;
use refrain_protocol::openai::{JsonObject, LogitBias, Parameters};
use refrain_protocol::scheduling::RequestClass;
use refrain_protocol::{ApiError, TokenId};
use refrain_service_kit::random;
use refrain_tokenization::JsonValue;

use super::body::{ChatFields, CompletionFields};
use super::messages::check_content;
use super::refusal::{invalid, unsupported};
use crate::config::GatewayTuning;
use crate::models::Model;

/// Longest `session` and `group`, bytes.
const NAME_BYTES_MAX: usize = 256;
/// Longest stop text, bytes.
const STOP_BYTES_MAX: usize = 1024;
/// Largest `n`, as with OpenAI.
const CHOICES_MAX: u64 = 128;
/// Largest `top_logprobs` of a chat, as with OpenAI.
const CHAT_TOP_LOGPROBS_MAX: u64 = 20;
/// Largest `logprobs` of a text completion, as with OpenAI.
const COMPLETION_LOGPROBS_MAX: u64 = 5;
/// Largest presence and frequency penalty, as with OpenAI.
const PENALTY_MAX: f64 = 2.0;
/// Largest repetition penalty. Useful ones are below 2.
const REPETITION_PENALTY_MAX: f32 = 100.0;
/// Most `stop_token_ids`.
const STOP_TOKEN_IDS_MAX: usize = 64;

/// Largest `tpot_ms`, since nobody waits longer than a minute for a token.
const TPOT_MS_MAX: u64 = 60_000;

/// Reads `priority` and `tpot_ms`.
pub(super) fn urgency(parameters: &Parameters) -> Result<Urgency, ApiError> {
    let tpot_ms = match parameters.tpot_ms {
        None => None,
        Some(wanted @ 1..=TPOT_MS_MAX) => Some(wanted as u32),
        Some(_) => return invalid("tpot_ms", format!("must be 1 to {TPOT_MS_MAX}")),
    };
    Ok(Urgency {
        priority: parameters
            .priority
            .map_or_else(Priority::default, Priority::from),
        tpot_ms,
    })
}

/// Checks that the body names a model.
pub(super) fn check_model(parameters: &Parameters) -> Result<(), ApiError> {
    match parameters.model.is_empty() {
        true => invalid("model", "is missing"),
        false => Ok(()),
    }
}

/// Checks `session` and `group`.
pub(super) fn check_names(parameters: &Parameters) -> Result<(), ApiError> {
    for (name, value) in [
        ("session", &parameters.session),
        ("group", &parameters.group),
    ] {
        if value
            .as_ref()
            .is_some_and(|text| text.is_empty() || text.len() > NAME_BYTES_MAX)
        {
            return invalid(name, format!("must have 1 to {NAME_BYTES_MAX} bytes"));
        }
    }
    Ok(())
}

/// Reads `truncate_prompt_tokens`: the number of tokens to keep.
pub(super) fn kept_prompt_tokens(parameters: &Parameters) -> Result<Option<usize>, ApiError> {
    match parameters.truncate_prompt_tokens {
        None => Ok(None),
        Some(-1) => Ok(Some(usize::MAX)),
        Some(keep @ 1..) => Ok(Some(usize::try_from(keep).unwrap_or(usize::MAX))),
        Some(_) => invalid("truncate_prompt_tokens", "must be at least 1, or -1"),
    }
}

/// Checks that `min_tokens` leaves room for the output limit.
pub(super) fn check_min_tokens(sampling: &Sampling, max_new_tokens: u32) -> Result<(), ApiError> {
    match sampling.min_tokens > max_new_tokens {
        true => invalid(
            "min_tokens",
            format!("must be at most the output limit, which is {max_new_tokens}"),
        ),
        false => Ok(()),
    }
}

/// Reads `class`. The samples of a group are rollouts, unless the request says otherwise.
pub(super) fn class(parameters: &Parameters) -> RequestClass {
    let by_group = match &parameters.group {
        Some(_) => RequestClass::Rollout,
        None => RequestClass::Interactive,
    };
    parameters.class.map_or(by_group, RequestClass::from)
}

/// Most tokens of a chunk that the request asks for. `None`: it has no wish.
pub(super) fn chunk_tokens(
    parameters: &Parameters,
    sampling: &Sampling,
    limits: &GatewayTuning,
) -> Option<u32> {
    let tokens = match (parameters.chunk_tokens, class(parameters)) {
        (Some(tokens), _) => tokens,
        // Not every engine can continue such an output.
        (None, _) if sampling.depends_on_output() => 0,
        (None, RequestClass::Rollout) => limits.rollout_chunk_tokens,
        (None, RequestClass::Interactive) => limits.chunk_tokens,
    };
    (tokens > 0).then_some(tokens)
}

/// Reads `n`.
pub(super) fn choices(parameters: &Parameters) -> Result<u32, ApiError> {
    match parameters.n.unwrap_or(1) {
        n @ 1..=CHOICES_MAX => Ok(n as u32),
        _ => invalid("n", format!("must be 1 to {CHOICES_MAX}")),
    }
}

/// Reads `stop`.
pub(super) fn stops(parameters: &Parameters) -> Result<Vec<String>, ApiError> {
    let stops = parameters.stop.clone().unwrap_or_default().0;
    let is_valid = |stop: &String| (1..=STOP_BYTES_MAX).contains(&stop.len());
    match stops.iter().all(is_valid) {
        true => Ok(stops),
        false => invalid(
            "stop",
            format!("a text must have 1 to {STOP_BYTES_MAX} bytes"),
        ),
    }
}

/// Reads `stream_options.include_usage`.
pub(super) fn include_usage(parameters: &Parameters) -> Result<bool, ApiError> {
    match &parameters.stream_options {
        None => Ok(false),
        Some(_) if parameters.stream != Some(true) => {
            invalid("stream_options", "is allowed only with stream: true")
        }
        Some(JsonObject(options)) => Ok(options.include_usage.unwrap_or(false)),
    }
}

/// Reads how to sample.
pub(super) fn sampling(
    parameters: &Parameters,
    model: &Model,
    top_logprobs: Option<u32>,
) -> Result<Sampling, ApiError> {
    let within =
        |name: &str, value: Option<f64>, default: f64, most: f64| match value.unwrap_or(default) {
            value if (0.0..=most).contains(&value) => Ok(value as f32),
            _ => invalid(name, format!("must be 0 to {most}")),
        };
    let top_k = match parameters.top_k.unwrap_or(0) {
        -1 => 0,
        value => match u32::try_from(value) {
            Ok(value) => value,
            Err(_) => {
                let fault = "must be a positive number, or 0 or -1 to keep all tokens";
                return invalid("top_k", fault);
            }
        },
    };
    let seed = match parameters.seed {
        Some(seed) => seed as u64,
        // The seed is fixed here, so that a continuation on another worker draws the same noise.
        None => random::u64()?,
    };
    let ignore_eos = parameters.ignore_eos.unwrap_or(false);
    let mut stop_token_ids = match ignore_eos {
        true => Vec::new(),
        false => model.stop_token_ids.clone(),
    };
    let extra = parameters.stop_token_ids.as_deref().unwrap_or_default();
    if extra.len() > STOP_TOKEN_IDS_MAX {
        let fault = format!("at most {STOP_TOKEN_IDS_MAX} ids are allowed");
        return invalid("stop_token_ids", fault);
    }
    check_ids("stop_token_ids", extra, model)?;
    for id in extra {
        if !stop_token_ids.contains(id) {
            stop_token_ids.push(*id);
        }
    }
    let penalty = |name: &str, value: Option<f64>| match value.unwrap_or(0.0) {
        value if (-PENALTY_MAX..=PENALTY_MAX).contains(&value) => Ok(value as f32),
        _ => invalid(name, format!("must be -{PENALTY_MAX} to {PENALTY_MAX}")),
    };
    let repetition_penalty = match parameters.repetition_penalty.unwrap_or(1.0) as f32 {
        value if (f32::MIN_POSITIVE..=REPETITION_PENALTY_MAX).contains(&value) => value,
        _ => {
            let fault = format!("must be greater than 0 and at most {REPETITION_PENALTY_MAX}");
            return invalid("repetition_penalty", fault);
        }
    };
    let bad_words = bad_words(parameters)?;
    Ok(Sampling {
        temperature: within("temperature", parameters.temperature, 1.0, 2.0)?,
        top_k,
        // 0 keeps only the most likely token, and so does the smallest positive number.
        top_p: within("top_p", parameters.top_p, 1.0, 1.0)?.max(f32::MIN_POSITIVE),
        min_p: within("min_p", parameters.min_p, 0.0, 1.0)?,
        seed,
        choice: 0,
        logit_bias: logit_bias(parameters, model)?,
        stop_token_ids,
        top_logprobs,
        presence_penalty: penalty("presence_penalty", parameters.presence_penalty)?,
        frequency_penalty: penalty("frequency_penalty", parameters.frequency_penalty)?,
        repetition_penalty,
        // More tokens than that are more than any context, which is refused later.
        min_tokens: u32::try_from(parameters.min_tokens.unwrap_or(0)).unwrap_or(u32::MAX),
        ignore_eos,
        bad_tokens: bad_tokens(&bad_words, model)?,
        bad_words,
        forced_output: Vec::new(),
        form: None,
    })
}

/// Reads `bad_words`.
fn bad_words(parameters: &Parameters) -> Result<Vec<String>, ApiError> {
    let words = parameters.bad_words.clone().unwrap_or_default().0;
    match words
        .iter()
        .all(|word| (1..=STOP_BYTES_MAX).contains(&word.len()) && !word.trim_start().is_empty())
    {
        true => Ok(words),
        false => invalid(
            "bad_words",
            format!("a text must have 1 to {STOP_BYTES_MAX} bytes, and not only spaces"),
        ),
    }
}

/// The tokens of bad words, at the beginning of a text and after a space, as vLLM finds them: the latter only where
/// the space begins another token of the same number.
fn bad_tokens(words: &[String], model: &Model) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let encode = |text: &str| {
        let tokens = model.tokenizer.encode(text);
        tokens.or_else(|error| invalid("bad_words", error))
    };
    let mut all: Vec<Vec<TokenId>> = Vec::new();
    for word in words {
        let word = word.trim_start();
        let bare = encode(word)?;
        let spaced = encode(&format!(" {word}"))?;
        let is_other = spaced.len() == bare.len() && spaced.first() != bare.first();
        all.push(bare);
        if is_other {
            all.push(spaced);
        }
    }
    Ok(all)
}

fn logit_bias(parameters: &Parameters, model: &Model) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let mut biases = Vec::new();
    for (token, bias) in parameters.logit_bias.iter().flat_map(|LogitBias(of)| of) {
        let Ok(token) = token.parse::<TokenId>() else {
            return invalid("logit_bias", "keys must be token ids");
        };
        check_ids("logit_bias", &[token], model)?;
        if !(-100.0..=100.0).contains(bias) {
            return invalid("logit_bias", "values must be from -100 to 100");
        }
        biases.push((token, *bias as f32));
    }
    Ok(biases)
}

/// Checks that the tokens are in the vocabulary of the model.
pub(super) fn check_ids(param: &str, ids: &[TokenId], model: &Model) -> Result<(), ApiError> {
    let size = model.tokenizer.vocab_size();
    match ids.iter().find(|id| **id >= size) {
        Some(id) => invalid(
            param,
            format!("token {id} is not in the vocabulary of this model, which has {size} tokens"),
        ),
        None => Ok(()),
    }
}

/// Checks the prediction of a chat.
pub(super) fn check_chat(chat: &ChatFields) -> Result<(), ApiError> {
    if let Some(prediction) = &chat.prediction {
        if prediction.get("type").as_ref().and_then(JsonValue::as_str) != Some("content") {
            return invalid("prediction.type", "must be \"content\"");
        }
        check_content(prediction.get("content"), || {
            "prediction.content".to_owned()
        })?;
    }
    Ok(())
}

/// Reads `logprobs` and `top_logprobs` of a chat.
pub(super) fn chat_logprobs(chat: &ChatFields) -> Result<Option<u32>, ApiError> {
    match (chat.logprobs.unwrap_or(false), chat.top_logprobs) {
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => invalid("top_logprobs", "is allowed only with logprobs: true"),
        (true, top @ (None | Some(0..=CHAT_TOP_LOGPROBS_MAX))) => Ok(Some(top.unwrap_or(0) as u32)),
        (true, Some(_)) => invalid(
            "top_logprobs",
            format!("must be 0 to {CHAT_TOP_LOGPROBS_MAX}"),
        ),
    }
}

/// Reads `prompt_logprobs`.
pub(super) fn prompt_logprobs(parameters: &Parameters) -> Result<Option<u32>, ApiError> {
    let Some(top) = parameters.prompt_logprobs else {
        return Ok(None);
    };
    // Prompts are long, so these limits bound the answer.
    if top > COMPLETION_LOGPROBS_MAX {
        let fault = format!("must be 0 to {COMPLETION_LOGPROBS_MAX}");
        return invalid("prompt_logprobs", fault);
    }
    if parameters.stream == Some(true) {
        return invalid("prompt_logprobs", "is not allowed with stream: true");
    }
    if parameters.n.unwrap_or(1) > 1 {
        return invalid("prompt_logprobs", "is allowed only with n: 1");
    }
    Ok(Some(top as u32))
}

/// Reads `best_of`, which is `n` by default.
pub(super) fn best_of(
    parameters: &Parameters,
    completion: &CompletionFields,
) -> Result<u32, ApiError> {
    let n = choices(parameters)?;
    match completion.best_of {
        None => Ok(n),
        Some(best_of) if best_of < u64::from(n) || best_of > CHOICES_MAX => {
            let fault = format!("must be at least n, which is {n}, and at most {CHOICES_MAX}");
            invalid("best_of", fault)
        }
        Some(best_of) if best_of > u64::from(n) && parameters.stream == Some(true) => {
            let fault = "must be n with stream: true, since the best are known only at the end";
            invalid("best_of", fault)
        }
        Some(best_of) if best_of > u64::from(n) && parameters.prompt_logprobs.is_some() => {
            invalid("best_of", "must be n with prompt_logprobs")
        }
        Some(best_of) => Ok(best_of as u32),
    }
}

/// Reads `logprobs` of a text completion, and refuses fields that are not supported beside it.
pub(super) fn completion_logprobs(completion: &CompletionFields) -> Result<Option<u32>, ApiError> {
    let suffix = completion.suffix.as_deref();
    if suffix.is_some_and(|suffix| !suffix.is_empty()) {
        return unsupported("suffix", "suffix is not supported; leave it out");
    }
    match completion.logprobs {
        None => Ok(None),
        Some(top @ 0..=COMPLETION_LOGPROBS_MAX) => Ok(Some(top as u32)),
        Some(_) => invalid(
            "logprobs",
            format!("must be 0 to {COMPLETION_LOGPROBS_MAX}"),
        ),
    }
}
