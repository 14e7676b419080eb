//! The form of a model's calls and answers: each family says how its own format is written.

use std::collections::HashSet;

use refrain_protocol::engine::{ArgumentsForm, CallForm, CallsForm, FormPart, TextForm};
use serde_json::{Map, Value, json};

use crate::options::Tool;
use crate::schema::{Shape, shape_of};
use crate::sink::is_name;

/// Maximum number of bytes of the texts of a form, with all copies of what tools share.
const FORM_BYTES_MAX: usize = 1 << 20;

/// The calls that an output is to have.
#[derive(Clone, Copy, Debug)]
pub struct CallsWanted<'a> {
    /// The tools that may be called. The arguments of a call must be valid by the tool's `parameters`.
    pub tools: &'a [Tool],
    /// Whether the output may also be an answer in text.
    pub optional: bool,
    /// Whether more than one call is allowed.
    pub parallel: bool,
    /// Whether the form follows reasoning that the output begins with.
    pub after_reasoning: bool,
}

/// A reason why calls have no form in a model's format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{fault}")]
pub struct NoForm {
    /// The tool at fault, if it is one.
    pub tool: Option<String>,
    /// The fault, and what to do about it.
    pub fault: String,
}

impl NoForm {
    pub(crate) fn of(tool: &Tool, fault: impl std::fmt::Display) -> Self {
        NoForm {
            tool: Some(tool.name.clone()),
            fault: fault.to_string(),
        }
    }
}

impl CallsWanted<'_> {
    /// A form of calls, with the same text around each of them.
    pub(crate) fn calls(
        &self,
        [begin, separator, end]: [&str; 3],
        call: impl Fn(&Tool) -> Result<CallForm, NoForm>,
    ) -> Result<CallsForm, NoForm> {
        let mut bytes = 0;
        let mut calls = Vec::with_capacity(self.tools.len());
        for tool in self.tools {
            let call = call(tool)?;
            bytes += call.text_bytes();
            check_bytes(tool, bytes)?;
            calls.push(call);
        }
        Ok(CallsForm {
            optional: self.optional,
            parallel: self.parallel,
            begin: begin.to_owned(),
            separator: separator.to_owned(),
            end: end.to_owned(),
            calls,
        })
    }
}

/// Checks the bytes of a form before more is written for this tool.
///
/// # Errors
/// They are too many.
pub(crate) fn check_bytes(tool: &Tool, bytes: usize) -> Result<(), NoForm> {
    match bytes <= FORM_BYTES_MAX {
        true => Ok(()),
        false => {
            let fault = format!(
                "the form of its calls would have more than {FORM_BYTES_MAX} bytes; send smaller schemas, or fewer \
                 parameters that share definitions"
            );
            Err(NoForm::of(tool, fault))
        }
    }
}

/// A form of calls in a format where nothing but the first character marks a call. So an answer must not begin with
/// it, nor with white space and then with it.
pub(crate) fn unmarked(mut calls: CallsForm, first: char) -> TextForm {
    if !std::mem::take(&mut calls.optional) {
        return TextForm::Calls(calls);
    }
    let answer = TextForm::Regex(format!("(?s:\\s*([^\\s\\{first}].*)?)"));
    TextForm::AnyOf(vec![TextForm::Calls(calls), answer])
}

/// A name that stands in a call as it is, without quotes.
pub(crate) fn bare_name<'a>(tool: &'a Tool, name: &'a str) -> Result<&'a str, NoForm> {
    match is_name(name) {
        true => Ok(name),
        false => {
            let fault = "a name with brackets, quotes, commas or spaces cannot stand in the model's format of calls";
            Err(NoForm::of(tool, fault))
        }
    }
}

/// A call whose arguments are JSON.
pub(crate) fn json_call(tool: &Tool, begin: String, end: &str) -> CallForm {
    CallForm {
        begin,
        arguments: ArgumentsForm::JsonSchema(object_schema(&tool.parameters).to_string()),
        end: end.to_owned(),
    }
}

/// The name of a tool as JSON.
pub(crate) fn json_name(tool: &Tool) -> String {
    Value::from(tool.name.as_str()).to_string()
}

/// The schema of arguments, which are always an object. Without a schema there are none.
pub(crate) fn object_schema(parameters: &Value) -> Value {
    let Value::Object(schema) = parameters else {
        return json!({"type": "object", "properties": {}, "additionalProperties": false});
    };
    let says_more = ["type", "$ref", "anyOf", "oneOf", "allOf"];
    let mut schema = schema.clone();
    if !says_more.iter().any(|key| schema.contains_key(*key)) {
        schema.insert("type".into(), "object".into());
    }
    Value::Object(schema)
}

/// One parameter of a tool.
pub(crate) struct Parameter {
    pub(crate) name: String,
    /// Its schema, with the definitions that it may refer to.
    pub(crate) schema: Value,
    pub(crate) is_required: bool,
}

/// The parameters of a tool.
pub(crate) enum Parameters {
    /// These, in the order of the schema.
    Listed(Vec<Parameter>),
    /// Any.
    Any,
}

