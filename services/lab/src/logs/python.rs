//! Literals of Python, as engines print requests and as programs print dictionaries.

use serde_json::{Map, Value};

const DEPTH_MAX: usize = 64;

/// The values that a line names, such as `prompt: 'a', params: None` or `obj=Request(text='a'), out={'text': 'b'}`.
/// `None` if it names none.
pub(super) fn named_values(line: &str) -> Option<Map<String, Value>> {
    let mut found = Map::new();
    let mut rest = line;
    // A name, a sign, and a value that begins like one.
    while let Some(at) = rest.find([':', '=']) {
        let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
        let name = rest[..at].rsplit(|letter| !is_part(letter)).next()?;
        let is_equal = rest[at..].starts_with('=');
        rest = &rest[at + 1..];
        if name.is_empty() || !(is_equal || rest.starts_with(' ')) {
            continue;
        }
        let mut parser = Parser { rest };
        if let Some(value) = parser.value(DEPTH_MAX) {
            rest = parser.rest;
            found.insert(name.to_owned(), value);
        }
    }
    (!found.is_empty()).then_some(found)
}

/// The value of a literal, with nothing after it.
pub(super) fn literal(text: &str) -> Option<Value> {
    let mut parser = Parser { rest: text };
    let value = parser.value(DEPTH_MAX)?;
    parser.rest.trim().is_empty().then_some(value)
}

struct Parser<'a> {
    rest: &'a str,
}

impl Parser<'_> {
    fn value(&mut self, depth: usize) -> Option<Value> {
        let depth = depth.checked_sub(1)?;
        self.rest = self.rest.trim_start();
        match self.rest.chars().next()? {
            '\'' | '"' => self.text().map(Value::String),
            '[' => self.values(']', depth),
            '(' => self.values(')', depth),
            '{' => self.values('}', depth),
            _ => self.word(depth),
        }
    }

    fn take(&mut self, sign: char) -> bool {
        self.rest = self.rest.trim_start();
        let rest = self.rest.strip_prefix(sign);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn text(&mut self) -> Option<String> {
        let mut letters = self.rest.chars();
        let quote = letters.next()?;
        let mut text = String::new();
        loop {
            text.push(match letters.next()? {
                letter if letter == quote => break,
                '\\' => match letters.next()? {
                    'n' => '\n',
                    't' => '\t',
                    'r' => '\r',
                    '0' => '\0',
                    width @ ('x' | 'u' | 'U') => {
                        let digits = match width {
                            'x' => 2,
                            'u' => 4,
                            _ => 8,
                        };
                        let code: String = letters.by_ref().take(digits).collect();
                        let code = u32::from_str_radix(&code, 16).ok()?;
                        char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
                    }
                    other => other,
                },
                letter => letter,
            });
        }
        self.rest = letters.as_str();
        Some(text)
    }

    /// The values up to this end: an object where they have names, as in `{'a': 1}` and `(a=1)`, and else a list.
    fn values(&mut self, end: char, depth: usize) -> Option<Value> {
        self.rest = &self.rest[1..];
        let (mut members, mut items) = (Map::new(), Vec::new());
        while !self.take(end) {
            let value = self.value(depth)?;
            if self.take(':') || self.take('=') {
                let name = match value {
                    Value::String(name) => name,
                    other => other.to_string(),
                };
                members.insert(name, self.value(depth)?);
            } else {
                items.push(value);
            }
            if !self.take(',') && !self.rest.starts_with(end) {
                return None;
            }
        }
        let is_list = members.is_empty() && (end != '}' || !items.is_empty());
        Some(match is_list {
            true => Value::Array(items),
            false => Value::Object(members),
        })
    }

    /// A number, a name, or an object with its class.
    fn word(&mut self, depth: usize) -> Option<Value> {
        let is_part = |letter: char| letter.is_alphanumeric() || "_.+-".contains(letter);
        let len = self.rest.find(|letter| !is_part(letter));
        let (word, rest) = self.rest.split_at(len.unwrap_or(self.rest.len()));
        if word.is_empty() {
            // An object that says nothing of itself, such as `<object at 0x1>`.
            let (_, rest) = self.rest.strip_prefix('<')?.split_once('>')?;
            self.rest = rest;
            return Some(Value::Null);
        }
        self.rest = rest;
        if rest.starts_with('(') {
            return self.values(')', depth);
        }
        Some(match word {
            "None" | "nan" | "inf" | "-inf" => Value::Null,
            "True" => Value::Bool(true),
            "False" => Value::Bool(false),
            word => match word.parse() {
                Ok(number) => Value::Number(number),
                Err(_) => Value::String(word.to_owned()),
            },
        })
    }
}
