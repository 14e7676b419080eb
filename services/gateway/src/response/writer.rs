//! One answer: the JSON of a whole one, or the events of a stream.

use std::sync::Arc;

use async_trait::async_trait;
use refrain_output_parsers::Event;
use refrain_protocol::openai::{
    Answer, ChatChoice, ChatChunkChoice, ChatLogprobs, CompletionChoice, CompletionLogprobs, Delta,
    FinishReason, PromptLogprobs, TracedStep, WeightSpan,
};
use refrain_protocol::{ApiError, TokenId};
use refrain_service_kit::{clock, random};
use refrain_tokenization::{Detokenizer, STAGE};
use serde::Serialize;

use crate::relay::{ChoiceProgress, KeptStep, OutputToken, RequestEvents, RequestSummary};
use crate::request::{Endpoint, GenerateRequest, PreparedPrompt};
use crate::response::best_of::{best, mean_logprob};
use crate::response::logprobs::{TokenNames, chat_logprobs, completion_logprobs, prompt_logprobs};
use crate::response::message::{self, CallShape};
use crate::response::surface_writer::{SurfaceWriter, read_to_end, write_frame};
use crate::response::weight_spans::{add_weight_spans, weight_spans};

/// Bytes of an event without its text, about.
const FRAME_BYTES: usize = 320;

/// Writes the answer to one request.
pub(crate) struct AnswerWriter {
    request: Arc<GenerateRequest>,
    id: String,
    created: u64,
    choices: Vec<WrittenChoice>,
    /// The text of the steps that events have. A request that asks for its steps has one choice.
    step_text: Option<Detokenizer>,
}

/// The part of a choice that was written so far.
#[derive(Clone, Debug, Default)]
struct WrittenChoice {
    has_begun: bool,
    /// Characters of the choice before its next token.
    offset: u64,
    /// Versions of the weights that sampled it so far, for a trainer.
    spans: Vec<WeightSpan>,
}

/// A choice that is collected for a whole answer.
#[derive(Default)]
struct CollectedChoice {
    events: Vec<Event>,
    prompt: Vec<OutputToken>,
    tokens: Vec<OutputToken>,
    finish: Option<FinishReason>,
}

