//! Reads JSON as it arrives: finds the end of a value, and says whether it is valid.

/// Deepest nesting of a valid value, as in `serde_json`.
const DEPTH_MAX: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Value,
    /// After `[`: a value or `]`.
    FirstItem,
    /// After `{`: a key or `}`.
    FirstKey,
    Key,
    Colon,
    /// After a value: a comma or the end of the container.
    After,
    String,
    Escape,
    /// Hexadecimal digits that are still to come.
    Hex(u8),
    /// The rest of `true`, `false` or `null`.
    Literal(&'static [u8]),
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
    /// The byte at hand does not belong to the number before it, and is read again.
    NumberEnded,
    /// After a mistake: only strings and brackets matter.
    Broken,
    Done,
}

/// Follows one value. After a mistake it goes on counting brackets, so that the end is still found.
#[derive(Clone, Debug)]
pub(crate) struct JsonReader {
    state: State,
    /// One bit for each open container: whether it is an object. The innermost is the lowest bit.
    objects: u128,
    depth: usize,
    is_key: bool,
    is_valid: bool,
}

impl JsonReader {
    pub(crate) fn new() -> Self {
        JsonReader {
            state: State::Value,
            objects: 0,
            depth: 0,
            is_key: false,
            is_valid: true,
        }
    }

    /// Whether no mistake was found.
    pub(crate) fn is_valid(&self) -> bool {
        self.is_valid
    }

    /// Whether the value has ended. A number is also whole where the text ends.
    pub(crate) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Whether a marker at this place is part of a string. After a mistake, this cannot be told.
    pub(crate) fn is_in_string(&self) -> bool {
        self.is_valid && matches!(self.state, State::String | State::Escape | State::Hex(_))
    }

    /// Reads until the value ends, and returns how many bytes belong to it. It stops before a mistake that has no
    /// open container around it.
    pub(crate) fn feed(&mut self, text: &str) -> usize {
        let bytes = text.as_bytes();
        let mut at = 0;
        while let Some(&byte) = bytes.get(at) {
            if self.is_done() {
                break;
            }
            if self.state == State::String {
                let plain = |byte: &u8| *byte >= 0x20 && *byte != b'"' && *byte != b'\\';
                let run = bytes[at..].iter().position(|byte| !plain(byte));
                let run = run.unwrap_or(bytes.len() - at);
                if run > 0 {
                    at += run;
                    continue;
                }
            }
            if !self.step(byte) {
                break;
            }
            match self.state {
                State::NumberEnded => self.ended(),
                _ => at += 1,
            }
        }
        at
    }

    /// Whether the value is complete if nothing more comes.
    pub(crate) fn is_whole(&self) -> bool {
        let ends_here = matches!(
            self.state,
            State::Done | State::Zero | State::Integer | State::Fraction | State::ExponentDigits
        );
        self.is_valid && self.depth == 0 && ends_here
    }

    fn ended(&mut self) {
        self.state = match (self.depth, self.is_valid) {
            (0, _) => State::Done,
            (_, true) => State::After,
            (_, false) => State::Broken,
        };
    }

    fn open(&mut self, is_object: bool) {
        self.depth += 1;
        self.objects = self.objects << 1 | u128::from(is_object);
        self.state = match (self.is_valid, is_object) {
            (false, _) => State::Broken,
            (true, true) => State::FirstKey,
            (true, false) => State::FirstItem,
        };
        if self.depth > DEPTH_MAX {
            self.is_valid = false;
            self.state = State::Broken;
        }
    }

    fn close(&mut self) {
        self.depth -= 1;
        self.objects >>= 1;
        self.ended();
    }

    fn in_object(&self) -> bool {
        self.objects & 1 == 1
    }

