//! Texts in the syntax of Lark.

use serde_json::Value;

/// A text as Lark's literal.
pub(crate) fn literal(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}
