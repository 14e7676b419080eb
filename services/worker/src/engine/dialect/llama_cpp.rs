//! llama.cpp's llama-server, over `/completion`: token arrays in, token ids out.
//!
//! An event holds the id of one token, but the server sends no event while the text ends inside a character (see
//! [`partial`]). The server supports no stop ids but the model's own, so the worker ends the call at others. Its
//! prompt cache is shared by all requests.

mod partial;
mod primer;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

use refrain_protocol::engine::{TextForm, TokenLogprob};
use refrain_protocol::engine_order::EngineOrder;
use refrain_protocol::{ApiError, TokenId};
use refrain_tokenization::Tokenizer;
use serde::Deserialize;
use serde_json::{Value, json};

use self::partial::Fragments;
use super::{Decoder, Dialect, error_event, no_words};
use crate::engine::client::{parse, unexpected_response};
use crate::engine::forms::{FormAbilities, any_object, checked_schema, choice_as_ebnf};
use crate::engine::generate::{GenerateRequest, Generated, GeneratedEnd};
use crate::engine::load::{CapacitySeries, LoadSeries, PrefillSeries};
use crate::engine::order_calls::{OrderCall, no_order};
use crate::engine::slots::PrimerCalls;
use crate::engine::streaming::{LOGPROB_MIN, StreamingCapabilities, TOP_LOGPROBS_MAX};
use crate::engine::words::unsupported;

/// Maximum number of tokens of one character, one byte each. A call for fewer tokens may end inside a character, and
/// then returns nothing at all. The worker drops surplus tokens.
const CHARACTER_TOKENS_MAX: u32 = 4;

/// A llama-server.
pub(crate) struct LlamaCpp {
    fragments: Arc<Fragments>,
    prompt_cache: bool,
}

impl LlamaCpp {
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, prompt_cache: bool) -> Self {
        LlamaCpp {
            fragments: Arc::new(Fragments::new(tokenizer)),
            prompt_cache,
        }
    }
}

impl Dialect for LlamaCpp {
    fn capabilities(&self) -> StreamingCapabilities {
        StreamingCapabilities {
            // The server's presence and frequency penalties count the prompt as well.
            output_penalties: false,
            min_tokens: false,
            // It has JSON schemas for whole answers only, and no regular expressions.
            forms: FormAbilities {
                json: true,
                choice: true,
                ebnf: true,
                ..FormAbilities::default()
            },
            ..StreamingCapabilities::of_dialect(Some(TOP_LOGPROBS_MAX))
        }
    }

    fn path(&self) -> &'static str {
        "/completion"
    }

    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        let sampling = &request.sampling;
        // The largest 32-bit seed asks for a random one.
        let seed = request.engine_seed() % u64::from(u32::MAX);
        let mut body = json!({
            "n_predict": request.tokens_max.max(CHARACTER_TOKENS_MAX),
            "stream": true,
            "return_tokens": true,
            "return_progress": true,
            "cache_prompt": self.prompt_cache,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            // The order of the mesh. The server's other samplers are left out.
            "samplers": ["temperature", "top_k", "top_p", "min_p"],
            "repeat_penalty": 1.0,
            "seed": seed,
            // Without this list the last event repeats the prompt.
            "response_fields": ["stop", "stop_type", "tokens_predicted"],
        });
        if sampling.repetition_penalty != 1.0 {
            body["samplers"] = json!(["penalties", "temperature", "top_k", "top_p", "min_p"]);
            body["repeat_penalty"] = json!(sampling.repetition_penalty);
            // All of the context, not only its end.
            body["repeat_last_n"] = json!(-1);
        }
        if sampling.ignore_eos {
            body["ignore_eos"] = json!(true);
        }
        if !sampling.logit_bias.is_empty() {
            body["logit_bias"] = json!(sampling.logit_bias);
        }
        if let Some(form) = &sampling.form {
            let (name, value) = constraint(&form.text)?;
            body[name] = value;
        }
        if let Some(top) = sampling.top_logprobs {
            body["n_probs"] = json!(top.max(1));
        }
        Ok(body)
    }

    fn order_calls(&self, order: &EngineOrder) -> Result<Vec<OrderCall>, ApiError> {
        Err(no_order("a llama-server", order))
    }

    fn decoder(&self, request: &GenerateRequest) -> Box<dyn Decoder> {
        Box::new(LlamaDecoder {
            fragments: self.fragments.clone(),
            top: request.sampling.top_logprobs,
            seen: 0,
            has_told_cached: false,
        })
    }

    fn load(&self) -> Option<LoadSeries> {
        Some(LoadSeries {
            path: "/metrics",
            running: "llamacpp:requests_processing",
            waiting: "llamacpp:requests_deferred",
            // Present versions do not tell it.
            kv_usage: Some("llamacpp:kv_cache_usage_ratio"),
            kv_capacity: Some(CapacitySeries::Used("llamacpp:kv_cache_tokens")),
            prefill: Some(PrefillSeries {
                seconds: "llamacpp:prompt_seconds_total",
                tokens: "llamacpp:prompt_tokens_total",
                cached_tokens: None,
            }),
        })
    }

    fn primer(&self) -> Option<PrimerCalls> {
        Some(primer::CALLS)
    }

    fn detokenize(&self, tokens: &[TokenId]) -> Option<(&'static str, Value, &'static str)> {
        Some(("/detokenize", json!({ "tokens": tokens }), "content"))
    }

    fn context(&self) -> Option<(&'static str, &'static str)> {
        // The context length of one slot, since a request has no more than that.
        Some(("/props", "/default_generation_settings/n_ctx"))
    }
}

