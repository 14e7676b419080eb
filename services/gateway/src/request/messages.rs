//! The checks of a chat's messages.

use refrain_protocol::ApiError;
use refrain_tokenization::{JsonList, JsonValue};

use super::refusal::invalid;

/// The roles of messages.
const ROLES: [&str; 6] = [
    "system",
    "developer",
    "user",
    "assistant",
    "tool",
    "function",
];

/// Stands in the place of an image in the result of a tool.
pub(crate) const IMAGE_LEFT_OUT: &str = "[image left out: this model reads text only]";

/// Checks all messages. Images in the results of tools become words about them: they stay in the conversation, so
/// refusing them would end it.
pub(super) fn checked(messages: JsonList) -> Result<JsonList, ApiError> {
    if messages.is_empty() {
        return invalid("messages", "must have at least one message");
    }
    let has_images = messages.items().any(|message| has_image(&message));
    let messages = match has_images {
        true => messages.items().map(without_images).collect(),
        false => messages,
    };
    for (place, message) in messages.items().enumerate() {
        check_message(&message, place)?;
    }
    Ok(messages)
}

/// Whether a message is the result of a tool with an image in it.
fn has_image(message: &JsonValue) -> bool {
    let role = message.get("role");
    let content = message.get("content");
    role.and_then(|role| role.as_str().map(|role| role == "tool")) == Some(true)
        && content.is_some_and(|content| content.items().into_iter().flatten().any(is_image))
}

fn is_image(part: JsonValue) -> bool {
    let kind = part.get("type");
    matches!(
        kind.as_ref().and_then(JsonValue::as_str),
        Some("image_url" | "image" | "input_image")
    )
}

fn without_images(message: JsonValue) -> JsonValue {
    if !has_image(&message) {
        return message;
    }
    let content = message.get("content").unwrap_or_default();
    let text = |text| JsonValue::object([("type", "text"), ("text", text)].map(pair));
    let parts = content.items().into_iter().flatten();
    let parts = parts.map(|part| match is_image(part.clone()) {
        true => text(IMAGE_LEFT_OUT),
        false => part,
    });
    message.with("content", parts.collect())
}

fn pair<'a>((name, text): (&'a str, &str)) -> (&'a str, JsonValue) {
    (name, JsonValue::from(text))
}

/// Checks the message that stands at `place` in the list. Paths are only written for errors.
fn check_message(message: &JsonValue, place: usize) -> Result<(), ApiError> {
    if !message.is_object() {
        let param = format!("messages[{place}]");
        return invalid(&param, "must be an object with role and content");
    }
    let at = |field: &str| format!("messages[{place}].{field}");
    let role = message.get("role");
    let role = role.as_ref().and_then(JsonValue::as_str);
    if !role.is_some_and(|role| ROLES.contains(&role)) {
        return invalid(&at("role"), format!("must be one of {}", ROLES.join(", ")));
    }
    if let Some(calls) = message.get("tool_calls") {
        let Some(calls) = calls.items() else {
            return invalid(&at("tool_calls"), "must be a list");
        };
        for (number, call) in calls.enumerate() {
            let place = || at(&format!("tool_calls[{number}].function"));
            check_function(call.get("function"), place)?;
        }
    }
    if let Some(call) = message.get("function_call") {
        check_function(Some(call), || at("function_call"))?;
    }
    match message.get("content") {
        // Agents send a turn of the model without content where it only called tools, reasoned, or refused.
        None if role == Some("assistant") => Ok(()),
        content => check_content(content, || at("content")),
    }
}

/// Checks the function of a call in the history. `place` writes its path in the request.
fn check_function(function: Option<JsonValue>, place: impl Fn() -> String) -> Result<(), ApiError> {
    let Some(function) = function.filter(JsonValue::is_object) else {
        return invalid(&place(), "must be an object with name and arguments");
    };
    let name = function.get("name");
    if name.as_ref().and_then(JsonValue::as_str).is_none() {
        return invalid(&format!("{}.name", place()), "must be a text");
    }
    let arguments = function.get("arguments");
    let is_known = |value: &JsonValue| value.as_str().is_some() || value.is_object();
    match arguments.as_ref().is_none_or(is_known) {
        true => Ok(()),
        false => {
            let param = format!("{}.arguments", place());
            invalid(&param, "must be a text of JSON")
        }
    }
}

/// Checks a content, which may only be text. `name` writes its path in the request.
pub(super) fn check_content(
    content: Option<JsonValue>,
    name: impl Fn() -> String,
) -> Result<(), ApiError> {
    if content.as_ref().and_then(JsonValue::as_str).is_some() {
        return Ok(());
    }
    let Some(parts) = content.as_ref().and_then(JsonValue::items) else {
        return invalid(&name(), "must be a text or a list of text parts");
    };
    for (place, part) in parts.enumerate() {
        let kind = part.get("type");
        let kind = kind.as_ref().and_then(JsonValue::as_str);
        let Some(field @ ("text" | "refusal")) = kind else {
            let param = format!("{}[{place}].type", name());
            let fault = "only text parts are supported, no images, audio or files";
            return invalid(&param, fault);
        };
        if part
            .get(field)
            .as_ref()
            .and_then(JsonValue::as_str)
            .is_none()
        {
            let param = format!("{}[{place}].{field}", name());
            return invalid(&param, format!("a {field} part must have a {field}"));
        }
    }
    Ok(())
}
