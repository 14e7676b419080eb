//! The answer to a request of OpenAI's Responses: the JSON of a whole one, or the events of a stream.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use refrain_protocol::openai::{FinishReason, Usage};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::{clock, random};
use serde_json::{Value, json};

use super::echo::Echo;
use super::history::HistoryItem;
use super::input_items::call_value;
use super::store::StoredResponse;
use super::tools::CalledTool;
use crate::relay::{ChoiceProgress, RequestEvents, RequestSummary};
use crate::request::GenerateRequest;
use crate::response::{SurfaceWriter, read_to_end, write_named_frame};
use crate::surfaces::items::{Change, Item, ItemEnd, ItemKind, Items};

/// The beginning of the names of events about the text that a custom tool takes.
const CUSTOM_INPUT: &str = "response.custom_tool_call_input";

/// Writes the answer to one request.
pub(in crate::surfaces) struct ResponsesWriter {
    id: u128,
    created: u64,
    model: String,
    echo: Echo,
    items: Items,
    finish: Option<FinishReason>,
    /// The number of the next event.
    sequence: u64,
}

impl ResponsesWriter {
    /// Creates the writer of an answer with a new id.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(in crate::surfaces) fn new(
        request: &GenerateRequest,
        echo: Echo,
    ) -> Result<Self, ApiError> {
        let (id, model) = (random::u128()?, request.model_name.clone());
        Ok(ResponsesWriter::with(id, clock::unix_s(), model, echo))
    }

    fn with(id: u128, created: u64, model: String, echo: Echo) -> Self {
        ResponsesWriter {
            id,
            created,
            model,
            echo,
            items: Items::default(),
            finish: None,
            sequence: 0,
        }
    }

    fn take(&mut self, progress: ChoiceProgress) -> Vec<Change> {
        let mut changes = Vec::new();
        for event in progress.events {
            self.items.apply(event, &mut changes);
        }
        self.finish = self.finish.or(progress.finish);
        changes
    }

    fn response_id(&self) -> String {
        format!("resp_{:032x}", self.id)
    }

    fn item_id(&self, number: usize, kind: &ItemKind) -> String {
        let prefix = match kind {
            ItemKind::Text => "msg",
            ItemKind::Reasoning => "rs",
            ItemKind::Call { name, .. } if self.echo.tools.called(name).is_custom => "ctc",
            ItemKind::Call { .. } => "fc",
        };
        format!("{prefix}_{:032x}_{number}", self.id)
    }

    fn call_id(&self, number: usize, id: Option<&str>) -> String {
        match id {
            Some(id) => id.to_owned(),
            None => format!("call_{:032x}_{number}", self.id),
        }
    }

    /// The status of the response once it has ended.
    fn end_status(&self) -> &'static str {
        match self.finish {
            Some(FinishReason::Length) => "incomplete",
            _ => "completed",
        }
    }

    /// The response with all its items. It has a usage only at its end.
    fn response(&self, status: &str, usage: Option<&Usage>, error: Option<&ApiError>) -> Value {
        let mut response = self.echo.fields.clone();
        let items = self.items.all().iter().enumerate();
        let output: Vec<Value> = items
            .map(|(number, item)| self.item(number, item, self.item_status(number, item)))
            .collect();
        let is_cut = status == "incomplete";
        let error =
            error.map(|error| json!({"code": error_code(error.kind), "message": error.message}));
        let fields = [
            ("id", json!(self.response_id())),
            ("object", json!("response")),
            ("created_at", json!(self.created)),
            ("status", json!(status)),
            ("error", json!(error)),
            (
                "incomplete_details",
                json!(is_cut.then(|| json!({"reason": "max_output_tokens"}))),
            ),
            ("model", json!(self.model)),
            ("output", json!(output)),
            ("usage", json!(usage.map(usage_value))),
        ];
        response.extend(fields.map(|(name, value)| (name.to_owned(), value)));
        Value::Object(response)
    }

    /// The status of an item. Only the last one can have been cut off.
    fn item_status(&self, number: usize, item: &Item) -> &'static str {
        let is_last = number + 1 == self.items.all().len();
        match item.end {
            ItemEnd::Open => "in_progress",
            ItemEnd::Broken => "incomplete",
            ItemEnd::Complete if is_last => self.end_status(),
            ItemEnd::Complete => "completed",
        }
    }

    /// An item with its text.
    fn item(&self, number: usize, item: &Item, status: &str) -> Value {
        let id = self.item_id(number, &item.kind);
        match &item.kind {
            ItemKind::Text => {
                let parts = match item.text.is_empty() {
                    true => Vec::new(),
                    false => vec![part(&item.kind, &item.text)],
                };
                json!({"type": "message", "id": id, "status": status, "role": "assistant", "content": parts})
            }
            ItemKind::Reasoning => {
                let parts = match item.text.is_empty() {
                    true => Vec::new(),
                    false => vec![part(&item.kind, &item.text)],
                };
                json!({
                    "type": "reasoning", "id": id, "status": status,
                    "summary": [], "content": parts, "encrypted_content": null,
                })
            }
            ItemKind::Call { id: call, name } => {
                let tool = self.echo.tools.called(name);
                let is_whole = !tool.is_custom || item.end != ItemEnd::Open;
                let given = is_whole.then(|| tool.given(&item.text));
                let given = given.unwrap_or_default();
                let call = self.call_id(number, call.as_deref());
                call_value(&id, status, &call, &tool, &given)
            }
        }
    }

    /// Writes an event with the next number.
    fn event(
        &mut self,
        frames: &mut Vec<u8>,
        kind: &str,
        mut event: Value,
    ) -> Result<(), ApiError> {
        event["type"] = kind.into();
        event["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        write_named_frame(frames, kind, &event)
    }

    fn write(&mut self, frames: &mut Vec<u8>, changes: Vec<Change>) -> Result<(), ApiError> {
        for change in changes {
            match change {
                Change::Begin(at) => self.begun(frames, at)?,
                Change::Grow(at, text) => self.grown(frames, at, &text)?,
                Change::End(at) => self.ended(frames, at)?,
            }
        }
        Ok(())
    }

    /// The custom tool that an item calls.
    fn custom(&self, kind: &ItemKind) -> Option<CalledTool> {
        let ItemKind::Call { name, .. } = kind else {
            return None;
        };
        Some(self.echo.tools.called(name)).filter(|tool| tool.is_custom)
    }

    /// An event about the text of an item, with the fields that all of them have.
    fn about(&self, at: usize, kind: &ItemKind, more: Value) -> Value {
        let mut event = json!({"item_id": self.item_id(at, kind), "output_index": at});
        if !is_call(kind) {
            event["content_index"] = 0.into();
        }
        if let (Value::Object(event), Value::Object(more)) = (&mut event, more) {
            event.extend(more);
        }
        event
    }

    fn begun(&mut self, frames: &mut Vec<u8>, at: usize) -> Result<(), ApiError> {
        let Some(kind) = self.items.all().get(at).map(|item| item.kind.clone()) else {
            return Ok(());
        };
        let item = Item {
            kind,
            text: String::new(),
            end: ItemEnd::Open,
        };
        let added = self.item(at, &item, "in_progress");
        let event = json!({"output_index": at, "item": added});
        self.event(frames, "response.output_item.added", event)?;
        if !is_call(&item.kind) {
            let event = self.about(at, &item.kind, json!({"part": part(&item.kind, "")}));
            self.event(frames, "response.content_part.added", event)?;
        }
        Ok(())
    }

    fn grown(&mut self, frames: &mut Vec<u8>, at: usize, text: &str) -> Result<(), ApiError> {
        // The item itself is not copied: it has all the text so far.
        let Some(item) = self.items.all().get(at) else {
            return Ok(());
        };
        if self.custom(&item.kind).is_some() {
            // Its text is whole only with its last argument.
            return Ok(());
        }
        let (name, _) = text_events(&item.kind);
        let more = match item.kind {
            ItemKind::Text => json!({"delta": text, "logprobs": []}),
            _ => json!({"delta": text}),
        };
        let event = self.about(at, &item.kind, more);
        self.event(frames, name, event)
    }

    fn ended(&mut self, frames: &mut Vec<u8>, at: usize) -> Result<(), ApiError> {
        let Some(item) = self.items.all().get(at).cloned() else {
            return Ok(());
        };
        let kind = &item.kind;
        let (_, name) = text_events(kind);
        let more = match kind {
            ItemKind::Text => json!({"text": item.text, "logprobs": []}),
            ItemKind::Reasoning => json!({"text": item.text}),
            ItemKind::Call { name, .. } => {
                json!({"name": self.echo.tools.called(name).name, "arguments": item.text})
            }
        };
        if let Some(tool) = self.custom(kind) {
            let input = tool.given(&item.text);
            let [delta, done] = ["delta", "done"].map(|end| format!("{CUSTOM_INPUT}.{end}"));
            let event = self.about(at, kind, json!({"delta": input}));
            self.event(frames, &delta, event)?;
            let event = self.about(at, kind, json!({"input": input}));
            self.event(frames, &done, event)?;
        } else {
            let event = self.about(at, kind, more);
            self.event(frames, name, event)?;
        }
        if !is_call(kind) {
            let event = self.about(at, kind, json!({"part": part(kind, &item.text)}));
            self.event(frames, "response.content_part.done", event)?;
        }
        let ended = self.item(at, &item, self.item_status(at, &item));
        let event = json!({"output_index": at, "item": ended});
        self.event(frames, "response.output_item.done", event)
    }

    /// Ends the output. The changes are those of the last item.
    fn end(&mut self, usage: &Usage) -> Result<(Vec<u8>, Value), ApiError> {
        let (mut frames, mut changes) = (Vec::new(), Vec::new());
        self.items.finish(&mut changes);
        self.write(&mut frames, changes)?;
        let response = self.response(self.end_status(), Some(usage), None);
        self.store(&response);
        Ok((frames, response))
    }

    fn store(&self, response: &Value) {
        let Some(store) = &self.echo.store else {
            return;
        };
        let mut history = self.echo.history.clone();
        let mut items = Vec::new();
        for (number, item) in self.items.all().iter().enumerate() {
            items.push(self.item_id(number, &item.kind));
            let text = item.text.clone();
            history.push(Arc::new(match &item.kind {
                ItemKind::Text => HistoryItem::Message {
                    role: "assistant",
                    text,
                },
                ItemKind::Reasoning => HistoryItem::Reasoning(text),
                ItemKind::Call { id, name } => {
                    let tool = self.echo.tools.called(name);
                    HistoryItem::Call {
                        id: self.call_id(number, id.as_deref()),
                        given: tool.given(&text),
                        tool,
                    }
                }
            }));
        }
        let stored = StoredResponse {
            body: Bytes::from(response.to_string()),
            history,
            items,
        };
        store.insert(
            &self.echo.tenant,
            &self.response_id(),
            stored,
            Instant::now(),
        );
    }
}