    /// Reads a byte. Returns false for a mistake outside of all containers.
    fn step(&mut self, byte: u8) -> bool {
        if self.state == State::Broken {
            self.step_broken(byte);
        } else if let Some(next) = self.next(byte) {
            self.state = next;
        } else if self.depth > 0 {
            self.is_valid = false;
            match (self.state, byte) {
                (State::Hex(_), b'"') => self.ended(),
                (State::Hex(_), b'\\') => self.state = State::Escape,
                (State::String | State::Escape | State::Hex(_), _) => self.state = State::String,
                _ => self.step_broken(byte),
            }
        } else {
            self.is_valid = false;
            return false;
        }
        true
    }

    fn step_broken(&mut self, byte: u8) {
        self.state = State::Broken;
        match byte {
            b'"' => self.state = State::String,
            b'{' | b'[' => self.open(byte == b'{'),
            b'}' | b']' => self.close(),
            _ => {}
        }
    }

    /// The state after a byte, or nothing for a mistake.
    fn next(&mut self, byte: u8) -> Option<State> {
        let is_blank = matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        Some(match (self.state, byte) {
            (
                State::Value
                | State::FirstItem
                | State::FirstKey
                | State::Key
                | State::Colon
                | State::After,
                _,
            ) if is_blank => self.state,
            (State::FirstItem, b']') | (State::FirstKey, b'}') => return Some(self.closed()),
            (State::FirstKey | State::Key, b'"') => {
                self.is_key = true;
                State::String
            }
            (State::Colon, b':') => State::Value,
            (State::After, b',') if self.in_object() => State::Key,
            (State::After, b',') => State::Value,
            (State::After, b'}') if self.in_object() => return Some(self.closed()),
            (State::After, b']') if !self.in_object() => return Some(self.closed()),
            (State::Value | State::FirstItem, b'{' | b'[') => {
                self.open(byte == b'{');
                self.state
            }
            (State::Value | State::FirstItem, b'"') => {
                self.is_key = false;
                State::String
            }
            (State::Value | State::FirstItem, b't') => State::Literal(b"rue"),
            (State::Value | State::FirstItem, b'f') => State::Literal(b"alse"),
            (State::Value | State::FirstItem, b'n') => State::Literal(b"ull"),
            (State::Value | State::FirstItem, b'-') => State::Minus,
            (State::Value | State::FirstItem | State::Minus, b'0') => State::Zero,
            (State::Value | State::FirstItem | State::Minus, b'1'..=b'9') => State::Integer,
            (State::String, b'"') if self.is_key && self.is_valid => State::Colon,
            (State::String, b'"') => return Some(self.after_value()),
            (State::String, b'\\') => State::Escape,
            (State::String, 0x20..) => State::String,
            (State::Escape, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {
                State::String
            }
            (State::Escape, b'u') => State::Hex(4),
            (State::Hex(1), _) if byte.is_ascii_hexdigit() => State::String,
            (State::Hex(left), _) if byte.is_ascii_hexdigit() => State::Hex(left - 1),
            (State::Literal(rest), _) if rest.first() == Some(&byte) => match &rest[1..] {
                [] => return Some(self.after_value()),
                rest => State::Literal(rest),
            },
            (State::Integer, b'0'..=b'9') => State::Integer,
            (State::Zero | State::Integer, b'.') => State::Point,
            (State::Point | State::Fraction, b'0'..=b'9') => State::Fraction,
            (State::Zero | State::Integer | State::Fraction, b'e' | b'E') => State::Exponent,
            (State::Exponent, b'+' | b'-') => State::ExponentSign,
            (State::Exponent | State::ExponentSign | State::ExponentDigits, b'0'..=b'9') => {
                State::ExponentDigits
            }
            (State::Zero | State::Integer | State::Fraction | State::ExponentDigits, _) => {
                State::NumberEnded
            }
            _ => return None,
        })
    }

    fn closed(&mut self) -> State {
        self.close();
        self.state
    }

    fn after_value(&mut self) -> State {
        self.ended();
        self.state
    }
}

/// Whether a text is one valid JSON value, with whitespace around it.
pub(crate) fn is_json(text: &str) -> bool {
    let text = text.trim_matches([' ', '\t', '\n', '\r']);
    let mut reader = JsonReader::new();
    reader.feed(text) == text.len() && reader.is_whole()
}

/// Appends text as the inside of a JSON string.
pub(crate) fn escape(text: &str, out: &mut String) {
    let mut rest = text;
    while let Some(at) = rest.find(|c: char| c < ' ' || c == '"' || c == '\\') {
        out.push_str(&rest[..at]);
        let byte = rest.as_bytes()[at];
        match byte {
            b'"' => out.push_str("\\\""),
            b'\\' => out.push_str("\\\\"),
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            _ => {
                const DIGITS: &[u8; 16] = b"0123456789abcdef";
                out.push_str("\\u00");
                out.push(char::from(DIGITS[usize::from(byte >> 4)]));
                out.push(char::from(DIGITS[usize::from(byte & 15)]));
            }
        }
        rest = &rest[at + 1..];
    }
    out.push_str(rest);
}

/// A text as a JSON string.
pub(crate) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    escape(text, &mut out);
    out.push('"');
    out
}

