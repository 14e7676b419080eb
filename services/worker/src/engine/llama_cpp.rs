//! llama.cpp's llama-server, over `/completion`: token arrays in, token ids out.
//!
//! Its ways: an event holds one token's id, and none at all while the text ends inside a character (see [`partial`]). It
//! knows no stop ids but the model's own, so the worker ends the call at others. Its prompt cache is one for all.

mod partial;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

use refrain_protocol::engine::TokenLogprob;
use refrain_protocol::{ApiError, ErrorKind, TokenId};
use refrain_tokenization::Tokenizer;
use serde::Deserialize;
use serde_json::{Value, json};

use self::partial::Fragments;
use super::client::{no_engine, parse};
use super::dialect::{Decoder, Dialect, error_event};
use super::load::LoadSeries;
use super::streaming::{
    GenerateRequest, Generated, GeneratedEnd, LOGPROB_MIN, StreamingCapabilities, TOP_LOGPROBS_MAX,
};
use super::verify::{Said, Verified, VerifyRequest, VerifyWay};

/// Most tokens of one character, a byte each. A call for fewer may end inside a character, and then says nothing at all; what
/// is too much, the worker drops.
const CHARACTER_TOKENS_MAX: u32 = 4;

pub(super) struct LlamaCpp {
    fragments: Arc<Fragments>,
    prompt_cache: bool,
}

impl LlamaCpp {
    pub(super) fn new(tokenizer: Arc<Tokenizer>, prompt_cache: bool) -> Self {
        LlamaCpp {
            fragments: Arc::new(Fragments::new(tokenizer)),
            prompt_cache,
        }
    }
}

impl Dialect for LlamaCpp {
    fn capabilities(&self) -> StreamingCapabilities {
        StreamingCapabilities::of_dialect(Some(TOP_LOGPROBS_MAX))
    }

    fn path(&self) -> &'static str {
        "/completion"
    }

    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        let sampling = &request.sampling;
        // The largest 32-bit seed asks for a random one.
        let seed = request.engine_seed() % u64::from(u32::MAX);
        let mut body = json!({
            "prompt": request.tokens,
            "n_predict": request.tokens_max.max(CHARACTER_TOKENS_MAX),
            "stream": true,
            "return_tokens": true,
            "return_progress": true,
            "cache_prompt": self.prompt_cache,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            // In the mesh's order; without the others, so that nothing is penalised unasked.
            "samplers": ["temperature", "top_k", "top_p", "min_p"],
            "repeat_penalty": 1.0,
            "seed": seed,
            // The last event repeats the prompt unless told what to hold.
            "response_fields": ["stop", "stop_type", "tokens_predicted"],
        });
        if !sampling.logit_bias.is_empty() {
            body["logit_bias"] = json!(sampling.logit_bias);
        }
        if let Some(top) = sampling.top_logprobs {
            body["n_probs"] = json!(top.max(1));
        }
        Ok(body)
    }

    fn decoder(&self, request: &GenerateRequest) -> Box<dyn Decoder> {
        Box::new(LlamaDecoder {
            fragments: self.fragments.clone(),
            top: request.sampling.top_logprobs,
            seen: 0,
            has_begun: false,
        })
    }

    fn verify(&self, request: &VerifyRequest) -> Option<(&'static str, Value)> {
        if request.way != VerifyWay::FanOut {
            return None;
        }
        let mut body = self.body(&request.text).ok()?;
        body["prompt"] = json!(request.prompts());
        body["n_predict"] = json!(1);
        body["response_fields"] = json!(["index", "tokens", "stop_type"]);
        for of_streams in ["stream", "return_progress"] {
            body[of_streams] = json!(false);
        }
        // One seed for all prompts would draw the same noise at each place. It draws another one for each by itself.
        body["seed"] = json!(u32::MAX);
        Some((self.path(), body))
    }

    fn verified(&self, request: &VerifyRequest, answer: &[u8]) -> Result<Verified, ApiError> {
        let answers: Vec<Drawn> = parse(answer)?;
        let drawn = answers.iter();
        let drawn = drawn.map(|drawn| (drawn.index, drawn.said()));
        Verified::of_fan_out(request, drawn)
    }

    fn load(&self) -> Option<LoadSeries> {
        Some(LoadSeries {
            path: "/metrics",
            running: "llamacpp:requests_processing",
            waiting: "llamacpp:requests_deferred",
            kv_usage: None,
        })
    }

    fn detokenize(&self, tokens: &[TokenId]) -> Option<(&'static str, Value, &'static str)> {
        Some(("/detokenize", json!({ "tokens": tokens }), "content"))
    }

    fn context(&self) -> Option<(&'static str, &'static str)> {
        // A slot's, not the server's: requests do not share it.
        Some(("/props", "/default_generation_settings/n_ctx"))
    }
}

