//! One answer: the JSON of a whole one, or the events of a stream.

use std::sync::Arc;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use refrain_output_parsers::Event;
use refrain_protocol::ApiError;
use refrain_protocol::openai::{
    Answer, ChatChoice, ChatChunkChoice, ChatLogprobs, CompletionChoice, CompletionLogprobs, Delta,
    ErrorBody, FinishReason,
};
use refrain_service_kit::{clock, random};
use serde::Serialize;

use crate::relay::{ChoiceProgress, OutputToken, RelayEvent, RequestEvents, RequestSummary};
use crate::request::{Endpoint, GenerateRequest};
use crate::response::logprobs::{chat_logprobs, completion_logprobs};
use crate::response::message::{self, CallShape};
use crate::response::surface_writer::SurfaceWriter;

/// Bytes of an event without its text, about.
const FRAME_BYTES: usize = 320;

/// Writes the answer to one request.
pub(crate) struct AnswerWriter {
    request: Arc<GenerateRequest>,
    id: String,
    created: u64,
    choices: Vec<WrittenChoice>,
}

/// The part of a choice that was written so far.
#[derive(Clone, Debug, Default)]
struct WrittenChoice {
    has_begun: bool,
    /// Characters of the choice before its next token.
    offset: u64,
}

/// A choice that is collected for a whole answer.
#[derive(Default)]
struct CollectedChoice {
    events: Vec<Event>,
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
        })
    }

    /// Collects all events and writes the whole answer as JSON.
    ///
    /// # Errors
    /// The error of the request.
    pub(crate) async fn collect(mut self, events: &mut RequestEvents) -> Result<Vec<u8>, ApiError> {
        let mut collected = Vec::new();
        collected.resize_with(self.choices.len(), CollectedChoice::default);
        let summary = loop {
            match events.next().await {
                None => {
                    return Err(ApiError::internal("a request ended without a last event"));
                }
                Some(RelayEvent::Failed(error)) => return Err(error),
                Some(RelayEvent::Done(summary)) => break summary,
                Some(RelayEvent::Progress { index, progress }) => {
                    if let Some(choice) = collected.get_mut(index as usize) {
                        for event in progress.events {
                            event.append(&mut choice.events);
                        }
                        choice.tokens.extend(progress.tokens);
                        choice.finish = choice.finish.or(progress.finish);
                    }
                }
            }
        };
        let collected = (0u32..).zip(collected);
        match self.request.endpoint {
            Endpoint::Chat => {
                let choices = collected.map(|(index, choice)| ChatChoice {
                    index,
                    message: message::message(choice.events, self.call_shape()),
                    logprobs: self.chat_logprobs(&choice.tokens),
                    finish_reason: self.call_shape().finish(choice.finish),
                });
                to_json(&self.envelope("chat.completion", choices.collect(), Some(&summary)))
            }
            Endpoint::Completion => {
                let choices: Vec<_> = collected
                    .map(|(index, choice)| {
                        let echo = self.begin_completion(index);
                        CompletionChoice {
                            index,
                            text: echo + &message::text(choice.events),
                            logprobs: self.completion_logprobs(index, &choice.tokens),
                            finish_reason: choice.finish,
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
        let has_logprobs = self.request.wants_logprobs() && !progress.tokens.is_empty();
        match self.request.endpoint {
            Endpoint::Chat => self.chat_progress(&mut frames, index, progress)?,
            Endpoint::Completion => {
                let text = self.begin_completion(index) + &message::text(progress.events);
                if !text.is_empty() || has_logprobs || progress.finish.is_some() {
                    let logprobs = match has_logprobs {
                        true => self.completion_logprobs(index, &progress.tokens),
                        false => None,
                    };
                    let choice = CompletionChoice {
                        index,
                        text,
                        logprobs,
                        finish_reason: progress.finish,
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
            self.chat_frame(frames, index, delta, None, None)?;
        }
        let shape = self.call_shape();
        let has_logprobs = self.request.wants_logprobs() && !progress.tokens.is_empty();
        let mut logprobs = match has_logprobs {
            true => self.chat_logprobs(&progress.tokens),
            false => None,
        };
        for delta in message::deltas(progress.events, shape) {
            self.chat_frame(frames, index, delta, logprobs.take(), None)?;
        }
        if logprobs.is_some() {
            let content = self.request.parsing.is_none().then(String::new);
            let delta = Delta {
                content: content.map(Some),
                ..Delta::default()
            };
            self.chat_frame(frames, index, delta, logprobs, None)?;
        }
        if progress.finish.is_some() {
            let finish = shape.finish(progress.finish);
            self.chat_frame(frames, index, Delta::default(), None, finish)?;
        }
        Ok(())
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
        let wants = request.wants_logprobs();
        wants.then(|| chat_logprobs(&request.model.tokenizer, tokens))
    }

    /// Log-probabilities in the shape of text completions, if asked for.
    fn completion_logprobs(
        &mut self,
        index: u32,
        tokens: &[OutputToken],
    ) -> Option<CompletionLogprobs> {
        let request = &self.request;
        let choice = self.choices.get_mut(index as usize)?;
        let wants = request.wants_logprobs();
        wants.then(|| completion_logprobs(&request.model.tokenizer, tokens, &mut choice.offset))
    }

    /// The echoed prompt, at the first call for a choice.
    fn begin_completion(&mut self, index: u32) -> String {
        let prompt = index as usize / self.request.choices_per_prompt.max(1) as usize;
        match self.choices.get_mut(index as usize) {
            Some(choice) if !choice.has_begun => {
                choice.has_begun = true;
                let prompt = self.request.prompts.get(prompt);
                let echo = prompt.map_or("", |prompt| &*prompt.echo);
                choice.offset = echo.chars().count() as u64;
                echo.to_owned()
            }
            _ => String::new(),
        }
    }

    fn chat_frame(
        &self,
        frames: &mut Vec<u8>,
        index: u32,
        delta: Delta,
        logprobs: Option<ChatLogprobs>,
        finish_reason: Option<FinishReason>,
    ) -> Result<(), ApiError> {
        let choice = ChatChunkChoice {
            index,
            delta,
            logprobs,
            finish_reason,
        };
        let event = self.envelope("chat.completion.chunk", vec![choice], None);
        write_frame(frames, &event)
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
            model: &self.request.model.id,
            choices,
            usage: match summary {
                Some(summary) => Some(Some(summary.usage)),
                None => self.request.include_usage.then_some(None),
            },
            metrics: summary.map(|summary| summary.metrics.clone()),
        }
    }
}

impl SurfaceWriter for AnswerWriter {
    fn progress(&mut self, index: u32, progress: ChoiceProgress) -> Result<Vec<u8>, ApiError> {
        AnswerWriter::progress(self, index, progress)
    }

    fn done(&mut self, summary: &RequestSummary) -> Result<Vec<u8>, ApiError> {
        AnswerWriter::done(self, summary)
    }

    /// An event with a top-level `error`. No `[DONE]` follows.
    fn failed(&mut self, error: &ApiError) -> Result<Vec<u8>, ApiError> {
        let mut frames = Vec::new();
        write_frame(&mut frames, &ErrorBody::from(error))?;
        Ok(frames)
    }

    fn collect<'a>(
        self: Box<Self>,
        events: &'a mut RequestEvents,
    ) -> BoxFuture<'a, Result<Vec<u8>, ApiError>>
    where
        Self: 'a,
    {
        AnswerWriter::collect(*self, events).boxed()
    }
}

fn to_json<T: Serialize>(value: &T) -> Result<Vec<u8>, ApiError> {
    serde_json::to_vec(value).map_err(ApiError::internal)
}

/// Writes one event of a stream.
pub(super) fn write_frame<T: Serialize>(frames: &mut Vec<u8>, value: &T) -> Result<(), ApiError> {
    frames.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *frames, value).map_err(ApiError::internal)?;
    frames.extend_from_slice(b"\n\n");
    Ok(())
}
