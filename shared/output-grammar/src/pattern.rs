//! Writes a grammar as one regular expression, for texts that stand in another format, such as a string in JSON.
//!
//! That is possible for a grammar in Lark none of whose rules refers to itself. Every way to part a text counts, as
//! with Lark's parser for Earley grammars; a lexer that always takes the longest terminal would allow less.

use std::collections::HashMap;
use std::fmt::Write as _;

use refrain_protocol::engine::TextForm;

use crate::GrammarError;
use crate::lark::without_anchors;
use crate::reader::Reader;

/// Longest grammar, bytes.
const GRAMMAR_BYTES_MAX: usize = 64 << 10;
/// Longest regular expression, bytes. Rules that are used several times are written several times.
const PATTERN_BYTES_MAX: usize = 16 << 10;
/// Most rules that use one another in a row.
const DEPTH_MAX: usize = 64;
/// Largest number in a repetition.
const REPEAT_MAX: u32 = 1_000;

/// The terminals of Lark's own file `common`, as regular expressions.
const COMMON: [(&str, &str); 19] = [
    ("CNAME", "[_A-Za-z][_A-Za-z0-9]*"),
    ("CR", r"\r"),
    ("DECIMAL", r"[0-9]+\.[0-9]*|\.[0-9]+"),
    ("DIGIT", "[0-9]"),
    ("ESCAPED_STRING", r#""([^"\\\n]|\\.)*""#),
    (
        "FLOAT",
        r"([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+",
    ),
    ("HEXDIGIT", "[a-fA-F0-9]"),
    ("INT", "[0-9]+"),
    ("LCASE_LETTER", "[a-z]"),
    ("LETTER", "[A-Za-z]"),
    ("LF", r"\n"),
    ("NEWLINE", r"(\r?\n)+"),
    ("NUMBER", r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"),
    ("SIGNED_INT", "[+-]?[0-9]+"),
    (
        "SIGNED_NUMBER",
        r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?",
    ),
    ("UCASE_LETTER", "[A-Z]"),
    ("WORD", "[A-Za-z]+"),
    ("WS", r"[ \t\f\r\n]+"),
    ("WS_INLINE", r"[ \t]+"),
];

/// The pattern of a JSON schema that holds a string to a grammar in Lark or to a regular expression.
///
/// # Errors
/// The grammar cannot be written so, or is too large. Whether the pattern can be compiled is found out later.
pub fn text_pattern(grammar: &TextForm) -> Result<String, GrammarError> {
    let text = match grammar {
        TextForm::Regex(text) | TextForm::Lark(text) if text.len() <= GRAMMAR_BYTES_MAX => text,
        _ => return Err(GrammarError::refused("the grammar is too long")),
    };
    let pattern = match grammar {
        TextForm::Lark(_) => of_lark(text)?,
        _ => without_anchors(text).to_owned(),
    };
    check_size(&pattern)?;
    Ok(format!("^(?:{pattern})$"))
}

fn check_size(pattern: &str) -> Result<(), GrammarError> {
    match pattern.len() <= PATTERN_BYTES_MAX {
        true => Ok(()),
        false => Err(GrammarError::refused(
            "the grammar is too large as a regular expression",
        )),
    }
}

/// A piece of a rule.
enum Piece<'a> {
    /// A regular expression for a text.
    Text(String),
    Name(&'a str),
    /// A parenthesis, or a sign between or behind atoms, as regular expressions have it.
    Sign(String),
}

type Rules<'a> = HashMap<&'a str, Vec<Piece<'a>>>;

fn of_lark(text: &str) -> Result<String, GrammarError> {
    let mut reader = Reader::new(text);
    let mut rules = Rules::new();
    let mut ignored = Vec::new();
    loop {
        skip(&mut reader);
        let before = reader;
        let mut define = |name, body| match rules.insert(name, body) {
            None => Ok(()),
            Some(_) => Err(before.fault("another rule has this name")),
        };
        if let Some(name) = rule_begin(&mut reader) {
            define(name, body(&mut reader)?)?;
        } else if reader.take("%ignore") {
            if !ignored.is_empty() {
                ignored.push(Piece::Sign("|".to_owned()));
            }
            ignored.extend(body(&mut reader)?);
        } else if reader.take("%import") {
            for (name, pattern) in imports(&mut reader)? {
                define(name, vec![Piece::Text(pattern.to_owned())])?;
            }
        } else if reader.rest.is_empty() {
            break;
        } else {
            return Err(reader.fault("only rules, %ignore and %import are read"));
        }
    }
    let mut writer = Writer {
        rules: &rules,
        ignored: String::new(),
        written: HashMap::new(),
        open: Vec::new(),
    };
    if !ignored.is_empty() {
        writer.ignored = format!("(?:{})*", writer.body(&ignored, false)?);
    }
    Ok(format!("{}{}", writer.rule("start")?, writer.ignored))
}

/// Skips white space and comments.
fn skip(reader: &mut Reader<'_>) {
    reader.take_while(char::is_whitespace);
    while reader.rest.starts_with("//") || reader.rest.starts_with('#') {
        reader.take_while(|c| c != '\n');
        reader.take_while(char::is_whitespace);
    }
}

fn name<'a>(reader: &mut Reader<'a>) -> &'a str {
    reader.take_while(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Takes the name of a rule and its colon, if the text goes on with one.
fn rule_begin<'a>(reader: &mut Reader<'a>) -> Option<&'a str> {
    let mut ahead = *reader;
    ahead.take_while(|c| c == '?' || c == '!');
    let name = name(&mut ahead);
    if ahead.take(".") {
        ahead.take_while(|c| c.is_ascii_digit());
    }
    skip(&mut ahead);
    let begins = !name.is_empty() && ahead.take(":");
    begins.then(|| {
        *reader = ahead;
        name
    })
}

