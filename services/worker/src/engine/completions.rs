//! The stream of OpenAI's `/v1/completions` with the token ids that vLLM and TensorRT-LLM add to it.

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};

use refrain_protocol::engine::{Sampling, TokenLogprob};
use refrain_protocol::{ApiError, ErrorKind, TokenId};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::client::{no_engine, parse};
use super::dialect::{Decoder, end_of, error_event};
use super::streaming::{GenerateRequest, Generated, GeneratedEnd, LOGPROB_MIN};
use super::verify::{Said, Verified, VerifyRequest};

/// The mesh has no penalties, and lets no engine add its own.
pub(super) const NO_PENALTIES: [(&str, f32); 3] = [
    ("repetition_penalty", 1.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
];

/// The fields that all of them take.
pub(super) fn common_body(model: &str, request: &GenerateRequest) -> Map<String, Value> {
    let sampling = &request.sampling;
    let mut body = Map::new();
    let mut set = |key: &str, value: Value| body.insert(key.to_owned(), value);
    set("model", json!(model));
    set("max_tokens", json!(request.tokens_max));
    set("stream", json!(true));
    set("temperature", json!(sampling.temperature));
    set("top_p", json!(sampling.top_p));
    // Engines read it as a signed number.
    set("seed", json!(request.engine_seed() >> 1));
    body
}

/// What vLLM and TensorRT-LLM take beyond it.
///
/// Values that change nothing are sent too: what is left out, vLLM takes from the model's `generation_config.json`, and
/// samples from another distribution than was asked for.
pub(super) fn extended_body(model: &str, request: &GenerateRequest) -> Map<String, Value> {
    let sampling = &request.sampling;
    let mut body = common_body(model, request);
    let mut set = |key: &str, value: Value| body.insert(key.to_owned(), value);
    set("prompt", json!(request.tokens));
    set("stream_options", json!({ "include_usage": true }));
    set("stop_token_ids", json!(sampling.stop_token_ids));
    set("top_k", json!(sampling.top_k));
    set("min_p", json!(sampling.min_p));
    for (name, value) in NO_PENALTIES {
        set(name, json!(value));
    }
    if !sampling.logit_bias.is_empty() {
        set("logit_bias", logit_bias(sampling));
    }
    body
}

/// The prompts of a fan-out, as [`extended_body`] asks for one.
pub(super) fn fan_out_body(model: &str, request: &VerifyRequest) -> Map<String, Value> {
    let mut body = extended_body(model, &request.text);
    body.remove("stream_options");
    // One seed for all prompts would draw the same noise at each place.
    body.remove("seed");
    let mut set = |key: &str, value: Value| body.insert(key.to_owned(), value);
    set("stream", json!(false));
    set("max_tokens", json!(1));
    set("prompt", json!(request.prompts()));
    body
}

/// What was drawn for the prompts of a fan-out.
pub(super) fn fan_out_answer(request: &VerifyRequest, answer: &[u8]) -> Result<Verified, ApiError> {
    let choices = Event::parse(answer)?.choices;
    let choices = choices.ok_or_else(|| no_engine("no choices"))?;
    let drawn = choices.into_iter().map(|choice| {
        let stop_id = choice.stop_id();
        let drawn = choice.token_ids.as_deref().and_then(<[_]>::first).copied();
        let said = Said {
            token: drawn.or(stop_id),
            is_end: choice.finish_reason.as_deref() == Some("stop"),
        };
        (choice.index, said)
    });
    Verified::of_fan_out(request, drawn)
}

/// By token id, as text.
pub(super) fn logit_bias(sampling: &Sampling) -> Value {
    sampling
        .logit_bias
        .iter()
        .map(|(token, bias)| (token.to_string(), json!(bias)))
        .collect::<Map<_, _>>()
        .into()
}

/// An event of the stream.
#[derive(Debug, Deserialize)]
pub(super) struct Event<'a> {
    #[serde(borrow)]
    choices: Option<Vec<Choice<'a>>>,
    /// Instead of all else.
    #[serde(default)]
    error: Option<Value>,
    #[serde(default)]
    usage: Option<Usage>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Choice<'a> {
    #[serde(default)]
    index: usize,
    #[serde(borrow, default)]
    pub(super) text: Cow<'a, str>,
    #[serde(default)]
    token_ids: Option<Vec<TokenId>>,
    #[serde(default)]
    logprobs: Option<Logprobs>,
    #[serde(borrow, default)]
    pub(super) finish_reason: Option<Cow<'a, str>>,
    /// The stop id that ended it, a string, or nothing.
    #[serde(default)]
    stop_reason: Value,
}

