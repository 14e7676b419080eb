//! The tools of a chat: which ones the template shows, and which calls the client expects.

use std::collections::HashMap;

use refrain_output_grammar::text_pattern;
use refrain_output_parsers::Tool;
use refrain_protocol::ApiError;
use refrain_protocol::engine::TextForm;
use refrain_tokenization::{JsonList, JsonValue};
use serde_json::{Map, Value};

use super::body::ChatFields;
use super::refusal::{invalid, unsupported};
use crate::models::Model;

/// Longest name of a function, bytes.
const NAME_BYTES_MAX: usize = 256;

/// The tools of a request.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// The tools as the template shows them. `None` without any.
    pub(super) shown: Option<JsonList>,
    /// The tools whose calls are looked for in the output.
    pub(super) callable: Vec<CallableTool>,
    /// Whether calls are forced.
    pub(super) demand: CallDemand,
    /// Whether only one call is wanted.
    pub(super) first_call_only: bool,
    /// Whether the client speaks the deprecated `functions`.
    pub(super) are_functions: bool,
}

/// A tool that may be called.
#[derive(Clone, Debug)]
pub(super) struct CallableTool {
    pub(super) tool: Tool,
    /// Whether the client wants its arguments to be valid by its schema.
    pub(super) is_strict: bool,
    /// The place of its function in the body.
    pub(super) place: String,
}

/// Whether the model has to call a tool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum CallDemand {
    /// It decides by itself.
    #[default]
    Free,
    /// It calls one or more of the tools.
    Required,
    /// It calls the only one that may be called, once.
    Named,
}

/// The choice of tools.
#[derive(Debug, PartialEq, Eq)]
enum Choice {
    None,
    Auto,
    /// The model must call a function.
    Required,
    /// The model must call this function.
    Named(String),
    /// The model may call only these functions, or must call one of them.
    Allowed {
        names: Vec<String>,
        is_required: bool,
    },
}

impl Choice {
    /// The functions that it names.
    fn names(&self) -> &[String] {
        match self {
            Choice::Named(name) => std::slice::from_ref(name),
            Choice::Allowed { names, .. } => names,
            Choice::None | Choice::Auto | Choice::Required => &[],
        }
    }

    fn demand(&self) -> CallDemand {
        match self {
            Choice::Named(_) => CallDemand::Named,
            Choice::Required
            | Choice::Allowed {
                is_required: true, ..
            } => CallDemand::Required,
            Choice::None | Choice::Auto | Choice::Allowed { .. } => CallDemand::Free,
        }
    }
}

impl Tools {
    /// Reads `tools`, `tool_choice`, `parallel_tool_calls`, and the deprecated `functions` and `function_call`.
    pub(super) fn read(chat: &mut ChatFields) -> Result<Self, ApiError> {
        let are_functions = chat.functions.is_some();
        if are_functions && chat.tools.is_some() {
            return invalid("functions", "is the older form of tools; send only tools");
        }
        let (choice, choice_field) = match chat.function_call.take() {
            Some(choice) if are_functions => (function_choice(&choice)?, "function_call"),
            Some(_) => return invalid("function_call", "is allowed only with functions"),
            None => (tool_choice(chat.tool_choice.as_ref())?, "tool_choice"),
        };
        let listed: Vec<JsonValue> = match chat.functions.take() {
            Some(functions) => functions.items().map(as_tool).collect(),
            None => chat.tools.take().iter().flat_map(JsonList::items).collect(),
        };
        let field = if are_functions { "functions" } else { "tools" };
        let mut tools = Vec::with_capacity(listed.len());
        for (place, tool) in listed.into_iter().enumerate() {
            let read = read_tool(&tool, &format!("{field}[{place}]"), are_functions)?;
            tools.push((read, tool));
        }
        let is_known = |name: &String| tools.iter().any(|(tool, _)| tool.tool.name == *name);
        if !choice.names().iter().all(is_known) {
            let fault = "names a function that is not among the tools";
            return invalid(choice_field, fault);
        }
        let demand = choice.demand();
        if demand != CallDemand::Free && tools.is_empty() {
            return invalid(
                choice_field,
                "a call can be forced only where there are tools",
            );
        }
        if matches!(choice, Choice::Allowed { .. }) {
            tools.retain(|(tool, _)| choice.names().contains(&tool.tool.name));
        }
        let (mut callable, mut shown): (Vec<_>, Vec<_>) = tools.into_iter().unzip();
        // Programs tell the model about these later, so that the head of the prompt stays the same.
        shown.retain(|tool: &JsonValue| !is_deferred(tool));
        match &choice {
            // The template shows all tools in either case, as with vLLM, so that the prompt stays the same.
            Choice::None => callable.clear(),
            Choice::Named(name) => callable.retain(|tool| tool.tool.name == *name),
            Choice::Auto | Choice::Required | Choice::Allowed { .. } => {}
        }
        Ok(Tools {
            shown: (!shown.is_empty()).then(|| shown.into_iter().collect()),
            callable,
            demand,
            first_call_only: are_functions
                || demand == CallDemand::Named
                || chat.parallel_tool_calls == Some(false),
            are_functions,
        })
    }
}

