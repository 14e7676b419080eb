//! Grammars in EBNF, as llama.cpp (GBNF) and XGrammar write them, become Lark.
//!
//! llguidance's lexer takes the longest match of a terminal and never goes back. So whatever is regular becomes a
//! terminal as a whole, with its neighbours, and only what refers to itself becomes a rule.

use std::collections::HashMap;
use std::fmt::Write as _;

use crate::GrammarError;
use crate::limits::GrammarLimits;
use crate::literal::literal;
use crate::reader::Reader;

/// Deepest nesting of parentheses.
const DEPTH_MAX: usize = 100;
/// Largest number in a repetition.
const REPEAT_MAX: u32 = 10_000;

/// Alternatives, each of which is a sequence.
type Alternatives = Vec<Vec<Item>>;

#[derive(Clone, Debug)]
struct Item {
    atom: Atom,
    /// `*`, `+`, `?` or `{m,n}`, or nothing.
    repeat: String,
}

#[derive(Clone, Debug)]
enum Atom {
    /// A literal or a class of characters, in the syntax of Lark.
    Text(String),
    Name(String),
    Group(Alternatives),
}

/// The grammar in Lark.
pub(crate) fn to_lark(text: &str, limits: &GrammarLimits) -> Result<String, GrammarError> {
    if text.len() > limits.grammar_bytes_max {
        let reason = format!(
            "the grammar has more than {} bytes",
            limits.grammar_bytes_max
        );
        return Err(GrammarError::refused(reason));
    }
    let mut reader = EbnfReader {
        text: Reader::new(text),
        depth: 0,
    };
    let mut rules: Vec<(String, Alternatives)> = Vec::new();
    let mut places = HashMap::new();
    reader.skip(true);
    while !reader.text.rest.is_empty() {
        let name = reader.name()?;
        if !reader.text.take("::=") {
            return Err(reader.text.fault("a rule is written as: name ::= ..."));
        }
        reader.skip(true);
        let body = reader.alternatives()?;
        if places.insert(name.clone(), rules.len()).is_some() {
            return Err(reader
                .text
                .fault("a rule before this place has the name of another"));
        }
        rules.push((name, body));
        reader.skip(true);
    }
    let Some(root) = places.get("root").copied() else {
        return Err(GrammarError::refused("the grammar has no rule root"));
    };
    let regular = regular_rules(&rules, &places)?;
    let mut writer = Writer {
        places: &places,
        regular: &regular,
        lark: String::new(),
        names: rules.len(),
    };
    for (place, (_, body)) in rules.iter().enumerate() {
        let body = match regular[place] {
            true => writer.terminal(body),
            false => writer.rule(body),
        };
        let _ = writeln!(writer.lark, "{}: {body}", name_of(place, regular[place]));
    }
    let _ = writeln!(writer.lark, "start: {}", name_of(root, regular[root]));
    Ok(writer.lark)
}

fn name_of(number: usize, is_regular: bool) -> String {
    match is_regular {
        true => format!("T{number}"),
        false => format!("r{number}"),
    }
}

/// Which rules neither refer to themselves nor to a rule that does, by whatever way.
fn regular_rules(
    rules: &[(String, Alternatives)],
    places: &HashMap<String, usize>,
) -> Result<Vec<bool>, GrammarError> {
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); rules.len()];
    let mut needs = vec![0; rules.len()];
    for (place, (_, body)) in rules.iter().enumerate() {
        let mut names = Vec::new();
        names_in(body, &mut names);
        for name in names {
            let Some(used) = places.get(name) else {
                return Err(GrammarError::refused("a name in the grammar has no rule"));
            };
            users[*used].push(place);
            needs[place] += 1;
        }
    }
    // A rule is regular once all that it refers to are.
    let mut regular = vec![false; rules.len()];
    let mut open: Vec<usize> = (0..rules.len())
        .filter(|place| needs[*place] == 0)
        .collect();
    while let Some(place) = open.pop() {
        regular[place] = true;
        for user in &users[place] {
            needs[*user] -= 1;
            if needs[*user] == 0 {
                open.push(*user);
            }
        }
    }
    Ok(regular)
}

