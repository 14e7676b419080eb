//! Literals of Python, as engines print requests and as programs print dictionaries.

use serde_json::{Map, Number, Value};

const DEPTH_MAX: usize = 64;

/// The values that a line names, such as `prompt: 'a', params: None` or `obj=Request(text='a'), out={'text': 'b'}`.
/// `None` if it names none.
pub(super) fn named_values(line: &str) -> Option<Map<String, Value>> {
    let mut found = Map::new();
    let mut rest = line;
    // A name, a sign, and a value that begins like one.
    while let Some(at) = rest.find([':', '=']) {
        let name: String = rest[..at]
            .chars()
            .rev()
            .take_while(|letter| letter.is_alphanumeric() || *letter == '_')
            .collect();
        let name: String = name.chars().rev().collect();
        let sign = rest.as_bytes()[at];
        rest = &rest[at + 1..];
        let is_named = !name.is_empty() && (sign == b'=' || rest.starts_with(' '));
        if !is_named {
            continue;
        }
        let mut parser = Parser {
            rest: rest.trim_start(),
        };
        if let Some(value) = parser.value(DEPTH_MAX) {
            rest = parser.rest;
            found.insert(name, value);
        }
    }
    (!found.is_empty()).then_some(found)
}

/// The value of a literal, with nothing after it.
pub(super) fn literal(text: &str) -> Option<Value> {
    let mut parser = Parser { rest: text.trim() };
    let value = parser.value(DEPTH_MAX)?;
    parser.rest.trim().is_empty().then_some(value)
}

struct Parser<'a> {
    rest: &'a str,
}

impl Parser<'_> {
    fn value(&mut self, depth: usize) -> Option<Value> {
        let depth = depth.checked_sub(1)?;
        self.skip_space();
        match self.rest.chars().next()? {
            '\'' | '"' => self.text().map(Value::String),
            '[' => self.items(']', depth).map(Value::Array),
            '(' => self.items(')', depth).map(Value::Array),
            '{' => self.members('{', '}', ':', depth).map(Value::Object),
            _ => self.word(depth),
        }
    }

    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn take(&mut self, sign: char) -> bool {
        self.skip_space();
        let rest = self.rest.strip_prefix(sign);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn text(&mut self) -> Option<String> {
        let quote = self.rest.chars().next()?;
        let mut text = String::new();
        let mut letters = self.rest.char_indices().skip(1);
        while let Some((at, letter)) = letters.next() {
            match letter {
                _ if letter == quote => {
                    self.rest = &self.rest[at + 1..];
                    return Some(text);
                }
                '\\' => {
                    let (_, escaped) = letters.next()?;
                    let digits = match escaped {
                        'x' => 2,
                        'u' => 4,
                        'U' => 8,
                        _ => 0,
                    };
                    if digits > 0 {
                        let code: String = letters
                            .by_ref()
                            .take(digits)
                            .map(|(_, digit)| digit)
                            .collect();
                        let code = u32::from_str_radix(&code, 16).ok()?;
                        text.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
                        continue;
                    }
                    text.push(match escaped {
                        'n' => '\n',
                        't' => '\t',
                        'r' => '\r',
                        '0' => '\0',
                        other => other,
                    });
                }
                other => text.push(other),
            }
        }
        None
    }

    fn items(&mut self, end: char, depth: usize) -> Option<Vec<Value>> {
        self.rest = &self.rest[1..];
        let mut items = Vec::new();
        while !self.take(end) {
            items.push(self.value(depth)?);
            if !self.take(',') && !self.rest.starts_with(end) {
                return None;
            }
        }
        Some(items)
    }

    fn members(
        &mut self,
        begin: char,
        end: char,
        sign: char,
        depth: usize,
    ) -> Option<Map<String, Value>> {
        self.rest = self.rest.strip_prefix(begin)?;
        let mut members = Map::new();
        while !self.take(end) {
            self.skip_space();
            let key = match self.rest.chars().next()? {
                '\'' | '"' => self.text()?,
                _ => {
                    let len = self
                        .rest
                        .find(|letter: char| !(letter.is_alphanumeric() || letter == '_'))?;
                    let (key, rest) = self.rest.split_at(len);
                    self.rest = rest;
                    key.to_owned()
                }
            };
            if !self.take(sign) {
                return None;
            }
            members.insert(key, self.value(depth)?);
            if !self.take(',') && !self.rest.starts_with(end) {
                return None;
            }
        }
        Some(members)
    }

    /// A number, a name, or an object with its class.
    fn word(&mut self, depth: usize) -> Option<Value> {
        let is_part = |letter: char| letter.is_alphanumeric() || "_.+-".contains(letter);
        let len = self
            .rest
            .find(|letter| !is_part(letter))
            .unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(len);
        if word.is_empty() {
            // An object that says nothing of itself, such as `<object at 0x1>`.
            let end = self.rest.starts_with('<').then(|| self.rest.find('>'))??;
            self.rest = &self.rest[end + 1..];
            return Some(Value::Null);
        }
        self.rest = rest;
        if rest.starts_with('(') {
            let before = self.rest;
            let members = self.members('(', ')', '=', depth);
            return members.map(Value::Object).or_else(|| {
                self.rest = before;
                self.items(')', depth).map(Value::Array)
            });
        }
        Some(match word {
            "None" | "nan" | "inf" | "-inf" => Value::Null,
            "True" => Value::Bool(true),
            "False" => Value::Bool(false),
            number => match (
                number.parse::<i64>(),
                number.parse::<f64>().ok().and_then(Number::from_f64),
            ) {
                (Ok(whole), _) => whole.into(),
                (_, Some(number)) => Value::Number(number),
                _ => Value::String(word.to_owned()),
            },
        })
    }
}
