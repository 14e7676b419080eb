//! The tools of Responses as the functions of a chat, and the way back for their calls.
//!
//! * The functions of a `namespace` are called `namespace__name` in a chat, as with vLLM and LiteLLM. Answers and the
//!   conversation have both names apart, as the client gave them: Codex refuses calls of names that it did not give.
//! * A `custom` tool takes a text. In a chat it is a function with one argument. The model reads the grammar of the
//!   text in the description, and the output is held to it where that is possible.
//! * Tools that OpenAI runs itself, such as `web_search`, are left out. A choice that forces one is refused.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use refrain_protocol::ApiError;
use refrain_protocol::engine::TextForm;
use refrain_tokenization::JsonValue;
use serde_json::{Value, json};

use crate::surfaces::chat_body::{
    ChatBody, ChatTool, refuse, shown, text_of, type_of, unsupported,
};

/// Stands between the names of a namespace and of its function.
const SEPARATOR: &str = "__";

/// The argument of a custom tool.
const INPUT: &str = "input";

/// Types of tools that run at OpenAI, or in the client without a definition. Those with a date or `_preview` behind
/// them are the same.
const HOSTED: [&str; 10] = [
    "apply_patch",
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "shell",
    "tool_search",
    "web_search",
];

/// The types in [`HOSTED`] that the log has named already, a bit each.
static LOGGED: AtomicUsize = AtomicUsize::new(0);

/// The place in a body's tools that a function of a chat stands for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CalledTool {
    pub(super) name: String,
    pub(super) namespace: Option<String>,
    /// Whether it takes a text and no arguments.
    pub(super) is_custom: bool,
}

/// The tools of a body as a chat has them.
#[derive(Clone, Debug, Default)]
pub(super) struct ToolNames {
    /// The tools by their names in a chat.
    tools: HashMap<String, CalledTool>,
    /// The place in the body of each function of the chat.
    places: Vec<String>,
    /// The grammars of the texts that custom tools take, by the names of the tools in a chat.
    pub(super) grammars: HashMap<String, TextForm>,
}

impl CalledTool {
    /// The name in a chat.
    pub(super) fn chat_name(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("{namespace}{SEPARATOR}{}", self.name),
            None => self.name.clone(),
        }
    }

    /// The arguments of a chat for what the client's tool is given.
    pub(super) fn chat_arguments(&self, given: &str) -> String {
        match self.is_custom {
            true => json!({ INPUT: given }).to_string(),
            false => given.to_owned(),
        }
    }

    /// The text or arguments for the client's tool, by the arguments of a chat. Those that are not as they should be
    /// stay as they are, since the client tells the model about them.
    pub(super) fn given(&self, arguments: &str) -> String {
        let parsed = || serde_json::from_str::<Value>(arguments).ok();
        let input = self.is_custom.then(parsed).flatten();
        let input = input.and_then(|value| Some(value.get(INPUT)?.as_str()?.to_owned()));
        input.unwrap_or_else(|| arguments.to_owned())
    }
}

impl ToolNames {
    /// The tool that a function of a chat stands for.
    pub(super) fn called(&self, chat_name: &str) -> CalledTool {
        let known = self.tools.get(chat_name).cloned();
        known.unwrap_or_else(|| CalledTool {
            name: chat_name.to_owned(),
            ..CalledTool::default()
        })
    }

    /// An error of the chat about a function, with its place in the body.
    pub(super) fn renamed(&self, mut error: ApiError) -> ApiError {
        let place = error.param.as_deref().and_then(|param| {
            let (number, rest) = param.strip_prefix("tools[")?.split_once(']')?;
            let place = self.places.get(number.parse::<usize>().ok()?)?;
            // A function's fields stand in the tool itself here.
            let rest = rest.strip_prefix(".function").unwrap_or(rest);
            Some((param.to_owned(), format!("{place}{rest}")))
        });
        if let Some((there, here)) = place {
            error.message = error.message.replacen(&there, &here, 1);
            error.param = Some(here);
        }
        error
    }

