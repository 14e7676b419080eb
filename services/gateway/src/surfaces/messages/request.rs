//! The body of Anthropic's Messages as the body of a chat.

use std::collections::HashMap;

use bytes::Bytes;
use refrain_protocol::ApiError;
use refrain_tokenization::JsonValue;
use serde_json::json;

use crate::request::{IMAGE_LEFT_OUT, NamedUser, is_deferred, read};
use crate::surfaces::chat_body::{
    self, ChatBody, ChatCall, ChatMessage, ChatTool, add_line, refuse, shown, text_of, type_of,
    unsupported,
};

/// A block with this beginning changes with every request of Anthropic's own agents and means nothing to a model. In
/// the prompt it would keep prompts from sharing a prefix.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// Fields that have the same meaning in a chat, with their names there.
const SAME_FIELDS: [(&str, &str); 6] = [
    ("model", "model"),
    ("stop_sequences", "stop"),
    ("temperature", "temperature"),
    ("top_p", "top_p"),
    ("top_k", "top_k"),
    ("stream", "stream"),
];

/// The other fields of this API. Those that are not read below change nothing in the output.
const OTHER_FIELDS: [&str; 22] = [
    "betas",
    "cache_control",
    "container",
    "context_management",
    "diagnostics",
    "inference_geo",
    "max_tokens",
    "mcp_servers",
    "messages",
    "metadata",
    "output_config",
    "output_format",
    "service_tier",
    "speed",
    "stop_sequences",
    "stream",
    "system",
    "thinking",
    "tool_choice",
    "tools",
    "user_profile_id",
    "workspace_id",
];

/// Writes the body of a chat. With `counts_only`, the prompt alone matters, and an output limit need not be given.
pub(in crate::surfaces) fn to_chat(
    body: Bytes,
    counts_only: bool,
) -> Result<(Bytes, &'static str), ApiError> {
    let given: JsonValue = read(&body)?;
    drop(body);
    if !given.is_object() {
        return refuse("body", "must be a JSON object");
    }
    let mut chat = ChatBody::default();
    for (from, to) in SAME_FIELDS {
        if !(counts_only && from == "stream") {
            chat.take(&given, from, to)?;
        }
    }
    match given.get("max_tokens") {
        _ if counts_only => chat.set("max_tokens", &1)?,
        Some(max_tokens) => chat.set("max_tokens", &max_tokens)?,
        None => return refuse("max_tokens", "is required"),
    }
    check_unsupported(&given)?;
    output_format(&given, &mut chat)?;
    let messages = messages(&given, &DeferredTools::read(&given))?;
    if messages.last().is_some_and(is_prefill) {
        // The answer goes on where the last message ends.
        chat.set("continue_final_message", &true)?;
        chat.set("add_generation_prompt", &false)?;
    }
    chat.set("messages", &messages)?;
    let user = given.get("metadata").and_then(|given| given.get("user_id"));
    let named = user.and_then(|user| user.as_str().map(NamedUser::of));
    let NamedUser { user, session } = named.unwrap_or_default();
    for (name, value) in [("safety_identifier", user), ("prompt_cache_key", session)] {
        if let Some(value) = value {
            chat.set(name, &value)?;
        }
    }
    tools(&given, &mut chat)?;
    thinking(&given, &mut chat)?;
    chat.take_others(&given, &OTHER_FIELDS)?;
    Ok((chat.finish(), format_field(&given)))
}

fn check_unsupported(given: &JsonValue) -> Result<(), ApiError> {
    let servers = given.get("mcp_servers");
    let count = servers
        .as_ref()
        .and_then(JsonValue::items)
        .map(Iterator::count);
    if count.unwrap_or(0) > 0 {
        return unsupported(
            "mcp_servers",
            "are not supported; give their tools as tools",
        );
    }
    Ok(())
}

/// The field by which this body asks for a form of the answer: the present one, or the earlier one.
fn format_field(given: &JsonValue) -> &'static str {
    match given.get("output_format") {
        None => "output_config.format",
        Some(_) => "output_format",
    }
}

