//! Answers of SGLang's `/generate`, whole or as a stream.
//!
//! An event of a stream has all of the output so far, as SGLang sends it. So that a long output does not cost its
//! square in bytes, an event is sent when the output has grown by a share of its length, and at its end.

use std::sync::Arc;

use async_trait::async_trait;
use refrain_gateway::{
    ChoiceFigures, ChoiceProgress, GenerateRequest, OutputToken, RequestEvents, RequestSummary,
    SurfaceWriter, add_weight_spans, chosen, read_to_end, text, top, write_frame,
};
use refrain_protocol::openai::{FinishReason, WeightSpan};
use refrain_protocol::{ApiError, TokenId};
use refrain_service_kit::random;
use serde::Serialize;
use serde_json::{Value, json};

use super::output_facts::{OutputFacts, shown_figures};
use super::sglang::SglangShape;
use super::version::version_name;

/// A stream has an event when the output has grown by one part in this many.
const GROWTH_SHARE: usize = 16;

/// The message of an abort that left no token. Trainers look for it.
const ABORTED_BEFORE_OUTPUT: &str = "Abort before prefill";

/// A token with its log-probability, and the place of its text, which is never given.
type ScoredToken = (Option<f64>, TokenId, Option<&'static str>);

/// Writes the answer to one request.
pub(super) struct SglangWriter {
    request: Arc<GenerateRequest>,
    shape: SglangShape,
    id: String,
    /// The version of an output without a token.
    version: u64,
    choices: Vec<WrittenChoice>,
}

/// A choice as it grows.
#[derive(Clone, Default)]
struct WrittenChoice {
    text: String,
    ids: Vec<TokenId>,
    prompt_logprobs: Vec<ScoredToken>,
    logprobs: Vec<ScoredToken>,
    top_logprobs: Vec<Vec<ScoredToken>>,
    spans: Vec<WeightSpan>,
    finish: Option<Value>,
    figures: ChoiceFigures,
    /// Length of the output in the last event.
    sent: usize,
}

#[derive(Serialize)]
struct Sample<'a> {
    text: &'a str,
    output_ids: &'a [TokenId],
    meta_info: MetaInfo<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
}

#[derive(Serialize)]
struct MetaInfo<'a> {
    id: String,
    finish_reason: &'a Option<Value>,
    prompt_tokens: usize,
    completion_tokens: usize,
    cached_tokens: u64,
    #[serde(flatten)]
    facts: OutputFacts<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    input_token_logprobs: Option<&'a [ScoredToken]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_token_logprobs: Option<&'a [ScoredToken]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_token_logprobs_length: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    output_top_logprobs: Option<&'a [Vec<ScoredToken>]>,
}

fn scored(token: &OutputToken) -> ScoredToken {
    (Some(chosen(token)), token.id, None)
}

impl WrittenChoice {
    fn add(&mut self, request: &GenerateRequest, progress: ChoiceProgress) {
        self.text += &text(progress.events);
        self.prompt_logprobs
            .extend(progress.prompt.iter().map(scored));
        add_weight_spans(&mut self.spans, &progress.tokens);
        let most = request.top_logprobs();
        for token in &progress.tokens {
            self.ids.push(token.id);
            if let Some(most) = most {
                self.logprobs.push(scored(token));
                if most > 0 {
                    let likely = top(token, most).map(|(id, logprob)| (Some(logprob), id, None));
                    self.top_logprobs.push(likely.collect());
                }
            }
        }
        self.figures = progress.figures.unwrap_or(self.figures);
        if let Some(finish) = progress.finish {
            self.finish = Some(match finish {
                FinishReason::Length => json!({"type": "length", "length": self.ids.len()}),
                FinishReason::Abort if self.ids.is_empty() => {
                    json!({"type": "abort", "message": ABORTED_BEFORE_OUTPUT})
                }
                FinishReason::Abort => json!({"type": "abort", "message": "Aborted"}),
                _ => {
                    let stop = progress.stop_text.and_then(|at| request.stops().get(at));
                    let matched = match (stop, self.ids.last()) {
                        (Some(stop), _) => json!(stop),
                        (None, last) => json!(last),
                    };
                    json!({"type": "stop", "matched": matched})
                }
            });
        }
    }

    /// Whether the output has an event of a stream to be sent.
    fn is_due(&self) -> bool {
        let grown = self.ids.len() - self.sent;
        self.finish.is_some() || grown > self.sent / GROWTH_SHARE
    }
}

