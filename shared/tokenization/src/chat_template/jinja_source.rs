//! Constructs of chat templates that the template engine does not know, translated before it compiles them.
//!
//! * `{% generation %}` marks what the model says, for training. Here it only limits the scope of variables, which is
//!   what `{% with %}` does.
//! * `'%s' % x` formats a text. The engine has `%` for numbers only, so a call takes its place where the left operand
//!   may be a text.
//! * `{% set x = .. %}` and `{% set ns.x = .. %}` keep a value, so a text that doubles with each of them, or in every
//!   turn of a loop, grows there. The value goes through a filter that bounds its length.

use std::ops::Range;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, State};

use super::growth;

/// The filter that bounds what a template keeps.
pub(super) const BOUNDED: &str = "__bounded";

/// The function that stands for `%` after a text.
pub(super) const PERCENT: &str = "__percent";

/// Tags of the training library, and the tags that stand for them.
const TAGS: [(&str, &str); 2] = [("generation", "with"), ("endgeneration", "endwith")];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Word,
    Open,
    Close,
    Operator,
}

/// A token inside a tag.
#[derive(Clone, Debug)]
struct Token<'a> {
    kind: Kind,
    text: &'a str,
    /// How many brackets are open around it. A bracket has the depth of what is around it.
    depth: usize,
    range: Range<usize>,
}

/// The template with these constructs translated. Lines keep their numbers.
pub(super) fn translate(source: &str) -> String {
    let mut edits: Vec<(Range<usize>, &str)> = Vec::new();
    let mut at = 0;
    while let Some(found) = source[at..].find('{') {
        let start = at + found;
        let rest = &source[start..];
        at = if rest.starts_with("{#") {
            end_of(source, start + 2, "#}")
        } else if rest.starts_with("{%") || rest.starts_with("{{") {
            let (tokens, end) = tokens(source, start + 2);
            match tokens.as_slice() {
                [only] if only.text == "raw" => end_of_raw(source, end),
                [only] => {
                    let tag = TAGS.iter().find(|(name, _)| *name == only.text);
                    edits.extend(tag.map(|(_, stand_in)| (only.range.clone(), *stand_in)));
                    end
                }
                tokens => {
                    // The bracket of the whole value opens before that of its first operand.
                    edits.extend(bounds(tokens));
                    edits.extend(percents(tokens));
                    end
                }
            }
        } else {
            start + 1
        };
    }
    // Parentheses that close at one place go before those that open there.
    edits.sort_by_key(|(range, text)| (range.start, *text != ")"));
    let mut translated = String::with_capacity(source.len());
    let mut copied = 0;
    for (range, text) in edits {
        translated.push_str(&source[copied..range.start]);
        translated.push_str(text);
        copied = range.end;
    }
    translated.push_str(&source[copied..]);
    translated
}

/// The place after the next `mark`, or the end of the text.
fn end_of(source: &str, from: usize, mark: &str) -> usize {
    source[from..]
        .find(mark)
        .map_or(source.len(), |found| from + found + mark.len())
}

/// The place after `{% endraw %}`.
fn end_of_raw(source: &str, from: usize) -> usize {
    let mut at = from;
    loop {
        let tag = end_of(source, at, "{%");
        let name = source[tag..].trim_start_matches(['-', '+']).trim_start();
        if tag == source.len() || name.starts_with("endraw") {
            return end_of(source, tag, "%}");
        }
        at = tag;
    }
}

/// The tokens of a tag that begins at `at`, and the place after the tag.
fn tokens(source: &str, mut at: usize) -> (Vec<Token<'_>>, usize) {
    let mut tokens: Vec<Token<'_>> = Vec::new();
    let mut depth = 0usize;
    // A sign right after the start of the tag is about white space.
    if source[at..].starts_with(['-', '+']) {
        at += 1;
    }
    while let Some(first) = source[at..].chars().next() {
        let rest = &source[at..];
        if depth == 0 {
            let sign = usize::from(rest.starts_with(['-', '+']));
            if rest[sign..].starts_with("%}") || rest[sign..].starts_with("}}") {
                return (tokens, at + sign + 2);
            }
        }
        let word = |character: char| character.is_alphanumeric() || character == '_';
        let (kind, length) = match first {
            '"' | '\'' => (Kind::Text, text_length(rest, first)),
            '(' | '[' | '{' => (Kind::Open, 1),
            ')' | ']' | '}' => (Kind::Close, 1),
            _ if word(first) => {
                let length = rest.find(|character| !word(character));
                (Kind::Word, length.unwrap_or(rest.len()))
            }
            _ if ["**", "//", "==", "!=", "<=", ">="].contains(&rest.get(..2).unwrap_or("")) => {
                (Kind::Operator, 2)
            }
            _ => (Kind::Operator, first.len_utf8()),
        };
        if kind == Kind::Close {
            depth = depth.saturating_sub(1);
        }
        if !first.is_whitespace() {
            tokens.push(Token {
                kind,
                text: &rest[..length],
                depth,
                range: at..at + length,
            });
        }
        if kind == Kind::Open {
            depth += 1;
        }
        at += length;
    }
    (tokens, at)
}

