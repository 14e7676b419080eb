//! The part of a chat request that a template reads.

use minijinja::value::Value;

use crate::{JsonList, JsonMap, JsonValue};

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

    /// The tools, and the variables with their names.
    pub fn surroundings(&self) -> impl Iterator<Item = (&str, JsonValue)> {
        let tools = self.tools.iter().flat_map(|tools| &tools.0);
        let tools = tools.map(|tool| ("tools", JsonValue(tool.clone())));
        let kwargs = self.kwargs.iter().flat_map(|kwargs| &kwargs.0);
        tools.chain(kwargs.map(|(name, value)| (name.as_str(), JsonValue(value.clone()))))
    }

    /// The messages.
    pub fn messages(&self) -> &JsonList {
        &self.messages
    }

    /// The same input with only its first messages.
    pub(super) fn first(&self, count: usize) -> Self {
        let messages = self.messages.0.iter().take(count).cloned().collect();
        ChatInput {
            messages: JsonList(messages),
            ..self.clone()
        }
    }

    /// The messages behind one of them.
    pub(super) fn behind(&self, message: usize) -> Value {
        self.messages.0.iter().skip(message + 1).cloned().collect()
    }

    /// The same input with one message, behind one of a user.
    pub(super) fn only(&self, message: usize) -> Self {
        let user = Value::from_pairs([("role", "user"), ("content", "x")]);
        let message = self.messages.0.get(message).cloned();
        ChatInput {
            messages: JsonList([user].into_iter().chain(message).collect()),
            ..self.clone()
        }
    }

    /// All values that a user wrote.
    pub(super) fn values(&self) -> impl Iterator<Item = &Value> {
        let tools = self.tools.iter().flat_map(|tools| &tools.0);
        let kwargs = self.kwargs.iter().flat_map(|kwargs| &kwargs.0);
        let kwargs = kwargs.map(|(_, value)| value);
        self.messages.0.iter().chain(tools).chain(kwargs)
    }

    /// The same input without tools.
    pub fn without_tools(mut self) -> Self {
        self.tools = None;
        self
    }
}
