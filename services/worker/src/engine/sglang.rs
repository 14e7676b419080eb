//! SGLang, over its own `/generate`: token ids in and out, KV apart by namespace, aborts by request id.
//!
//! Written after its published request and response schemas; it was never run against a real one.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use refrain_protocol::engine::TokenLogprob;
use refrain_protocol::{ApiError, TokenId};
use serde::Deserialize;
use serde_json::{Value, json};

use super::client::{no_engine, parse};
use super::completions::{NO_PENALTIES, logit_bias};
use super::dialect::{Decoder, Dialect, end_of, error_event};
use super::load::LoadSeries;
use super::streaming::{
    GenerateRequest, Generated, GeneratedEnd, LOGPROB_MIN, StreamingCapabilities, TOP_LOGPROBS_MAX,
};
use super::verify::{Said, Verified, VerifyRequest, VerifyWay, sure_best};

pub(super) struct SgLang;

impl Dialect for SgLang {
    fn capabilities(&self) -> StreamingCapabilities {
        StreamingCapabilities::of_dialect(Some(TOP_LOGPROBS_MAX))
    }

    fn path(&self) -> &'static str {
        "/generate"
    }

    fn body(&self, request: &GenerateRequest) -> Result<Value, ApiError> {
        let sampling = &request.sampling;
        let mut parameters = json!({
            "max_new_tokens": request.tokens_max,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": if sampling.top_k > 0 { i64::from(sampling.top_k) } else { -1 },
            "min_p": sampling.min_p,
            "stop_token_ids": sampling.stop_token_ids,
            // Read where inference is deterministic, else ignored. Signed, 32 bits.
            "sampling_seed": request.engine_seed() >> 33,
            "no_stop_trim": true,
            "skip_special_tokens": false,
        });
        // A server may have been started with other values for what a request leaves out.
        for (name, value) in NO_PENALTIES {
            parameters[name] = json!(value);
        }
        if !sampling.logit_bias.is_empty() {
            parameters["logit_bias"] = logit_bias(sampling);
        }
        let mut body = json!({
            "rid": request.name(),
            "input_ids": request.tokens,
            "sampling_params": parameters,
            "stream": true,
            "extra_key": request.namespace.to_string(),
        });
        if let Some(top) = sampling.top_logprobs {
            body["return_logprob"] = json!(true);
            body["top_logprobs_num"] = json!(top);
        }
        Ok(body)
    }

    fn decoder(&self, request: &GenerateRequest) -> Box<dyn Decoder> {
        Box::new(SgLangDecoder {
            top: request.sampling.top_logprobs,
            seen: 0,
            has_begun: false,
        })
    }

    fn verify(&self, request: &VerifyRequest) -> Option<(&'static str, Value)> {
        let mut body = self.body(&request.text).ok()?;
        let parameters = body["sampling_params"].as_object_mut()?;
        parameters.insert("max_new_tokens".to_owned(), json!(1));
        // One seed for all prompts would draw the same noise at each place.
        parameters.remove("sampling_seed");
        body["stream"] = json!(false);
        match request.way {
            VerifyWay::Chain => {
                body["input_ids"] = json!(request.chained());
                body["return_logprob"] = json!(true);
                // Its cache is read up to there, so that no place of the draft goes without a score.
                body["logprob_start_len"] = json!(request.text.tokens.len() - 1);
                // The two best, to know a tie from a best one.
                body["top_logprobs_num"] = json!(2);
            }
            VerifyWay::FanOut => {
                let prompts = request.prompts();
                // Each has a name of its own; an abort by what they begin with hits them all.
                let name = request.text.name();
                let names: Vec<String> = (0..prompts.len())
                    .map(|at| format!("{name}-{at}"))
                    .collect();
                body["rid"] = json!(names);
                body["input_ids"] = json!(prompts);
            }
        }
        Some((self.path(), body))
    }

    fn verified(&self, request: &VerifyRequest, answer: &[u8]) -> Result<Verified, ApiError> {
        match request.way {
            VerifyWay::Chain => {
                let answer: Event = parse(answer)?;
                let last = answer.said();
                let meta = answer.meta_info.ok_or_else(|| no_engine("no meta_info"))?;
                let rows = meta.input_top_logprobs.unwrap_or_default();
                let best = rows.iter().map(|row| {
                    let row = row.as_ref()?.iter();
                    sure_best(row.map(|(logprob, id, _)| (*id, logprob.unwrap_or(f32::NAN))))
                });
                Ok(Verified::of_chain(request, best, last))
            }
            VerifyWay::FanOut => {
                let answers: Vec<Event> = parse(answer)?;
                let drawn = answers.iter().map(Event::said);
                Verified::of_fan_out(request, drawn.enumerate())
            }
        }
    }

    fn abort(&self, request: &GenerateRequest) -> Option<(&'static str, Value)> {
        Some(("/abort_request", json!({ "rid": request.name() })))
    }

    fn load(&self) -> Option<LoadSeries> {
        Some(LoadSeries {
            path: "/metrics",
            running: "sglang:num_running_reqs",
            waiting: "sglang:num_queue_reqs",
            kv_usage: Some("sglang:token_usage"),
        })
    }
}