/// The length of a text in quotes at the start of `rest`.
fn text_length(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, character) in rest.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if character == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// Edits that bound the value which a tag keeps, in a variable or in a namespace.
fn bounds<'a>(tokens: &[Token<'_>]) -> Vec<(Range<usize>, &'a str)> {
    let ([set, name, after @ ..], Some(last)) = (tokens, tokens.last()) else {
        return Vec::new();
    };
    if set.text != "set" || name.kind != Kind::Word {
        return Vec::new();
    }
    let of_value = match after {
        [dot, field, of_value @ ..] if dot.text == "." && field.kind == Kind::Word => of_value,
        of_value => of_value,
    };
    let end = last.range.end..last.range.end;
    match of_value {
        // The value is the text up to `{% endset %}`.
        [] => vec![(end, "|__bounded")],
        [filter, ..] if filter.text == "|" => vec![(end, "|__bounded")],
        [assign, first, ..] if assign.text == "=" => {
            vec![
                (first.range.start..first.range.start, "("),
                (end, ")|__bounded"),
            ]
        }
        _ => Vec::new(),
    }
}

/// Edits that make a call of each `%` whose left operand begins with a text or a name, which may be that of a text.
fn percents<'a>(tokens: &[Token<'_>]) -> Vec<(Range<usize>, &'a str)> {
    const CALL: &str = "__percent(";
    let mut edits = Vec::new();
    for (at, percent) in tokens.iter().enumerate() {
        if percent.kind != Kind::Operator || percent.text != "%" {
            continue;
        }
        let left = left_operand(&tokens[..at], percent.depth);
        let before = &tokens[..at - left.len()];
        let is_text = left
            .iter()
            .find(|token| token.text != "(")
            .is_some_and(|token| may_be_text(token) && !ends_with_sign(before));
        let right = right_operand(&tokens[at + 1..], percent.depth);
        if let (true, Some(first), Some(last)) = (is_text, left.first(), right.last()) {
            edits.push((first.range.start..first.range.start, CALL));
            edits.push((percent.range.clone(), ","));
            edits.push((last.range.end..last.range.end, ")"));
        }
    }
    edits
}

/// Whether a token is a text or a name.
fn may_be_text(token: &Token<'_>) -> bool {
    token.kind == Kind::Text
        || (token.kind == Kind::Word && !token.text.starts_with(|first: char| first.is_numeric()))
}

/// Whether the last token is the sign of what follows. Such an operand is a number.
fn ends_with_sign(before: &[Token<'_>]) -> bool {
    let [rest @ .., sign] = before else {
        return false;
    };
    let is_operand = |token: &Token<'_>| match token.kind {
        Kind::Text | Kind::Close => true,
        Kind::Word => !KEYWORDS.contains(&token.text),
        Kind::Open | Kind::Operator => false,
    };
    matches!(sign.text, "-" | "+") && !rest.last().is_some_and(is_operand)
}

/// Words that end an operand.
const KEYWORDS: [&str; 12] = [
    "if",
    "elif",
    "else",
    "and",
    "or",
    "not",
    "in",
    "is",
    "set",
    "for",
    "do",
    "recursive",
];

fn ends_operand(token: &Token<'_>) -> bool {
    match token.kind {
        Kind::Word => KEYWORDS.contains(&token.text),
        Kind::Operator => !matches!(token.text, "." | "|"),
        _ => false,
    }
}

/// The factors before a `%`: everything up to an operator that binds less.
fn left_operand<'a, 'b>(before: &'a [Token<'b>], depth: usize) -> &'a [Token<'b>] {
    let ends = |token: &Token<'_>| {
        token.depth < depth
            || (token.depth == depth
                && ends_operand(token)
                && !matches!(token.text, "*" | "/" | "//" | "%" | "**"))
    };
    let start = before.iter().rposition(ends).map_or(0, |at| at + 1);
    &before[start..]
}

/// The factor after a `%`.
fn right_operand<'a, 'b>(after: &'a [Token<'b>], depth: usize) -> &'a [Token<'b>] {
    let signs = after.iter().take_while(|token| token.text == "-").count();
    let ends = |token: &Token<'_>| {
        token.depth < depth || (token.depth == depth && (ends_operand(token) && token.text != "**"))
    };
    let ends = after
        .iter()
        .skip(signs)
        .position(|token| ends(token) || closes(token, depth));
    &after[..ends.map_or(after.len(), |at| at + signs)]
}

/// Whether a token closes the bracket that is open around a depth.
fn closes(token: &Token<'_>, depth: usize) -> bool {
    token.kind == Kind::Close && token.depth < depth
}

/// `left % right` as Python computes it: a text is formatted, and numbers have a remainder.
pub(super) fn percent(
    state: &mut State<'_, '_>,
    left: &Value,
    right: &Value,
) -> Result<Value, Error> {
    if let Some(text) = left.as_str() {
        let arguments: Vec<Value> = match right.is_tuple() {
            true => right.try_iter()?.collect(),
            false => vec![right.clone()],
        };
        return growth::printf(state, text, &arguments);
    }
    remainder(left, right)
}

