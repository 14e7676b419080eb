//! The answer to a request of Anthropic's Messages: the JSON of a whole one, or the events of a stream.

use std::sync::Arc;

use async_trait::async_trait;
use refrain_protocol::ApiError;
use refrain_protocol::openai::{FinishReason, Usage};
use refrain_service_kit::random;
use serde_json::{Value, json};

use crate::relay::{ChoiceProgress, RequestEvents, RequestSummary};
use crate::request::GenerateRequest;
use crate::response::{SurfaceWriter, read_to_end, write_named_frame};
use crate::surfaces::items::{Change, Item, ItemKind, Items};
use crate::surfaces::messages::error::error_value;

/// The signature of reasoning. Clients send it back with the reasoning, and nothing here reads it.
const SIGNATURE: &str = "refrain";

/// A comment that keeps a stream open, as Anthropic sends it.
const PING: &[u8] = b"event: ping\ndata: {\"type\": \"ping\"}\n\n";

/// Writes the answer to one request.
pub(in crate::surfaces) struct MessagesWriter {
    id: u128,
    model: String,
    prompt_tokens: u64,
    stops: Arc<[String]>,
    items: Items,
    finish: Option<FinishReason>,
    /// The stop text that ended the output.
    stop: Option<String>,
}

impl MessagesWriter {
    /// Creates the writer of an answer with a new id.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(in crate::surfaces) fn new(request: &GenerateRequest) -> Result<Self, ApiError> {
        let prompt = request.prompts.first();
        let prompt_tokens = prompt.map_or(0, |prompt| prompt.tokens.len() as u64);
        let (model, stops) = (request.model_name.clone(), request.stops.clone());
        let id = random::u128()?;
        Ok(MessagesWriter::with(id, model, prompt_tokens, stops))
    }

    fn with(id: u128, model: String, prompt_tokens: u64, stops: Arc<[String]>) -> Self {
        MessagesWriter {
            id,
            model,
            prompt_tokens,
            stops,
            items: Items::default(),
            finish: None,
            stop: None,
        }
    }

    fn take(&mut self, progress: ChoiceProgress) -> Vec<Change> {
        let mut changes = Vec::new();
        for event in progress.events {
            self.items.apply(event, &mut changes);
        }
        self.finish = self.finish.or(progress.finish);
        if let Some(number) = progress.stop_text {
            self.stop = self.stops.get(number).cloned();
        }
        changes
    }

    fn message(&self, content: Vec<Value>, usage: Value, ended: bool) -> Value {
        json!({
            "id": format!("msg_{:032x}", self.id),
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": ended.then(|| self.stop_reason()),
            "stop_sequence": self.stop,
            "usage": usage,
        })
    }

    fn stop_reason(&self) -> &'static str {
        match self.finish {
            Some(FinishReason::Length) => "max_tokens",
            _ if self.stop.is_some() => "stop_sequence",
            _ if self.items.has_calls() => "tool_use",
            _ => "end_turn",
        }
    }

    fn call_id(&self, number: usize, id: Option<&str>) -> String {
        match id {
            Some(id) => id.to_owned(),
            None => format!("toolu_{:032x}_{number}", self.id),
        }
    }

    /// A block as it begins in a stream.
    fn begun(&self, number: usize, item: &Item) -> Value {
        match &item.kind {
            ItemKind::Text => json!({"type": "text", "text": ""}),
            ItemKind::Reasoning => json!({"type": "thinking", "thinking": "", "signature": ""}),
            ItemKind::Call { id, name } => {
                let id = self.call_id(number, id.as_deref());
                json!({"type": "tool_use", "id": id, "name": name, "input": {}})
            }
        }
    }

    /// A whole block.
    fn block(&self, number: usize, item: &Item) -> Value {
        let mut block = self.begun(number, item);
        match &item.kind {
            ItemKind::Text => block["text"] = item.text.as_str().into(),
            ItemKind::Reasoning => {
                block["thinking"] = item.text.as_str().into();
                block["signature"] = SIGNATURE.into();
            }
            ItemKind::Call { .. } => block["input"] = input(&item.text),
        }
        block
    }

    fn write(&self, frames: &mut Vec<u8>, changes: Vec<Change>) -> Result<(), ApiError> {
        for change in changes {
            match change {
                Change::Begin(index) => {
                    let block = self
                        .items
                        .all()
                        .get(index)
                        .map(|item| self.begun(index, item));
                    write(
                        frames,
                        &json!({"type": "content_block_start", "index": index, "content_block": block}),
                    )?;
                }
                Change::Grow(index, text) => {
                    let delta = match self.kind(index) {
                        Some(ItemKind::Reasoning) => {
                            json!({"type": "thinking_delta", "thinking": text})
                        }
                        Some(ItemKind::Call { .. }) => {
                            json!({"type": "input_json_delta", "partial_json": text})
                        }
                        _ => json!({"type": "text_delta", "text": text}),
                    };
                    write_delta(frames, index, &delta)?;
                }
                Change::End(index) => {
                    if self.kind(index) == Some(&ItemKind::Reasoning) {
                        let delta = json!({"type": "signature_delta", "signature": SIGNATURE});
                        write_delta(frames, index, &delta)?;
                    }
                    write(
                        frames,
                        &json!({"type": "content_block_stop", "index": index}),
                    )?;
                }
            }
        }
        Ok(())
    }

    fn kind(&self, index: usize) -> Option<&ItemKind> {
        self.items.all().get(index).map(|item| &item.kind)
    }

    fn whole(&mut self, usage: &Usage) -> Value {
        self.items.finish(&mut Vec::new());
        let items = self.items.all().iter().enumerate();
        let content = items.map(|(number, item)| self.block(number, item));
        self.message(content.collect(), usage_value(usage), true)
    }

    fn end(&mut self, usage: &Usage) -> Result<Vec<u8>, ApiError> {
        let (mut frames, mut changes) = (Vec::new(), Vec::new());
        self.items.finish(&mut changes);
        self.write(&mut frames, changes)?;
        let delta = json!({"stop_reason": self.stop_reason(), "stop_sequence": self.stop});
        write(
            &mut frames,
            &json!({"type": "message_delta", "delta": delta, "usage": usage_value(usage)}),
        )?;
        write(&mut frames, &json!({"type": "message_stop"}))?;
        Ok(frames)
    }
}