    fn add(&mut self, tool: CalledTool, place: &str) -> Result<JsonValue, ApiError> {
        let name = tool.chat_name();
        let chat_name = JsonValue::from(name.as_str());
        self.places.push(place.to_owned());
        match self.tools.insert(name, tool) {
            None => Ok(chat_name),
            Some(_) => refuse(
                &format!("{place}.name"),
                "another tool has this name, or this namespace and name joined by __",
            ),
        }
    }
}

/// Passes the tools on.
pub(super) fn tools(given: &JsonValue, chat: &mut ChatBody) -> Result<ToolNames, ApiError> {
    let mut names = ToolNames::default();
    let Some(tools) = given.get("tools") else {
        return Ok(names);
    };
    let Some(tools) = tools.items() else {
        return refuse("tools", "must be a list of tools");
    };
    let mut functions = Vec::new();
    for (number, tool) in tools.enumerate() {
        let place = format!("tools[{number}]");
        match type_of(&tool, "").as_str() {
            "namespace" => {
                let namespace = text_of(&tool, "name", &place)?;
                let Some(inner) = tool.get("tools").and_then(|inner| {
                    let items = inner.items()?;
                    Some(items.collect::<Vec<_>>())
                }) else {
                    return refuse(&format!("{place}.tools"), "must be a list of tools");
                };
                for (number, tool) in inner.iter().enumerate() {
                    let place = format!("{place}.tools[{number}]");
                    let function = function(tool, Some(&namespace), &mut names, &place)?;
                    functions.extend(function);
                }
            }
            _ => functions.extend(function(&tool, None, &mut names, &place)?),
        }
    }
    if !functions.is_empty() {
        chat.set("tools", &functions)?;
    }
    Ok(names)
}

/// A tool as a function of a chat; `None` if it is left out.
fn function(
    tool: &JsonValue,
    namespace: Option<&str>,
    names: &mut ToolNames,
    place: &str,
) -> Result<Option<ChatTool>, ApiError> {
    let kind = type_of(tool, "");
    let is_custom = match kind.as_str() {
        "function" => false,
        "custom" => true,
        other => {
            if let Some(at) = hosted(other) {
                note_left_out(at);
                return Ok(None);
            }
            let fault = format!(
                "tools of type {} are not supported, only function, namespace and custom",
                shown(other)
            );
            return unsupported(&format!("{place}.type"), fault);
        }
    };
    let called = CalledTool {
        name: text_of(tool, "name", place)?,
        namespace: namespace.map(str::to_owned),
        is_custom,
    };
    let chat_name = called.chat_name();
    let name = names.add(called, place)?;
    if !is_custom {
        return Ok(Some(ChatTool::function(name, tool, "parameters")));
    }
    let (definition, grammar) = custom_definition(tool, place)?;
    names
        .grammars
        .extend(grammar.map(|grammar| (chat_name, grammar)));
    Ok(Some(ChatTool::function(name, &definition, "parameters")))
}

/// A custom tool as the definition of a function, and the grammar of its text. The model reads that in the
/// description.
fn custom_definition(
    tool: &JsonValue,
    place: &str,
) -> Result<(JsonValue, Option<TextForm>), ApiError> {
    let mut description = match tool.get("description") {
        Some(_) => text_of(tool, "description", place)?,
        None => String::new(),
    };
    let format = tool.get("format").unwrap_or_default();
    let grammar = match type_of(&format, "text").as_str() {
        "text" => None,
        "grammar" => {
            let place = format!("{place}.format");
            let syntax = text_of(&format, "syntax", &place)?;
            let definition = text_of(&format, "definition", &place)?;
            let (kind, form): (_, fn(String) -> TextForm) = match syntax.as_str() {
                "lark" => ("Lark grammar", TextForm::Lark),
                "regex" => ("regular expression", TextForm::Regex),
                _ => return refuse(&format!("{place}.syntax"), "must be lark or regex"),
            };
            if !description.is_empty() {
                description.push_str("\n\n");
            }
            description.push_str(&format!("The input follows this {kind}:\n{definition}"));
            Some(form(definition))
        }
        _ => return refuse(&format!("{place}.format.type"), "must be text or grammar"),
    };
    let parameters = json!({
        "type": "object", "properties": {INPUT: {"type": "string"}},
        "required": [INPUT], "additionalProperties": false,
    });
    let parameters = serde_json::from_value(parameters).map_err(ApiError::internal)?;
    let definition = JsonValue::object([
        ("description", JsonValue::from(description.as_str())),
        ("parameters", parameters),
    ]);
    Ok((definition, grammar))
}