fn names_in<'a>(body: &'a Alternatives, names: &mut Vec<&'a str>) {
    for item in body.iter().flatten() {
        match &item.atom {
            Atom::Text(_) => {}
            Atom::Name(name) => names.push(name),
            Atom::Group(body) => names_in(body, names),
        }
    }
}

struct Writer<'a> {
    places: &'a HashMap<String, usize>,
    regular: &'a [bool],
    lark: String,
    names: usize,
}

impl Writer<'_> {
    fn is_regular(&self, item: &Item) -> bool {
        match &item.atom {
            Atom::Text(_) => true,
            Atom::Name(name) => self.regular[self.places[name]],
            Atom::Group(body) => body.iter().flatten().all(|item| self.is_regular(item)),
        }
    }

    fn define(&mut self, is_regular: bool, body: &str) -> String {
        let name = name_of(self.names, is_regular);
        self.names += 1;
        let _ = writeln!(self.lark, "{name}: {body}");
        name
    }

    /// Groups have a name of their own, because Lark bounds how deep they nest.
    fn item(&mut self, item: &Item) -> String {
        let atom = match &item.atom {
            Atom::Text(text) => text.clone(),
            Atom::Name(name) => {
                let place = self.places[name];
                name_of(place, self.regular[place])
            }
            Atom::Group(body) => {
                let is_regular = self.is_regular(item);
                let body = match is_regular {
                    true => self.terminal(body),
                    false => self.rule(body),
                };
                self.define(is_regular, &body)
            }
        };
        format!("{atom}{}", item.repeat)
    }

    fn terminal(&mut self, body: &Alternatives) -> String {
        let sequence = |writer: &mut Self, items: &Vec<Item>| match items.is_empty() {
            true => "\"\"".to_owned(),
            false => {
                let items: Vec<String> = items.iter().map(|item| writer.item(item)).collect();
                items.join(" ")
            }
        };
        let alternatives: Vec<String> = body.iter().map(|items| sequence(self, items)).collect();
        alternatives.join(" | ")
    }

    fn rule(&mut self, body: &Alternatives) -> String {
        let mut alternatives = Vec::new();
        for items in body {
            let mut sequence = Vec::new();
            let mut run = Vec::new();
            for item in items {
                let text = self.item(item);
                if self.is_regular(item) {
                    run.push(text);
                    continue;
                }
                if !run.is_empty() {
                    let run = std::mem::take(&mut run).join(" ");
                    sequence.push(self.define(true, &run));
                }
                sequence.push(text);
            }
            if !run.is_empty() {
                sequence.push(self.define(true, &run.join(" ")));
            }
            alternatives.push(match sequence.is_empty() {
                true => "\"\"".to_owned(),
                false => sequence.join(" "),
            });
        }
        alternatives.join(" | ")
    }
}

struct EbnfReader<'a> {
    text: Reader<'a>,
    depth: usize,
}