#[async_trait]
impl SurfaceWriter for MessagesWriter {
    fn begin(&mut self) -> Result<Vec<u8>, ApiError> {
        let usage = Usage {
            prompt_tokens: self.prompt_tokens,
            ..Usage::default()
        };
        let message = self.message(Vec::new(), usage_value(&usage), false);
        let mut frames = Vec::new();
        write(
            &mut frames,
            &json!({"type": "message_start", "message": message}),
        )?;
        frames.extend_from_slice(PING);
        Ok(frames)
    }

    fn progress(&mut self, _index: u32, progress: ChoiceProgress) -> Result<Vec<u8>, ApiError> {
        let changes = self.take(progress);
        let mut frames = Vec::new();
        self.write(&mut frames, changes)?;
        Ok(frames)
    }

    fn done(&mut self, summary: &RequestSummary) -> Result<Vec<u8>, ApiError> {
        self.end(&summary.usage)
    }

    fn failed(&mut self, error: &ApiError) -> Result<Vec<u8>, ApiError> {
        let mut frames = Vec::new();
        write(&mut frames, &error_value(error))?;
        Ok(frames)
    }

    fn keep_alive(&self) -> &'static [u8] {
        PING
    }

    async fn collect(mut self: Box<Self>, events: &mut RequestEvents) -> Result<Vec<u8>, ApiError> {
        let summary = read_to_end(events, |_, progress| {
            self.take(progress);
        })
        .await?;
        Ok(self.whole(&summary.usage).to_string().into_bytes())
    }
}

/// The arguments of a call as the object that the API has in their place. Anthropic documents this wrapping for text
/// that is no object.
fn input(arguments: &str) -> Value {
    if arguments.trim().is_empty() {
        return json!({});
    }
    match serde_json::from_str(arguments) {
        Ok(object @ Value::Object(_)) => object,
        _ => json!({"INVALID_JSON": arguments}),
    }
}

/// Here the tokens out of a cache are not among the input tokens.
fn usage_value(usage: &Usage) -> Value {
    let cached = usage.prompt_tokens_details.cached_tokens;
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    })
}

fn write_delta(frames: &mut Vec<u8>, index: usize, delta: &Value) -> Result<(), ApiError> {
    write(
        frames,
        &json!({"type": "content_block_delta", "index": index, "delta": delta}),
    )
}

/// Writes an event, which has the name of its type.
fn write(frames: &mut Vec<u8>, event: &Value) -> Result<(), ApiError> {
    let name = event["type"].as_str().unwrap_or_default();
    write_named_frame(frames, name, event)
}

#[cfg(test)]
mod tests;