#[async_trait]
impl SurfaceWriter for ResponsesWriter {
    fn begin(&mut self) -> Result<Vec<u8>, ApiError> {
        let mut frames = Vec::new();
        for kind in ["response.created", "response.in_progress"] {
            let response = self.response("in_progress", None, None);
            self.event(&mut frames, kind, json!({"response": response}))?;
        }
        Ok(frames)
    }

    fn progress(&mut self, _index: u32, progress: ChoiceProgress) -> Result<Vec<u8>, ApiError> {
        let changes = self.take(progress);
        let mut frames = Vec::new();
        self.write(&mut frames, changes)?;
        Ok(frames)
    }

    fn done(&mut self, summary: &RequestSummary) -> Result<Vec<u8>, ApiError> {
        let (mut frames, response) = self.end(&summary.usage)?;
        let kind = format!("response.{}", self.end_status());
        self.event(&mut frames, &kind, json!({"response": response}))?;
        Ok(frames)
    }

    fn failed(&mut self, error: &ApiError) -> Result<Vec<u8>, ApiError> {
        let response = self.response("failed", None, Some(error));
        let mut frames = Vec::new();
        self.event(
            &mut frames,
            "response.failed",
            json!({"response": response}),
        )?;
        Ok(frames)
    }

    async fn collect(mut self: Box<Self>, events: &mut RequestEvents) -> Result<Vec<u8>, ApiError> {
        let summary = read_to_end(events, |_, progress| {
            self.take(progress);
        })
        .await?;
        let (_, response) = self.end(&summary.usage)?;
        Ok(response.to_string().into_bytes())
    }
}

fn is_call(kind: &ItemKind) -> bool {
    matches!(kind, ItemKind::Call { .. })
}

/// The names of the events by which the text of an item grows and ends.
fn text_events(kind: &ItemKind) -> (&'static str, &'static str) {
    match kind {
        ItemKind::Text => ("response.output_text.delta", "response.output_text.done"),
        ItemKind::Reasoning => (
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
        ),
        ItemKind::Call { .. } => (
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
        ),
    }
}

/// The part of a message or of reasoning with its text.
fn part(kind: &ItemKind, text: &str) -> Value {
    match kind {
        ItemKind::Reasoning => json!({"type": "reasoning_text", "text": text}),
        _ => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
    }
}

fn usage_value(usage: &Usage) -> Value {
    let reasoning = usage
        .completion_tokens_details
        .map_or(0, |details| details.reasoning_tokens);
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.total_tokens,
    })
}

fn error_code(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Overloaded => "rate_limit_exceeded",
        ErrorKind::InvalidRequest => "invalid_prompt",
        _ => "server_error",
    }
}

#[cfg(test)]
mod tests;
