//! The body of a chat, as other surfaces write it.

use bytes::Bytes;
use refrain_protocol::ApiError;
use refrain_tokenization::JsonValue;
use serde::Serialize;

/// The body of a chat request, which grows field by field. It is JSON, so that [`ParsedRequest::chat`] checks it as
/// it checks the body of a client.
///
/// [`ParsedRequest::chat`]: crate::request::ParsedRequest::chat
#[derive(Debug, Default)]
pub(crate) struct ChatBody {
    json: Vec<u8>,
    /// The fields that it has.
    names: Vec<String>,
}

/// Fields of chats for which the answers of the other surfaces have no place.
const CHATS_ONLY: [&str; 10] = [
    "echo",
    "function_call",
    "functions",
    "logprobs",
    "messages",
    "n",
    "prompt",
    "prompt_logprobs",
    "response_format",
    "top_logprobs",
];

/// A message of a chat.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct ChatMessage {
    pub(super) role: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<ChatCall>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_call_id: Option<String>,
}

/// A call in a message of the assistant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct ChatCall {
    pub(super) id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    pub(super) function: ChatFunction,
}

/// The function that is called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct ChatFunction {
    pub(super) name: String,
    /// JSON text.
    pub(super) arguments: String,
}

/// A tool that the model may call.
#[derive(Serialize)]
pub(super) struct ChatTool {
    #[serde(rename = "type")]
    kind: &'static str,
    function: ChatToolFunction,
    /// Whether it may be called, and is not in the head of the prompt.
    #[serde(rename = "defer_loading", skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_hidden: bool,
}

#[derive(Serialize)]
struct ChatToolFunction {
    name: JsonValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<JsonValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<JsonValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    strict: Option<JsonValue>,
}

impl ChatBody {
    /// Adds a field.
    ///
    /// # Errors
    /// The value cannot be written as JSON, which would be a fault of this service.
    pub(crate) fn set<T: Serialize + ?Sized>(
        &mut self,
        name: &str,
        value: &T,
    ) -> Result<(), ApiError> {
        let separator = if self.json.is_empty() { b'{' } else { b',' };
        self.json.push(separator);
        self.names.push(name.to_owned());
        serde_json::to_writer(&mut self.json, name).map_err(ApiError::internal)?;
        self.json.push(b':');
        serde_json::to_writer(&mut self.json, value).map_err(ApiError::internal)
    }

    /// Adds the field `to` with the value that `body` has in its field `from`, if it has one.
    ///
    /// # Errors
    /// As [`ChatBody::set`].
    pub(crate) fn take(&mut self, body: &JsonValue, from: &str, to: &str) -> Result<(), ApiError> {
        match body.get(from) {
            Some(value) => self.set(to, &value),
            None => Ok(()),
        }
    }

    /// Adds all fields of `body` that the surface does not know, unchanged: those that are extensions of chats have
    /// their effect, and for the others the rule for unknown fields of chats holds.
    ///
    /// # Errors
    /// A field has no place in the answer.
    pub(super) fn take_others(&mut self, body: &JsonValue, known: &[&str]) -> Result<(), ApiError> {
        for name in body.names() {
            if known.contains(&&*name) || self.names.contains(&name) {
                continue;
            }
            if CHATS_ONLY.contains(&&*name) && body.get(&name).is_some() {
                return unsupported(&name, "is not a field of this API; leave it out");
            }
            self.take(body, &name, &name)?;
        }
        Ok(())
    }

    /// The body.
    pub(crate) fn finish(mut self) -> Bytes {
        if self.json.is_empty() {
            self.json.push(b'{');
        }
        self.json.push(b'}');
        Bytes::from(self.json)
    }
}

impl ChatMessage {
    /// A message of a role with a text.
    pub(super) fn text(role: &'static str, text: impl Into<String>) -> Self {
        ChatMessage {
            role,
            content: Some(text.into()),
            ..ChatMessage::default()
        }
    }

    /// The result of a tool.
    pub(super) fn tool(call: impl Into<String>, result: impl Into<String>) -> Self {
        ChatMessage {
            tool_call_id: Some(call.into()),
            ..ChatMessage::text("tool", result)
        }
    }
}

impl ChatCall {
    /// A call of a function.
    pub(super) fn new(id: String, name: String, arguments: String) -> Self {
        ChatCall {
            id,
            kind: "function",
            function: ChatFunction { name, arguments },
        }
    }
}

