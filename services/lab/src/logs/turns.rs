//! Turns of a conversation, and how they are written into a prompt.
//!
//! Tools write messages in dozens of ways, and models see them through a template. Here all are written as ChatML,
//! with calls of tools as Hermes' JSON: the text differs from that of the real template, but repeats where that
//! repeats.

use std::sync::Arc;

use serde::Serialize;
use serde_json::{Map, Value};

use super::members::{Object, first_of, has_any, is_named, looks_like_json, words};

/// The beginning of the turn that the model writes.
pub(super) const OPENING: &str = "<|im_start|>assistant\n";

/// Nested contents are followed so deep.
const DEPTH_MAX: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    System,
    User,
    Assistant,
    Tool,
}

/// One turn, written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    pub(super) role: Role,
    pub(super) text: String,
}

impl Role {
    fn named(name: &str) -> Option<Role> {
        let name = name.to_ascii_lowercase();
        let name = name.trim_end_matches("chunk").trim_end_matches("message");
        Some(match name {
            "system" | "developer" => Role::System,
            "user" | "human" | "customer" | "prompter" => Role::User,
            "assistant" | "ai" | "gpt" | "model" | "bot" | "chatgpt" | "chatbot" | "agent"
            | "gemini" | "claude" => Role::Assistant,
            "tool" | "function" | "observation" | "environment" | "ipython" | "toolresult"
            | "tool_response" | "function_response" => Role::Tool,
            _ => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }

    /// The role of a message, if this is one.
    fn of(message: &Object) -> Option<Role> {
        let said = ["role", "from", "sender", "speaker", "author", "info"]
            .iter()
            .find_map(|key| match message.get(*key)? {
                Value::String(name) => Role::named(name),
                Value::Object(author) => Role::named(author.get("role")?.as_str()?),
                _ => None,
            });
        said.or_else(|| {
            // LangChain names the class of a message, in one of two ways.
            if let Some(class) = message.get("id").and_then(Value::as_array) {
                return Role::named(class.last()?.as_str()?);
            }
            match message.get("type")?.as_str()? {
                "function_call" | "reasoning" | "custom_tool_call" | "local_shell_call" => {
                    Some(Role::Assistant)
                }
                kind if kind.ends_with("_call_output") => Some(Role::Tool),
                kind @ ("human" | "ai" | "system" | "tool" | "user" | "gemini") => {
                    Role::named(kind)
                }
                kind if kind.ends_with("Message") => Role::named(kind),
                _ => None,
            }
        })
    }
}

impl Turn {
    pub(super) fn new(role: Role, text: impl Into<String>) -> Self {
        Turn {
            role,
            text: text.into(),
        }
    }

    /// The turn that a message holds; `None` for a value that is no message.
    pub(super) fn of(message: &Value) -> Option<Turn> {
        Turn::of_object(message.as_object()?)
    }

    /// As [`Turn::of`].
    pub(super) fn of_object(mut message: &Object) -> Option<Turn> {
        // OpenInference wraps each message.
        if let (1, Some(Value::Object(inner))) = (message.len(), message.get("message")) {
            message = inner;
        }
        let role = Role::of(message)?;
        let mut text = String::new();
        let kind = message.get("type").and_then(Value::as_str);
        match kind {
            Some(kind) if kind.ends_with("_call") || kind.ends_with("_call_output") => {
                push_part(&mut text, message, DEPTH_MAX);
            }
            _ if !has_body(message) => return None,
            _ => push_body(&mut text, message, DEPTH_MAX),
        }
        if role == Role::Tool && !text.starts_with("<tool_response>") {
            text = format!("<tool_response>\n{text}\n</tool_response>");
        }
        Some(Turn { role, text })
    }

    /// The turns of a list of messages. `None` if it is none; values in between that are no messages are left out.
    pub(super) fn list(value: &Value) -> Option<Vec<Turn>> {
        let mut list = value.as_array()?;
        // LangChain logs a batch of lists.
        while let [Value::Array(inner)] = &list[..] {
            list = inner;
        }
        let mut turns: Vec<Turn> = Vec::new();
        let mut count = 0;
        for turn in list.iter().filter_map(Turn::of) {
            count += 1;
            match turns.last_mut() {
                // One turn of an assistant may stand in several items.
                Some(last) if (last.role, turn.role) == (Role::Assistant, Role::Assistant) => {
                    last.go_on(&turn.text);
                }
                _ => turns.push(turn),
            }
        }
        // Most are messages, or this is a list of something else.
        (count > 0 && count * 2 >= list.len()).then_some(turns)
    }

    /// Goes on with the same turn.
    pub(super) fn go_on(&mut self, text: &str) {
        if !self.text.is_empty() && !text.is_empty() && !self.text.ends_with('\n') {
            self.text.push('\n');
        }
        self.text.push_str(text);
    }

    /// The turn as a part of a prompt.
    pub(super) fn segment(&self) -> Arc<str> {
        format!(
            "<|im_start|>{}\n{}<|im_end|>\n",
            self.role.name(),
            self.text
        )
        .into()
    }
}

const REASONING: &str = "reasoning_content reasoning thinking internal_reasoning";
const BODY: &str = "content contents value parts text message kwargs data summary body";

fn has_body(message: &Object) -> bool {
    has_any(message, BODY) || has_any(message, "tool_calls function_call additional_kwargs")
}

/// The text of an answer: reasoning, content and calls of tools, in the order in which a model writes them.
pub(super) fn body_text(message: &Object) -> String {
    let mut text = String::new();
    push_body(&mut text, message, DEPTH_MAX);
    text
}

/// The text of a content: a text, a part, or a list of them.
pub(super) fn content_text(content: &Value) -> String {
    let mut text = String::new();
    push_content(&mut text, content, DEPTH_MAX);
    text
}

/// The definitions of tools, as Hermes' template writes them.
pub(super) fn tools_text(tools: &Value) -> Option<String> {
    let mut tools = tools.as_array()?.iter().peekable();
    tools.peek()?;
    let mut text = "# Tools\n\n<tools>\n".to_owned();
    for tool in tools {
        // OpenInference wraps each in a text.
        let schema = tool
            .get("tool")
            .and_then(|tool| tool.get("json_schema"))
            .and_then(Value::as_str);
        text += &schema.map_or_else(|| json_text(tool), str::to_owned);
        text.push('\n');
    }
    Some(text + "</tools>")
}

fn push_body(out: &mut String, message: &Object, depth: usize) {
    let Some(depth) = depth.checked_sub(1) else {
        return;
    };
    let is_reasoning = message.get("type").and_then(Value::as_str) == Some("reasoning");
    let reasoning = first_of(message, REASONING).filter(|value| !value.is_object());
    if let Some(reasoning) = reasoning {
        let mut thought = String::new();
        push_content(&mut thought, reasoning, depth);
        push_thought(out, &thought);
    }
    let is_given =
        |value: &&Value| !value.is_null() && value.as_array().is_none_or(|list| !list.is_empty());
    let contents = words(BODY).filter_map(|key| message.get(key));
    if let Some(content) = contents.into_iter().find(is_given) {
        let mut text = String::new();
        push_content(&mut text, content, depth);
        match is_reasoning {
            true => push_thought(out, &text),
            false => out.push_str(&text),
        }
    }
    let extra = message.get("additional_kwargs").and_then(Value::as_object);
    for of in [Some(message), extra].into_iter().flatten() {
        for call in of
            .get("tool_calls")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
        {
            if let Value::Object(call) = call {
                push_call(out, call);
            }
        }
        if let Some(Value::Object(call)) = of.get("function_call") {
            push_call(out, call);
        }
    }
}

fn push_content(out: &mut String, content: &Value, depth: usize) {
    let Some(depth) = depth.checked_sub(1) else {
        return;
    };
    match content {
        Value::String(text) => push_text(out, text),
        Value::Array(parts) => parts.iter().for_each(|part| push_content(out, part, depth)),
        Value::Object(part) => push_part(out, part, depth),
        _ => {}
    }
}

/// Appends a text. After a call of a tool it begins a line.
fn push_text(out: &mut String, text: &str) {
    if out.ends_with('>') && out.ends_with("</tool_call>") && !text.is_empty() {
        out.push('\n');
    }
    out.push_str(text);
}

fn push_part(out: &mut String, part: &Object, depth: usize) {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
    let inner = |names| words(names).find_map(|name| part.get(name)?.as_object());
    if let Some(result) = inner("toolResult functionResponse") {
        return push_result(out, result, depth);
    }
    if inner("toolUse functionCall").is_some() {
        return push_call(out, part);
    }
    if let Some(wrapped) = inner("message_content") {
        return push_part(out, wrapped, depth.saturating_sub(1));
    }
    match kind {
        "thinking" | "reasoning" => {
            let mut thought = String::new();
            let keys = "thinking text reasoning content summary";
            if let Some(text) = first_of(part, keys) {
                push_content(&mut thought, text, depth);
            }
            push_thought(out, &thought);
        }
        kind if kind.ends_with("_output")
            || kind.ends_with("tool_result")
            || kind == "tool_call_response" =>
        {
            // `input_text` and alike end otherwise.
            push_result(out, part, depth);
        }
        "tool_use" | "toolUse" | "server_tool_use" | "tool-call" | "toolRequest"
        | "tool_call_request" => push_call(out, part),
        "toolResponse" | "tool-result" => push_result(out, part, depth),
        kind if kind.ends_with("_call") && kind != "refusal" => push_call(out, part),
        kind if kind.contains("image") || kind.contains("audio") || kind.contains("file") => {
            out.push('[');
            out.push_str(kind.trim_start_matches("input_").trim_end_matches("_url"));
            out.push(']');
        }
        _ if has_body(part) => push_body(out, part, depth),
        _ => {
            if let Some(Value::String(text)) = part.get("refusal") {
                out.push_str(text);
            }
        }
    }
}

fn push_thought(out: &mut String, thought: &str) {
    if !thought.is_empty() {
        out.push_str("<think>\n");
        out.push_str(thought.trim_matches('\n'));
        out.push_str("\n</think>\n\n");
    }
}

fn push_result(out: &mut String, result: &Object, depth: usize) {
    let keys = "output content response result toolResult value";
    let content = first_of(result, keys);
    let mut text = String::new();
    if let Some(content) = content {
        push_content(&mut text, content, depth);
        // A result can be any JSON; an object without text is written as it is.
        if text.is_empty() && !content.is_null() && content.as_str() != Some("") {
            text = json_text(content);
        }
    }
    out.push_str("<tool_response>\n");
    out.push_str(&text);
    out.push_str("\n</tool_response>");
}

fn push_call(out: &mut String, call: &Object) {
    let wrappers = "tool_call toolCall value function functionCall toolUse action";
    let mut inner = call;
    while let Some(wrapped) = words(wrappers).find_map(|key| inner.get(key)?.as_object()) {
        inner = wrapped;
    }
    let name = [inner, call]
        .iter()
        .find_map(|of| first_of(of, "name tool_name toolName")?.as_str());
    let arguments = [inner, call]
        .iter()
        .find_map(|of| first_of(of, "arguments args input parameters"));
    let name = name
        .or_else(|| call.get("type")?.as_str())
        .unwrap_or_default();
    if !out.is_empty() && !out.ends_with('\n') {
        out.push('\n');
    }
    out.push_str("<tool_call>\n{\"name\": ");
    out.push_str(&json_text(&Value::from(name)));
    out.push_str(", \"arguments\": ");
    match arguments {
        // The model wrote this text, so its spaces stay.
        Some(Value::String(text)) if looks_like_json(text) => out.push_str(text),
        Some(arguments) => out.push_str(&json_text(arguments)),
        // A local shell's call has its arguments beside.
        None if inner.len() > 1 => out.push_str(&json_text(&Value::Object(without_type(inner)))),
        None => out.push_str("{}"),
    }
    out.push_str("}\n</tool_call>");
}

fn without_type(object: &Object) -> Map<String, Value> {
    let kept = object.iter().filter(|(key, _)| !is_named(key, "type"));
    kept.map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

/// A value as JSON with a space after each comma and colon, as templates and models write it.
pub(super) fn json_text(value: &Value) -> String {
    let mut bytes = Vec::new();
    let mut writer = serde_json::Serializer::with_formatter(&mut bytes, Spaced);
    match value.serialize(&mut writer) {
        Ok(()) => String::from_utf8(bytes).unwrap_or_default(),
        Err(_) => String::new(),
    }
}

struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