/// Reads the parameters of a tool one by one, for formats that write them so.
pub(crate) fn parameters(tool: &Tool) -> Result<Parameters, NoForm> {
    let schema = object_schema(&tool.parameters);
    for key in ["$ref", "anyOf", "oneOf", "allOf", "patternProperties"] {
        if schema.get(key).is_some() {
            let fault = format!(
                "the model's format of calls writes parameters one by one, so {key} cannot stand at the top of the schema"
            );
            return Err(NoForm::of(tool, fault));
        }
    }
    let none = Map::new();
    let properties = schema.get("properties").and_then(Value::as_object);
    let properties = properties.unwrap_or(&none);
    let required = schema.get("required").and_then(Value::as_array);
    let required: Vec<&str> = required
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let unlisted = required
        .iter()
        .filter(|name| !properties.contains_key(**name));
    let unlisted = unlisted.map(|name| ((*name).to_owned(), Value::Object(Map::new())));
    let properties = properties
        .iter()
        .map(|(name, schema)| (name.clone(), schema.clone()));
    let mut listed = Vec::new();
    let mut bytes = 0;
    for (name, own) in properties.chain(unlisted) {
        let (schema, definition_bytes) = with_definitions(own, &schema)
            .map_err(|fault| NoForm::of(tool, format!("{name} {fault}")))?;
        bytes += definition_bytes;
        check_bytes(tool, bytes)?;
        listed.push(Parameter {
            is_required: required.contains(&name.as_str()),
            schema,
            name,
        });
    }
    if !listed.is_empty() {
        return Ok(Parameters::Listed(listed));
    }
    match schema.get("additionalProperties") {
        Some(Value::Bool(false)) => Ok(Parameters::Listed(Vec::new())),
        None | Some(Value::Bool(true)) => Ok(Parameters::Any),
        Some(_) => {
            let fault = "the model's format of calls has no types for additionalProperties; list the properties";
            Err(NoForm::of(tool, fault))
        }
    }
}

/// A part of a schema, with those definitions of the whole that it refers to, and about how many bytes these have.
fn with_definitions(part: Value, whole: &Value) -> Result<(Value, usize), String> {
    let mut found: Vec<[String; 2]> = Vec::new();
    references(&part, &mut found)?;
    let mut known: HashSet<[String; 2]> = HashSet::new();
    let mut bytes = 0;
    let Value::Object(mut part) = part else {
        return Ok((part, 0));
    };
    while let Some([key, name]) = found.pop() {
        let Some(definition) = whole.get(&key).and_then(|all| all.get(&name)) else {
            return Err(format!("refers to #/{key}/{name}, which is missing"));
        };
        if !known.insert([key.clone(), name.clone()]) {
            continue;
        }
        // A reference means the whole schema, where the part may have definitions of its own.
        let definitions = part.entry(key).or_insert_with(|| json!({}));
        if let Value::Object(definitions) = definitions {
            bytes += name.len() + definition.to_string().len();
            if bytes > FORM_BYTES_MAX {
                break;
            }
            definitions.insert(name, definition.clone());
        }
        references(definition, &mut found)?;
    }
    Ok((Value::Object(part), bytes))
}

/// Collects the definitions that a schema refers to: their keyword and name.
fn references(schema: &Value, found: &mut Vec<[String; 2]>) -> Result<(), String> {
    match schema {
        Value::Object(fields) => {
            if let Some(Value::String(target)) = fields.get("$ref") {
                let definition = ["$defs", "definitions"].into_iter().find_map(|key| {
                    let rest = target.strip_prefix("#/")?.strip_prefix(key)?;
                    let name = rest.strip_prefix('/')?.split('/').next()?;
                    Some([key.to_owned(), name.replace("~1", "/").replace("~0", "~")])
                });
                match definition {
                    Some(definition) => found.push(definition),
                    None => {
                        return Err(
                            "refers to another place than $defs, which the model's format of calls cannot say"
                                .to_owned(),
                        );
                    }
                }
            }
            fields
                .values()
                .try_for_each(|inner| references(inner, found))
        }
        Value::Array(items) => items.iter().try_for_each(|inner| references(inner, found)),
        _ => Ok(()),
    }
}

/// Text that is written as it stands, up to one of `ends`, and is a string that is valid by this schema.
pub(crate) fn bare_string(schema: &Value, ends: &[&str]) -> Result<FormPart, String> {
    for key in ["anyOf", "oneOf"] {
        if let Some(Value::Array(alternatives)) = schema.get(key) {
            let parts = alternatives
                .iter()
                .map(|schema| Ok(vec![bare_string(schema, ends)?]));
            return Ok(FormPart::AnyOf(parts.collect::<Result<_, String>>()?));
        }
    }
    let null = || FormPart::Text("null".into());
    let values = match (schema.get("enum"), schema.get("const")) {
        (Some(Value::Array(values)), _) => Some(values.clone()),
        (_, Some(value)) => Some(vec![value.clone()]),
        _ => None,
    };
    if let Some(values) = values {
        let part = |value: Value| match value {
            Value::String(text) => Ok(vec![FormPart::Text(text)]),
            Value::Null => Ok(vec![null()]),
            _ => Err(
                "has values of several types, which the model's format of calls cannot tell apart",
            ),
        };
        let parts: Result<Vec<_>, _> = values.into_iter().map(part).collect();
        return Ok(FormPart::AnyOf(parts?));
    }
    let kind = schema.get("type");
    if kind == Some(&Value::from("null")) {
        return Ok(null());
    }
    let text = constrained_string(schema, ends)?;
    let may_be_null = kind
        .and_then(Value::as_array)
        .is_some_and(|kinds| kinds.contains(&"null".into()));
    Ok(match may_be_null {
        true => FormPart::AnyOf(vec![vec![text], vec![null()]]),
        false => text,
    })
}

