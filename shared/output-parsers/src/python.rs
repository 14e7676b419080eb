//! Turns Python literals and keyword arguments into JSON text, as they arrive.

use crate::json::{JsonReader, Progress, escape, is_json};
use crate::sink::{NAME_BYTES_MAX, Sink, is_name};

/// Deepest nesting of a literal.
const DEPTH_MAX: usize = 128;
/// Longest number or word.
const WORD_BYTES_MAX: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    List,
    Tuple,
    /// A dictionary whose next text is a key.
    Key,
    /// A dictionary whose next text is a value.
    Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A literal, or the end of the container where it may end here.
    Begin {
        may_end: bool,
    },
    /// A comma, a colon or the end of the container.
    After,
    Text {
        quote: char,
    },
    Escape {
        quote: char,
    },
    Code {
        quote: char,
        left: u8,
        code: u32,
    },
    Word,
    Done,
}

/// Reads one literal. Strings are written as they come; numbers and words when they end.
#[derive(Clone, Debug)]
pub(crate) struct Literal {
    state: State,
    containers: Vec<Container>,
    word: String,
    /// Whether a comma came. It is written with the item after it, because Python lets one stand before the end.
    has_comma: bool,
}

impl Literal {
    pub(crate) fn new() -> Self {
        Literal {
            state: State::Begin { may_end: false },
            containers: Vec::new(),
            word: String::new(),
            has_comma: false,
        }
    }

    /// Whether a marker at this place is text within a string.
    pub(crate) fn is_in_string(&self) -> bool {
        matches!(
            self.state,
            State::Text { .. } | State::Escape { .. } | State::Code { .. }
        )
    }

    /// Text that was read and is not yet written: a word, or an escape.
    fn unwritten(&self) -> &str {
        match self.state {
            State::Word | State::Escape { .. } | State::Code { .. } => &self.word,
            _ => "",
        }
    }

    /// Appends JSON, and returns how many bytes belong to the literal.
    pub(crate) fn feed(&mut self, text: &str, out: &mut String) -> (usize, Progress) {
        let mut at = 0;
        while let Some(next) = text[at..].chars().next() {
            if let State::Text { quote } = self.state {
                let rest = &text[at..];
                let run = rest.find([quote, '\\']).unwrap_or(rest.len());
                if run > 0 {
                    escape(&rest[..run], out);
                    at += run;
                    continue;
                }
            }
            match self.step(next, out) {
                Some(true) => at += next.len_utf8(),
                Some(false) => {}
                None => return (at, Progress::Wrong),
            }
            if self.state == State::Done {
                return (at, Progress::Done);
            }
        }
        (at, Progress::More)
    }

    /// Reads a character. Returns whether it was used, or nothing for a mistake.
    fn step(&mut self, next: char, out: &mut String) -> Option<bool> {
        match self.state {
            State::Begin { .. } | State::After if next.is_whitespace() => {}
            State::Begin { may_end: true } if matches!(next, ']' | ')' | '}') => {
                self.close(next, out)?;
            }
            State::Begin { .. } => return self.begin(next, out),
            State::After => self.after(next, out)?,
            State::Text { quote } if next == quote => {
                out.push('"');
                self.ended();
            }
            State::Text { quote } => {
                self.word.clear();
                self.word.push(next);
                self.state = State::Escape { quote };
            }
            State::Escape { quote } => self.escaped(quote, next, out),
            State::Code { quote, left, code } => {
                let code = code << 4 | next.to_digit(16)?;
                self.word.push(next);
                self.state = State::Code {
                    quote,
                    left: left - 1,
                    code,
                };
                if left == 1 {
                    let decoded = char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
                    escape(decoded.encode_utf8(&mut [0; 4]), out);
                    self.state = State::Text { quote };
                }
            }
            State::Word => {
                if next.is_ascii_alphanumeric() || "+-._".contains(next) {
                    if self.word.len() == WORD_BYTES_MAX {
                        return None;
                    }
                    self.word.push(next);
                } else {
                    self.word_ended(out)?;
                    return Some(false);
                }
            }
            State::Done => return Some(false),
        }
        Some(true)
    }