/// An error of the chat with the name that its field has here. `format_field` is the one of the answer's form.
pub(in crate::surfaces) fn renamed(mut error: ApiError, format_field: &str) -> ApiError {
    if let Some(param) = &error.param
        && let Some((number, rest)) = param
            .strip_prefix("tools[")
            .and_then(|rest| rest.split_once("].function"))
    {
        let rest = rest.replacen(".parameters", ".input_schema", 1);
        let here = format!("tools.{number}{rest}");
        error.message = error.message.replacen(param.as_str(), &here, 1);
        error.param = Some(here);
    }
    let names = [
        ("response_format.json_schema", format_field),
        ("response_format", format_field),
        ("stop", "stop_sequences"),
    ];
    chat_body::renamed(error, &names)
}

/// Passes the format of the answer on, by its present name and by its earlier one.
fn output_format(given: &JsonValue, chat: &mut ChatBody) -> Result<(), ApiError> {
    let config = given.get("output_config");
    let format = config.and_then(|config| config.get("format"));
    let (format, place) = match (format, given.get("output_format")) {
        (None, None) => return Ok(()),
        (Some(format), None) => (format, "output_config.format"),
        (None, Some(format)) => (format, "output_format"),
        (Some(_), Some(_)) => {
            return refuse(
                "output_format",
                "is the earlier name of output_config.format; send one of them",
            );
        }
    };
    if type_of(&format, "") != "json_schema" {
        return refuse(&format!("{place}.type"), "must be json_schema");
    }
    let schema = JsonValue::object([("schema", format.get("schema").unwrap_or_default())]);
    let kind = JsonValue::from("json_schema");
    let chats = JsonValue::object([("type", kind), ("json_schema", schema)]);
    chat.set("response_format", &chats)
}

fn is_prefill(last: &ChatMessage) -> bool {
    last.role == "assistant" && last.tool_calls.is_empty() && last.content.is_some()
}

fn messages(given: &JsonValue, tools: &DeferredTools) -> Result<Vec<ChatMessage>, ApiError> {
    let mut messages = Vec::new();
    if let Some(system) = given.get("system") {
        let mut text = None;
        for (block, place) in blocks(&system, "system")? {
            match type_of(&block, "text").as_str() {
                "text" => {
                    let more = text_of(&block, "text", &place)?;
                    if !more.starts_with(BILLING_HEADER) {
                        add_line(&mut text, &more);
                    }
                }
                other => return unknown_block(&place, other),
            }
        }
        messages.extend(text.map(|text| ChatMessage::text("system", text)));
    }
    let Some(list) = given
        .get("messages")
        .as_ref()
        .and_then(JsonValue::items)
        .map(Vec::from_iter)
    else {
        return refuse("messages", "must be a list of messages");
    };
    if list.is_empty() {
        return refuse("messages", "must have at least one message");
    }
    for (number, message) in list.iter().enumerate() {
        let place = format!("messages.{number}");
        let Some(content) = message.get("content") else {
            return refuse(&format!("{place}.content"), "is required");
        };
        let content = blocks(&content, &format!("{place}.content"))?;
        match message.get("role").as_ref().and_then(JsonValue::as_str) {
            Some("user") => user(content, tools, &mut messages)?,
            Some("assistant") => messages.push(assistant(content)?),
            Some("system") => {
                let mut text = None;
                for (block, place) in content {
                    add_line(&mut text, &text_of(&block, "text", &place)?);
                }
                messages.push(ChatMessage::text("system", text.unwrap_or_default()));
            }
            _ => return refuse(&format!("{place}.role"), "must be user or assistant"),
        }
    }
    Ok(messages)
}

/// The blocks of a content with their places. A text counts as one block.
fn blocks(content: &JsonValue, place: &str) -> Result<Vec<(JsonValue, String)>, ApiError> {
    if content.as_str().is_some() {
        return Ok(vec![(content.clone(), place.to_owned())]);
    }
    let Some(items) = content.items() else {
        return refuse(place, "must be a text or a list of blocks");
    };
    let items = items.enumerate();
    Ok(items
        .map(|(number, block)| (block, format!("{place}.{number}")))
        .collect())
}

