//! Forms of logs: their names for the report, and what tools write besides calls.

use serde_json::Value;

use super::members::{Object, first_of, has_any, has_word, named, words};
use super::shapes::{Api, Prompt, answers_in};
use super::turns::{Role, Turn, content_text, json_text};

/// Name of a form.
pub(super) type Form = &'static str;

/// Forms with the keys that tell them from others, the surest first. They name what was found; how a record is read
/// does not depend on them.
const FORMS: [(Form, &str); 24] = [
    ("OpenAI batch", "custom_id"),
    ("OpenTelemetry export", "resourceSpans"),
    ("OpenTelemetry export", "resource_spans"),
    ("OpenTelemetry export", "resourceLogs"),
    ("Langfuse traces", "observations"),
    ("Langfuse observations", "traceId type startTime"),
    ("LiteLLM spend logs", "request_id call_type spend"),
    ("LiteLLM logs", "call_type response_cost"),
    ("Helicone requests", "request_created_at"),
    ("LangSmith runs", "run_type inputs"),
    ("SWE-agent trajectories", "trajectory info"),
    ("mini-swe-agent trajectories", "trajectory_format"),
    ("OpenHands trajectories", "source action"),
    ("OpenHands trajectories", "source observation"),
    ("OpenHands trajectories", "source kind"),
    ("Codex sessions", "timestamp type payload"),
    ("Claude Code sessions", "sessionId uuid message"),
    ("ShareGPT conversations", "conversations"),
    ("ChatGPT export", "mapping"),
    ("Claude export", "chat_messages"),
    ("SGLang requests", "obj out"),
    ("vLLM requests", "vllm_request_id"),
    ("HTTP archive", "startedDateTime request response"),
    ("preferences", "chosen rejected"),
];

/// The form of an object, if it is a known one.
pub(super) fn of(object: &Object) -> Option<Form> {
    let mut forms = FORMS.iter();
    forms.find_map(|(form, keys)| {
        words(keys)
            .all(|key| object.contains_key(key))
            .then_some(*form)
    })
}

/// The form of a request with its response.
pub(super) fn of_api(prompt: &Prompt, api: Api) -> Form {
    match (api, prompt) {
        (Api::Chat, _) => "chat requests and responses",
        (Api::Completions, _) => "completion requests and responses",
        (Api::Responses, _) => "Responses requests and responses",
        (Api::Anthropic, _) => "Messages requests and responses",
        (Api::Gemini, _) => "Gemini requests and responses",
        (Api::Named, Prompt::Turns(_)) => "messages and output",
        (Api::Named, Prompt::Plain(_)) => "prompt and output",
    }
}

/// The form of a call whose halves had these forms.
pub(super) fn joined(request: Form, response: Form) -> Form {
    match response {
        "responses" if request == "requests" => "requests and responses, joined by id",
        "responses" => request,
        response => response,
    }
}

/// Whether a member holds records, and not texts or messages.
pub(super) fn has_records(value: &Value) -> bool {
    match value {
        Value::Array(list) => list.iter().any(Value::is_object) && Turn::list(value).is_none(),
        Value::Object(members) => !members.is_empty() && members.values().all(Value::is_object),
        _ => false,
    }
}

/// Keys of a record that is a call, and no line of a conversation.
const CALL_KEYS: &str = "messages request response prompt input output choices completion";

/// Lines that agents write for themselves.
pub(super) fn is_bookkeeping(object: &Object) -> bool {
    const KINDS: &str = "event_msg turn_context session_meta compacted world_state \
        token_usage_record queue-operation last-prompt summary file-history-snapshot attachment \
        session_info model_change thinking_level_change";
    let is_line = has_any(object, "payload sessionId timestamp leafUuid messageId");
    let is_known = kind(object).is_some_and(|kind| has_word(KINDS, kind));
    is_line && is_known && !has_any(object, CALL_KEYS)
}

/// Whether a line of bookkeeping names the session or the model of those after it.
pub(super) fn names_others(object: &Object) -> bool {
    matches!(kind(object), Some("session_meta" | "turn_context"))
}

/// The instructions that a session begins with.
pub(super) fn instructions(object: &Object) -> Option<Turn> {
    let payload = object.get("payload")?.as_object()?;
    let text = first_of(payload, "base_instructions instructions").map(content_text)?;
    (!text.is_empty()).then(|| Turn::new(Role::System, text))
}

fn kind(object: &Object) -> Option<&str> {
    object.get("type")?.as_str()
}