/// The number of a type of tools that run elsewhere.
fn hosted(kind: &str) -> Option<usize> {
    let is_same = |known: &str| {
        let rest = kind.strip_prefix(known);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
    };
    HOSTED.iter().position(|known| is_same(known))
}

/// Says once in the life of the process that tools of a type are left out.
fn note_left_out(at: usize) {
    let bit = 1 << at;
    if LOGGED.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
        tracing::info!(
            kind = HOSTED[at],
            "tools of this type run at OpenAI, so /v1/responses leaves them out of the prompt"
        );
    }
}

/// Passes the choice on. A named function is one level deeper in a chat.
pub(super) fn tool_choice(given: &JsonValue, chat: &mut ChatBody) -> Result<(), ApiError> {
    let Some(choice) = given.get("tool_choice") else {
        return Ok(());
    };
    if choice.as_str().is_some() {
        return chat.set("tool_choice", &choice);
    }
    match type_of(&choice, "").as_str() {
        "function" | "custom" => {
            let name = chat_name(&choice, "tool_choice")?;
            let named = json!({"type": "function", "function": {"name": name}});
            chat.set("tool_choice", &named)
        }
        "allowed_tools" => {
            let tools = choice.get("tools");
            let tools = tools.iter().filter_map(JsonValue::items).flatten();
            let mut named = Vec::new();
            for (number, tool) in tools.enumerate() {
                if hosted(&type_of(&tool, "")).is_none() {
                    let name = chat_name(&tool, &format!("tool_choice.tools[{number}]"))?;
                    named.push(json!({"type": "function", "function": {"name": name}}));
                }
            }
            let mode = choice.get("mode").map(|mode| mode.to_json());
            let allowed = json!({"mode": mode.unwrap_or("auto".into()), "tools": named});
            chat.set(
                "tool_choice",
                &json!({"type": "allowed_tools", "allowed_tools": allowed}),
            )
        }
        other => {
            let fault = match hosted(other) {
                Some(_) => format!("tools of type {} run at OpenAI, not here", shown(other)),
                None => format!("a choice of type {} is not supported", shown(other)),
            };
            unsupported("tool_choice.type", fault)
        }
    }
}

/// The name in a chat of the tool that a choice names.
fn chat_name(choice: &JsonValue, place: &str) -> Result<String, ApiError> {
    let called = CalledTool {
        name: text_of(choice, "name", place)?,
        namespace: namespace_of(choice),
        is_custom: false,
    };
    Ok(called.chat_name())
}

