//! Streams of chunks, joined to the response that they carry.

use serde_json::{Map, Value, json};

use super::members::Object;

/// The response of these events, in the shape of one that is not streamed. `None` if they are none of a stream.
pub(super) fn joined(events: &[Value]) -> Option<Value> {
    let mut stream = Stream::default();
    // Most lists are none of events.
    let is_event = |event: &Value| {
        ["choices", "type", "done", "data"]
            .iter()
            .any(|key| event.get(key).is_some())
    };
    if !events.first().is_some_and(is_event) {
        return None;
    }
    for event in events {
        let event = event.as_object()?;
        // Some programs log what came with each chunk beside it.
        let event = event
            .get("data")
            .and_then(Value::as_object)
            .unwrap_or(event);
        if let Some(whole) = stream.add(event) {
            return Some(whole);
        }
    }
    stream.is_any.then(|| stream.response())
}

/// The parts of a stream so far.
#[derive(Default)]
struct Stream {
    is_any: bool,
    text: String,
    is_completion: bool,
    reasoning: String,
    /// Names and arguments of calls, by index.
    calls: Vec<(String, String)>,
}

impl Stream {
    /// Adds an event. Returns the response if the event holds all of it.
    fn add(&mut self, event: &Object) -> Option<Value> {
        let kind = event
            .get("type")
            .and_then(Value::as_str)
            .unwrap_or_default();
        if let ("response.completed" | "response.incomplete", Some(response)) =
            (kind, event.get("response"))
        {
            return Some(response.clone());
        }
        let choice = event.get("choices").and_then(|choices| choices.get(0));
        if let Some(choice) = choice {
            if let Some(delta) = choice.get("delta").and_then(Value::as_object) {
                self.is_any = true;
                self.add_delta(delta);
            } else if let (Some(text), true) = (
                choice.get("text").and_then(Value::as_str),
                event.get("usage").is_none_or(Value::is_null),
            ) {
                self.is_any = true;
                self.is_completion = true;
                self.text += text;
            }
        }
        match kind {
            "content_block_start" => {
                let block = event.get("content_block");
                let is_call =
                    |block: &&Value| block.get("type").and_then(Value::as_str) == Some("tool_use");
                if let Some(block) = block.filter(is_call) {
                    let name = block
                        .get("name")
                        .and_then(Value::as_str)
                        .unwrap_or_default();
                    self.calls.push((name.to_owned(), String::new()));
                }
                self.is_any = true;
            }
            "content_block_delta" => {
                if let Some(Value::Object(delta)) = event.get("delta") {
                    self.add_delta(delta);
                }
                self.is_any = true;
            }
            "response.output_text.delta" => {
                if let Some(Value::String(delta)) = event.get("delta") {
                    self.text += delta;
                }
                self.is_any = true;
            }
            _ => {}
        }
        // Ollama's lines.
        if event.contains_key("done") {
            self.is_any = true;
            match (event.get("message"), event.get("response")) {
                (Some(Value::Object(message)), _) => self.add_delta(message),
                (_, Some(Value::String(text))) => self.text += text,
                _ => {}
            }
        }
        None
    }

    fn add_delta(&mut self, delta: &Object) {
        let text_of = |key: &str| delta.get(key).and_then(Value::as_str);
        for key in ["content", "text"] {
            self.text += text_of(key).unwrap_or_default();
        }
        for key in ["reasoning_content", "reasoning", "thinking"] {
            self.reasoning += text_of(key).unwrap_or_default();
        }
        if let (Some(text), Some((_, arguments))) = (text_of("partial_json"), self.calls.last_mut())
        {
            arguments.push_str(text);
        }
        for call in delta
            .get("tool_calls")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            let index = call
                .get("index")
                .and_then(Value::as_u64)
                .unwrap_or(self.calls.len() as u64);
            // A stream has few calls, whatever an index says.
            let index = (index as usize).min(self.calls.len());
            if index == self.calls.len() {
                self.calls.push(<(String, String)>::default());
            }
            let function = call.get("function").unwrap_or(call);
            let (name, arguments) = &mut self.calls[index];
            *name += function
                .get("name")
                .and_then(Value::as_str)
                .unwrap_or_default();
            match function.get("arguments") {
                Some(Value::String(more)) => arguments.push_str(more),
                Some(whole @ Value::Object(_)) => *arguments = whole.to_string(),
                _ => {}
            }
        }
    }

    fn response(self) -> Value {
        if self.is_completion {
            return json!({"choices": [{"text": self.text}]});
        }
        let calls = self.calls.into_iter();
        let calls: Vec<Value> = calls
            .map(|(name, arguments)| json!({"name": name, "arguments": arguments}))
            .collect();
        let mut message = Map::new();
        message.insert("role".to_owned(), "assistant".into());
        message.insert("content".to_owned(), self.text.into());
        if !self.reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), self.reasoning.into());
        }
        message.insert("tool_calls".to_owned(), calls.into());
        json!({"choices": [{"message": message}]})
    }
}