    fn begin(&mut self, next: char, out: &mut String) -> Option<bool> {
        let is_key = self.containers.last() == Some(&Container::Key);
        if std::mem::take(&mut self.has_comma) {
            out.push_str(", ");
        }
        let container = match next {
            '[' => Container::List,
            '(' => Container::Tuple,
            '{' => Container::Key,
            '\'' | '"' => {
                out.push('"');
                self.state = State::Text { quote: next };
                return Some(true);
            }
            _ if next.is_ascii_alphanumeric() || "+-.".contains(next) => {
                self.word.clear();
                self.state = State::Word;
                return Some(false);
            }
            _ => return None,
        };
        if is_key || self.containers.len() == DEPTH_MAX {
            return None;
        }
        out.push(if next == '{' { '{' } else { '[' });
        self.containers.push(container);
        self.state = State::Begin { may_end: true };
        Some(true)
    }

    fn close(&mut self, next: char, out: &mut String) -> Option<()> {
        let closed = match (self.containers.pop()?, next) {
            (Container::List, ']') | (Container::Tuple, ')') => ']',
            (Container::Key | Container::Value, '}') => '}',
            _ => return None,
        };
        self.has_comma = false;
        out.push(closed);
        self.ended();
        Some(())
    }

    fn ended(&mut self) {
        self.state = match self.containers.is_empty() {
            true => State::Done,
            false => State::After,
        };
    }

    fn after(&mut self, next: char, out: &mut String) -> Option<()> {
        match (self.containers.last_mut()?, next) {
            (container @ Container::Key, ':') => {
                *container = Container::Value;
                out.push_str(": ");
                self.state = State::Begin { may_end: false };
            }
            (Container::Key, _) => return None,
            (container, ',') => {
                if *container == Container::Value {
                    *container = Container::Key;
                }
                self.has_comma = true;
                self.state = State::Begin { may_end: true };
            }
            _ => self.close(next, out)?,
        }
        Some(())
    }