impl EbnfReader<'_> {
    /// Skips white space and comments; with `lines`, ends of lines as well.
    fn skip(&mut self, lines: bool) {
        loop {
            let is_space = |c: char| c.is_whitespace() && (lines || c != '\n');
            self.text.take_while(is_space);
            if self.text.peek() != Some('#') {
                return;
            }
            self.text.take_while(|c| c != '\n');
        }
    }

    fn name(&mut self) -> Result<String, GrammarError> {
        let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
        let name = self.text.take_while(is_part).to_owned();
        if name.is_empty() {
            return Err(self
                .text
                .fault("these characters are not part of the language"));
        }
        self.skip(false);
        Ok(name)
    }

    fn alternatives(&mut self) -> Result<Alternatives, GrammarError> {
        let mut alternatives = vec![Vec::new()];
        loop {
            self.skip(self.depth > 0);
            // A line that begins with | goes on with the rule.
            let mut ahead = EbnfReader { ..*self };
            ahead.skip(true);
            if ahead.text.take("|") {
                self.text = ahead.text;
                self.skip(true);
                alternatives.push(Vec::new());
                continue;
            }
            let next = self.text.peek();
            let Some(next) = next.filter(|next| !matches!(next, '\n' | ')')) else {
                return Ok(alternatives);
            };
            let atom = match next {
                '"' => {
                    self.text.next();
                    Atom::Text(literal(&self.text.string()?))
                }
                '[' => Atom::Text(self.class()?),
                '.' => {
                    self.text.next();
                    Atom::Text("/(?s:.)/".to_owned())
                }
                '(' => {
                    self.text.next();
                    Atom::Group(self.group()?)
                }
                _ => Atom::Name(self.name()?),
            };
            let repeat = self.repeat()?;
            if let Some(last) = alternatives.last_mut() {
                last.push(Item { atom, repeat });
            }
        }
    }

    fn group(&mut self) -> Result<Alternatives, GrammarError> {
        if self.depth >= DEPTH_MAX {
            return Err(self.text.fault("the grammar nests too deeply"));
        }
        self.depth += 1;
        let body = self.alternatives()?;
        self.depth -= 1;
        match self.text.take(")") {
            true => Ok(body),
            false => Err(self.text.fault("a parenthesis is not closed")),
        }
    }

    fn repeat(&mut self) -> Result<String, GrammarError> {
        for operator in ["*", "+", "?"] {
            if self.text.take(operator) {
                return Ok(operator.to_owned());
            }
        }
        if !self.text.take("{") {
            return Ok(String::new());
        }
        let Some(end) = self.text.rest.find('}') else {
            return Err(self
                .text
                .fault("a repetition is written as {m}, {m,} or {m,n}"));
        };
        let (range, rest) = (&self.text.rest[..end], &self.text.rest[end + 1..]);
        let number = |text: &str| {
            text.trim()
                .parse::<u32>()
                .ok()
                .filter(|number| *number <= REPEAT_MAX)
        };
        let (least, most) = match range.split_once(',') {
            None => (number(range), number(range)),
            Some((least, most)) if most.trim().is_empty() => (number(least), Some(u32::MAX)),
            Some((least, most)) => (number(least), number(most)),
        };
        match (least, most) {
            (Some(least), Some(most)) if most > 0 && least <= most => {
                self.text.rest = rest;
                Ok(match most {
                    u32::MAX => format!("{{{least},}}"),
                    most => format!("{{{least},{most}}}"),
                })
            }
            _ => Err(self
                .text
                .fault("a repetition is written as {m}, {m,} or {m,n}, with numbers up to 10000")),
        }
    }

    /// A class of characters as a regular expression, in which every character is escaped.
    fn class(&mut self) -> Result<String, GrammarError> {
        self.text.next();
        let mut class = "/[".to_owned();
        if self.text.take("^") {
            class.push('^');
        }
        let empty = class.len();
        loop {
            match self.text.peek() {
                Some(']') if class.len() > empty => {
                    self.text.next();
                    class.push_str("]/");
                    return Ok(class);
                }
                None | Some('\n' | ']') => {
                    return Err(self
                        .text
                        .fault("a class of characters is empty or not closed"));
                }
                Some(_) => {}
            }
            let from = self.text.character()?;
            let is_range = self.text.rest.starts_with('-') && !self.text.rest.starts_with("-]");
            let to = match is_range {
                true => {
                    self.text.next();
                    self.text.character()?
                }
                false => from,
            };
            if to < from {
                return Err(self
                    .text
                    .fault("a range of characters has its end before its beginning"));
            }
            let _ = write!(
                class,
                "\\x{{{:x}}}-\\x{{{:x}}}",
                u32::from(from),
                u32::from(to)
            );
        }
    }
}