impl AnswerWriter {
    /// Creates the writer of an answer with a new id.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(crate) fn new(request: Arc<GenerateRequest>) -> Result<Self, ApiError> {
        let id = random::u128()?;
        let prefix = match request.endpoint {
            Endpoint::Chat => "chatcmpl",
            Endpoint::Completion => "cmpl",
        };
        let choices = vec![WrittenChoice::default(); request.choice_count()];
        Ok(AnswerWriter {
            id: format!("{prefix}-{id:032x}"),
            created: clock::unix_s(),
            request,
            choices,
            step_text: None,
        })
    }

    /// Collects all events and writes the whole answer as JSON.
    ///
    /// # Errors
    /// The error of the request.
    pub(crate) async fn collect(mut self, events: &mut RequestEvents) -> Result<Vec<u8>, ApiError> {
        let mut collected = Vec::new();
        collected.resize_with(self.choices.len(), CollectedChoice::default);
        let summary = read_to_end(events, |index, progress| {
            if let Some(choice) = collected.get_mut(index as usize) {
                for event in progress.events {
                    event.append(&mut choice.events);
                }
                choice.prompt.extend(progress.prompt);
                choice.tokens.extend(progress.tokens);
                choice.finish = choice.finish.or(progress.finish);
            }
        })
        .await?;
        match self.request.endpoint {
            Endpoint::Chat => {
                let prompt = collected.first().map(|choice| &*choice.prompt);
                let prompt_logprobs = prompt.and_then(|prompt| self.prompt_logprobs(prompt));
                let choices = (0u32..).zip(collected).map(|(index, choice)| ChatChoice {
                    index,
                    message: message::message(choice.events, self.call_shape()),
                    logprobs: self.chat_logprobs(&choice.tokens),
                    finish_reason: self.finish_reason(choice.finish),
                    token_ids: self.token_ids(&choice.tokens),
                });
                let choices = choices.collect();
                let mut answer = self.envelope("chat.completion", choices, Some(&summary));
                answer.prompt_token_ids = self.prompt_token_ids(0);
                answer.prompt_logprobs = prompt_logprobs;
                to_json(&answer)
            }
            Endpoint::Completion => {
                let answered = (0u32..).zip(self.answered(collected));
                let choices: Vec<_> = answered
                    .map(|(index, (run, choice))| {
                        let token_ids = self.token_ids(&choice.tokens);
                        let weight_versions = self.weight_versions(&choice.tokens);
                        let prompt_logprobs = self.prompt_logprobs(&choice.prompt);
                        let (echo, scored) =
                            self.begin_completion(run, choice.prompt, choice.tokens);
                        CompletionChoice {
                            index,
                            text: echo + &message::text(choice.events),
                            logprobs: self.completion_logprobs(run, &scored),
                            finish_reason: choice.finish,
                            token_ids,
                            prompt_token_ids: self.prompt_token_ids(run),
                            prompt_logprobs,
                            weight_versions,
                        }
                    })
                    .collect();
                to_json(&self.envelope("text_completion", choices, Some(&summary)))
            }
        }
    }

    /// Writes the events for the new output of a choice.
    ///
    /// # Errors
    /// A value cannot be written as JSON, which would be a fault of this service.
    pub(crate) fn progress(
        &mut self,
        index: u32,
        progress: ChoiceProgress,
    ) -> Result<Vec<u8>, ApiError> {
        let mut frames = Vec::with_capacity(FRAME_BYTES);
        let has_tokens = !progress.tokens.is_empty() || !progress.prompt.is_empty();
        let has_logprobs = self.request.output.top_logprobs.is_some() && has_tokens;
        let has_ids = self.request.output.has_token_ids && has_tokens;
        match self.request.endpoint {
            Endpoint::Chat => self.chat_progress(&mut frames, index, progress)?,
            Endpoint::Completion => {
                let is_first = self
                    .choices
                    .get(index as usize)
                    .is_some_and(|it| !it.has_begun);
                let token_ids = self.token_ids(&progress.tokens);
                let ends = progress.finish.is_some();
                let weight_versions = self.streamed_weight_versions(index, &progress.tokens, ends);
                let (echo, scored) = self.begin_completion(index, progress.prompt, progress.tokens);
                let text = echo + &message::text(progress.events);
                if !text.is_empty() || has_logprobs || has_ids || ends {
                    let logprobs = match has_logprobs {
                        true => self.completion_logprobs(index, &scored),
                        false => None,
                    };
                    let choice = CompletionChoice {
                        index,
                        text,
                        logprobs,
                        finish_reason: progress.finish,
                        token_ids,
                        prompt_token_ids: self.prompt_token_ids(index).filter(|_| is_first),
                        prompt_logprobs: None,
                        weight_versions,
                    };
                    let event = self.envelope("text_completion", vec![choice], None);
                    write_frame(&mut frames, &event)?;
                }
            }
        }
        Ok(frames)
    }

    fn chat_progress(
        &mut self,
        frames: &mut Vec<u8>,
        index: u32,
        progress: ChoiceProgress,
    ) -> Result<(), ApiError> {
        let choice = self.choices.get_mut(index as usize);
        if choice.is_some_and(|choice| !std::mem::replace(&mut choice.has_begun, true)) {
            // A message that turns out to be a call has no content. Text may follow null in a stream.
            let content = self.request.parsing.is_none().then(String::new);
            let delta = Delta {
                role: Some("assistant"),
                content: Some(content),
                ..Delta::default()
            };
            let mut event = self.chat_event(index, delta, None, None);
            event.prompt_token_ids = self.prompt_token_ids(index);
            write_frame(frames, &event)?;
        }
        let shape = self.call_shape();
        let has_tokens = !progress.tokens.is_empty();
        let logprobs = self.chat_logprobs(&progress.tokens);
        let mut logprobs = logprobs.filter(|_| has_tokens);
        let mut token_ids = self.token_ids(&progress.tokens).filter(|_| has_tokens);
        let mut steps = self.traced(&progress.steps);
        let mut deltas: Vec<Delta> = message::deltas(progress.events, shape).collect();
        let has_more = logprobs.is_some() || token_ids.is_some() || !steps.is_empty();
        if deltas.is_empty() && has_more {
            let content = self.request.parsing.is_none().then(String::new);
            deltas.push(Delta {
                content: content.map(Some),
                ..Delta::default()
            });
        }
        for delta in deltas {
            let mut event = self.chat_event(index, delta, logprobs.take(), None);
            for choice in &mut event.choices {
                choice.token_ids = token_ids.take();
                choice.steps = std::mem::take(&mut steps);
            }
            write_frame(frames, &event)?;
        }
        if progress.finish.is_some() {
            let finish = self.finish_reason(progress.finish);
            let event = self.chat_event(index, Delta::default(), None, finish);
            write_frame(frames, &event)?;
        }
        Ok(())
    }

    /// The reason of the end as the client knows it. With OpenAI an output ends with `stop` where its call was named.
    fn finish_reason(&self, finish: Option<FinishReason>) -> Option<FinishReason> {
        match finish {
            Some(FinishReason::ToolCalls) if self.request.names_call => Some(FinishReason::Stop),
            finish => self.call_shape().finish(finish),
        }
    }

    fn call_shape(&self) -> CallShape {
        match self.request.answers_function_call {
            true => CallShape::Function,
            false => CallShape::Tools,
        }
    }

    /// Writes the events at the end: the usage, if asked for, and `[DONE]`.
    ///
    /// # Errors
    /// As [`AnswerWriter::progress`].
    pub(crate) fn done(&self, summary: &RequestSummary) -> Result<Vec<u8>, ApiError> {
        let mut frames = Vec::new();
        if self.request.include_usage {
            let object = match self.request.endpoint {
                Endpoint::Chat => "chat.completion.chunk",
                Endpoint::Completion => "text_completion",
            };
            let event = self.envelope::<ChatChunkChoice>(object, Vec::new(), Some(summary));
            write_frame(&mut frames, &event)?;
        }
        frames.extend_from_slice(b"data: [DONE]\n\n");
        Ok(frames)
    }

    /// Log-probabilities in the shape of chats, if asked for.
    fn chat_logprobs(&self, tokens: &[OutputToken]) -> Option<ChatLogprobs> {
        let request = &self.request;
        let most = request.output.top_logprobs?;
        Some(chat_logprobs(self.names(), tokens, most))
    }

    /// Log-probabilities in the shape of text completions, if asked for.
    fn completion_logprobs(
        &mut self,
        index: u32,
        tokens: &[OutputToken],
    ) -> Option<CompletionLogprobs> {
        let request = self.request.clone();
        let choice = self.choices.get_mut(index as usize)?;
        let most = request.output.top_logprobs?;
        let names = TokenNames {
            tokenizer: &request.model.tokenizer,
            are_ids: request.output.names_ids,
        };
        let offset = &mut choice.offset;
        Some(completion_logprobs(names, tokens, most, offset))
    }

    /// The names of tokens in log-probabilities.
    fn names(&self) -> TokenNames<'_> {
        TokenNames {
            tokenizer: &self.request.model.tokenizer,
            are_ids: self.request.output.names_ids,
        }
    }

    /// The versions that sampled an output, if a trainer asked.
    fn weight_versions(&self, tokens: &[OutputToken]) -> Option<Vec<WeightSpan>> {
        let is_trainers = self.request.abort.is_some();
        is_trainers.then(|| weight_spans(tokens))
    }

    /// Adds new tokens of a stream to the versions that sampled the choice. Its last event has all of them, if a
    /// trainer asked.
    fn streamed_weight_versions(
        &mut self,
        index: u32,
        tokens: &[OutputToken],
        ends: bool,
    ) -> Option<Vec<WeightSpan>> {
        self.request.abort.as_ref()?;
        let spans = &mut self.choices.get_mut(index as usize)?.spans;
        add_weight_spans(spans, tokens);
        ends.then(|| std::mem::take(spans))
    }

    /// Log-probabilities of the prompt, if asked for. The tokens are all but its first.
    fn prompt_logprobs(&self, tokens: &[OutputToken]) -> Option<PromptLogprobs> {
        let request = &self.request;
        let most = request.output.prompt_logprobs?;
        Some(prompt_logprobs(&request.model.tokenizer, tokens, most))
    }

    /// The choices of an answer, with their numbers: of each prompt the best ones, if there are more than that.
    fn answered(&self, collected: Vec<CollectedChoice>) -> Vec<(u32, CollectedChoice)> {
        let request = &self.request;
        let keep = request.answers_per_prompt as usize;
        let per_prompt = request.choices_per_prompt.max(1) as usize;
        if keep >= per_prompt {
            return (0..).zip(collected).collect();
        }
        let mut left: Vec<_> = (0u32..).zip(collected).map(Some).collect();
        let mut answered = Vec::new();
        for of_prompt in left.chunks_mut(per_prompt) {
            let means = of_prompt.iter().flatten();
            let means: Vec<f64> = means
                .map(|(_, choice)| mean_logprob(&choice.tokens))
                .collect();
            let kept = best(&means, keep).into_iter();
            answered.extend(kept.filter_map(|place| of_prompt[place].take()));
        }
        answered
    }

    /// The ids of output tokens, if asked for.
    fn token_ids(&self, tokens: &[OutputToken]) -> Option<Vec<TokenId>> {
        let wants = self.request.output.has_token_ids;
        wants.then(|| tokens.iter().map(|token| token.id).collect())
    }

    /// New steps of a stream, with the text of their tokens.
    fn traced(&mut self, steps: &[KeptStep]) -> Vec<TracedStep> {
        let tokenizer = &self.request.model.tokenizer;
        let mut of_step = |step: &KeptStep| {
            let text = self
                .step_text
                .get_or_insert_with(|| Detokenizer::new(tokenizer.clone()));
            step.traced(text)
        };
        steps.iter().map(&mut of_step).collect()
    }

    /// The prompt of a choice.
    fn prompt(&self, index: u32) -> Option<&PreparedPrompt> {
        let per_prompt = self.request.choices_per_prompt.max(1);
        self.request.prompts.get((index / per_prompt) as usize)
    }

    /// The token ids of the prompt of a choice, if asked for.
    fn prompt_token_ids(&self, index: u32) -> Option<Vec<TokenId>> {
        let wants = self.request.output.has_token_ids;
        let prompt = self.prompt(index).filter(|_| wants)?;
        Some(prompt.tokens.to_vec())
    }

    /// The echoed prompt at the first call for a choice, and the tokens whose log-probabilities come beside the text:
    /// those of the prompt if they are echoed too, and new output. The first token of a prompt has no
    /// log-probability, since nothing comes before it.
    fn begin_completion(
        &mut self,
        index: u32,
        prompt: Vec<OutputToken>,
        tokens: Vec<OutputToken>,
    ) -> (String, Vec<OutputToken>) {
        let echoes_logprobs = self.request.output.echoes_logprobs;
        let begins = self
            .choices
            .get_mut(index as usize)
            .is_some_and(|choice| !std::mem::replace(&mut choice.has_begun, true));
        let (mut echo, mut first) = (String::new(), None);
        if let Some(prompt) = self.prompt(index).filter(|_| begins) {
            echo.clone_from(&prompt.echo);
            first = prompt.tokens.first().map(|id| OutputToken {
                id: *id,
                logprob: None,
                weight_version: 0,
            });
            if !echoes_logprobs && let Some(choice) = self.choices.get_mut(index as usize) {
                choice.offset = echo.chars().count() as u64;
            }
        }
        match echoes_logprobs {
            true => (
                echo,
                first.into_iter().chain(prompt).chain(tokens).collect(),
            ),
            false => (echo, tokens),
        }
    }

    fn chat_event(
        &self,
        index: u32,
        delta: Delta,
        logprobs: Option<ChatLogprobs>,
        finish_reason: Option<FinishReason>,
    ) -> Answer<'_, ChatChunkChoice> {
        let choice = ChatChunkChoice {
            index,
            delta,
            logprobs,
            finish_reason,
            token_ids: None,
            steps: Vec::new(),
        };
        self.envelope("chat.completion.chunk", vec![choice], None)
    }

    /// The fields of all answers and events. In an event, `usage` is null if a later one will have it.
    fn envelope<C>(
        &self,
        object: &'static str,
        choices: Vec<C>,
        summary: Option<&RequestSummary>,
    ) -> Answer<'_, C> {
        Answer {
            id: &self.id,
            object,
            created: self.created,
            model: &self.request.model_name,
            choices,
            prompt_token_ids: None,
            prompt_logprobs: None,
            usage: match summary {
                Some(summary) => Some(Some(summary.usage)),
                None => self.request.include_usage.then_some(None),
            },
            metrics: summary.and_then(|summary| summary.metrics.clone()),
        }
    }
}

#[async_trait]
impl SurfaceWriter for AnswerWriter {
    fn progress(&mut self, index: u32, progress: ChoiceProgress) -> Result<Vec<u8>, ApiError> {
        AnswerWriter::progress(self, index, progress)
    }

    fn done(&mut self, summary: &RequestSummary) -> Result<Vec<u8>, ApiError> {
        AnswerWriter::done(self, summary)
    }

    async fn collect(self: Box<Self>, events: &mut RequestEvents) -> Result<Vec<u8>, ApiError> {
        AnswerWriter::collect(*self, events).await
    }
}

fn to_json<T: Serialize>(value: &T) -> Result<Vec<u8>, ApiError> {
    let _stage = tracing::trace_span!(target: STAGE, "write").entered();
    serde_json::to_vec(value).map_err(ApiError::internal)
}