    fn escaped(&mut self, quote: char, next: char, out: &mut String) {
        let left = match next {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        if left > 0 {
            self.word.push(next);
            self.state = State::Code {
                quote,
                left,
                code: 0,
            };
            return;
        }
        self.state = State::Text { quote };
        match next {
            'n' => out.push_str("\\n"),
            't' => out.push_str("\\t"),
            'r' => out.push_str("\\r"),
            'b' => out.push_str("\\b"),
            'f' => out.push_str("\\f"),
            'v' => out.push_str("\\u000b"),
            'a' => out.push_str("\\u0007"),
            '0' => out.push_str("\\u0000"),
            '\n' => {}
            '\\' | '\'' | '"' => escape(next.encode_utf8(&mut [0; 4]), out),
            // Python keeps the backslash of an escape that it does not know.
            _ => {
                out.push_str("\\\\");
                escape(next.encode_utf8(&mut [0; 4]), out);
            }
        }
    }

    fn word_ended(&mut self, out: &mut String) -> Option<()> {
        let word = word_as_json(&self.word)?;
        match self.containers.last() {
            Some(Container::Key) => {
                out.push('"');
                out.push_str(&word);
                out.push('"');
            }
            _ => out.push_str(&word),
        }
        self.word.clear();
        self.ended();
        Some(())
    }
}

fn word_as_json(word: &str) -> Option<String> {
    let constant = match word {
        "True" | "true" => "true",
        "False" | "false" => "false",
        "None" | "null" => "null",
        _ => "",
    };
    if !constant.is_empty() {
        return Some(constant.to_owned());
    }
    if !word.contains(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let mut number = word.strip_prefix('+').unwrap_or(word).replace('_', "");
    if number.ends_with('.') {
        number.push('0');
    }
    number = number.replace(".e", ".0e").replace(".E", ".0E");
    if number.starts_with('.') {
        number.insert(0, '0');
    } else if number.starts_with("-.") {
        number.insert(1, '0');
    }
    is_json(&number).then_some(number)
}

/// A whole text as JSON, if it is a Python literal.
pub(crate) fn literal_as_json(text: &str) -> Option<String> {
    let mut literal = Literal::new();
    let mut out = String::new();
    let (taken, progress) = literal.feed(text, &mut out);
    if progress == Progress::More && literal.state == State::Word {
        literal.word_ended(&mut out)?;
    }
    let is_whole = literal.state == State::Done && text[taken..].trim().is_empty();
    is_whole.then_some(out)
}

#[derive(Clone, Debug)]
enum Place {
    /// A key, or the closing parenthesis.
    First,
    Next,
    Key,
    Equals,
    Value(Literal),
    After,
}

/// Reads `key=literal, key=literal)` from behind the opening parenthesis, and writes a JSON object.
#[derive(Clone, Debug)]
pub(crate) struct KeywordArguments {
    place: Place,
    key: String,
    /// Whether the form has shown itself: a key with its equals sign came, or the end.
    has_begun: bool,
}

impl KeywordArguments {
    pub(crate) fn new() -> Self {
        KeywordArguments {
            place: Place::First,
            key: String::new(),
            has_begun: false,
        }
    }

    /// Whether a marker at this place is text within a string.
    pub(crate) fn is_in_string(&self) -> bool {
        matches!(&self.place, Place::Value(literal) if literal.is_in_string())
    }

    /// Text of a call that was read and is not yet written.
    pub(crate) fn unwritten(&self) -> &str {
        match &self.place {
            Place::Key | Place::Equals => &self.key,
            Place::Value(literal) => literal.unwritten(),
            _ => "",
        }
    }

    /// Reads on, and records what it takes. The call starts when the form has shown itself.
    pub(crate) fn feed_call(
        &mut self,
        text: &str,
        name: &str,
        sink: &mut Sink,
    ) -> (usize, Progress) {
        let has_started = self.has_begun;
        let mut out = String::new();
        let (taken, progress) = self.feed(text, &mut out);
        if self.has_begun && !has_started {
            sink.start(None, name);
        }
        sink.arguments(&out);
        sink.record(&text[..taken]);
        (taken, progress)
    }

    /// Appends JSON, and returns how many bytes it took. The closing parenthesis is among them.
    fn feed(&mut self, text: &str, out: &mut String) -> (usize, Progress) {
        let mut at = 0;
        while let Some(next) = text[at..].chars().next() {
            if let Place::Value(literal) = &mut self.place {
                let (taken, progress) = literal.feed(&text[at..], out);
                at += taken;
                match progress {
                    Progress::Done => self.place = Place::After,
                    progress => return (at, progress),
                }
                continue;
            }
            match self.step(next, out) {
                Some(false) => at += next.len_utf8(),
                Some(true) => return (at + next.len_utf8(), Progress::Done),
                None => return (at, Progress::Wrong),
            }
        }
        (at, Progress::More)
    }

    /// Reads a character between values. Returns whether it was the end, or nothing for a mistake.
    fn step(&mut self, next: char, out: &mut String) -> Option<bool> {
        match (&self.place, next) {
            (Place::First | Place::Next | Place::Equals | Place::After, _)
                if next.is_whitespace() => {}
            (Place::First | Place::Next | Place::After, ')') => {
                out.push_str(if self.has_begun { "}" } else { "{}" });
                self.has_begun = true;
                return Some(true);
            }
            (Place::After, ',') => self.place = Place::Next,
            (Place::First | Place::Next, _) if next == '_' || next.is_alphabetic() => {
                self.key.clear();
                self.key.push(next);
                self.place = Place::Key;
            }
            (Place::Key, _) if next == '_' || next.is_alphanumeric() => {
                if self.key.len() >= NAME_BYTES_MAX {
                    return None;
                }
                self.key.push(next);
            }
            (Place::Key, _) if next.is_whitespace() => self.place = Place::Equals,
            (Place::Key | Place::Equals, '=') if is_name(&self.key) => {
                out.push_str(if self.has_begun { ", \"" } else { "{\"" });
                out.push_str(&self.key);
                out.push_str("\": ");
                self.has_begun = true;
                self.place = Place::Value(Literal::new());
            }
            _ => return None,
        }
        Some(false)
    }
}

/// Whether a text is a JSON number.
pub(crate) fn is_number(text: &str) -> bool {
    let begins = text.starts_with(|c: char| c == '-' || c.is_ascii_digit());
    let mut reader = JsonReader::new();
    begins && reader.feed(text) == text.len() && reader.is_whole()
}