/// What was drawn for one of several prompts.
#[derive(Debug, Deserialize)]
struct Drawn {
    index: usize,
    #[serde(default)]
    tokens: Vec<TokenId>,
    #[serde(default)]
    stop_type: Option<String>,
}

impl Drawn {
    fn said(&self) -> Said {
        Said {
            token: self.tokens.first().copied(),
            is_end: self.stop_type.as_deref() == Some("eos"),
        }
    }
}

/// An event of `/completion`.
#[derive(Debug, Deserialize)]
struct Event<'a> {
    #[serde(borrow, default)]
    content: Cow<'a, str>,
    #[serde(default)]
    tokens: Vec<TokenId>,
    stop: Option<bool>,
    /// Instead of all else.
    #[serde(default)]
    error: Option<Value>,
    /// Tokens drawn so far, those included whose ids were not sent.
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
    /// Tokens whose ids are known.
    seen: u64,
    has_begun: bool,
}

impl Decoder for LlamaDecoder {
    fn decode(&mut self, data: &[u8], out: &mut VecDeque<Generated>) -> Result<(), ApiError> {
        let event: Event<'_> = parse(data)?;
        if let Some(error) = &event.error {
            return Err(error_event(error));
        }
        if event.stop.ok_or_else(|| no_engine("no stop"))? {
            // Tokens that end inside a character were drawn and never sent: what they would become is not known.
            out.push_back(Generated::End(match event.stop_type.as_deref() {
                Some("limit") => GeneratedEnd::Length,
                Some("eos" | "word") => GeneratedEnd::Stop,
                other => return Err(no_engine(format!("stop type {other:?}"))),
            }));
            return Ok(());
        }
        if let Some(progress) = event.prompt_progress {
            // Sent for every piece of a long prompt; it says where the answer begins only once.
            if !std::mem::replace(&mut self.has_begun, true) {
                out.push_back(Generated::Begun {
                    cached_tokens: progress.cache,
                });
            }
            return Ok(());
        }
        let [token] = event.tokens[..] else {
            return Err(no_engine(format!("{} tokens", event.tokens.len())));
        };
        let drawn = self.seen.saturating_add(1);
        let unsent = event.tokens_predicted.saturating_sub(drawn);
        let tokens = match unsent {
            0 => event.tokens,
            // The text of all of them, now that it ends with a character.
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
                return Err(ApiError::new(
                    ErrorKind::InvalidRequest,
                    "this engine has no log-probabilities of tokens that hold a part of a character, and the output has some; ask without logprobs",
                )
                .with_code("unsupported_by_engine"));
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
        // So it is while the server drafts for itself.
        return Err(ApiError::new(
            ErrorKind::InvalidRequest,
            "this engine gives no log-probabilities while it speculates; ask without logprobs",
        )
        .with_code("unsupported_by_engine"));
    };
    if own.id != token {
        return Err(no_engine("the log-probability of another token"));
    }
    let best = own.top_logprobs.iter().take(top as usize);
    Ok(TokenLogprob {
        logprob: own.logprob.max(LOGPROB_MIN),
        top: best
            .map(|other| (other.id, other.logprob.max(LOGPROB_MIN)))
            .collect(),
    })
}
