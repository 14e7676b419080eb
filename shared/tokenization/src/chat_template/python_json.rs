//! The `tojson` filter of templates, which writes JSON as Python does.

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize as _;

/// Most spaces per level of indentation.
const INDENT_MAX: usize = 16;

/// Python's `json.dumps(value, ensure_ascii=False)`: a space after `,` and `:`, or lines if `indent` is given.
pub(super) fn to_json(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = kwargs.get::<Option<usize>>("indent")?;
    for ignored in ["ensure_ascii", "sort_keys", "separators"] {
        let _ = kwargs.get::<Option<Value>>(ignored)?;
    }
    kwargs.assert_all_used()?;
    let failed =
        |error: &dyn std::fmt::Display| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut bytes = Vec::new();
    let written = match indent {
        None => value.serialize(&mut serde_json::Serializer::with_formatter(
            &mut bytes,
            PythonFormatter,
        )),
        Some(indent) => {
            let spaces = " ".repeat(indent.min(INDENT_MAX));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(
                &mut bytes, formatter,
            ))
        }
    };
    written.map_err(|error| failed(&error))?;
    String::from_utf8(bytes)
        .map(Value::from)
        .map_err(|error| failed(&error))
}

/// JSON on one line, with a space after `,` and `:`.
struct PythonFormatter;

fn separate<W: ?Sized + std::io::Write>(writer: &mut W, first: bool) -> std::io::Result<()> {
    if first {
        Ok(())
    } else {
        writer.write_all(b", ")
    }
}

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        separate(writer, first)
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        separate(writer, first)
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}