fn remainder(left: &Value, right: &Value) -> Result<Value, Error> {
    let failed = || {
        let kinds = (left.kind(), right.kind());
        Error::new(
            ErrorKind::InvalidOperation,
            format!("tried to use % on {} and {}", kinds.0, kinds.1),
        )
    };
    if left.kind() != ValueKind::Number || right.kind() != ValueKind::Number {
        return Err(failed());
    }
    if let (Ok(left), Ok(right)) = (i64::try_from(left.clone()), i64::try_from(right.clone())) {
        let remainder = left.checked_rem(right).ok_or_else(failed)?;
        let is_other_sign = remainder != 0 && (remainder < 0) != (right < 0);
        return Ok(Value::from(
            remainder + if is_other_sign { right } else { 0 },
        ));
    }
    let (left, right) = (f64::try_from(left.clone())?, f64::try_from(right.clone())?);
    Ok(Value::from(left - right * (left / right).floor()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_of_training_become_scopes_and_keep_their_white_space_control() {
        for (source, expected) in [
            (
                "{% generation %}a{% endgeneration %}",
                "{% with %}a{% endwith %}",
            ),
            (
                "{%- generation -%} {%+endgeneration+%}",
                "{%- with -%} {%+endwith+%}",
            ),
            (
                "{{ generation.x }}{% set generation = 1 %}",
                "{{ generation.x }}{% set generation = (1)|__bounded %}",
            ),
            ("{# {% generation %} #}", "{# {% generation %} #}"),
            (
                "{% raw %}{% generation %}{% endraw %}{%generation%}",
                "{% raw %}{% generation %}{% endraw %}{%with%}",
            ),
            ("{{ '{% generation %}' }} {", "{{ '{% generation %}' }} {"),
        ] {
            assert_eq!(translate(source), expected);
        }
    }

    #[test]
    fn a_percent_sign_after_a_text_becomes_a_call() {
        for (source, expected) in [
            ("{{ '%s' % x }}", "{{ __percent('%s' , x) }}"),
            ("{{ '%s' % x ~ y }}", "{{ __percent('%s' , x) ~ y }}"),
            (
                "{{ a ~ '%s' % (x, y)[0] | upper + b }}",
                "{{ a ~ __percent('%s' , (x, y)[0] | upper) + b }}",
            ),
            (
                "{% set a = '%d' % -n if n else 'b' %}",
                "{% set a = (__percent('%d' , -n) if n else 'b')|__bounded %}",
            ),
            ("{{ f('%s' % x, 2) }}", "{{ f(__percent('%s' , x), 2) }}"),
            (
                "{{ '%s %%s' % x % y }}",
                "{{ __percent(__percent('%s %%s' , x) , y) }}",
            ),
            (
                "{{ loop.index0 % 2 }}{%- if 'a' and i % 2 %}",
                "{{ __percent(loop.index0 , 2) }}{%- if 'a' and __percent(i , 2) %}",
            ),
            (
                "{{ a - b.c[0] | first % x == 1 }}",
                "{{ a - __percent(b.c[0] | first , x) == 1 }}",
            ),
            ("{{ 7 % n }}{{ -n % 3 }}", "{{ 7 % n }}{{ -n % 3 }}"),
            ("100 % {{ 'a%}' }}", "100 % {{ 'a%}' }}"),
        ] {
            assert_eq!(translate(source), expected);
        }
    }

    #[test]
    fn values_that_are_kept_are_bounded() {
        for (source, expected) in [
            (
                "{%- set ns.a = ns.a ~ 'x' if b else c -%}",
                "{%- set ns.a = (ns.a ~ 'x' if b else c)|__bounded -%}",
            ),
            (
                "{% set ns.a = fmt % 2 %}",
                "{% set ns.a = (__percent(fmt , 2))|__bounded %}",
            ),
            ("{% set ns.a = 1, 2 %}", "{% set ns.a = (1, 2)|__bounded %}"),
            (
                "{% set ns.a %}b{% endset %}{% set ns.a | trim %}b{% endset %}",
                "{% set ns.a|__bounded %}b{% endset %}{% set ns.a | trim|__bounded %}b{% endset %}",
            ),
            (
                "{% set a = b.c %}{{ set.a }}{% set a %}b{% endset %}",
                "{% set a = (b.c)|__bounded %}{{ set.a }}{% set a|__bounded %}b{% endset %}",
            ),
        ] {
            assert_eq!(translate(source), expected);
        }
    }

    #[test]
    fn remainders_have_the_sign_of_the_divisor() {
        let of = |a: i64, b: i64| remainder(&a.into(), &b.into()).unwrap().as_i64();
        assert_eq!(
            (of(7, 3), of(-7, 3), of(7, -3)),
            (Some(1), Some(2), Some(-2))
        );
        assert!(remainder(&1.into(), &0.into()).is_err());
        assert!(remainder(&i64::MIN.into(), &(-1).into()).is_err());
    }
}