fn unknown_block<T>(place: &str, kind: &str) -> Result<T, ApiError> {
    let kind = shown(kind);
    match kind.as_str() {
        // Claude Code knows a place that ends so, and sends the message again without the image.
        "image" | "document" => unsupported(
            &format!("{place}.{kind}"),
            format!("blocks of type {kind} are not supported, only text; send the text instead"),
        ),
        _ => unsupported(
            &format!("{place}.type"),
            format!("blocks of type {kind} are not supported here"),
        ),
    }
}

/// A message of the user: results of tools become messages of their own, in their order.
fn user(
    content: Vec<(JsonValue, String)>,
    tools: &DeferredTools,
    messages: &mut Vec<ChatMessage>,
) -> Result<(), ApiError> {
    let mut text = None;
    let mut is_empty = true;
    for (block, place) in content {
        match type_of(&block, "text").as_str() {
            "text" => add_line(&mut text, &text_of(&block, "text", &place)?),
            "tool_result" => {
                let said = text.take();
                messages.extend(said.map(|text| ChatMessage::text("user", text)));
                messages.push(tool_result(&block, tools, &place)?);
            }
            other => return unknown_block(&place, other),
        }
        is_empty = false;
    }
    if is_empty {
        text = Some(String::new());
    }
    messages.extend(text.map(|text| ChatMessage::text("user", text)));
    Ok(())
}

/// The result of a tool. An image in it becomes words about it: it stays in the conversation, so refusing it would
/// end the session. A reference to a tool becomes its definition, which the prompt does not have elsewhere.
fn tool_result(
    block: &JsonValue,
    tools: &DeferredTools,
    place: &str,
) -> Result<ChatMessage, ApiError> {
    let call = text_of(block, "tool_use_id", place)?;
    let mut text = None;
    if let Some(content) = block.get("content") {
        for (part, place) in blocks(&content, &format!("{place}.content"))? {
            match type_of(&part, "text").as_str() {
                "text" => add_line(&mut text, &text_of(&part, "text", &place)?),
                "image" => add_line(&mut text, IMAGE_LEFT_OUT),
                "tool_reference" => {
                    let name = text_of(&part, "tool_name", &place)?;
                    add_line(&mut text, tools.definition(&name).unwrap_or(&name));
                }
                other => return unknown_block(&place, other),
            }
        }
    }
    let mut text = text.unwrap_or_default();
    let is_error = block.get("is_error").and_then(|value| value.as_bool());
    if is_error == Some(true) {
        // Chats have no place for it beside the text.
        text.insert_str(0, "Error: ");
    }
    Ok(ChatMessage::tool(call, text))
}

fn assistant(content: Vec<(JsonValue, String)>) -> Result<ChatMessage, ApiError> {
    let mut message = ChatMessage {
        role: "assistant",
        ..ChatMessage::default()
    };
    for (block, place) in content {
        match type_of(&block, "text").as_str() {
            "text" => add_line(&mut message.content, &text_of(&block, "text", &place)?),
            "thinking" => {
                let thought = text_of(&block, "thinking", &place)?;
                add_line(&mut message.reasoning_content, &thought);
            }
            // Only the service that wrote it can read it.
            "redacted_thinking" => {}
            "tool_use" => {
                let arguments = match block.get("input") {
                    None => "{}".to_owned(),
                    Some(input) if input.is_object() => {
                        serde_json::to_string(&input).map_err(ApiError::internal)?
                    }
                    Some(_) => return refuse(&format!("{place}.input"), "must be an object"),
                };
                let id = text_of(&block, "id", &place)?;
                let name = text_of(&block, "name", &place)?;
                message.tool_calls.push(ChatCall::new(id, name, arguments));
            }
            other => return unknown_block(&place, other),
        }
    }
    if message.content.is_none() && message.tool_calls.is_empty() {
        message.content = Some(String::new());
    }
    Ok(message)
}