/// The namespace that a choice or a call names.
pub(super) fn namespace_of(value: &JsonValue) -> Option<String> {
    let namespace = value.get("namespace");
    namespace.and_then(|namespace| namespace.as_str().map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(body: &Value) -> Result<(Value, ToolNames), ApiError> {
        let given = serde_json::from_value(body.clone()).unwrap();
        let mut chat = ChatBody::default();
        let names = tools(&given, &mut chat)?;
        tool_choice(&given, &mut chat)?;
        Ok((serde_json::from_slice(&chat.finish()).unwrap(), names))
    }

    /// The tools of Codex, with one of a namespace and one that takes a text.
    fn codex() -> Value {
        json!([
            {"type": "function", "name": "shell", "parameters": {"type": "object"}},
            {"type": "web_search", "external_web_access": false},
            {"type": "namespace", "name": "agents", "tools": [
                {"type": "function", "name": "spawn", "description": "d", "parameters": {"type": "object"}},
            ]},
            {"type": "custom", "name": "apply_patch", "description": "Patches.",
             "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"x\""}},
            {"type": "web_search_preview_2025_03_11"}, {"type": "image_generation"}, {"type": "tool_search"},
        ])
    }

    #[test]
    fn namespaces_are_unfolded_texts_are_arguments_and_the_rest_is_left_out() {
        let (chat, names) = chat(&json!({"tools": codex()})).unwrap();
        let input = json!({
            "type": "object", "properties": {"input": {"type": "string"}},
            "required": ["input"], "additionalProperties": false,
        });
        let function = |function: Value| json!({"type": "function", "function": function});
        let expected = [
            function(json!({"name": "shell", "parameters": {"type": "object"}})),
            function(
                json!({"name": "agents__spawn", "description": "d", "parameters": {"type": "object"}}),
            ),
            function(json!({
                "name": "apply_patch", "parameters": input,
                "description": "Patches.\n\nThe input follows this Lark grammar:\nstart: \"x\"",
            })),
        ];
        assert_eq!(chat["tools"], json!(expected));
        let spawn = names.called("agents__spawn");
        assert_eq!(
            (&*spawn.name, spawn.namespace.as_deref()),
            ("spawn", Some("agents"))
        );
        assert_eq!(spawn.given("{\"a\":1}"), "{\"a\":1}");
        let patch = names.called("apply_patch");
        assert_eq!(patch.given("{\"input\": \"a\\nb\"}"), "a\nb");
        assert_eq!(patch.given("{\"input\": \"a"), "{\"input\": \"a");
        assert_eq!(patch.chat_arguments("a\nb"), "{\"input\":\"a\\nb\"}");
        assert_eq!(names.called("unknown").name, "unknown");
    }

    #[test]
    fn faults_have_their_places_in_the_body() {
        let (_, names) = chat(&json!({"tools": codex()})).unwrap();
        for (there, here) in [
            ("tools[0].function.parameters.a", "tools[0].parameters.a"),
            ("tools[1].function.name", "tools[2].tools[0].name"),
            ("tools[2].function", "tools[3]"),
            ("tools[9].function", "tools[9].function"),
            ("tools", "tools"),
        ] {
            let error = names.renamed(ApiError::invalid(there, format!("{there}: no")));
            assert_eq!(error.param.as_deref(), Some(here));
            assert_eq!(error.message, format!("{here}: no"));
        }
        let function = |name: &str| json!({"type": "function", "name": name});
        let space =
            |name: &str, inner: Value| json!({"type": "namespace", "name": name, "tools": inner});
        for (tools, place) in [
            (
                json!([function("a__b"), space("a", json!([function("b")]))]),
                "tools[1].tools[0].name",
            ),
            (json!([function("a"), function("a")]), "tools[1].name"),
            (json!([space("a", json!(7))]), "tools[0].tools"),
            (json!([{"type": "namespace", "tools": []}]), "tools[0].name"),
            (json!([{"type": "odd"}]), "tools[0].type"),
            (
                json!([{"type": "custom", "name": "c", "format": {"type": "odd"}}]),
                "tools[0].format.type",
            ),
            (
                json!([{"type": "custom", "name": "c",
                    "format": {"type": "grammar", "syntax": "peg", "definition": "x"}}]),
                "tools[0].format.syntax",
            ),
        ] {
            let error = chat(&json!({"tools": tools})).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(place), "{tools}");
        }
    }

    #[test]
    fn a_choice_names_functions_as_the_chat_does() {
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        for (choice, expected) in [
            (
                json!({"type": "custom", "name": "apply_patch"}),
                named("apply_patch"),
            ),
            (
                json!({"type": "function", "name": "spawn", "namespace": "agents"}),
                named("agents__spawn"),
            ),
            (
                json!({"type": "allowed_tools", "mode": "auto",
                    "tools": [{"type": "web_search"}, {"type": "function", "name": "shell"}]}),
                json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("shell")]}}),
            ),
        ] {
            let (chat, _) = chat(&json!({"tools": codex(), "tool_choice": choice})).unwrap();
            assert_eq!(chat["tool_choice"], expected);
        }
        let error = chat(&json!({"tool_choice": {"type": "file_search"}})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("tool_choice.type"));
        assert!(error.has_code("unsupported_parameter"));
    }
}