impl Tools {
    /// The field that lists them.
    pub(super) fn field(&self) -> &'static str {
        match self.are_functions {
            true => "functions",
            false => "tools",
        }
    }

    /// The same tools to be called, with a grammar in the schema of each that has one. `None` if none has, or none
    /// can be written so: the model then only reads it.
    pub(super) fn with_grammars(&self, grammars: &HashMap<String, TextForm>) -> Option<Tools> {
        let mut callable = self.callable.clone();
        let mut has_one = false;
        for CallableTool {
            tool, is_strict, ..
        } in &mut callable
        {
            let pattern = match grammars.get(&tool.name).map(text_pattern) {
                None => continue,
                Some(Ok(pattern)) => pattern,
                Some(Err(error)) => {
                    tracing::debug!(%error, "no output can be held to the grammar of a tool");
                    continue;
                }
            };
            let properties = tool.parameters.get_mut("properties");
            let properties = properties.and_then(Value::as_object_mut);
            let arguments = properties.into_iter().flat_map(Map::values_mut);
            for argument in arguments.filter_map(Value::as_object_mut) {
                argument.insert("pattern".to_owned(), pattern.as_str().into());
            }
            (*is_strict, has_one) = (true, true);
        }
        has_one.then_some(Tools {
            shown: None,
            callable,
            ..*self
        })
    }

    /// Refuses tools that the model would never see.
    pub(super) fn check_shown(&self, model: &Model) -> Result<(), ApiError> {
        if self.callable.is_empty() || model.shows_tools || model.template.is_none() {
            return Ok(());
        }
        let field = self.field();
        let message = format!(
            "{field}: the chat template of this model has no place for tools; use another model, or describe them in a message"
        );
        unsupported(field, &message)
    }
}

/// Whether a program tells the model about a tool only later, so that it is not in the head of the prompt.
pub(crate) fn is_deferred(tool: &JsonValue) -> bool {
    tool.get("defer_loading").and_then(|value| value.as_bool()) == Some(true)
}

/// A function of the deprecated form as a tool.
fn as_tool(function: JsonValue) -> JsonValue {
    JsonValue::object([
        ("type", JsonValue::from("function")),
        ("function", function),
    ])
}