/// Whether the record is a step of an agent that is no call of a model, or groups such steps.
pub(super) fn is_other_step(object: &Object) -> bool {
    const STEPS: &str = "span event tool chain retriever agent embedding evaluator guardrail \
        reranker execute_tool invoke_agent create_agent embeddings";
    let attribute = |path: &str| {
        let mut at = object.get("attributes").unwrap_or(&Value::Null);
        for key in words(path) {
            at = at.get(key).unwrap_or(&Value::Null);
        }
        at.as_str()
    };
    let is_traced = has_any(object, "traceId trace_id traceid");
    let said = [
        object.get("run_type").and_then(Value::as_str),
        kind(object).filter(|_| is_traced),
        attribute("openinference span kind"),
        attribute("gen_ai operation name"),
        attribute("langfuse observation type"),
        attribute("traceloop span kind"),
    ];
    let mut said = said.into_iter().flatten();
    said.any(|said| has_word(STEPS, &said.to_ascii_lowercase()))
}

/// The turn of a record that is one message and nothing else.
pub(super) fn bare_message(object: &Object) -> Option<Turn> {
    let has_more =
        has_any(object, CALL_KEYS) || has_any(object, "usage stop_reason done finish_reason");
    Turn::of_object(object).filter(|_| !has_more)
}

/// The turn of a line of a conversation that is logged line by line; `Some(None)` if such a line has none.
pub(super) fn message_of_thread(object: &Object) -> Option<Option<Turn>> {
    if kind(object) == Some("response_item") {
        return Some(Turn::of(object.get("payload")?));
    }
    if has_any(object, CALL_KEYS) {
        return None;
    }
    if object.contains_key("source") && has_any(object, "action observation kind") {
        return Some(openhands_turn(object));
    }
    const LINKS: &str = "sessionId session_id uuid parentUuid parentId parent parent_id";
    let is_line = has_any(object, LINKS);
    let message = object.get("message").filter(|message| message.is_object());
    match message {
        Some(message) if is_line => Some(Turn::of(message)),
        // The root of a tree of messages.
        None if object.contains_key("children") && object.contains_key("parent") => Some(None),
        _ => None,
    }
}

/// The turn of an event of OpenHands, of its first or its second kind.
fn openhands_turn(event: &Object) -> Option<Turn> {
    let text = |key: &str| event.get(key).map(content_text).unwrap_or_default();
    if let Some(message) = event.get("llm_message") {
        return Turn::of(message);
    }
    if let Some(prompt) = event.get("system_prompt") {
        return Some(Turn::new(Role::System, content_text(prompt)));
    }
    let of_agent = event.get("source").and_then(Value::as_str) == Some("agent");
    if let Some(call) = event.get("tool_call").filter(|_| of_agent) {
        let message = serde_json::json!({
            "role": "assistant", "reasoning": event.get("reasoning_content"), "content": event.get("thought"), "tool_calls": [call],
        });
        return Turn::of(&message);
    }
    if let Some(observation) = event.get("observation") {
        let said = observation.as_str().unwrap_or_default();
        if ["agent_state_changed", "null", "recall"].contains(&said) {
            return None;
        }
        let content = match observation {
            Value::Object(inner) => first_of(inner, "content output text")
                .map(content_text)
                .unwrap_or_default(),
            _ => text("content"),
        };
        return Some(Turn::new(
            Role::Tool,
            format!("<tool_response>\n{content}\n</tool_response>"),
        ));
    }
    let action = event.get("action")?.as_str()?;
    let arguments = event.get("args")?.as_object()?;
    let said = first_of(arguments, "content thought")
        .map(content_text)
        .unwrap_or_default();
    match (action, of_agent) {
        ("message", false) => Some(Turn::new(Role::User, said)),
        ("system", _) => Some(Turn::new(Role::System, said)),
        ("message", true) => Some(Turn::new(Role::Assistant, said)),
        (_, true) => {
            // The model's own words, if the event has them.
            let response = event
                .get("tool_call_metadata")
                .and_then(Value::as_object)
                .and_then(answers_in);
            let written =
                response.and_then(|answers| answers.choices.into_iter().next()?.into_text());
            let action = || {
                format!(
                    "{said}\n{}",
                    json_text(event.get("args").unwrap_or(&Value::Null))
                )
            };
            (action_is_said(event))
                .then(|| Turn::new(Role::Assistant, written.unwrap_or_else(action)))
        }
        _ => None,
    }
}

/// Whether an action is one that a model chose.
fn action_is_said(event: &Object) -> bool {
    let action = event
        .get("action")
        .and_then(Value::as_str)
        .unwrap_or_default();
    named(event, "toolcallmetadata").is_some()
        || !["recall", "change_agent_state", "condensation", "null"].contains(&action)
}