#[derive(Debug, Deserialize)]
struct Logprobs {
    #[serde(default)]
    token_logprobs: Vec<Option<f32>>,
    #[serde(default)]
    top_logprobs: Vec<Option<HashMap<String, f32>>>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Usage {
    #[serde(default)]
    prompt_tokens_details: Option<UsageDetails>,
}

#[derive(Debug, Deserialize)]
struct UsageDetails {
    #[serde(default)]
    cached_tokens: Option<u32>,
}

impl Usage {
    /// Tokens of the prompt that were found in the cache, if it says so.
    pub(super) fn cached_tokens(&self) -> Option<u32> {
        self.prompt_tokens_details.as_ref()?.cached_tokens
    }
}

impl Choice<'_> {
    /// The stop id that ended it. Some leave it out of the ids, and say which it was.
    fn stop_id(&self) -> Option<TokenId> {
        TokenId::try_from(self.stop_reason.as_u64()?).ok()
    }
}

impl<'a> Event<'a> {
    pub(super) fn parse(data: &'a [u8]) -> Result<Self, ApiError> {
        let event: Self = parse(data)?;
        match &event.error {
            Some(error) => Err(error_event(error)),
            None => Ok(event),
        }
    }

    /// The one choice of a request for one; the last event has none.
    pub(super) fn choice(self) -> Result<Option<Choice<'a>>, ApiError> {
        let choices = self.choices.ok_or_else(|| no_engine("no choices"))?;
        Ok(choices.into_iter().next())
    }
}

/// Reads a stream whose choices hold token ids.
///
/// What was found in the cache stands in the usage: in every event, or in one of its own behind the last token. That token
/// is held back until then, since with it the output may be over for whoever reads.
pub(super) struct CompletionsDecoder {
    top: Option<u32>,
    has_begun: bool,
    held: VecDeque<Generated>,
}

impl CompletionsDecoder {
    pub(super) fn new(sampling: &Sampling) -> Self {
        CompletionsDecoder {
            top: sampling.top_logprobs,
            has_begun: false,
            held: VecDeque::new(),
        }
    }
}

impl Decoder for CompletionsDecoder {
    fn decode(&mut self, data: &[u8], out: &mut VecDeque<Generated>) -> Result<(), ApiError> {
        let event = Event::parse(data)?;
        if let Some(cached_tokens) = event.usage.as_ref().and_then(Usage::cached_tokens)
            && !std::mem::replace(&mut self.has_begun, true)
        {
            out.push_back(Generated::Begun { cached_tokens });
        }
        let Some(choice) = event.choice()? else {
            self.done(out);
            return Ok(());
        };
        let end = choice.finish_reason.as_deref().map(end_of).transpose()?;
        let stop_id = choice.stop_id();
        let mut tokens = match choice.token_ids {
            Some(tokens) => tokens,
            None if choice.text.is_empty() => Vec::new(),
            None => {
                return Err(ApiError::new(
                    ErrorKind::Upstream,
                    "the engine sent text without token ids; it is too old for this adapter, or worker.engine.kind is another's",
                ));
            }
        };
        let logprobs = match self.top {
            Some(top) if !tokens.is_empty() => Some(logprobs(choice.logprobs, tokens.len(), top)?),
            _ => None,
        };
        if let (Some(GeneratedEnd::Stop), Some(id), None) = (end, stop_id, self.top)
            && tokens.last() != Some(&id)
        {
            tokens.push(id);
        }
        let waits = end.is_some() && !self.has_begun;
        let out = if waits { &mut self.held } else { out };
        if !tokens.is_empty() {
            out.push_back(Generated::Tokens { tokens, logprobs });
        }
        out.extend(end.map(Generated::End));
        Ok(())
    }

    fn done(&mut self, out: &mut VecDeque<Generated>) {
        out.append(&mut self.held);
    }
}

/// The prefix of a token that is named by its id.
const TOKEN_ID_PREFIX: &str = "token_id:";

fn logprobs(
    sent: Option<Logprobs>,
    tokens: usize,
    top: u32,
) -> Result<Vec<TokenLogprob>, ApiError> {
    let sent = sent
        .filter(|sent| sent.token_logprobs.len() == tokens)
        .ok_or_else(|| no_engine("not one log-probability per token"))?;
    let mut all = Vec::with_capacity(tokens);
    let mut alternatives = sent.top_logprobs.into_iter();
    for logprob in sent.token_logprobs {
        let mut best = Vec::new();
        for (token, logprob) in alternatives.next().flatten().unwrap_or_default() {
            let id = token
                .strip_prefix(TOKEN_ID_PREFIX)
                .and_then(|id| id.parse::<TokenId>().ok());
            let id = id.ok_or_else(|| no_engine("an alternative that is named by no token id"))?;
            best.push((id, logprob.max(LOGPROB_MIN)));
        }
        // The token itself is among them even where it is none of the best.
        best.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        best.truncate(top as usize);
        all.push(TokenLogprob {
            logprob: logprob.unwrap_or(LOGPROB_MIN).max(LOGPROB_MIN),
            top: best,
        });
    }
    Ok(all)
}
