//! The message of a chat, whole or in parts, out of the events of its output.

use refrain_output_parsers::Event;
use refrain_protocol::openai::{AnswerMessage, Delta, FinishReason, FunctionCall, ToolCall};

/// The shape in which a client reads calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallShape {
    /// `tool_calls`.
    Tools,
    /// The deprecated `function_call`, which has room for one call.
    Function,
}

impl CallShape {
    /// The reason of the end, as this client knows it.
    pub(super) fn finish(self, finish: Option<FinishReason>) -> Option<FinishReason> {
        match (self, finish) {
            (CallShape::Function, Some(FinishReason::ToolCalls)) => {
                Some(FinishReason::FunctionCall)
            }
            (_, finish) => finish,
        }
    }
}

/// The text of the events.
pub fn text(events: Vec<Event>) -> String {
    let texts = events.into_iter().filter_map(|event| match event {
        Event::Text(text) => Some(text),
        _ => None,
    });
    texts.collect()
}

/// The new parts of a message.
pub(super) fn deltas(events: Vec<Event>, shape: CallShape) -> impl Iterator<Item = Delta> {
    events
        .into_iter()
        .filter_map(move |event| delta(event, shape))
}

fn delta(event: Event, shape: CallShape) -> Option<Delta> {
    let nothing = Delta::default();
    Some(match event {
        Event::Text(text) => Delta {
            content: Some(Some(text)),
            ..nothing
        },
        Event::Reasoning(text) => Delta {
            reasoning_content: Some(text.clone()),
            reasoning: Some(text),
            ..nothing
        },
        Event::CallStart { index, id, name } => {
            let function = FunctionCall {
                name: Some(name),
                arguments: String::new(),
            };
            let kind = Some("function");
            call_delta(index, id, kind, function, shape)
        }
        Event::CallArguments { index, delta } => {
            let function = FunctionCall {
                name: None,
                arguments: delta,
            };
            call_delta(index, None, None, function, shape)
        }
        Event::CallEnd { .. } => return None,
    })
}

fn call_delta(
    index: u32,
    id: Option<String>,
    kind: Option<&'static str>,
    function: FunctionCall,
    shape: CallShape,
) -> Delta {
    match shape {
        CallShape::Function => Delta {
            function_call: Some(function),
            ..Delta::default()
        },
        CallShape::Tools => Delta {
            tool_calls: vec![ToolCall {
                index: Some(index),
                id,
                kind,
                function,
            }],
            ..Delta::default()
        },
    }
}

/// The whole message. Its content is null where there are only calls, or only reasoning.
pub(super) fn message(events: Vec<Event>, shape: CallShape) -> AnswerMessage {
    let (mut text, mut reasoning) = (String::new(), String::new());
    let mut calls: Vec<ToolCall> = Vec::new();
    for event in events {
        match event {
            Event::Text(part) => text.push_str(&part),
            Event::Reasoning(part) => reasoning.push_str(&part),
            Event::CallStart { id, name, .. } => calls.push(ToolCall {
                index: None,
                id,
                kind: Some("function"),
                function: FunctionCall {
                    name: Some(name),
                    arguments: String::new(),
                },
            }),
            Event::CallArguments { delta, .. } => {
                // The fragments of a call follow its start.
                if let Some(call) = calls.last_mut() {
                    call.function.arguments.push_str(&delta);
                }
            }
            Event::CallEnd { .. } => {}
        }
    }
    let is_missing = text.is_empty() && !(calls.is_empty() && reasoning.is_empty());
    let reasoning = (!reasoning.is_empty()).then_some(reasoning);
    let mut message = AnswerMessage {
        role: "assistant",
        content: (!is_missing).then_some(text),
        refusal: None,
        reasoning_content: reasoning.clone(),
        reasoning,
        tool_calls: Vec::new(),
        function_call: None,
    };
    match shape {
        CallShape::Tools => message.tool_calls = calls,
        CallShape::Function => {
            message.function_call = calls.into_iter().next().map(|call| call.function);
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn events() -> Vec<Event> {
        vec![
            Event::Reasoning("hm".into()),
            Event::CallStart {
                index: 0,
                id: Some("call_1".into()),
                name: "f".into(),
            },
            Event::CallArguments {
                index: 0,
                delta: "{\"a\":".into(),
            },
            Event::CallArguments {
                index: 0,
                delta: "1}".into(),
            },
            Event::CallEnd {
                index: 0,
                intact: true,
            },
        ]
    }

    fn streamed(events: Vec<Event>, shape: CallShape) -> serde_json::Value {
        serde_json::to_value(deltas(events, shape).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn the_first_part_of_a_call_has_its_id_and_name() {
        assert_eq!(
            streamed(events(), CallShape::Tools),
            json!([
                {"reasoning_content": "hm", "reasoning": "hm"},
                {"tool_calls": [{"index": 0, "id": "call_1", "type": "function",
                    "function": {"name": "f", "arguments": ""}}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": "{\"a\":"}}]},
                {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
            ])
        );
    }

    #[test]
    fn a_message_of_calls_has_no_content() {
        let whole = |events, shape| serde_json::to_value(message(events, shape)).unwrap();
        assert_eq!(
            whole(events(), CallShape::Tools),
            json!({"role": "assistant", "content": null, "refusal": null, "reasoning_content": "hm", "reasoning": "hm",
                "tool_calls": [{"id": "call_1", "type": "function",
                    "function": {"name": "f", "arguments": "{\"a\":1}"}}]})
        );
        let empty = json!({"role": "assistant", "content": "", "refusal": null});
        assert_eq!(whole(Vec::new(), CallShape::Tools), empty);
    }

    #[test]
    fn clients_of_functions_read_one_call_without_an_id() {
        let whole = serde_json::to_value(message(events(), CallShape::Function)).unwrap();
        assert_eq!(
            whole["function_call"],
            json!({"name": "f", "arguments": "{\"a\":1}"})
        );
        assert_eq!(whole.get("tool_calls"), None);
        let parts = streamed(events(), CallShape::Function);
        assert_eq!(
            parts[1],
            json!({"function_call": {"name": "f", "arguments": ""}})
        );
        let finish = CallShape::Function.finish(Some(FinishReason::ToolCalls));
        assert_eq!(finish, Some(FinishReason::FunctionCall));
    }
}