/// An event of `/generate`.
#[derive(Debug, Deserialize)]
struct Event {
    #[serde(default)]
    output_ids: Vec<TokenId>,
    meta_info: Option<MetaInfo>,
    /// Instead of all else.
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct MetaInfo {
    #[serde(default)]
    finish_reason: Option<FinishReason>,
    completion_tokens: usize,
    #[serde(default)]
    cached_tokens: Option<u32>,
    /// (logprob, id, text) per token.
    #[serde(default)]
    output_token_logprobs: Option<Vec<Scored>>,
    /// The best of each place.
    #[serde(default)]
    output_top_logprobs: Option<Vec<Option<Vec<Scored>>>>,
    /// The best of the prompt's places, from where they were asked for.
    #[serde(default)]
    input_top_logprobs: Option<Vec<Option<Vec<Scored>>>>,
}

/// (logprob, id, text).
type Scored = (Option<f32>, TokenId, Value);

#[derive(Debug, Deserialize)]
struct FinishReason {
    #[serde(rename = "type")]
    kind: String,
    /// The stop id or string.
    #[serde(default)]
    matched: Value,
}

impl Event {
    /// The answer to a call for one token.
    fn said(&self) -> Said {
        let meta = self.meta_info.as_ref();
        let end = meta.and_then(|meta| meta.finish_reason.as_ref());
        let matched = end.and_then(|reason| TokenId::try_from(reason.matched.as_u64()?).ok());
        Said {
            token: self.output_ids.last().copied().or(matched),
            is_end: end.is_some_and(|reason| reason.kind == "stop"),
        }
    }
}

struct SgLangDecoder {
    top: Option<u32>,
    /// Output tokens so far.
    seen: usize,
    has_begun: bool,
}

impl Decoder for SgLangDecoder {
    fn decode(&mut self, data: &[u8], out: &mut VecDeque<Generated>) -> Result<(), ApiError> {
        let event: Event = parse(data)?;
        if let Some(error) = &event.error {
            return Err(error_event(error));
        }
        let meta = event.meta_info.ok_or_else(|| no_engine("no meta_info"))?;
        if let Some(cached_tokens) = meta.cached_tokens
            && !std::mem::replace(&mut self.has_begun, true)
        {
            out.push_back(Generated::Begun { cached_tokens });
        }
        let end = meta
            .finish_reason
            .as_ref()
            .map(|reason| end_of(&reason.kind));
        let end = end.transpose()?;
        // Whole outputs or what is new, as the server was started: the count tells which.
        let fresh = meta.completion_tokens.saturating_sub(self.seen);
        let mut tokens = newest(event.output_ids, fresh);
        if tokens.len() != fresh {
            return Err(no_engine("another number of tokens than it counts"));
        }
        let logprobs = match self.top {
            Some(top) if fresh > 0 => Some(logprobs(&meta, fresh, top)?),
            _ => None,
        };
        self.seen += fresh;
        let stop_id = meta
            .finish_reason
            .and_then(|reason| reason.matched.as_u64())
            .and_then(|id| TokenId::try_from(id).ok());
        if let (Some(GeneratedEnd::Stop), Some(id), None) = (end, stop_id, self.top)
            && fresh > 0
            && tokens.last() != Some(&id)
        {
            tokens.push(id);
        }
        if !tokens.is_empty() {
            out.push_back(Generated::Tokens { tokens, logprobs });
        }
        out.extend(end.map(Generated::End));
        Ok(())
    }
}

/// The last `count` of them.
fn newest<T>(mut all: Vec<T>, count: usize) -> Vec<T> {
    all.drain(..all.len().saturating_sub(count));
    all
}

fn logprobs(meta: &MetaInfo, fresh: usize, top: u32) -> Result<Vec<TokenLogprob>, ApiError> {
    let own = meta.output_token_logprobs.as_deref().unwrap_or_default();
    let best = meta.output_top_logprobs.as_deref().unwrap_or_default();
    if own.len() < fresh {
        return Err(no_engine("not one log-probability per token"));
    }
    let clip = |logprob: Option<f32>| logprob.unwrap_or(LOGPROB_MIN).max(LOGPROB_MIN);
    // Aligned at their ends, whole or what is new.
    let at = |back: usize| TokenLogprob {
        logprob: clip(own[own.len() - back].0),
        top: best
            .len()
            .checked_sub(back)
            .and_then(|place| best[place].as_ref())
            .map(|scored| {
                let best = scored.iter().take(top as usize);
                best.map(|(logprob, id, _)| (*id, clip(*logprob))).collect()
            })
            .unwrap_or_default(),
    };
    Ok((1..=fresh).rev().map(at).collect())
}
