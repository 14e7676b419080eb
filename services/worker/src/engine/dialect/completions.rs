//! OpenAI's `/v1/completions` with the token ids that vLLM and TensorRT-LLM add to it.

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};

use refrain_protocol::engine::{Sampling, TokenLogprob};
use refrain_protocol::{ApiError, ErrorKind, TokenId};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Decoder, end_of, error_event, pass_on};
use crate::engine::client::{parse, unexpected_response};
use crate::engine::generate::{GenerateRequest, Generated};
use crate::engine::streaming::LOGPROB_MIN;

/// The penalties. Neutral ones are sent as well, since a server may have been started with other defaults.
pub(super) fn penalties(sampling: &Sampling) -> [(&'static str, f32); 3] {
    [
        ("repetition_penalty", sampling.repetition_penalty),
        ("presence_penalty", sampling.presence_penalty),
        ("frequency_penalty", sampling.frequency_penalty),
    ]
}

/// Fields that a body has at most. A table that grows costs more than what it holds.
const FIELDS_MAX: usize = 28;

/// The fields that all servers of this route accept.
pub(super) fn common_body(model: &str, request: &GenerateRequest) -> Map<String, Value> {
    let sampling = &request.sampling;
    let mut body = Map::with_capacity(FIELDS_MAX);
    let mut set = |key: &str, value: Value| body.insert(key.to_owned(), value);
    set("model", json!(model));
    set("max_tokens", json!(request.tokens_max));
    set("stream", json!(true));
    set("temperature", json!(sampling.temperature));
    set("top_p", json!(sampling.top_p));
    // Engines read the seed as a signed number.
    set("seed", json!(request.engine_seed() >> 1));
    body
}

/// The common fields and those that only vLLM and TensorRT-LLM accept.
///
/// Neutral values are sent too: vLLM takes absent fields from the model's `generation_config.json`, and would then
/// sample from another distribution than requested.
pub(super) fn extended_body(model: &str, request: &GenerateRequest) -> Map<String, Value> {
    let sampling = &request.sampling;
    let mut body = common_body(model, request);
    let mut set = |key: &str, value: Value| body.insert(key.to_owned(), value);
    set("stream_options", json!({ "include_usage": true }));
    set("stop_token_ids", json!(sampling.stop_token_ids));
    set("top_k", json!(sampling.top_k));
    set("min_p", json!(sampling.min_p));
    for (name, value) in penalties(sampling) {
        set(name, json!(value));
    }
    if request.min_tokens_left() > 0 {
        set("min_tokens", json!(request.min_tokens_left()));
    }
    if sampling.ignore_eos {
        set("ignore_eos", json!(true));
    }
    if !sampling.logit_bias.is_empty() {
        set("logit_bias", logit_bias(sampling));
    }
    body
}

/// The biases, keyed by token id as text.
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
pub(super) struct CompletionEvent<'a> {
    #[serde(borrow)]
    choices: Option<Vec<CompletionChoice<'a>>>,
    /// Replaces all other fields.
    #[serde(default)]
    error: Option<Value>,
    #[serde(default)]
    usage: Option<Usage>,
}

#[derive(Debug, Deserialize)]
pub(super) struct CompletionChoice<'a> {
    #[serde(borrow, default)]
    pub(super) text: Cow<'a, str>,
    #[serde(default)]
    token_ids: Option<Vec<TokenId>>,
    #[serde(default)]
    logprobs: Option<Logprobs>,
    #[serde(borrow, default)]
    pub(super) finish_reason: Option<Cow<'a, str>>,
    /// The stop id or stop string that ended the output, or null.
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
struct Usage {
    #[serde(default)]
    prompt_tokens_details: Option<UsageDetails>,
}

#[derive(Debug, Deserialize)]
struct UsageDetails {
    #[serde(default)]
    cached_tokens: Option<u32>,
}

impl Usage {
    /// Tokens of the prompt that were found in the cache, if the engine reports them.
    fn cached_tokens(&self) -> Option<u32> {
        self.prompt_tokens_details.as_ref()?.cached_tokens
    }
}

impl CompletionChoice<'_> {
    /// The stop id that ended the output. Some engines omit it from the token ids, and name it here.
    fn stop_id(&self) -> Option<TokenId> {
        TokenId::try_from(self.stop_reason.as_u64()?).ok()
    }
}

