//! The part of a chat request that a template reads.

use crate::{JsonList, JsonMap};

/// The messages of a chat, its tools, and variables of the template.
///
/// They come from the request's own JSON, so that keys keep the client's order: tool schemas are part of the prompt,
/// and models were trained on them in that order.
#[derive(Clone, Debug, Default)]
pub struct ChatInput {
    pub(super) messages: JsonList,
    pub(super) tools: Option<JsonList>,
    /// Variables of the template, such as `enable_thinking`.
    pub(super) kwargs: Option<JsonMap>,
}

impl ChatInput {
    /// Creates the input from the parts of a request: messages, tools, and variables of the template.
    pub fn new(messages: JsonList, tools: Option<JsonList>, kwargs: Option<JsonMap>) -> Self {
        ChatInput {
            messages,
            tools,
            kwargs,
        }
    }

    /// Creates the input from (role, content) pairs.
    #[cfg(test)]
    pub(crate) fn from_messages<'a>(
        messages: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Self {
        use minijinja::Value;
        let message = |(role, content)| Value::from_pairs([("role", role), ("content", content)]);
        let messages = JsonList(messages.into_iter().map(message).collect());
        ChatInput::new(messages, None, None)
    }

    /// Reads the input from the JSON of a chat request.
    #[cfg(test)]
    pub(crate) fn from_json(body: &str) -> Self {
        let body: crate::JsonValue = serde_json::from_str(body).expect("valid JSON");
        let list = |field| {
            let items = body.get(field)?;
            Some(JsonList(items.items()?.map(|item| item.0).collect()))
        };
        ChatInput::new(list("messages").expect("messages"), list("tools"), None)
    }

    /// The messages.
    pub fn messages(&self) -> &JsonList {
        &self.messages
    }

    /// The same input without tools.
    pub fn without_tools(mut self) -> Self {
        self.tools = None;
        self
    }
}
