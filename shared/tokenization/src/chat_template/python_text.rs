//! Values as text, as Python writes them.

use minijinja::value::{Value, ValueKind};

/// Python's `str(value)`. An undefined value is nothing, as in Jinja2.
pub(super) fn python_str(value: &Value) -> String {
    match value.kind() {
        ValueKind::String | ValueKind::Undefined => value.to_string(),
        _ => {
            let mut text = String::new();
            write_repr(&mut text, value);
            text
        }
    }
}

/// Python's `repr(float)`, which JSON has too: the shortest digits, with an exponent from 1e16 on and below 1e-4.
pub(super) fn python_float(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.into();
    }
    // Rust writes exponents at the same magnitudes, but with neither a plus sign nor a leading zero.
    let text = format!("{number:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            let digits = digits.strip_suffix(".0").unwrap_or(digits);
            format!("{digits}e{sign}{exponent:0>2}")
        }
    }
}

/// The number, if it is written with a point or an exponent.
pub(super) fn as_float(value: &Value) -> Option<f64> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    is_float.then(|| f64::try_from(value.clone()).ok())?
}

fn write_repr(text: &mut String, value: &Value) {
    match value.kind() {
        ValueKind::String => write_quoted(text, value.as_str().unwrap_or_default()),
        ValueKind::Undefined => text.push_str("Undefined"),
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = if value.is_tuple() {
                ('(', ')')
            } else {
                ('[', ']')
            };
            text.push(open);
            let mut count = 0;
            for item in value.try_iter().into_iter().flatten() {
                if count > 0 {
                    text.push_str(", ");
                }
                write_repr(text, &item);
                count += 1;
            }
            if count == 1 && value.is_tuple() {
                text.push(',');
            }
            text.push(close);
        }
        ValueKind::Map => {
            text.push('{');
            for (at, key) in value.try_iter().into_iter().flatten().enumerate() {
                if at > 0 {
                    text.push_str(", ");
                }
                write_repr(text, &key);
                text.push_str(": ");
                write_repr(text, &value.get_item(&key).unwrap_or_default());
            }
            text.push('}');
        }
        _ => match as_float(value) {
            Some(number) => text.push_str(&python_float(number)),
            None => text.push_str(&value.to_string()),
        },
    }
}

/// A text in quotes. Characters of other scripts stay as they are.
fn write_quoted(text: &mut String, quoted: &str) {
    let quote = if quoted.contains('\'') && !quoted.contains('"') {
        '"'
    } else {
        '\''
    };
    text.push(quote);
    for character in quoted.chars() {
        match character {
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\\' => text.push_str("\\\\"),
            _ if character == quote => text.extend(['\\', quote]),
            _ if character.is_control() => {
                text.push_str(&format!("\\x{:02x}", u32::from(character)));
            }
            _ => text.push(character),
        }
    }
    text.push(quote);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_python_writes_them() {
        for (number, expected) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (1e-7, "1e-07"),
            (1.5e-7, "1.5e-07"),
            (0.0001, "0.0001"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e300, "1.25e+300"),
        ] {
            assert_eq!(python_float(number), expected);
        }
    }

    #[test]
    fn lists_and_objects_are_written_as_python_writes_them() {
        let value: Value = serde_json::from_str(
            r#"{"a": [null, true, 1, 1.0, "x", "it's", "\"'", "\n\u0007"], "b": {}}"#,
        )
        .unwrap();
        let expected = r#"{'a': [None, True, 1, 1.0, 'x', "it's", '"\'', '\n\x07'], 'b': {}}"#;
        assert_eq!(python_str(&value), expected);
        assert_eq!(python_str(&Value::from("it's")), "it's");
        assert_eq!(python_str(&Value::default()), "");
    }
}
