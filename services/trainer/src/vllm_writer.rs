//! Answers of vLLM's `/inference/v1/generate`, whole or as a stream of new tokens.

use std::sync::Arc;

use async_trait::async_trait;
use refrain_gateway::{
    ChoiceFigures, ChoiceProgress, GenerateRequest, OutputToken, RequestEvents, RequestSummary,
    SurfaceWriter, TokenNames, add_weight_spans, chat_logprobs, prompt_logprobs, read_to_end, text,
    write_frame,
};
use refrain_protocol::openai::{ChatLogprobs, FinishReason, PromptLogprobs, Usage, WeightSpan};
use refrain_protocol::{ApiError, TokenId};
use refrain_service_kit::random;
use serde::Serialize;
use serde_json::{Value, json};

use super::output_facts::{OutputFacts, shown_figures};
use super::version::version_name;

/// Writes the answer to one request.
pub(super) struct VllmWriter {
    request: Arc<GenerateRequest>,
    name: String,
    /// The version of an output without a token.
    version: u64,
    choices: Vec<WrittenChoice>,
}

#[derive(Clone, Default)]
struct WrittenChoice {
    text: String,
    prompt: Vec<OutputToken>,
    tokens: Vec<OutputToken>,
    spans: Vec<WeightSpan>,
    finish: Option<FinishReason>,
    figures: ChoiceFigures,
}

/// The fields that this project adds to a choice.
#[derive(Serialize)]
struct Extra<'a> {
    /// The text of a whole answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(flatten)]
    facts: OutputFacts<'a>,
}

#[derive(Serialize)]
struct Choice<'a> {
    index: usize,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<FinishReason>,
    token_ids: Vec<TokenId>,
    #[serde(flatten)]
    extra: Option<Extra<'a>>,
}

#[derive(Serialize)]
struct Answer<'a> {
    request_id: &'a str,
    choices: Vec<Choice<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
}

impl WrittenChoice {
    /// Adds the tokens that came next, without keeping them where they are sent at once.
    fn add(&mut self, progress: ChoiceProgress, keeps: bool) -> Vec<OutputToken> {
        add_weight_spans(&mut self.spans, &progress.tokens);
        self.figures = progress.figures.unwrap_or(self.figures);
        self.finish = progress.finish.or(self.finish);
        if keeps {
            self.text += &text(progress.events);
            self.prompt.extend(progress.prompt);
            self.tokens.extend(progress.tokens);
            return Vec::new();
        }
        progress.tokens
    }
}

impl VllmWriter {
    /// Creates the writer of an answer. Without a name the request gets one. `version` is the present one of the
    /// weights.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(super) fn new(
        request: Arc<GenerateRequest>,
        name: Option<String>,
        version: u64,
    ) -> Result<Self, ApiError> {
        let name = match name {
            Some(name) => name,
            None => format!("generate-tokens-{:032x}", random::u128()?),
        };
        Ok(VllmWriter {
            choices: vec![WrittenChoice::default(); request.choice_count()],
            request,
            name,
            version,
        })
    }

    fn choice<'a>(
        &'a self,
        index: usize,
        choice: &'a WrittenChoice,
        tokens: &[OutputToken],
        text: Option<&'a str>,
    ) -> Choice<'a> {
        let request = &self.request;
        let names = TokenNames {
            tokenizer: request.tokenizer(),
            are_ids: true,
        };
        let most = request.top_logprobs();
        let figures = shown_figures(request, choice.figures);
        let ends = choice.finish.is_some();
        Choice {
            index,
            logprobs: most.map(|most| chat_logprobs(names, tokens, most)),
            finish_reason: choice.finish,
            token_ids: tokens.iter().map(|token| token.id).collect(),
            extra: ends.then(|| Extra {
                text,
                facts: OutputFacts::new(self.version, &choice.spans, figures),
            }),
        }
    }

    async fn collect(mut self, events: &mut RequestEvents) -> Result<Vec<u8>, ApiError> {
        let choices = &mut self.choices;
        let summary = read_to_end(events, |index, progress| {
            if let Some(choice) = choices.get_mut(index as usize) {
                choice.add(progress, true);
            }
        })
        .await?;
        let request = &self.request;
        let prompt = self.choices.first().map_or(&[][..], |first| &first.prompt);
        let most = request.prompt_logprobs();
        let answer = Answer {
            request_id: &self.name,
            choices: (self.choices.iter().enumerate())
                .map(|(index, choice)| {
                    self.choice(index, choice, &choice.tokens, Some(&choice.text))
                })
                .collect(),
            prompt_logprobs: most.map(|most| prompt_logprobs(request.tokenizer(), prompt, most)),
            usage: Some(summary.usage),
        };
        serde_json::to_vec(&answer).map_err(ApiError::internal)
    }
}

#[async_trait]
impl SurfaceWriter for VllmWriter {
    fn progress(&mut self, index: u32, progress: ChoiceProgress) -> Result<Vec<u8>, ApiError> {
        let at = index as usize;
        let mut frames = Vec::new();
        let Some(choice) = self.choices.get_mut(at) else {
            return Ok(frames);
        };
        let tokens = choice.add(progress, false);
        let choice = &self.choices[at];
        if tokens.is_empty() && choice.finish.is_none() {
            return Ok(frames);
        }
        let answer = Answer {
            request_id: &self.name,
            choices: vec![self.choice(at, choice, &tokens, None)],
            prompt_logprobs: None,
            usage: None,
        };
        write_frame(&mut frames, &answer)?;
        Ok(frames)
    }

    fn done(&mut self, summary: &RequestSummary) -> Result<Vec<u8>, ApiError> {
        let mut frames = Vec::new();
        let answer = Answer {
            request_id: &self.name,
            choices: Vec::new(),
            prompt_logprobs: None,
            usage: Some(summary.usage),
        };
        write_frame(&mut frames, &answer)?;
        frames.extend_from_slice(b"data: [DONE]\n\n");
        Ok(frames)
    }

    async fn collect(self: Box<Self>, events: &mut RequestEvents) -> Result<Vec<u8>, ApiError> {
        VllmWriter::collect(*self, events).await
    }
}

/// The answer to a request that was aborted before its body was read.
pub(super) fn aborted_unread(version: u64) -> Value {
    json!({
        "request_id": "",
        "choices": [{
            "index": 0,
            "logprobs": {"content": []},
            "finish_reason": "abort",
            "token_ids": [],
            "text": "",
            "weight_version": version_name(version),
            "weight_versions": [],
        }],
        "usage": Usage::default(),
    })
}
