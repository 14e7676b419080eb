//! Jinja as transformers sets it up, and what its errors mean.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind};

use super::growth::{self, TooLong, VALUE_LENGTH_MAX, bounded};
use super::jinja_source;
use super::python_json::to_json;
use super::python_text::python_str;
use crate::TokenizationError;

/// Maximum number of instructions of one rendering. A template takes some hundred per message, and a request has at
/// most some ten thousand messages. So only a loop within a loop over a very long chat, or a faulty template, reaches
/// this limit. The memory of the values that it makes is bounded in `growth.rs`.
pub(super) const INSTRUCTIONS_MAX: u64 = 20_000_000;

/// Jinja as the library sets it up for which these templates are written.
pub(super) fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(
        SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?,
    );
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    growth::bound(&mut environment);
    environment.set_formatter(|out, state, value| match value.kind() {
        ValueKind::String => match (value.as_str(), state.auto_escape()) {
            (Some(text), AutoEscape::None) => out.write_str(text).map_err(Error::from),
            _ => minijinja::escape_formatter(out, state, value),
        },
        _ => minijinja::escape_formatter(out, state, &Value::from(python_str(value))),
    });
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: &Value| python_str(value));
    for name in ["length", "count"] {
        // An undefined value is empty in Jinja2.
        environment.add_filter(name, |value: &Value| match value.is_undefined() {
            true => Ok(0),
            false => minijinja::filters::length(value),
        });
    }
    // In Python, `None` cannot be iterated over.
    environment.add_test("iterable", |value: &Value| {
        !value.is_none() && value.try_iter().is_ok()
    });
    environment.add_function(jinja_source::PERCENT, jinja_source::percent);
    environment.add_filter(jinja_source::BOUNDED, bounded);
    environment.add_function(
        "raise_exception",
        |message: &Value| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, python_str(message)).with_source(Refusal))
        },
    );
    environment.set_fuel(Some(INSTRUCTIONS_MAX));
    Ok(environment)
}

/// Marks errors that a template raised on purpose.
#[derive(Debug, thiserror::Error)]
#[error("raised by the template")]
struct Refusal;

/// Whether an error is marked.
fn is_marked<T: std::error::Error + 'static>(error: &Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if error.is::<T>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// The error of a rendering.
pub(super) fn failure(error: &Error) -> TokenizationError {
    if error.kind() == ErrorKind::OutOfFuel {
        return TokenizationError::Input(format!(
            "the model's chat template took more than {INSTRUCTIONS_MAX} instructions; send fewer messages"
        ));
    }
    if is_marked::<TooLong>(error) {
        return TokenizationError::Input(format!(
            "the model's chat template makes a value of more than {VALUE_LENGTH_MAX} bytes or entries; send fewer \
             messages"
        ));
    }
    if is_marked::<Refusal>(error) {
        return TokenizationError::Refused(describe(error));
    }
    TokenizationError::Render(describe(error))
}

/// The error's message without the excerpt of the template that debug builds add.
pub(super) fn describe(error: &Error) -> String {
    let message = error
        .detail()
        .map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{message} (template line {line})"),
        None => message,
    }
}
