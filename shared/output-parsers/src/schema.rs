//! The types of parameters, and values without JSON syntax turned into JSON.

use serde_json::Value;

use crate::json::{escape, is_json, quoted};
use crate::options::Tool;
use crate::python::{is_number, literal_as_json};

/// The kind of value that a parameter's schema asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// A string, as it stands.
    Text,
    /// A string, or the word for nothing.
    TextOrNull,
    Integer,
    Number,
    Boolean,
    /// An object, an array, or a type that is not known: JSON, a Python literal, or else a string.
    Any,
}

impl Shape {
    /// Whether values are written without JSON syntax.
    pub(crate) fn is_text(self) -> bool {
        matches!(self, Shape::Text | Shape::TextOrNull)
    }
}

/// The shape of a parameter. `unknown` is that of a parameter without a schema.
pub(crate) fn shape(tools: &[Tool], tool: &str, parameter: &str, unknown: Shape) -> Shape {
    let tool = tools.iter().find(|known| known.name == tool);
    let properties = tool.and_then(|tool| tool.parameters.get("properties"));
    match properties.and_then(|properties| properties.get(parameter)) {
        Some(schema) => shape_of(schema, unknown),
        None => unknown,
    }
}

pub(crate) fn shape_of(schema: &Value, unknown: Shape) -> Shape {
    let mut names = Vec::new();
    type_names(schema, &mut names);
    let has_null = names.contains(&"null");
    names.retain(|name| *name != "null");
    match names.as_slice() {
        [] if has_null => Shape::Any,
        [] if schema.get("enum").is_some() => Shape::TextOrNull,
        [] => unknown,
        [first, rest @ ..] => {
            let first = shape_of_name(first);
            let is_same = rest.iter().all(|name| shape_of_name(name) == first);
            match (is_same, first) {
                (false, _) => Shape::Any,
                (true, Shape::Text) if has_null => Shape::TextOrNull,
                (true, first) => first,
            }
        }
    }
}

/// Collects the types that a schema allows, also those of its alternatives.
fn type_names<'a>(schema: &'a Value, names: &mut Vec<&'a str>) {
    match schema.get("type") {
        Some(Value::String(name)) => names.push(name),
        Some(Value::Array(list)) => names.extend(list.iter().filter_map(Value::as_str)),
        _ => {
            for key in ["anyOf", "oneOf"] {
                let alternatives = schema.get(key).and_then(Value::as_array);
                for alternative in alternatives.into_iter().flatten() {
                    if let Some(name) = alternative.get("type").and_then(Value::as_str) {
                        names.push(name);
                    } else {
                        names.push("any");
                    }
                }
            }
            if schema.get("$ref").is_some() || schema.get("allOf").is_some() {
                names.push("any");
            }
        }
    }
}

fn shape_of_name(name: &str) -> Shape {
    match name {
        "string" | "str" | "text" | "varchar" | "char" | "enum" => Shape::Text,
        "boolean" | "bool" => Shape::Boolean,
        _ if name.starts_with("int") || name.starts_with("uint") || name.starts_with("long") => {
            Shape::Integer
        }
        _ if name.starts_with("num") || name.starts_with("float") || name == "double" => {
            Shape::Number
        }
        _ => Shape::Any,
    }
}

/// The JSON of a value that is not a plain string.
fn converted(shape: Shape, value: &str) -> String {
    let word = value.trim();
    let lower = word.to_ascii_lowercase();
    let json = match shape {
        _ if lower == "null" || lower == "none" => Some("null".to_owned()),
        Shape::Boolean if lower == "true" || lower == "false" => Some(lower),
        Shape::Integer | Shape::Number if is_number(word) => {
            let is_integer = !word.contains(['.', 'e', 'E']);
            (is_integer || shape == Shape::Number).then(|| word.to_owned())
        }
        Shape::Any if is_json(word) => Some(word.to_owned()),
        Shape::Any => literal_as_json(word),
        _ => None,
    };
    json.unwrap_or_else(|| quoted(value))
}

/// Writes one value as JSON while its text arrives. Strings flow; other values wait for their end.
#[derive(Clone, Debug)]
pub(crate) struct ValueWriter {
    shape: Shape,
    /// Whether a line break at the beginning and one at the end belong to the format.
    has_line_breaks: bool,
    /// Text whose type is not yet decided.
    held: String,
    held_max: usize,
    is_flowing: bool,
    has_begun: bool,
    /// A line break that may be the last character.
    line_break: bool,
}

impl ValueWriter {
    pub(crate) fn new(shape: Shape, has_line_breaks: bool, held_max: usize) -> Self {
        ValueWriter {
            shape,
            has_line_breaks,
            held: String::new(),
            held_max,
            is_flowing: shape == Shape::Text,
            has_begun: false,
            line_break: false,
        }
    }

    /// Whether the text so far ends with a line break.
    pub(crate) fn is_at_line_begin(&self) -> bool {
        self.line_break
    }

    /// Text that was taken and is not yet written.
    pub(crate) fn unwritten(&self) -> String {
        let line_break = if self.line_break { "\n" } else { "" };
        format!("{}{line_break}", self.held)
    }

    /// Takes text of the value, and appends JSON.
    pub(crate) fn push(&mut self, text: &str, out: &mut String) {
        let mut text = text;
        if !self.has_begun && !text.is_empty() {
            self.has_begun = true;
            if self.shape == Shape::Text {
                out.push('"');
            }
            if self.has_line_breaks {
                text = text.strip_prefix('\n').unwrap_or(text);
            }
        }
        if text.is_empty() {
            return;
        }
        if std::mem::take(&mut self.line_break) {
            self.write("\n", out);
        }
        if self.has_line_breaks && text.ends_with('\n') {
            self.line_break = true;
            text = &text[..text.len() - 1];
        }
        self.write(text, out);
    }

    fn write(&mut self, text: &str, out: &mut String) {
        if self.is_flowing {
            escape(text, out);
            return;
        }
        self.held.push_str(text);
        let is_decided = match self.shape {
            Shape::TextOrNull => !["null", "none"].iter().any(|word| {
                let begun = self.held.as_bytes();
                word.as_bytes()
                    .get(..begun.len())
                    .is_some_and(|word| word.eq_ignore_ascii_case(begun))
            }),
            _ => self.held.len() > self.held_max,
        };
        if is_decided {
            out.push('"');
            escape(&std::mem::take(&mut self.held), out);
            self.is_flowing = true;
        }
    }

    /// The value ends.
    pub(crate) fn finish(&mut self, out: &mut String) {
        if self.is_flowing {
            if !self.has_begun {
                out.push('"');
            }
            out.push('"');
        } else if self.shape == Shape::TextOrNull && self.held.len() < "null".len() {
            out.push_str(&quoted(&self.held));
        } else {
            out.push_str(&converted(self.shape, &self.held));
        }
    }
}
