//! Writes choices, calls of tools and alternatives of forms as Lark.
//!
//! llguidance's lexer takes the longest match of a terminal and never goes back. So parts of text that stand next to
//! each other become one terminal, inside which every way to match counts.

use std::fmt::Write as _;

use llguidance::regex_to_lark;
use refrain_protocol::engine::{
    ArgumentsForm, CallForm, CallsForm, FormPart, TextForm, call_trigger,
};
use refrain_tokenization::Tokenizer;

use crate::limits::GrammarLimits;
use crate::literal::literal;
use crate::matcher::FreePart;
use crate::{GrammarError, TokenId, ebnf, schema};

/// Forms inside forms.
const DEPTH_MAX: usize = 16;

/// A piece of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    /// A regular expression, in the syntax of terminals.
    Regular(String),
    Special(TokenId),
    /// In the syntax of rules.
    Rule(String),
}

/// Any text that has none of these in it.
fn text_without(texts: &[&str]) -> String {
    match texts {
        [] => "ALL".to_owned(),
        texts => {
            let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
            format!("(ALL & ~(ALL ({}) ALL))", texts.join(" | "))
        }
    }
}

/// The model and the limits for which a form is written.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) eos: &'a [TokenId],
    pub(crate) limits: &'a GrammarLimits,
}

/// The parts of a text that begins JSON, as llguidance's grammars of JSON part it. `None`: it is no such text.
///
/// An answer in JSON and a call that is JSON may stand beside each other. Their terminals must then be the same as
/// far as their texts are, since the lexer follows the longest one, and does not come back for the other.
fn json_parts(mut text: &str) -> Option<Vec<&str>> {
    if !text.starts_with('{') {
        return None;
    }
    let mut parts = Vec::new();
    while let Some(first) = text.chars().next() {
        let len = match first {
            '{' | '}' | '[' | ']' => 1,
            ':' | ',' if text[1..].starts_with(' ') => 2,
            '"' => {
                let mut values = serde_json::Deserializer::from_str(text).into_iter::<String>();
                values.next()?.ok()?;
                values.byte_offset()
            }
            _ => return None,
        };
        parts.push(&text[..len]);
        text = &text[len..];
    }
    Some(parts)
}

/// A pattern as llguidance wants it, which always matches from end to end. So anchors there say what holds anyway.
pub(crate) fn without_anchors(pattern: &str) -> &str {
    let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
    let is_escaped = |rest: &str| rest.chars().rev().take_while(|c| *c == '\\').count() % 2 == 1;
    match pattern.strip_suffix('$') {
        Some(rest) if !is_escaped(rest) => rest,
        _ => pattern,
    }
}

/// Writes one grammar.
pub(crate) struct LarkWriter<'a> {
    context: Context<'a>,
    /// Definitions of rules and terminals.
    lark: String,
    names: usize,
    depth: usize,
}

/// How the beginning of a call is told from free text.
struct Trigger<'a> {
    /// By the special token that it begins with.
    token: Option<TokenId>,
    /// Otherwise by this beginning of its text.
    text: &'a str,
}

impl<'a> LarkWriter<'a> {
    pub(crate) fn new(context: Context<'a>) -> Self {
        LarkWriter {
            context,
            lark: "ALL: /(?s:.*)/\n".to_owned(),
            names: 0,
            depth: 0,
        }
    }

    /// The grammar of a form, and the free text before it if that ends with a special token.
    pub(crate) fn grammar(
        mut self,
        form: &TextForm,
    ) -> Result<(String, Option<FreePart>), GrammarError> {
        let free = match form {
            TextForm::Calls(calls) if calls.optional => self.special_triggers(calls)?,
            _ => None,
        };
        let start = match (form, &free) {
            (TextForm::Calls(calls), Some(_)) => self.calls(calls)?,
            _ => self.form(form)?,
        };
        let _ = writeln!(self.lark, "start: {start}");
        let free = free.map(|until| FreePart {
            until,
            end_is_bound: true,
        });
        Ok((self.lark, free))
    }