/// Longest bound that a string without quotes is held to. The automaton has states for every character of the bound,
/// so longer bounds would be too complex; they are left out.
const BOUNDED_CHARS_MAX: u64 = 64;

/// A string with the bounds of its schema on pattern and length. Where it has a pattern, it has no `<` beyond those
/// of the pattern, so that it cannot have an end in it.
fn constrained_string(schema: &Value, ends: &[&str]) -> Result<FormPart, String> {
    let length = |key: &str| schema.get(key).and_then(Value::as_u64);
    let lengths = (
        length("minLength").filter(|chars| *chars <= BOUNDED_CHARS_MAX),
        length("maxLength").filter(|chars| *chars <= BOUNDED_CHARS_MAX),
    );
    let pattern = schema.get("pattern").and_then(Value::as_str);
    let ends = || ends.iter().map(|end| (*end).to_owned()).collect();
    match (pattern, lengths) {
        (None, (None, None)) => Ok(FormPart::TextWithout(ends())),
        (None, (least, most)) => Ok(FormPart::BoundedText {
            without: ends(),
            chars_min: least.unwrap_or(0),
            chars_max: most,
        }),
        (Some(pattern), (None, None)) => Ok(FormPart::Regex(whole_pattern(pattern))),
        (Some(_), _) => Err(
            "has a pattern and a length; the model's format of calls can hold it to one of them"
                .into(),
        ),
    }
}

/// A pattern of a schema, which may match anywhere, as one that matches the whole text.
fn whole_pattern(pattern: &str) -> String {
    let (before, pattern) = match pattern.strip_prefix('^') {
        Some(rest) => ("", rest),
        None => ("[^<]*", pattern),
    };
    let is_escaped = |rest: &str| rest.chars().rev().take_while(|c| *c == '\\').count() % 2 == 1;
    let (pattern, behind) = match pattern.strip_suffix('$') {
        Some(rest) if !is_escaped(rest) => (rest, ""),
        _ => (pattern, "[^<]*"),
    };
    format!("{before}(?:{pattern}){behind}")
}

/// A format that writes each parameter between tags.
pub(crate) struct TaggedParameters<'a> {
    /// Before a name.
    pub(crate) name_begin: &'a str,
    /// Between a name and its value.
    pub(crate) name_end: &'a str,
    /// After a value.
    pub(crate) value_end: &'a str,
    /// Texts that end a value where they stand in it.
    pub(crate) ends: &'a [&'a str],
    /// The shape of a parameter without a schema.
    pub(crate) unknown: Shape,
}

impl TaggedParameters<'_> {
    /// The parameters of a tool, in the order of its schema.
    pub(crate) fn parts(&self, tool: &Tool) -> Result<Vec<FormPart>, NoForm> {
        let listed = match parameters(tool)? {
            Parameters::Listed(listed) => listed,
            Parameters::Any => {
                let value = self.value(&Value::Object(Map::new()));
                let name = FormPart::Regex("[A-Za-z_][A-Za-z0-9_.-]{0,63}".into());
                let mut parts = vec![FormPart::Text(self.name_begin.into()), name];
                parts.push(FormPart::Text(self.name_end.into()));
                parts.push(value.map_err(|fault| NoForm::of(tool, fault))?);
                parts.push(FormPart::Text(self.value_end.into()));
                return Ok(vec![FormPart::Repeated(parts)]);
            }
        };
        let mut parts = Vec::new();
        for Parameter {
            name,
            schema,
            is_required,
        } in &listed
        {
            let value = self.value(schema);
            let value = value.map_err(|fault| NoForm::of(tool, format!("{name} {fault}")))?;
            let begin = format!(
                "{}{}{}",
                self.name_begin,
                bare_name(tool, name)?,
                self.name_end
            );
            let parameter = vec![
                FormPart::Text(begin),
                value,
                FormPart::Text(self.value_end.into()),
            ];
            match is_required {
                true => parts.extend(parameter),
                false => parts.push(FormPart::AnyOf(vec![parameter, Vec::new()])),
            }
        }
        Ok(parts)
    }

    /// A value as the reader of the format tells strings from other values.
    fn value(&self, schema: &Value) -> Result<FormPart, String> {
        match shape_of(schema, self.unknown).is_text() {
            true => bare_string(schema, self.ends),
            false => Ok(FormPart::JsonSchema(schema.to_string())),
        }
    }
}
