//! The faults of a body in plain words. The parser's own words name types of this program.

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};

/// The error for a body that the parser refused. `path` is the place of the fault, `.` for the body itself.
pub(super) fn fault(path: &str, error: &serde_json::Error) -> ApiError {
    if !error.is_data() {
        return not_json(error);
    }
    let message = error.to_string();
    let named = ["missing field `", "duplicate field `"]
        .iter()
        .find_map(|start| message.strip_prefix(start)?.split('`').next());
    let param = match (path, named) {
        (".", Some(field)) => field.to_owned(),
        (".", None) => {
            let message = format!("the body {}", plain(&message));
            return ApiError::new(ErrorKind::InvalidRequest, message);
        }
        (path, Some(field)) => format!("{path}.{field}"),
        (path, None) => path.to_owned(),
    };
    ApiError::invalid(&param, format!("{param}: {}", plain(&message)))
}

/// The error for a body that is not JSON.
pub(super) fn not_json(error: &serde_json::Error) -> ApiError {
    let message = format!("the body is not JSON: {error}");
    ApiError::new(ErrorKind::InvalidRequest, message).with_code(code::INVALID_JSON)
}

/// The parser's message without names of types, values of the client, and places in the bytes.
fn plain(message: &str) -> String {
    let message = match message.rfind(" at line ") {
        Some(at) => &message[..at],
        None => message,
    };
    if message.starts_with("missing field") {
        return "is missing".into();
    }
    if message.starts_with("duplicate field") {
        return "is there twice".into();
    }
    let mistaken = ["invalid type: ", "invalid value: ", "invalid length "]
        .iter()
        .find_map(|start| Some((*start, message.strip_prefix(start)?)));
    if let Some((start, rest)) = mistaken {
        let (found, wanted) = rest.rsplit_once(", expected ").unwrap_or((rest, "a value"));
        return match (start, kind(found)) {
            ("invalid type: ", Some(found)) => format!("must be {}, not {found}", shape(wanted)),
            _ => format!("must be {}", shape(wanted)),
        };
    }
    if let Some((_, wanted)) = message
        .strip_prefix("unknown variant ")
        .and_then(|rest| rest.split_once(", expected "))
    {
        let wanted = wanted.strip_prefix("one of ").unwrap_or(wanted);
        return format!("must be one of {}", wanted.replace('`', "\""));
    }
    message.to_owned()
}

/// The kind of a value, as the parser names it.
fn kind(found: &str) -> Option<&'static str> {
    let kinds = [
        ("string", "a text"),
        ("integer", "a whole number"),
        ("floating point", "a number with a decimal point"),
        ("boolean", "true or false"),
        ("null", "null"),
        ("unit", "null"),
        ("sequence", "a list"),
        ("map", "an object"),
    ];
    let mut kinds = kinds.iter();
    kinds
        .find(|(name, _)| found.starts_with(name))
        .map(|(_, kind)| *kind)
}

/// The wanted shape in plain words.
fn shape(wanted: &str) -> &str {
    match wanted {
        "f32" | "f64" => "a number",
        "i8" | "i16" | "i32" | "i64" => "a whole number",
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number that is not negative",
        "a boolean" => "true or false",
        "a string" => "a text",
        "a sequence" => "a list",
        "a map" => "an object",
        wanted if wanted.starts_with("struct ") => "an object",
        wanted if wanted.starts_with("tuple ") => "a list",
        wanted if wanted.starts_with("enum ") => "a name",
        wanted => wanted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_the_parser_become_plain() {
        for (message, expected) in [
            (
                "invalid type: string \"hot, expected\", expected f64 at line 1 column 9",
                "must be a number, not a text",
            ),
            (
                "invalid type: sequence, expected an object at line 1 column 0",
                "must be an object, not a list",
            ),
            (
                "invalid type: null, expected u32",
                "must be a whole number that is not negative, not null",
            ),
            (
                "invalid value: integer `-1`, expected u64 at line 3 column 1",
                "must be a whole number that is not negative",
            ),
            (
                "invalid length 0, expected struct Parameters with 24 elements",
                "must be an object",
            ),
            ("missing field `model` at line 1 column 2", "is missing"),
            ("duplicate field `n` at line 1 column 2", "is there twice"),
            (
                "unknown variant `warp`, expected one of `auto`, `off` at line 1 column 9",
                "must be one of \"auto\", \"off\"",
            ),
            ("at most 64 texts at line 1 column 2", "at most 64 texts"),
        ] {
            assert_eq!(plain(message), expected);
        }
    }
}