/// The terminals that a directive imports, under their names here.
fn imports<'a>(reader: &mut Reader<'a>) -> Result<Vec<(&'a str, &'static str)>, GrammarError> {
    let fault = |reader: &Reader<'_>| reader.fault("only terminals of common can be imported");
    let known = |reader: &mut Reader<'a>| {
        skip(reader);
        let name = name(reader);
        let found = COMMON.iter().find(|(known, _)| *known == name);
        Ok((name, found.ok_or_else(|| fault(reader))?.1))
    };
    skip(reader);
    if !reader.take("common") {
        return Err(fault(reader));
    }
    if reader.take(".") {
        let (mut own_name, pattern) = known(reader)?;
        let mut ahead = *reader;
        skip(&mut ahead);
        if ahead.take("->") {
            skip(&mut ahead);
            own_name = name(&mut ahead);
            *reader = ahead;
        }
        return Ok(vec![(own_name, pattern)]);
    }
    skip(reader);
    let mut found = Vec::new();
    let mut goes_on = reader.take("(");
    while goes_on {
        found.push(known(reader)?);
        skip(reader);
        goes_on = reader.take(",");
    }
    match reader.take(")") {
        true => Ok(found),
        false => Err(fault(reader)),
    }
}

/// The pieces of a rule, up to the next rule or directive.
fn body<'a>(reader: &mut Reader<'a>) -> Result<Vec<Piece<'a>>, GrammarError> {
    let mut pieces = Vec::new();
    let mut closing = Vec::new();
    loop {
        skip(reader);
        let is_over = rule_begin(&mut { *reader }).is_some();
        let next = reader.peek().filter(|next| *next != '%' && !is_over);
        let Some(next) = next else {
            break;
        };
        if next.is_ascii_alphabetic() || next == '_' {
            pieces.push(Piece::Name(name(reader)));
            continue;
        }
        reader.next();
        let sign = |text: &str| Piece::Sign(text.to_owned());
        pieces.push(match next {
            '"' => Piece::Text(literal(reader)?),
            '/' => Piece::Text(expression(reader)?),
            '(' | '[' => {
                closing.push(if next == '(' { (')', ")") } else { (']', ")?") });
                sign("(?:")
            }
            ')' | ']' => match closing.pop() {
                Some((expected, written)) if expected == next => sign(written),
                _ => return Err(reader.fault("this parenthesis was not opened")),
            },
            '|' | '*' | '+' | '?' => Piece::Sign(next.to_string()),
            '~' => Piece::Sign(repetition(reader)?),
            '-' if reader.take(">") => {
                skip(reader);
                name(reader);
                continue;
            }
            _ => return Err(reader.fault("this sign is not known")),
        });
    }
    match closing.is_empty() {
        true => Ok(pieces),
        false => Err(reader.fault("a parenthesis is not closed")),
    }
}