    fn define(&mut self, prefix: &str, body: &str) -> String {
        self.names += 1;
        let name = format!("{prefix}{}", self.names);
        let _ = writeln!(self.lark, "{name}: {body}");
        name
    }

    /// A form inside a grammar, in the syntax of rules.
    fn form(&mut self, form: &TextForm) -> Result<String, GrammarError> {
        Ok(match form {
            TextForm::JsonObject => format!("%json {}", schema::any_object()),
            TextForm::JsonSchema(text) => {
                format!("%json {}", schema::read(text, self.context.limits)?)
            }
            TextForm::Regex(pattern) => {
                let pattern = regex_to_lark(without_anchors(pattern), "");
                self.define("T", &format!("/(?:{pattern})/"))
            }
            TextForm::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
                if texts.is_empty() {
                    return Err(GrammarError::refused("the choice has no text"));
                }
                self.define("T", &texts.join(" | "))
            }
            TextForm::Lark(text) => {
                schema::check_in_lark(text, self.context.limits)?;
                format!("%lark {{\n{text}\n}}")
            }
            TextForm::Ebnf(text) => format!(
                "%lark {{\n{}\n}}",
                ebnf::to_lark(text, self.context.limits)?
            ),
            TextForm::Calls(calls) if calls.optional => self.optional_calls(calls)?,
            TextForm::Calls(calls) => self.calls(calls)?,
            TextForm::AnyOf(forms) => {
                self.depth += 1;
                if forms.is_empty() || self.depth > DEPTH_MAX {
                    return Err(GrammarError::refused(
                        "alternatives of forms nest too deeply, or there are none",
                    ));
                }
                let mut names = Vec::new();
                for form in forms {
                    let body = self.form(form)?;
                    names.push(self.define("any_", &body));
                }
                self.depth -= 1;
                names.join(" | ")
            }
        })
    }

    /// A text, split at the special tokens in it.
    fn text(&self, mut text: &str) -> Vec<Piece> {
        let specials = self.context.tokenizer.special_texts();
        let mut pieces = Vec::new();
        while !text.is_empty() {
            let found = specials
                .iter()
                .filter(|special| !special.is_empty())
                .filter_map(|special| Some((text.find(special)?, *special)))
                .min_by_key(|(at, special)| (*at, usize::MAX - special.len()))
                .and_then(|(at, special)| {
                    Some((at, special, self.context.tokenizer.token_id(special)?))
                });
            let Some((at, special, id)) = found else {
                pieces.push(Piece::Regular(literal(text)));
                break;
            };
            if at > 0 {
                pieces.push(Piece::Regular(literal(&text[..at])));
            }
            pieces.push(Piece::Special(id));
            text = &text[at + special.len()..];
        }
        pieces
    }

    /// A text after a call. An end token there is the end of the output, which no grammar has to name.
    fn end(&self, text: &str) -> Vec<Piece> {
        let mut pieces = self.text(text);
        if matches!(pieces.last(), Some(Piece::Special(token)) if self.context.eos.contains(token))
        {
            pieces.pop();
        }
        pieces
    }

    /// Any text that has none of these in it. No text has a special token in it.
    fn without(&self, texts: &[String]) -> String {
        let specials = self.context.tokenizer.special_texts();
        let texts = texts.iter().map(String::as_str);
        let texts: Vec<&str> = texts.filter(|text| !specials.contains(text)).collect();
        text_without(&texts)
    }

    fn parts(&mut self, parts: &[FormPart]) -> Result<Vec<Piece>, GrammarError> {
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(GrammarError::refused("parts of a form nest too deeply"));
        }
        let mut pieces = Vec::new();
        for part in parts {
            match part {
                FormPart::Text(text) => pieces.extend(self.text(text)),
                FormPart::JsonSchema(text) => {
                    let schema = schema::read(text, self.context.limits)?;
                    pieces.push(Piece::Rule(format!("%json {schema}")));
                }
                FormPart::Regex(pattern) => {
                    let pattern = regex_to_lark(without_anchors(pattern), "dw");
                    pieces.push(Piece::Regular(format!("/(?:{pattern})/")));
                }
                FormPart::TextWithout(texts) => {
                    pieces.push(Piece::Regular(self.without(texts)));
                }
                FormPart::BoundedText {
                    without,
                    chars_min,
                    chars_max,
                } => {
                    let most = chars_max.map_or_else(String::new, |most| most.to_string());
                    let length = format!("/(?s:.{{{chars_min},{most}}})/");
                    pieces.push(Piece::Regular(format!(
                        "({length} & {})",
                        self.without(without)
                    )));
                }
                FormPart::AnyOf(alternatives) => {
                    let alternatives = alternatives.iter().map(|parts| self.parts(parts));
                    let alternatives = alternatives.collect::<Result<Vec<_>, _>>()?;
                    if alternatives.is_empty() {
                        return Err(GrammarError::refused("a part of a form has no alternative"));
                    }
                    pieces.push(self.grouped(alternatives, ""));
                }
                FormPart::Repeated(parts) => {
                    let parts = self.parts(parts)?;
                    pieces.push(self.grouped(vec![parts], "*"));
                }
            }
        }
        self.depth -= 1;
        Ok(pieces)
    }

    /// Alternatives as one piece, which is regular if all of them are.
    fn grouped(&mut self, alternatives: Vec<Vec<Piece>>, operator: &str) -> Piece {
        let regular = |pieces: &Vec<Piece>| {
            let texts = pieces.iter().map(|piece| match piece {
                Piece::Regular(text) => Some(text.as_str()),
                _ => None,
            });
            let texts: Option<Vec<&str>> = texts.collect();
            texts.map(|texts| match texts.is_empty() {
                true => "\"\"".to_owned(),
                false => texts.join(" "),
            })
        };
        let texts: Option<Vec<String>> = alternatives.iter().map(regular).collect();
        match texts {
            Some(texts) => Piece::Regular(format!("({}){operator}", texts.join(" | "))),
            None => {
                let rules: Vec<String> = alternatives
                    .into_iter()
                    .map(|pieces| self.sequence(pieces))
                    .collect();
                Piece::Rule(format!("({}){operator}", rules.join(" | ")))
            }
        }
    }

    /// Pieces one after the other, in the syntax of rules.
    fn sequence(&mut self, pieces: Vec<Piece>) -> String {
        let mut rule = Vec::new();
        let mut run: Vec<String> = Vec::new();
        for piece in pieces {
            let text = match piece {
                Piece::Regular(text) => {
                    run.push(text);
                    continue;
                }
                Piece::Special(token) => format!("<[{token}]>"),
                Piece::Rule(text) => text,
            };
            if !run.is_empty() {
                rule.push(self.define("T", &std::mem::take(&mut run).join(" ")));
            }
            rule.push(text);
        }
        if !run.is_empty() {
            rule.push(self.define("T", &run.join(" ")));
        }
        match rule.is_empty() {
            true => "\"\"".to_owned(),
            false => rule.join(" "),
        }
    }

    fn arguments(&mut self, arguments: &ArgumentsForm) -> Result<Vec<Piece>, GrammarError> {
        Ok(match arguments {
            ArgumentsForm::JsonSchema(text) => {
                let schema = schema::of_arguments(schema::read(text, self.context.limits)?);
                vec![Piece::Rule(format!("%json {schema}"))]
            }
            ArgumentsForm::Parts(parts) => self.parts(parts)?,
        })
    }

    /// A call without the first `skipped` bytes of its beginning.
    fn call(&mut self, call: &CallForm, skipped: usize) -> Result<String, GrammarError> {
        let begin = call.begin.get(skipped..).unwrap_or_default();
        let mut pieces = match json_parts(begin) {
            Some(parts) => parts.into_iter().map(literal).map(Piece::Rule).collect(),
            None => self.text(begin),
        };
        pieces.extend(self.arguments(&call.arguments)?);
        pieces.extend(self.end(&call.end));
        Ok(self.sequence(pieces))
    }

    /// A rule for any call.
    fn any_call(&mut self, form: &CallsForm) -> Result<String, GrammarError> {
        let mut calls = Vec::new();
        for call in &form.calls {
            let call = self.call(call, 0)?;
            calls.push(self.define("call_", &call));
        }
        match calls.is_empty() {
            true => Err(GrammarError::refused("the form allows no call")),
            false => Ok(self.define("any_call_", &calls.join(" | "))),
        }
    }

    /// The calls that may follow the first one.
    fn more(&mut self, form: &CallsForm, any_call: &str) -> String {
        let end = self.end(&form.end);
        let end = self.sequence(end);
        let separator = self.text(&form.separator);
        match form.parallel {
            true => {
                let separator = self.sequence(separator);
                self.define("more_", &format!("({separator} {any_call})* {end}"))
            }
            false => end,
        }
    }

    fn calls(&mut self, form: &CallsForm) -> Result<String, GrammarError> {
        let any_call = self.any_call(form)?;
        let more = self.more(form, &any_call);
        let begin = self.text(&form.begin);
        let begin = self.sequence(begin);
        Ok(format!("{begin} {any_call} {more}"))
    }

    /// The special tokens that begin the calls, if they all begin with one.
    fn special_triggers(&self, form: &CallsForm) -> Result<Option<Vec<TokenId>>, GrammarError> {
        let triggers = self.triggers(form);
        let mut tokens: Vec<TokenId> = triggers
            .iter()
            .filter_map(|trigger| trigger.token)
            .collect();
        if tokens.len() < triggers.len() {
            let has_text =
                |trigger: &Trigger<'_>| trigger.token.is_none() && !trigger.text.is_empty();
            return match triggers.iter().all(has_text) {
                true => Ok(None),
                false => Err(GrammarError::refused(
                    "free text before calls needs calls that all begin with a special token, or all with a text",
                )),
            };
        }
        tokens.sort_unstable();
        tokens.dedup();
        Ok(Some(tokens))
    }

    fn triggers<'f>(&self, form: &'f CallsForm) -> Vec<Trigger<'f>> {
        let begins: Vec<&'f str> = match form.begin.as_str() {
            "" => form.calls.iter().map(|call| call.begin.as_str()).collect(),
            begin => vec![begin],
        };
        let trigger = |begin: &'f str| match self.text(begin).first() {
            Some(Piece::Special(token)) => Trigger {
                token: Some(*token),
                text: "",
            },
            _ => Trigger {
                token: None,
                text: call_trigger(begin),
            },
        };
        begins.into_iter().map(trigger).collect()
    }

    /// Calls, or free text up to the first call.
    fn optional_calls(&mut self, form: &CallsForm) -> Result<String, GrammarError> {
        if self.special_triggers(form)?.is_some() {
            let calls = self.calls(form)?;
            return Ok(format!("ALL | ALL {calls}"));
        }
        let triggers = self.triggers(form);
        let any_call = self.any_call(form)?;
        let more = self.more(form, &any_call);
        let mut texts: Vec<&str> = triggers.iter().map(|trigger| trigger.text).collect();
        texts.sort_unstable();
        texts.dedup();
        let mut starts = vec![self.define("FREE", &text_without(&texts))];
        for text in texts {
            let mut rests = Vec::new();
            match form.begin.as_str() {
                "" => {
                    for (call, trigger) in form.calls.iter().zip(&triggers) {
                        if trigger.text == text {
                            rests.push(self.call(call, text.len())?);
                        }
                    }
                }
                begin => {
                    let rest = self.text(&begin[text.len()..]);
                    let rest = self.sequence(rest);
                    rests.push(format!("{rest} {any_call}"));
                }
            }
            let rest = self.define("rest_", &rests.join(" | "));
            self.names += 1;
            let free = format!("free_{}", self.names);
            let _ = writeln!(self.lark, "{free}[suffix={}]: ALL", literal(text));
            starts.push(format!("{free} {rest} {more}"));
        }
        Ok(starts.join(" | "))
    }
}
