//! The body of OpenAI's Responses as the body of a chat.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use refrain_protocol::ApiError;
use refrain_protocol::engine::TextForm;
use refrain_tokenization::JsonValue;
use serde_json::json;

use super::echo::{self, Echo};
use super::history::{History, HistoryItem, messages};
use super::store::ResponseStore;
use super::tools::{CalledTool, namespace_of, tool_choice, tools};
use crate::request::{IMAGE_LEFT_OUT, check_metadata, read};
use crate::surfaces::chat_body::{
    self, ChatBody, add_line, refuse, shown, text_of, type_of, unsupported,
};

/// Fields that have the same meaning in a chat, with their names there.
const SAME_FIELDS: [(&str, &str); 6] = [
    ("model", "model"),
    ("max_output_tokens", "max_completion_tokens"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("stream", "stream"),
    ("parallel_tool_calls", "parallel_tool_calls"),
];

/// The other fields of this API. Those that are not read below change nothing in the output.
const OTHER_FIELDS: [&str; 26] = [
    "background",
    "client_metadata",
    "conversation",
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "previous_response_id",
    "prompt",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
];

/// The names that fields have here, by their names in a chat.
const RENAMED: [(&str, &str); 5] = [
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
    ("messages", "input"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
];

/// The code of an unknown `previous_response_id`.
const PREVIOUS_NOT_FOUND: &str = "previous_response_not_found";

/// Writes the body of a chat.
pub(in crate::surfaces) fn to_chat(
    body: Bytes,
    tenant: &str,
    store: &Arc<ResponseStore>,
) -> Result<(Bytes, Echo), ApiError> {
    let given: JsonValue = read(&body)?;
    drop(body);
    if !given.is_object() {
        return refuse("body", "must be a JSON object");
    }
    check_unsupported(&given)?;
    let history = history(&given, tenant, store)?;
    let mut chat = ChatBody::default();
    for (from, to) in SAME_FIELDS {
        chat.take(&given, from, to)?;
    }
    let instructions = match given.get("instructions") {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(_) => return refuse("instructions", "must be a text"),
    };
    chat.set("messages", &messages(instructions, &history))?;
    if let Some(effort) = given.get("reasoning").and_then(|given| given.get("effort")) {
        chat.set("reasoning_effort", &effort)?;
    }
    chat.take(&given, "safety_identifier", "safety_identifier")?;
    chat.take(&given, "user", "user")?;
    chat.take(&given, "prompt_cache_key", "prompt_cache_key")?;
    text_format(&given, &mut chat)?;
    let tools = tools(&given, &mut chat)?;
    tool_choice(&given, &mut chat)?;
    chat.take_others(&given, &OTHER_FIELDS)?;
    let wants_store = given.get("store").and_then(|value| value.as_bool());
    let is_stored = wants_store.unwrap_or(true) && store.is_on();
    let echo = Echo {
        fields: echo::fields(&given, is_stored),
        tenant: tenant.to_owned(),
        tools,
        history,
        store: is_stored.then(|| store.clone()),
    };
    Ok((chat.finish(), echo))
}

impl Echo {
    /// The grammars of the texts that tools take, by the names of the tools in a chat.
    pub(in crate::surfaces) fn grammars(&self) -> &HashMap<String, TextForm> {
        &self.tools.grammars
    }

    /// An error of the chat with the name that its field has here.
    pub(in crate::surfaces) fn renamed(&self, error: ApiError) -> ApiError {
        chat_body::renamed(self.tools.renamed(error), &RENAMED)
    }
}

fn check_unsupported(given: &JsonValue) -> Result<(), ApiError> {
    for field in ["conversation", "prompt"] {
        if given.get(field).is_some() {
            return unsupported(field, "is not supported; leave it out");
        }
    }
    let logprobs = given.get("top_logprobs").map(|value| value.to_json());
    if logprobs.is_some_and(|value| value != json!(0)) {
        return unsupported("top_logprobs", "is not supported here; use chats");
    }
    if given.get("background").and_then(|value| value.as_bool()) == Some(true) {
        return unsupported("background", "is not supported; leave it out");
    }
    given
        .get("metadata")
        .as_ref()
        .map_or(Ok(()), check_metadata)
}

/// The conversation: the one before, if the body names it, and the input.
fn history(given: &JsonValue, tenant: &str, store: &ResponseStore) -> Result<History, ApiError> {
    let mut history = History::new();
    if let Some(previous) = given.get("previous_response_id") {
        let found = previous
            .as_str()
            .and_then(|id| store.get(tenant, id, Instant::now()));
        let Some(found) = found else {
            let message = "previous_response_id: there is no such response here; it was not stored, or is forgotten. \
                           Send the whole conversation as input";
            let error = ApiError::invalid("previous_response_id", message);
            return Err(error.with_code(PREVIOUS_NOT_FOUND));
        };
        history.clone_from(&found.history);
    }
    let Some(input) = given.get("input") else {
        return refuse("input", "is required");
    };
    if let Some(text) = input.as_str() {
        history.push(Arc::new(HistoryItem::Message {
            role: "user",
            text: text.to_owned(),
        }));
        return Ok(history);
    }
    let Some(items) = input.items() else {
        return refuse("input", "must be a text or a list of items");
    };
    for (number, item) in items.enumerate() {
        let place = format!("input[{number}]");
        match type_of(&item, "message").as_str() {
            "item_reference" => {
                let id = text_of(&item, "id", &place)?;
                let Some(found) = store.item(tenant, &id) else {
                    let fault = "there is no such item here; it was not stored, or is forgotten. Send the item itself";
                    return refuse(&format!("{place}.id"), fault);
                };
                history.push(found);
            }
            kind => history.extend(input_item(kind, &item, &place)?.map(Arc::new)),
        }
    }
    if history.is_empty() {
        return refuse("input", "must have at least one item");
    }
    Ok(history)
}

fn input_item(kind: &str, item: &JsonValue, place: &str) -> Result<Option<HistoryItem>, ApiError> {
    Ok(Some(match kind {
        "message" => {
            let role = item.get("role");
            let role = match role.as_ref().and_then(JsonValue::as_str) {
                Some("user") => "user",
                Some("assistant") => "assistant",
                Some("system") => "system",
                Some("developer") => "developer",
                _ => {
                    let rule = "must be user, assistant, system or developer";
                    return refuse(&format!("{place}.role"), rule);
                }
            };
            let text = content(item, "content", place)?;
            HistoryItem::Message { role, text }
        }
        "function_call" => called(item, "arguments", false, place)?,
        "custom_tool_call" => called(item, "input", true, place)?,
        "function_call_output" | "custom_tool_call_output" => HistoryItem::CallOutput {
            id: text_of(item, "call_id", place)?,
            text: result(item, place)?,
            is_custom: kind == "custom_tool_call_output",
        },
        // Codex's own shell, which another server may have offered to the model.
        "local_shell_call" => HistoryItem::Call {
            id: text_of(item, "call_id", place)?,
            tool: CalledTool {
                name: "local_shell".to_owned(),
                ..CalledTool::default()
            },
            given: item.get("action").unwrap_or_default().to_json().to_string(),
        },
        "local_shell_call_output" => HistoryItem::CallOutput {
            id: text_of(item, "call_id", place).or_else(|_| text_of(item, "id", place))?,
            text: result(item, place)?,
            is_custom: false,
        },
        "reasoning" => {
            let mut text = None;
            for field in ["content", "summary"] {
                let parts = item.get(field);
                for part in parts.iter().filter_map(JsonValue::items).flatten() {
                    add_line(&mut text, &text_of(&part, "text", place)?);
                }
                if text.is_some() {
                    break;
                }
            }
            // Reasoning that another service encrypted cannot be read.
            return Ok(text.map(HistoryItem::Reasoning));
        }
        other => {
            let fault = format!("items of type {} are not supported", shown(other));
            return unsupported(&format!("{place}.type"), fault);
        }
    }))
}

/// A call in the conversation. `field` has what the tool was given.
fn called(
    item: &JsonValue,
    field: &str,
    is_custom: bool,
    place: &str,
) -> Result<HistoryItem, ApiError> {
    Ok(HistoryItem::Call {
        id: text_of(item, "call_id", place)?,
        tool: CalledTool {
            name: text_of(item, "name", place)?,
            namespace: namespace_of(item),
            is_custom,
        },
        given: text_of(item, field, place)?,
    })
}

/// The text of a message.
fn content(item: &JsonValue, field: &str, place: &str) -> Result<String, ApiError> {
    texts(item, field, place, false)
}

/// The text that a tool returned.
fn result(item: &JsonValue, place: &str) -> Result<String, ApiError> {
    texts(item, "output", place, true)
}

/// The text of a field that is a text or a list of parts. Images in the results of tools become words about them:
/// they stay in the conversation, so refusing them would end it.
fn texts(item: &JsonValue, field: &str, place: &str, is_result: bool) -> Result<String, ApiError> {
    let place = format!("{place}.{field}");
    let Some(content) = item.get(field) else {
        return refuse(&place, "is required");
    };
    if let Some(text) = content.as_str() {
        return Ok(text.to_owned());
    }
    let Some(parts) = content.items() else {
        return refuse(&place, "must be a text or a list of parts");
    };
    let mut text = None;
    for (number, part) in parts.enumerate() {
        let place = format!("{place}[{number}]");
        let field = match type_of(&part, "text").as_str() {
            "input_text" | "output_text" | "text" => "text",
            "refusal" => "refusal",
            "input_image" if is_result => {
                add_line(&mut text, IMAGE_LEFT_OUT);
                continue;
            }
            other => {
                let fault = format!(
                    "parts of type {} are not supported, only text",
                    shown(other)
                );
                return unsupported(&format!("{place}.type"), fault);
            }
        };
        add_line(&mut text, &text_of(&part, field, &place)?);
    }
    Ok(text.unwrap_or_default())
}

/// Passes the format on, as a chat has it.
fn text_format(given: &JsonValue, chat: &mut ChatBody) -> Result<(), ApiError> {
    let Some(format) = given.get("text").and_then(|text| text.get("format")) else {
        return Ok(());
    };
    match type_of(&format, "").as_str() {
        "text" => Ok(()),
        "json_schema" => {
            // The order of a schema's properties is that of the answer's, so it is kept.
            let field = |name| (name, format.get(name).unwrap_or_default());
            let schema = ["name", "description", "schema", "strict"].map(field);
            let fields = [
                ("type", JsonValue::from("json_schema")),
                ("json_schema", JsonValue::object(schema)),
            ];
            chat.set("response_format", &JsonValue::object(fields))
        }
        "json_object" => chat.set("response_format", &json!({"type": "json_object"})),
        _ => refuse(
            "text.format.type",
            "must be text, json_object or json_schema",
        ),
    }
}

#[cfg(test)]
mod tests;