/// The tools that a program shows to the model only once it has searched for them, by their names. They are not in
/// the head of the prompt, so that it stays the same when one is found.
struct DeferredTools(HashMap<String, String>);

impl DeferredTools {
    fn read(given: &JsonValue) -> Self {
        let tools = given.get("tools");
        let tools = tools.iter().filter_map(JsonValue::items).flatten();
        let deferred = tools.filter(is_deferred).filter_map(|tool| {
            let name = tool.get("name")?;
            let function = ChatTool::function(name.clone(), &tool, "input_schema");
            Some((
                name.as_str()?.to_owned(),
                serde_json::to_string(&function).ok()?,
            ))
        });
        DeferredTools(deferred.collect())
    }

    /// The definition of a tool as a chat has it, in JSON.
    fn definition(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }
}

fn tools(given: &JsonValue, chat: &mut ChatBody) -> Result<(), ApiError> {
    let choice = given.get("tool_choice");
    let kind = choice.as_ref().map(|choice| type_of(choice, ""));
    match kind.as_deref() {
        None => {}
        Some("auto") => chat.set("tool_choice", "auto")?,
        Some("none") => chat.set("tool_choice", "none")?,
        Some("any") => chat.set("tool_choice", "required")?,
        Some("tool") => {
            let name = text_of(&choice.clone().unwrap_or_default(), "name", "tool_choice")?;
            let named = json!({"type": "function", "function": {"name": name}});
            chat.set("tool_choice", &named)?;
        }
        Some(_) => return refuse("tool_choice.type", "must be auto, none, any or tool"),
    }
    let disables = choice.and_then(|choice| choice.get("disable_parallel_tool_use"));
    if disables.and_then(|value| value.as_bool()) == Some(true) {
        chat.set("parallel_tool_calls", &false)?;
    }
    let Some(tools) = given.get("tools") else {
        return Ok(());
    };
    let Some(tools) = tools.items() else {
        return refuse("tools", "must be a list of tools");
    };
    let mut functions = Vec::new();
    for (number, tool) in tools.enumerate() {
        let place = format!("tools.{number}");
        match type_of(&tool, "custom").as_str() {
            "custom" => {}
            other => {
                let fault = format!(
                    "tools of type {} run at Anthropic and are not supported; leave it out or give a tool with an input_schema",
                    shown(other)
                );
                return unsupported(&format!("{place}.type"), fault);
            }
        }
        let Some(name) = tool.get("name").filter(|name| name.as_str().is_some()) else {
            return refuse(&format!("{place}.name"), "must be a text");
        };
        if !tool
            .get("input_schema")
            .is_some_and(|schema| schema.is_object())
        {
            return refuse(&format!("{place}.input_schema"), "must be a JSON schema");
        }
        let mut function = ChatTool::function(name, &tool, "input_schema");
        function.is_hidden = is_deferred(&tool);
        functions.push(function);
    }
    if functions.is_empty() {
        return Ok(());
    }
    chat.set("tools", &functions)
}

/// Passes `thinking` to the template, under the name that most templates with a choice have for it.
fn thinking(given: &JsonValue, chat: &mut ChatBody) -> Result<(), ApiError> {
    let own = given.get("chat_template_kwargs");
    let kind = given.get("thinking").map(|thinking| type_of(&thinking, ""));
    match (own, kind.as_deref()) {
        (Some(own), _) => chat.set("chat_template_kwargs", &own),
        (None, None) => Ok(()),
        (None, Some("disabled")) => {
            chat.set("chat_template_kwargs", &json!({"enable_thinking": false}))
        }
        (None, Some("enabled" | "adaptive")) => {
            chat.set("chat_template_kwargs", &json!({"enable_thinking": true}))
        }
        (None, Some(_)) => refuse("thinking.type", "must be enabled, adaptive or disabled"),
    }
}

#[cfg(test)]
mod tests;