impl ChatTool {
    /// A function, whose parameters are in the field `parameters` of its definition.
    pub(super) fn function(name: JsonValue, definition: &JsonValue, parameters: &str) -> Self {
        ChatTool {
            kind: "function",
            function: ChatToolFunction {
                name,
                description: definition.get("description"),
                parameters: definition.get(parameters),
                strict: definition.get("strict"),
            },
            is_hidden: false,
        }
    }
}

/// Adds a text to the ones before it. The texts of one message are lines of one text, because many templates know no
/// lists of parts.
pub(super) fn add_line(text: &mut Option<String>, more: &str) {
    match text {
        Some(text) => {
            text.push('\n');
            text.push_str(more);
        }
        None => *text = Some(more.to_owned()),
    }
}

/// An error of the chat with the place that its field has in another API. `names` are the beginnings of places there
/// and here; the first that fits counts.
pub(super) fn renamed(mut error: ApiError, names: &[(&str, &str)]) -> ApiError {
    let Some(param) = &error.param else {
        return error;
    };
    let renamed = names.iter().find_map(|(there, here)| {
        let rest = param.strip_prefix(there)?;
        let is_whole = rest.is_empty() || rest.starts_with(['.', '[']);
        is_whole.then(|| format!("{here}{rest}"))
    });
    if let Some(renamed) = renamed {
        let begin = format!("{param}:");
        error.message = error.message.replacen(&begin, &format!("{renamed}:"), 1);
        error.param = Some(renamed);
    }
    error
}

/// Refuses a field, whose place begins the message.
pub(super) fn refuse<T>(place: &str, fault: impl std::fmt::Display) -> Result<T, ApiError> {
    Err(ApiError::invalid(place, format!("{place}: {fault}")))
}

/// Refuses a field that is valid and not supported.
pub(super) fn unsupported<T>(place: &str, fault: impl std::fmt::Display) -> Result<T, ApiError> {
    refuse(place, fault).map_err(|error: ApiError| error.with_code("unsupported_parameter"))
}

/// The text in a field. A text in the place of a part is a part with that `text`.
pub(super) fn text_of(value: &JsonValue, field: &str, place: &str) -> Result<String, ApiError> {
    if let (Some(text), "text") = (value.as_str(), field) {
        return Ok(text.to_owned());
    }
    match value.get(field).as_ref().and_then(JsonValue::as_str) {
        Some(text) => Ok(text.to_owned()),
        None => refuse(&format!("{place}.{field}"), "must be a text"),
    }
}

/// The `type` of a part, or `default`.
pub(super) fn type_of(value: &JsonValue, default: &str) -> String {
    let kind = value.get("type");
    let kind = kind.as_ref().and_then(JsonValue::as_str);
    kind.unwrap_or(default).to_owned()
}

/// A name out of a request as an error may repeat it.
pub(super) fn shown(name: &str) -> String {
    /// Longest name that an error repeats, characters.
    const SHOWN_MAX: usize = 64;
    name.chars().take(SHOWN_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_json_and_keeps_the_order_of_keys() {
        let schema: JsonValue =
            serde_json::from_str(r#"{"z":1,"a":{"y":1.5,"b":[null]}}"#).unwrap();
        let mut body = ChatBody::default();
        body.set("model", "m\"").unwrap();
        body.set("schema", &schema).unwrap();
        body.take(&schema, "z", "one").unwrap();
        body.take(&schema, "missing", "none").unwrap();
        assert_eq!(
            body.finish(),
            r#"{"model":"m\"","schema":{"z":1,"a":{"y":1.5,"b":[null]}},"one":1}"#
        );
        assert_eq!(ChatBody::default().finish(), "{}");
    }

    #[test]
    fn other_fields_are_passed_on_once() {
        let given: JsonValue =
            serde_json::from_str(r#"{"a":1,"b":2,"known":3,"session":"s","n":null}"#).unwrap();
        let mut body = ChatBody::default();
        body.set("a", &0).unwrap();
        body.take_others(&given, &["known"]).unwrap();
        assert_eq!(body.finish(), r#"{"a":0,"b":2,"session":"s"}"#);
        let given: JsonValue = serde_json::from_str(r#"{"n":2}"#).unwrap();
        let error = ChatBody::default().take_others(&given, &[]).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("n"));
    }
}
