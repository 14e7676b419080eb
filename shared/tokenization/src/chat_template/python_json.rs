//! The `tojson` filter of templates, which writes JSON as Python does.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::python_text::{as_float, python_float};

/// Maximum number of spaces per level of indentation.
const INDENT_MAX: usize = 16;

/// Characters from here on are for private use. The encoding of a prompt puts one of them into texts of
/// users and removes it from the prompt, so it is never escaped.
const PRIVATE_USE: char = '\u{F0000}';

/// Python's `json.dumps(value, ensure_ascii=False)` with its options.
pub(super) fn to_json(
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    separators: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    // Python refuses it, and a template that counts on that gets the messages in another shape.
    if value.is_undefined() {
        return Err(Error::new(
            ErrorKind::UndefinedError,
            "tojson of an undefined value",
        ));
    }
    let kwarg = |given: Option<Value>, name| match given {
        Some(value) => Ok(Some(value)),
        None => kwargs.get::<Option<Value>>(name),
    };
    let flag = |name| Ok::<_, Error>(kwargs.get::<Option<bool>>(name)?.unwrap_or(false));
    let indent = match kwarg(indent, "indent")?.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.chars().take(INDENT_MAX).collect(),
            None => " ".repeat(usize::try_from(indent)?.min(INDENT_MAX)),
        }),
    };
    let mut between = [
        if indent.is_some() { "," } else { ", " }.to_owned(),
        ": ".to_owned(),
    ];
    if let Some(given) = kwarg(separators, "separators")?.filter(|given| !given.is_none()) {
        let given: Vec<Value> = given.try_iter()?.collect();
        let [item, key] = given.as_slice() else {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: separators are two texts, after an item and after a key",
            ));
        };
        between = [item, key].map(|text| text.as_str().unwrap_or_default().to_owned());
    }
    let mut writer = Writer {
        text: String::new(),
        ensure_ascii: match ensure_ascii {
            Some(given) => given,
            None => flag("ensure_ascii")?,
        },
        sort_keys: flag("sort_keys")?,
        indent,
        between,
    };
    kwargs.assert_all_used()?;
    writer.value(value, 0);
    Ok(Value::from(writer.text))
}

struct Writer {
    text: String,
    ensure_ascii: bool,
    sort_keys: bool,
    /// The text of one level. `None`: all on one line.
    indent: Option<String>,
    /// The texts after an item and after a key.
    between: [String; 2],
}

impl Writer {
    /// Values come from JSON, whose parser bounds their depth, or from the template.
    fn value(&mut self, value: &Value, depth: usize) {
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => {
                let text = if value.is_true() { "true" } else { "false" };
                self.text.push_str(text);
            }
            ValueKind::Number => match as_float(value) {
                Some(number) => self.text.push_str(&json_float(number)),
                None => self.text.push_str(&value.to_string()),
            },
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter().into_iter().flatten().collect();
                self.list('[', ']', &items, depth, |writer, item| {
                    writer.value(item, depth + 1);
                });
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter().into_iter().flatten().collect();
                if self.sort_keys {
                    keys.sort_by_key(ToString::to_string);
                }
                self.list('{', '}', &keys, depth, |writer, key| {
                    writer.key(key);
                    writer.text.push_str(&writer.between[1].clone());
                    writer.value(&value.get_item(key).unwrap_or_default(), depth + 1);
                });
            }
            _ => {
                let text = value.to_string();
                self.string(&text);
            }
        }
    }

    fn list(
        &mut self,
        open: char,
        close: char,
        items: &[Value],
        depth: usize,
        mut write: impl FnMut(&mut Self, &Value),
    ) {
        self.text.push(open);
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                self.text.push_str(&self.between[0].clone());
            }
            self.line(depth + 1);
            write(self, item);
        }
        if !items.is_empty() {
            self.line(depth);
        }
        self.text.push(close);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            self.text.push_str(&indent.repeat(depth));
        }
    }

    /// Keys are texts in JSON; a template can make others.
    fn key(&mut self, key: &Value) {
        let text = match key.kind() {
            ValueKind::Bool => key.to_string().to_lowercase(),
            ValueKind::None => "null".to_owned(),
            _ => match as_float(key) {
                Some(number) => json_float(number),
                None => key.to_string(),
            },
        };
        self.string(&text);
    }

    fn string(&mut self, string: &str) {
        self.text.push('"');
        for character in string.chars() {
            match character {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                _ if character < ' '
                    || (self.ensure_ascii && character > '~' && character < PRIVATE_USE) =>
                {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        self.text.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                _ => self.text.push(character),
            }
        }
        self.text.push('"');
    }
}

/// A number as Python's `json` writes it.
fn json_float(number: f64) -> String {
    match number {
        _ if number.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        _ => python_float(number),
    }
}