impl SglangWriter {
    /// Creates the writer of an answer. `version` is the present one of the weights.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(super) fn new(
        request: Arc<GenerateRequest>,
        shape: SglangShape,
        version: u64,
    ) -> Result<Self, ApiError> {
        Ok(SglangWriter {
            version,
            choices: vec![WrittenChoice::default(); request.choice_count()],
            id: format!("{:032x}", random::u128()?),
            request,
            shape,
        })
    }

    /// The name of a choice: the trainer's, as far as there is one for it.
    fn name(&self, index: usize) -> String {
        let name = self.shape.names.get(self.request.prompt_of(index));
        match (name, self.choices.len()) {
            (Some(name), _) => name.clone(),
            (None, 1) => self.id.clone(),
            (None, _) => format!("{}-{index}", self.id),
        }
    }

    /// Takes the output of a choice that came next.
    pub(super) fn add(&mut self, index: u32, progress: ChoiceProgress) {
        if let Some(choice) = self.choices.get_mut(index as usize) {
            choice.add(&self.request, progress);
        }
    }

    /// The facts about a choice.
    ///
    /// # Errors
    /// A value cannot be written as JSON, which would be a fault of this service.
    pub(super) fn meta_info(&self, index: usize) -> serde_json::Result<Value> {
        let sample = self.sample(index);
        serde_json::to_value(sample.map(|sample| sample.meta_info))
    }

    fn sample(&self, index: usize) -> Option<Sample<'_>> {
        let request = &self.request;
        let choice = self.choices.get(index)?;
        let prompt = request.prompt_tokens(index)?;
        let most = request.top_logprobs();
        let figures = shown_figures(request, choice.figures);
        Some(Sample {
            text: &choice.text,
            output_ids: &choice.ids,
            meta_info: MetaInfo {
                id: self.name(index),
                finish_reason: &choice.finish,
                prompt_tokens: prompt.len(),
                completion_tokens: choice.ids.len(),
                cached_tokens: figures.cached_tokens,
                facts: OutputFacts::new(self.version, &choice.spans, figures),
                input_token_logprobs: (request.prompt_logprobs().is_some())
                    .then_some(&choice.prompt_logprobs),
                output_token_logprobs: most.map(|_| &*choice.logprobs),
                output_token_logprobs_length: most.map(|_| choice.logprobs.len()),
                output_top_logprobs: most.filter(|most| *most > 0).map(|_| &*choice.top_logprobs),
            },
            index: self.shape.is_list.then_some(index),
        })
    }

    /// Begins the log-probabilities of a prompt with its first token, which nothing comes before. Leaves out those
    /// that the trainer did not ask for.
    fn score_prompts(&mut self) {
        if self.request.prompt_logprobs().is_none() {
            return;
        }
        for (index, choice) in self.choices.iter_mut().enumerate() {
            let prompt = self.request.prompt_tokens(index);
            if let Some(first) = prompt.and_then(<[TokenId]>::first) {
                let told = self
                    .shape
                    .prompt_start
                    .min(choice.prompt_logprobs.len() + 1);
                choice.prompt_logprobs.insert(0, (None, *first, None));
                choice.prompt_logprobs.drain(..told);
            }
        }
    }

    async fn collect(mut self, events: &mut RequestEvents) -> Result<Vec<u8>, ApiError> {
        let (choices, request) = (&mut self.choices, &self.request);
        read_to_end(events, |index, progress| {
            if let Some(choice) = choices.get_mut(index as usize) {
                choice.add(request, progress);
            }
        })
        .await?;
        self.score_prompts();
        let samples = || (0..self.choices.len()).filter_map(|index| self.sample(index));
        let written = match self.shape.is_list {
            true => serde_json::to_vec(&samples().collect::<Vec<_>>()),
            false => serde_json::to_vec(&samples().next()),
        };
        written.map_err(ApiError::internal)
    }
}

#[async_trait]
impl SurfaceWriter for SglangWriter {
    fn progress(&mut self, index: u32, progress: ChoiceProgress) -> Result<Vec<u8>, ApiError> {
        let at = index as usize;
        let mut frames = Vec::new();
        let Some(choice) = self.choices.get_mut(at) else {
            return Ok(frames);
        };
        choice.add(&self.request, progress);
        if !choice.is_due() {
            return Ok(frames);
        }
        choice.sent = choice.ids.len();
        if let Some(sample) = self.sample(at) {
            write_frame(&mut frames, &sample)?;
        }
        Ok(frames)
    }

    fn done(&mut self, _: &RequestSummary) -> Result<Vec<u8>, ApiError> {
        Ok(b"data: [DONE]\n\n".to_vec())
    }

    async fn collect(self: Box<Self>, events: &mut RequestEvents) -> Result<Vec<u8>, ApiError> {
        SglangWriter::collect(*self, events).await
    }
}

/// The answer to a request that was aborted before its body was read.
pub(super) fn aborted_unread(version: u64) -> Value {
    json!({
        "text": "",
        "output_ids": [],
        "meta_info": {
            "id": "",
            "finish_reason": {"type": "abort", "message": ABORTED_BEFORE_OUTPUT},
            "prompt_tokens": 0,
            "completion_tokens": 0,
            "cached_tokens": 0,
            "weight_version": version_name(version),
            "weight_versions": [],
            "output_token_logprobs": [],
            "output_token_logprobs_length": 0,
            "spec_verify_ct": 0,
            "spec_draft_token_num": 0,
            "spec_accept_token_num": 0,
        },
    })
}