/// A form, as one of the fields of the body.
fn constraint(form: &TextForm) -> Result<(&'static str, Value), ApiError> {
    Ok(match form {
        TextForm::JsonObject => ("json_schema", any_object()),
        TextForm::JsonSchema(text) => ("json_schema", checked_schema(text)?),
        TextForm::Choice(texts) => ("grammar", json!(choice_as_ebnf(texts))),
        TextForm::Ebnf(grammar) => ("grammar", json!(grammar)),
        TextForm::Regex(_) | TextForm::Lark(_) | TextForm::Calls(_) | TextForm::AnyOf(_) => {
            return Err(no_words("GBNF"));
        }
    })
}

/// An event of `/completion`.
#[derive(Debug, Deserialize)]
struct LlamaEvent<'a> {
    #[serde(borrow, default)]
    content: Cow<'a, str>,
    #[serde(default)]
    tokens: Vec<TokenId>,
    stop: Option<bool>,
    /// Replaces all other fields.
    #[serde(default)]
    error: Option<Value>,
    /// Number of tokens generated so far, including those whose ids were not sent.
    #[serde(default)]
    tokens_predicted: u64,
    #[serde(borrow, default)]
    stop_type: Option<Cow<'a, str>>,
    #[serde(default)]
    prompt_progress: Option<Progress>,
    #[serde(default)]
    completion_probabilities: Vec<Probability>,
}

#[derive(Debug, Deserialize)]
struct Progress {
    cache: u32,
}

#[derive(Debug, Deserialize)]
struct Probability {
    id: TokenId,
    logprob: f32,
    #[serde(default)]
    top_logprobs: Vec<Alternative>,
}

#[derive(Debug, Deserialize)]
struct Alternative {
    id: TokenId,
    logprob: f32,
}

struct LlamaDecoder {
    fragments: Arc<Fragments>,
    top: Option<u32>,
    /// Number of tokens whose ids are known.
    seen: u64,
    has_told_cached: bool,
}

impl Decoder for LlamaDecoder {
    fn decode(&mut self, data: &[u8], out: &mut VecDeque<Generated>) -> Result<(), ApiError> {
        let event: LlamaEvent<'_> = parse(data)?;
        if let Some(error) = &event.error {
            return Err(error_event(error));
        }
        if event.stop.ok_or_else(|| unexpected_response("no stop"))? {
            // Tokens of an incomplete character were never sent, so they are unknown and lost.
            out.push_back(Generated::End(match event.stop_type.as_deref() {
                Some("limit") => GeneratedEnd::Length,
                Some("eos" | "word") => GeneratedEnd::Stop,
                other => {
                    return Err(unexpected_response(format!("stop type {other:?}")));
                }
            }));
            return Ok(());
        }
        if let Some(progress) = event.prompt_progress {
            // This comes for every piece of a long prompt; only the first one tells what was cached.
            if !std::mem::replace(&mut self.has_told_cached, true) {
                out.push_back(Generated::Cached {
                    tokens: progress.cache,
                });
            }
            return Ok(());
        }
        let [token] = event.tokens[..] else {
            return Err(unexpected_response(format!(
                "{} tokens",
                event.tokens.len()
            )));
        };
        let drawn = self.seen.saturating_add(1);
        let unsent = event.tokens_predicted.saturating_sub(drawn);
        let tokens = match unsent {
            0 => event.tokens,
            // The content is the text of all unsent tokens and this one, now that it ends with a whole character.
            _ => {
                let mut tokens = self.fragments.spell(&event.content, token, unsent)?;
                tokens.push(token);
                tokens
            }
        };
        self.seen = event.tokens_predicted.max(drawn);
        let logprobs = match self.top {
            None => None,
            Some(_) if unsent > 0 => {
                return Err(unsupported(
                    "this engine has no log-probabilities for tokens that are a part of a character, and the \
                     output has such tokens; ask without logprobs",
                ));
            }
            Some(top) => Some(vec![logprob(&event.completion_probabilities, token, top)?]),
        };
        out.push_back(Generated::Tokens { tokens, logprobs });
        Ok(())
    }
}

fn logprob(
    probabilities: &[Probability],
    token: TokenId,
    top: u32,
) -> Result<TokenLogprob, ApiError> {
    let [own] = probabilities else {
        // The server omits them while its own speculation is on.
        return Err(unsupported(
            "this engine gives no log-probabilities while it speculates; ask without logprobs",
        ));
    };
    if own.id != token {
        return Err(unexpected_response("the log-probability of another token"));
    }
    let best = own.top_logprobs.iter().take(top as usize);
    Ok(TokenLogprob {
        logprob: own.logprob.max(LOGPROB_MIN),
        top: best
            .map(|other| (other.id, other.logprob.max(LOGPROB_MIN)))
            .collect(),
    })
}
