//! Where in a form an error is. The library's own messages have text of the form, so they are not passed on.

use std::time::{Duration, Instant};

use llguidance::api::TopLevelGrammar;
use serde_json::Value;

use crate::GrammarError;
use crate::schema::{set_style, shown, subschemas};
use crate::source::{Language, Source};

/// Maximum number of subschemas that are compiled alone to find the one with the error.
const TRIES_MAX: usize = 64;
/// Time after which no further one is compiled.
const TRIES_TIME_MAX: Duration = Duration::from_secs(1);

/// The meanings of parts of the library's messages.
const REASONS: [(&str, &str); 22] = [
    ("Unsatisfiable", "no value satisfies it"),
    ("no text", "no text satisfies it"),
    ("Unknown format", "its format is not supported"),
    (
        "oneOf constraints",
        "its alternatives may overlap, which oneOf forbids; use anyOf",
    ),
    (
        "min/maxProperties",
        "minProperties and maxProperties need required properties",
    ),
    (
        "not disjoint",
        "its patternProperties may match the same name",
    ),
    (
        "are disjoint",
        "its patternProperties may match the same name",
    ),
    (
        "circular references",
        "a circular reference has keywords beside it",
    ),
    ("too deeply nested", "it nests too deeply"),
    ("stack level", "it nests too deeply"),
    ("too large", "it is too large"),
    ("too many", "it is too complex"),
    ("too complex", "it is too complex"),
    ("fuel", "it is too complex"),
    (
        "cannot go back",
        "rules with max_tokens or stop are not supported; use suffix",
    ),
    ("look-around", "look-around is not supported"),
    ("no start rule", "it has no rule start"),
    ("unknown name", "a name has no rule"),
    ("circular reference in token", "a terminal refers to itself"),
    ("duplicate", "a name is defined twice"),
    (
        "lexer error",
        "these characters are not part of the language",
    ),
    ("regex", "a regular expression cannot be compiled"),
];

/// The error with its place. `error_of` compiles a part alone.
pub(crate) fn locate(
    message: &str,
    source: &Source,
    error_of: impl Fn(TopLevelGrammar) -> Option<String>,
) -> GrammarError {
    match &source.language {
        Language::Schema(schema) => in_schema(message, schema, error_of),
        Language::Lark => match line_and_column(message) {
            Some((line, column)) => {
                let place = format!("line {line}, column {column}");
                GrammarError::at(
                    place,
                    format!("the grammar cannot be compiled: {}", reason(message)),
                )
            }
            None => GrammarError::refused(format!(
                "the grammar cannot be compiled: {}",
                reason(message)
            )),
        },
        Language::Ebnf => GrammarError::refused(format!(
            "the grammar cannot be compiled: {}",
            reason(message)
        )),
        Language::Regex => GrammarError::refused(format!(
            "the regular expression cannot be compiled: {}",
            reason(message)
        )),
        Language::Other => {
            GrammarError::refused(format!("the form cannot be compiled: {}", reason(message)))
        }
    }
}

fn reason(message: &str) -> &'static str {
    let found = REASONS.iter().find(|(part, _)| message.contains(part));
    found.map_or("it is not what the language allows", |(_, reason)| reason)
}

/// Goes down to the deepest subschema that has the error alone.
fn in_schema(
    message: &str,
    root: &Value,
    error_of: impl Fn(TopLevelGrammar) -> Option<String>,
) -> GrammarError {
    let (mut at, mut schema, mut message) = (String::new(), root, message.to_owned());
    let (mut tries, started) = (0, Instant::now());
    'down: loop {
        for (inner_at, inner) in subschemas(schema, &at) {
            tries += 1;
            if tries > TRIES_MAX || started.elapsed() > TRIES_TIME_MAX {
                break 'down;
            }
            if let Some(error) = error_of(TopLevelGrammar::from_json_schema(alone(inner, root))) {
                (at, schema, message) = (inner_at, inner, error);
                continue 'down;
            }
        }
        break;
    }
    GrammarError::at(
        shown(&at),
        format!("the schema cannot be compiled: {}", reason(&message)),
    )
}

/// A subschema with the definitions of the whole one, to which it may refer.
fn alone(inner: &Value, root: &Value) -> Value {
    let mut inner = inner.clone();
    if let (Some(fields), Some(root)) = (inner.as_object_mut(), root.as_object()) {
        for name in ["$defs", "definitions", "$schema"] {
            if let Some(definitions) = root.get(name) {
                fields.entry(name).or_insert_with(|| definitions.clone());
            }
        }
    }
    set_style(&mut inner);
    inner
}

/// The place at the head of a message: `12(3): ...` or `at 12(3): ...`.
fn line_and_column(message: &str) -> Option<(usize, usize)> {
    let message = message.strip_prefix("at ").unwrap_or(message);
    let (line, rest) = message.split_once('(')?;
    let (column, _) = rest.split_once(')')?;
    Some((line.parse().ok()?, column.parse().ok()?))
}