/// Checks a tool. `place` is its path in the request.
fn read_tool(tool: &JsonValue, place: &str, is_function: bool) -> Result<CallableTool, ApiError> {
    if !tool.is_object() {
        return invalid(place, "must be an object with a function");
    }
    let kind = tool.get("type");
    let kind = kind.as_ref().map_or(Some("function"), JsonValue::as_str);
    if kind != Some("function") {
        let message = format!("{place}.type: must be \"function\"; other tools are not supported");
        return unsupported(&format!("{place}.type"), &message);
    }
    let at = match is_function {
        true => place.to_owned(),
        false => format!("{place}.function"),
    };
    let function = tool.get("function").filter(JsonValue::is_object);
    let Some(function) = function else {
        return invalid(&at, "must be an object with a name");
    };
    let name = function.get("name");
    let name = name.as_ref().and_then(JsonValue::as_str).unwrap_or("");
    let is_odd = |c: char| c.is_whitespace() || c.is_control();
    if !(1..=NAME_BYTES_MAX).contains(&name.len()) || name.contains(is_odd) {
        let fault = format!("must be a text of 1 to {NAME_BYTES_MAX} bytes without spaces");
        return invalid(&format!("{at}.name"), fault);
    }
    let parameters = function.get("parameters");
    if parameters
        .as_ref()
        .is_some_and(|schema| !schema.is_object())
    {
        return invalid(&format!("{at}.parameters"), "must be a JSON schema");
    }
    let strict = function.get("strict");
    let is_strict = strict.as_ref().map_or(Some(false), JsonValue::as_bool);
    let Some(is_strict) = is_strict else {
        return invalid(&format!("{at}.strict"), "must be true or false");
    };
    Ok(CallableTool {
        tool: Tool {
            name: name.to_owned(),
            parameters: parameters.unwrap_or_default().to_json(),
        },
        is_strict,
        place: at,
    })
}

/// Reads `tool_choice`.
fn tool_choice(choice: Option<&JsonValue>) -> Result<Choice, ApiError> {
    let field = "tool_choice";
    let Some(choice) = choice else {
        return Ok(Choice::Auto);
    };
    match choice.as_str() {
        Some("none") => return Ok(Choice::None),
        Some("auto") => return Ok(Choice::Auto),
        Some("required") => return Ok(Choice::Required),
        Some(_) => {
            let fault = "must be \"none\", \"auto\", \"required\", a function or allowed_tools";
            return invalid(field, fault);
        }
        None => {}
    }
    let kind = choice.get("type");
    match kind.as_ref().and_then(JsonValue::as_str) {
        Some("function") => match function_name(choice) {
            Some(name) => Ok(Choice::Named(name)),
            None => invalid("tool_choice.function.name", "must be a text"),
        },
        Some("allowed_tools") => allowed_tools(choice),
        _ => invalid(
            "tool_choice.type",
            "must be \"function\" or \"allowed_tools\"",
        ),
    }
}

/// Reads `tool_choice` of the type `allowed_tools`.
fn allowed_tools(choice: &JsonValue) -> Result<Choice, ApiError> {
    // Both the form of chats and the flat form of other endpoints are known.
    let allowed = choice.get("allowed_tools");
    let allowed = allowed.as_ref().unwrap_or(choice);
    let mode = allowed.get("mode");
    let is_required = match mode.as_ref().map_or(Some("auto"), JsonValue::as_str) {
        Some("auto") => false,
        Some("required") => true,
        _ => {
            let place = "tool_choice.allowed_tools.mode";
            return invalid(place, "must be \"auto\" or \"required\"");
        }
    };
    let list = allowed.get("tools");
    let tools = list.as_ref().and_then(JsonValue::items);
    let names = tools.and_then(|tools| tools.map(|tool| function_name(&tool)).collect());
    match names {
        Some(names) => Ok(Choice::Allowed { names, is_required }),
        None => invalid(
            "tool_choice.allowed_tools.tools",
            "must be a list of functions with names",
        ),
    }
}

/// The name in `{"function": {"name": ...}}`, or in the flat form.
fn function_name(tool: &JsonValue) -> Option<String> {
    let function = tool.get("function");
    let name = function.as_ref().unwrap_or(tool).get("name")?;
    name.as_str().map(str::to_owned)
}