/// A string, or a range of characters, behind the first quote.
fn literal(reader: &mut Reader<'_>) -> Result<String, GrammarError> {
    let escaped = |text: &str| {
        text.chars().fold(String::new(), |mut escaped, c| {
            if "\\.+*?()|[]{}^$".contains(c) {
                escaped.push('\\');
            }
            escaped.push(c);
            escaped
        })
    };
    let text = reader.string()?;
    if reader.take("..") {
        let other = match reader.take("\"") {
            true => reader.string()?,
            false => String::new(),
        };
        let ends = [&text, &other].map(|end| (end.chars().next(), end.chars().count()));
        let [(Some(from), 1), (Some(to), 1)] = ends else {
            return Err(reader.fault("a range is between two characters"));
        };
        let (from, to) = (u32::from(from), u32::from(to));
        return Ok(format!("[\\x{{{from:x}}}-\\x{{{to:x}}}]"));
    }
    let flag = if reader.take("i") { "i" } else { "" };
    Ok(format!("(?{flag}:{})", escaped(&text)))
}

/// A regular expression behind its first slash.
fn expression(reader: &mut Reader<'_>) -> Result<String, GrammarError> {
    let mut body = String::new();
    loop {
        match reader.next() {
            Some('/') => break,
            None | Some('\n') => return Err(reader.fault("a regular expression is not closed")),
            Some(next) => {
                body.push(next);
                body.extend((next == '\\').then(|| reader.next()).flatten());
            }
        }
    }
    let flags = reader.take_while(|c| c.is_ascii_lowercase());
    match flags.chars().all(|flag| "imsu".contains(flag)) {
        true => Ok(format!("(?{}:{body})", flags.replace('u', ""))),
        false => Err(reader.fault("this flag is not known")),
    }
}

/// A number of times behind its sign.
fn repetition(reader: &mut Reader<'_>) -> Result<String, GrammarError> {
    let number = |reader: &mut Reader<'_>| {
        reader.take_while(char::is_whitespace);
        let number = reader.take_while(|c| c.is_ascii_digit()).parse::<u32>();
        number.ok().filter(|number| *number <= REPEAT_MAX)
    };
    let least = number(reader);
    let most = match reader.take("..") {
        true => number(reader),
        false => least,
    };
    match (least, most) {
        (Some(least), Some(most)) if least <= most => Ok(format!("{{{least},{most}}}")),
        _ => Err(reader.fault("a repetition is written as ~n or ~n..m, with numbers up to 1000")),
    }
}

/// Writes rules as regular expressions.
struct Writer<'a> {
    rules: &'a Rules<'a>,
    /// The texts that may stand before each terminal of a rule.
    ignored: String,
    written: HashMap<&'a str, String>,
    /// The rules that are being written.
    open: Vec<&'a str>,
}

impl<'a> Writer<'a> {
    fn rule(&mut self, name: &'a str) -> Result<String, GrammarError> {
        if let Some(written) = self.written.get(name) {
            return Ok(written.clone());
        }
        if self.open.contains(&name) {
            return Err(GrammarError::refused(
                "a rule of the grammar refers to itself",
            ));
        }
        let Some(body) = self.rules.get(name).filter(|_| self.open.len() < DEPTH_MAX) else {
            return Err(GrammarError::refused(
                "a name in the grammar has no rule, or its rules nest too deeply",
            ));
        };
        self.open.push(name);
        let written = self.body(body, !is_terminal(name))?;
        self.open.pop();
        self.written.insert(name, written.clone());
        Ok(written)
    }

    fn body(&mut self, body: &'a [Piece<'a>], is_rule: bool) -> Result<String, GrammarError> {
        let mut written = String::new();
        for piece in body {
            let (atom, ends_words) = match piece {
                Piece::Sign(sign) => {
                    written.push_str(sign);
                    continue;
                }
                Piece::Text(text) => (text.clone(), true),
                Piece::Name(name) => (format!("(?:{})", self.rule(name)?), is_terminal(name)),
            };
            let _ = match ends_words && is_rule && !self.ignored.is_empty() {
                true => write!(written, "(?:{}{atom})", self.ignored),
                false => write!(written, "{atom}"),
            };
            check_size(&written)?;
        }
        Ok(written)
    }
}

/// Whether a name is one of a terminal.
fn is_terminal(name: &str) -> bool {
    let first = name.chars().find(|c| *c != '_');
    first.is_some_and(|first| first.is_ascii_uppercase())
}