/// Decodes a JSON string as it arrives, from behind its first quote.
#[derive(Clone, Debug, Default)]
pub(crate) struct StringReader {
    escape: Option<Escape>,
    /// The first half of a surrogate pair.
    high: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
enum Escape {
    Begun,
    Hex { left: u8, value: u32 },
}

/// How a reader stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The text is used up.
    More,
    /// The thing has ended.
    Done,
    /// The next character is a mistake.
    Wrong,
}

impl StringReader {
    /// Appends decoded text, and returns how many bytes it took. The quote at the end is among them.
    pub(crate) fn feed(&mut self, text: &str, out: &mut String) -> (usize, Progress) {
        let mut at = 0;
        while let Some(next) = text[at..].chars().next() {
            match self.escape {
                None => {
                    let plain = |c: char| c >= ' ' && c != '"' && c != '\\';
                    let rest = &text[at..];
                    let run = rest.find(|c| !plain(c)).unwrap_or(rest.len());
                    if run > 0 {
                        self.lone_surrogate(out);
                        out.push_str(&rest[..run]);
                        at += run;
                        continue;
                    }
                    match next {
                        '"' => {
                            self.lone_surrogate(out);
                            return (at + 1, Progress::Done);
                        }
                        '\\' => self.escape = Some(Escape::Begun),
                        _ => return (at, Progress::Wrong),
                    }
                }
                Some(Escape::Begun) if next == 'u' => {
                    self.escape = Some(Escape::Hex { left: 4, value: 0 });
                }
                Some(Escape::Begun) => {
                    let Some(decoded) = simple_escape(next) else {
                        return (at, Progress::Wrong);
                    };
                    self.lone_surrogate(out);
                    out.push(decoded);
                    self.escape = None;
                }
                Some(Escape::Hex { left, value }) => {
                    let Some(digit) = next.to_digit(16) else {
                        return (at, Progress::Wrong);
                    };
                    let value = value << 4 | digit;
                    self.escape = Some(Escape::Hex {
                        left: left - 1,
                        value,
                    });
                    if left == 1 {
                        self.escape = None;
                        self.unit(value, out);
                    }
                }
            }
            at += next.len_utf8();
        }
        (at, Progress::More)
    }

    fn lone_surrogate(&mut self, out: &mut String) {
        if self.high.take().is_some() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }

    fn unit(&mut self, unit: u32, out: &mut String) {
        match (self.high, unit) {
            (Some(high), 0xdc00..=0xdfff) => {
                self.high = None;
                let code = 0x10000 + ((high - 0xd800) << 10) + (unit - 0xdc00);
                out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            (_, 0xd800..=0xdbff) => {
                self.lone_surrogate(out);
                self.high = Some(unit);
            }
            _ => {
                self.lone_surrogate(out);
                out.push(char::from_u32(unit).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
        }
    }
}

fn simple_escape(letter: char) -> Option<char> {
    Some(match letter {
        '"' | '\\' | '/' => letter,
        'b' => '\u{8}',
        'f' => '\u{c}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        _ => return None,
    })
}