impl<'a> CompletionEvent<'a> {
    /// Parses an event.
    ///
    /// # Errors
    /// The event has another shape, or it is an error of the engine.
    pub(super) fn parse(data: &'a [u8]) -> Result<Self, ApiError> {
        let event: Self = parse(data)?;
        match &event.error {
            Some(error) => Err(error_event(error)),
            None => Ok(event),
        }
    }

    /// The choice of a request for a single one; the last event has none.
    pub(super) fn choice(self) -> Result<Option<CompletionChoice<'a>>, ApiError> {
        let choices = self.choices;
        let choices = choices.ok_or_else(|| unexpected_response("no choices"))?;
        Ok(choices.into_iter().next())
    }
}

/// Decodes a stream whose choices hold token ids.
///
/// The usage tells how much of the prompt was cached. It comes with every event, or in a separate event after the
/// last token. The last token is held back until then, since its reader may stop listening with it.
pub(super) struct CompletionsDecoder {
    top: Option<u32>,
    has_told_cached: bool,
    held: VecDeque<Generated>,
}

impl CompletionsDecoder {
    pub(super) fn new(sampling: &Sampling) -> Self {
        CompletionsDecoder {
            top: sampling.top_logprobs,
            has_told_cached: false,
            held: VecDeque::new(),
        }
    }
}

impl Decoder for CompletionsDecoder {
    fn decode(&mut self, data: &[u8], out: &mut VecDeque<Generated>) -> Result<(), ApiError> {
        let event = CompletionEvent::parse(data)?;
        if let Some(tokens) = event.usage.as_ref().and_then(Usage::cached_tokens)
            && !std::mem::replace(&mut self.has_told_cached, true)
        {
            out.push_back(Generated::Cached { tokens });
        }
        let Some(choice) = event.choice()? else {
            self.done(out);
            return Ok(());
        };
        let end = choice.finish_reason.as_deref().map(end_of).transpose()?;
        let stop_id = choice.stop_id();
        let tokens = match choice.token_ids {
            Some(tokens) => tokens,
            None if choice.text.is_empty() => Vec::new(),
            None => {
                return Err(ApiError::new(
                    ErrorKind::Upstream,
                    "the engine sent text without token ids; it is too old, or worker.engine.kind does not match it",
                ));
            }
        };
        let logprobs = match self.top {
            Some(top) if !tokens.is_empty() => Some(logprobs(choice.logprobs, tokens.len(), top)?),
            _ => None,
        };
        let is_held = end.is_some() && !self.has_told_cached;
        let out = if is_held { &mut self.held } else { out };
        let stop_id = stop_id.filter(|_| self.top.is_none());
        pass_on(out, tokens, logprobs, end, stop_id);
        Ok(())
    }

    fn done(&mut self, out: &mut VecDeque<Generated>) {
        out.append(&mut self.held);
    }
}

/// The prefix of an alternative that is named by its token id.
const TOKEN_ID_PREFIX: &str = "token_id:";

fn logprobs(
    sent: Option<Logprobs>,
    tokens: usize,
    top: u32,
) -> Result<Vec<TokenLogprob>, ApiError> {
    let sent = sent
        .filter(|sent| sent.token_logprobs.len() == tokens)
        .ok_or_else(|| unexpected_response("not one log-probability per token"))?;
    let mut all = Vec::with_capacity(tokens);
    let mut alternatives = sent.top_logprobs.into_iter();
    for logprob in sent.token_logprobs {
        let mut best = Vec::new();
        for (token, logprob) in alternatives.next().flatten().unwrap_or_default() {
            let id = token
                .strip_prefix(TOKEN_ID_PREFIX)
                .and_then(|id| id.parse::<TokenId>().ok());
            let id = id.ok_or_else(|| unexpected_response("an alternative without a token id"))?;
            best.push((id, logprob.max(LOGPROB_MIN)));
        }
        // The engine also lists the sampled token, even if it is not among the best.
        best.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        best.truncate(top as usize);
        all.push(TokenLogprob {
            logprob: logprob.unwrap_or(LOGPROB_MIN).max(LOGPROB_MIN),
            top: best,
        });
    }
    Ok(all)
}
