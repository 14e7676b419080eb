//! A conversation as items, and as the messages of a chat.

use std::sync::Arc;

use super::tools::CalledTool;
use crate::surfaces::chat_body::{ChatCall, ChatMessage, add_line};

/// An item of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum HistoryItem {
    /// A message.
    Message { role: &'static str, text: String },
    /// Reasoning of the model.
    Reasoning(String),
    /// A call of a tool.
    Call {
        id: String,
        tool: CalledTool,
        /// Its arguments, or the text that a custom tool takes.
        given: String,
    },
    /// The result of a call.
    CallOutput {
        id: String,
        text: String,
        /// Whether a custom tool returned it.
        is_custom: bool,
    },
}

/// A conversation. Its items are shared with those that it continues.
pub(super) type History = Vec<Arc<HistoryItem>>;

/// Bytes of an item beside its texts, about.
const ITEM_BYTES: usize = 128;

impl HistoryItem {
    /// Its size in memory, about.
    pub(super) fn bytes(&self) -> usize {
        let texts = match self {
            HistoryItem::Message { text, .. } | HistoryItem::Reasoning(text) => text.len(),
            HistoryItem::Call { id, tool, given } => {
                id.len() + tool.chat_name().len() + given.len()
            }
            HistoryItem::CallOutput { id, text, .. } => id.len() + text.len(),
        };
        texts + ITEM_BYTES
    }
}

/// The messages of a chat. Reasoning, text and calls in this order are one message of the assistant.
pub(super) fn messages(instructions: Option<String>, history: &History) -> Vec<ChatMessage> {
    let mut messages = Vec::new();
    messages.extend(instructions.map(|text| ChatMessage::text("system", text)));
    for item in history {
        match &**item {
            HistoryItem::Message {
                role: "assistant",
                text,
            } => {
                let is_free =
                    |last: &ChatMessage| last.content.is_none() && last.tool_calls.is_empty();
                assistant(&mut messages, is_free, |last| {
                    last.content = Some(text.clone());
                });
            }
            HistoryItem::Message { role, text } => messages.push(ChatMessage::text(role, text)),
            HistoryItem::Reasoning(text) => {
                let is_free =
                    |last: &ChatMessage| last.content.is_none() && last.tool_calls.is_empty();
                assistant(&mut messages, is_free, |last| {
                    add_line(&mut last.reasoning_content, text);
                });
            }
            HistoryItem::Call { id, tool, given } => {
                let arguments = tool.chat_arguments(given);
                let call = ChatCall::new(id.clone(), tool.chat_name(), arguments);
                assistant(&mut messages, |_| true, |last| last.tool_calls.push(call));
            }
            HistoryItem::CallOutput { id, text, .. } => {
                messages.push(ChatMessage::tool(id, text));
            }
        }
    }
    for message in &mut messages {
        if message.content.is_none() && message.tool_calls.is_empty() {
            message.content = Some(String::new());
        }
    }
    messages
}

/// Changes the last message, if it is one of the assistant that `is_free`, and otherwise a new one.
fn assistant(
    messages: &mut Vec<ChatMessage>,
    is_free: impl Fn(&ChatMessage) -> bool,
    change: impl FnOnce(&mut ChatMessage),
) {
    let last = messages.last();
    if !last.is_some_and(|last| last.role == "assistant" && is_free(last)) {
        messages.push(ChatMessage {
            role: "assistant",
            ..ChatMessage::default()
        });
    }
    if let Some(last) = messages.last_mut() {
        change(last);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn items_of_one_turn_become_one_message() {
        let message = |role, text: &str| HistoryItem::Message {
            role,
            text: text.into(),
        };
        let call = |id: &str| HistoryItem::Call {
            id: id.into(),
            tool: CalledTool {
                name: "f".into(),
                ..CalledTool::default()
            },
            given: "{}".into(),
        };
        let history: History = [
            message("user", "a"),
            HistoryItem::Reasoning("r".into()),
            message("assistant", "b"),
            call("1"),
            call("2"),
            HistoryItem::CallOutput {
                id: "1".into(),
                text: "x".into(),
                is_custom: false,
            },
            HistoryItem::Reasoning("s".into()),
            call("3"),
            HistoryItem::Reasoning("only".into()),
        ]
        .into_iter()
        .map(Arc::new)
        .collect();
        let calls = |ids: &[&str]| -> Vec<_> {
            let call = |id: &&str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
            ids.iter().map(call).collect()
        };
        let messages = messages(Some("be kind".into()), &history);
        assert_eq!(
            serde_json::to_value(messages).unwrap(),
            json!([
                {"role": "system", "content": "be kind"},
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "reasoning_content": "r", "tool_calls": calls(&["1", "2"])},
                {"role": "tool", "content": "x", "tool_call_id": "1"},
                {"role": "assistant", "reasoning_content": "s", "tool_calls": calls(&["3"])},
                {"role": "assistant", "content": "", "reasoning_content": "only"},
            ])
        );
    }
}