/// Reads the deprecated `function_call`.
fn function_choice(choice: &JsonValue) -> Result<Choice, ApiError> {
    match choice.as_str() {
        Some("none") => Ok(Choice::None),
        Some("auto") => Ok(Choice::Auto),
        Some(_) => invalid(
            "function_call",
            "must be \"none\", \"auto\" or {\"name\": ...}",
        ),
        None => match function_name(choice) {
            Some(name) => Ok(Choice::Named(name)),
            None => invalid("function_call.name", "must be a text"),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(body: &Value) -> ChatFields {
        let part = |name: &str| body.get(name).filter(|value| !value.is_null()).cloned();
        let list = |name| part(name).map(|value| serde_json::from_value(value).unwrap());
        let value = |name| part(name).map(|value| serde_json::from_value(value).unwrap());
        ChatFields {
            tools: list("tools"),
            functions: list("functions"),
            tool_choice: value("tool_choice"),
            function_call: value("function_call"),
            parallel_tool_calls: body["parallel_tool_calls"].as_bool(),
            ..ChatFields::default()
        }
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    /// The shown and the callable tools.
    fn names(body: &Value) -> (usize, Vec<String>) {
        let tools = Tools::read(&mut fields(body)).unwrap();
        let shown = tools.shown.iter().flat_map(JsonList::items).count();
        let names = tools.callable.into_iter().map(|tool| tool.tool.name);
        (shown, names.collect())
    }

    #[test]
    fn the_choice_decides_what_is_shown_and_what_may_be_called() {
        let two = json!([tool("a"), tool("b")]);
        let allowed = |form: Value| json!({"tools": two, "tool_choice": form});
        for (body, shown, callable) in [
            (json!({}), 0, &[][..]),
            (json!({"tools": [], "tool_choice": "auto"}), 0, &[]),
            (json!({"tools": two}), 2, &["a", "b"]),
            (json!({"tools": two, "tool_choice": "auto"}), 2, &["a", "b"]),
            (json!({"tools": two, "tool_choice": "none"}), 2, &[]),
            (
                allowed(json!({"type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [tool("b")]}})),
                1,
                &["b"],
            ),
            (
                allowed(json!({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "a"}]})),
                1,
                &["a"],
            ),
            (
                json!({"tools": two, "tool_choice": "required"}),
                2,
                &["a", "b"],
            ),
            (json!({"tools": two, "tool_choice": tool("b")}), 2, &["b"]),
            (
                json!({"tools": [tool("a"), {"defer_loading": true, "function": {"name": "b"}}]}),
                1,
                &["a", "b"],
            ),
            (json!({"functions": [{"name": "f"}]}), 1, &["f"]),
            (
                json!({"functions": [{"name": "f"}, {"name": "g"}], "function_call": {"name": "g"}}),
                2,
                &["g"],
            ),
            (
                json!({"functions": [{"name": "f"}], "function_call": "none"}),
                1,
                &[],
            ),
        ] {
            assert_eq!(
                names(&body),
                (
                    shown,
                    callable.iter().map(|name| (*name).to_owned()).collect()
                ),
                "{body}"
            );
        }
    }

    #[test]
    fn only_one_call_is_wanted_where_the_client_says_so() {
        let first_only = |body| Tools::read(&mut fields(&body)).unwrap().first_call_only;
        assert!(!first_only(json!({"tools": [tool("a")]})));
        assert!(first_only(
            json!({"tools": [tool("a")], "parallel_tool_calls": false})
        ));
        assert!(first_only(json!({"functions": [{"name": "f"}]})));
    }

    #[test]
    fn the_choice_decides_whether_a_call_is_forced() {
        let tools = json!([tool("a"), tool("b")]);
        let strict = json!([{"function": {"name": "a", "strict": true}}]);
        let allowed =
            |mode: &str| json!({"type": "allowed_tools", "mode": mode, "tools": [tool("a")]});
        for (body, demand, first_only) in [
            (json!({"tools": tools}), CallDemand::Free, false),
            (json!({"tools": strict}), CallDemand::Free, false),
            (
                json!({"tools": tools, "tool_choice": allowed("auto")}),
                CallDemand::Free,
                false,
            ),
            (
                json!({"tools": tools, "tool_choice": "required"}),
                CallDemand::Required,
                false,
            ),
            (
                json!({"tools": tools, "tool_choice": "required", "parallel_tool_calls": false}),
                CallDemand::Required,
                true,
            ),
            (
                json!({"tools": tools, "tool_choice": allowed("required")}),
                CallDemand::Required,
                false,
            ),
            (
                json!({"tools": tools, "tool_choice": tool("a")}),
                CallDemand::Named,
                true,
            ),
            (
                json!({"functions": [{"name": "f"}], "function_call": {"name": "f"}}),
                CallDemand::Named,
                true,
            ),
        ] {
            let tools = Tools::read(&mut fields(&body)).unwrap();
            let found = (tools.demand, tools.first_call_only);
            assert_eq!(found, (demand, first_only), "{body}");
        }
        let tools = Tools::read(&mut fields(&json!({"tools": strict}))).unwrap();
        assert!(tools.callable[0].is_strict);
    }

    #[test]
    fn faults_name_their_field() {
        let function =
            |function: Value| json!({"tools": [{"type": "function", "function": function}]});
        let choice = |choice: Value| json!({"tools": [tool("a")], "tool_choice": choice});
        let allowed = |mode: &str, name: &str| {
            choice(json!({"type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": [tool(name)]}}))
        };
        for (body, param, is_unsupported) in [
            (json!({"tools": ["x"]}), "tools[0]", false),
            (
                json!({"tools": [tool("a"), {"foo": 1}]}),
                "tools[1].function",
                false,
            ),
            (
                json!({"tools": [{"type": "custom"}]}),
                "tools[0].type",
                true,
            ),
            (function(json!({})), "tools[0].function.name", false),
            (
                function(json!({"name": "a b"})),
                "tools[0].function.name",
                false,
            ),
            (
                function(json!({"name": 1})),
                "tools[0].function.name",
                false,
            ),
            (
                function(json!({"name": "a", "parameters": [1]})),
                "tools[0].function.parameters",
                false,
            ),
            (
                function(json!({"name": "a", "strict": "yes"})),
                "tools[0].function.strict",
                false,
            ),
            (choice(json!("any")), "tool_choice", false),
            (choice(tool("z")), "tool_choice", false),
            (choice(json!(7)), "tool_choice.type", false),
            (
                choice(json!({"type": "function"})),
                "tool_choice.function.name",
                false,
            ),
            (json!({"tool_choice": "required"}), "tool_choice", false),
            (
                allowed("sometimes", "a"),
                "tool_choice.allowed_tools.mode",
                false,
            ),
            (allowed("auto", "z"), "tool_choice", false),
            (
                choice(json!({"type": "allowed_tools", "tools": [{}]})),
                "tool_choice.allowed_tools.tools",
                false,
            ),
            (json!({"functions": [{}]}), "functions[0].name", false),
            (
                json!({"functions": [{"name": "f"}], "function_call": {"name": "g"}}),
                "function_call",
                false,
            ),
            (
                json!({"functions": [{"name": "f"}], "function_call": {}}),
                "function_call.name",
                false,
            ),
            (json!({"function_call": "auto"}), "function_call", false),
            (
                json!({"functions": [{"name": "f"}], "tools": [tool("a")]}),
                "functions",
                false,
            ),
        ] {
            let error = Tools::read(&mut fields(&body)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{body}");
            let is_so = error.has_code("unsupported_parameter");
            assert_eq!(is_so, is_unsupported, "{body}: {}", error.message);
            assert!(error.message.starts_with(param), "{}", error.message);
        }
    }
}
