//! Writes a form in the languages that llguidance compiles.

use std::fmt::Write as _;

use llguidance::api::TopLevelGrammar;
use refrain_protocol::engine::{ArgumentsForm, CallForm, CallsForm, OutputForm, TextForm};
use refrain_tokenization::Tokenizer;
use serde_json::{Value, json};

use crate::matcher::FreePart;
use crate::{GrammarError, GrammarLimits, TokenId, ebnf, schema};

/// Characters after which the beginning of a call is told from other text.
const TRIGGER_ENDS: [char; 7] = ['>', ']', ':', '=', '(', '|', '\n'];

/// A form, written for llguidance.
pub(crate) struct Source {
    pub(crate) grammar: TopLevelGrammar,
    pub(crate) free_parts: Vec<FreePart>,
    pub(crate) language: Language,
}

/// The language of the client's text, in which an error has a place.
pub(crate) enum Language {
    Schema(Value),
    Lark,
    Ebnf,
    Regex,
    Other,
}

pub(crate) struct Writer<'a> {
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) eos: &'a [TokenId],
    pub(crate) limits: &'a GrammarLimits,
}

/// A piece of the text of a form.
#[derive(Debug, PartialEq, Eq)]
enum Piece<'a> {
    Text(&'a str),
    Special(TokenId),
}

/// A text as Lark's literal.
fn literal(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

impl Writer<'_> {
    pub(crate) fn source(&self, form: &OutputForm) -> Result<Source, GrammarError> {
        let mut free_parts: Vec<FreePart> = form
            .after
            .map(|token| FreePart {
                until: vec![token],
                end_is_bound: false,
            })
            .into_iter()
            .collect();
        let (grammar, language) = match &form.text {
            TextForm::JsonObject => {
                let mut any = json!({"type": "object"});
                schema::set_style(&mut any);
                (TopLevelGrammar::from_json_schema(any), Language::Other)
            }
            TextForm::JsonSchema(text) => {
                let schema = schema::read(text, self.limits)?;
                let grammar = TopLevelGrammar::from_json_schema(schema.clone());
                (grammar, Language::Schema(schema))
            }
            TextForm::Regex(pattern) => {
                // Anchors at the ends say what holds anyway.
                let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
                let escaped = pattern.ends_with("\\$");
                let pattern = match pattern.strip_suffix('$') {
                    Some(inner) if !escaped => inner,
                    _ => pattern,
                };
                (TopLevelGrammar::from_regex(pattern), Language::Regex)
            }
            TextForm::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
                if texts.is_empty() {
                    return Err(GrammarError::refused("the choice has no text"));
                }
                let lark = format!("start: {}\n", texts.join(" | "));
                (TopLevelGrammar::from_lark(lark), Language::Other)
            }
            TextForm::Lark(text) => (TopLevelGrammar::from_lark(text.clone()), Language::Lark),
            TextForm::Ebnf(text) => (
                TopLevelGrammar::from_lark(ebnf::to_lark(text)?),
                Language::Ebnf,
            ),
            TextForm::Calls(calls) => {
                let (lark, free) = self.calls(calls)?;
                free_parts.extend(free);
                (TopLevelGrammar::from_lark(lark), Language::Other)
            }
        };
        Ok(Source {
            grammar,
            free_parts,
            language,
        })
    }

    /// Splits a text at the special tokens in it.
    fn pieces<'a>(&self, mut text: &'a str) -> Vec<Piece<'a>> {
        let specials = self.tokenizer.special_texts();
        let mut pieces = Vec::new();
        while !text.is_empty() {
            let found = specials
                .iter()
                .filter(|special| !special.is_empty())
                .filter_map(|special| Some((text.find(special)?, *special)))
                .min_by_key(|(at, special)| (*at, usize::MAX - special.len()))
                .and_then(|(at, special)| Some((at, special, self.tokenizer.token_id(special)?)));
            let Some((at, special, id)) = found else {
                pieces.push(Piece::Text(text));
                break;
            };
            if at > 0 {
                pieces.push(Piece::Text(&text[..at]));
            }
            pieces.push(Piece::Special(id));
            text = &text[at + special.len()..];
        }
        pieces
    }

    fn text(&self, text: &str) -> String {
        let mut lark = String::new();
        for piece in self.pieces(text) {
            let _ = match piece {
                Piece::Text(text) => write!(lark, "{} ", literal(text)),
                Piece::Special(id) => write!(lark, "<[{id}]> "),
            };
        }
        lark
    }

    /// A text after a call. An end token there is the end of the output, which no grammar has to name.
    fn end(&self, text: &str) -> String {
        let pieces = self.pieces(text);
        match pieces.last() {
            Some(Piece::Special(token)) if self.eos.contains(token) => {
                let len = self.tokenizer.token_bytes(*token).len();
                self.text(&text[..text.len() - len])
            }
            _ => self.text(text),
        }
    }

    fn arguments(&self, arguments: &ArgumentsForm) -> Result<String, GrammarError> {
        Ok(match arguments {
            ArgumentsForm::JsonSchema(text) => {
                let schema = schema::of_arguments(schema::read(text, self.limits)?);
                format!("%json {schema}")
            }
            ArgumentsForm::Lark(text) => format!("%lark {{\n{text}\n}}"),
        })
    }

    /// The calls as Lark, and the free text before them where it ends with a special token.
    fn calls(&self, form: &CallsForm) -> Result<(String, Option<FreePart>), GrammarError> {
        if form.calls.is_empty() {
            return Err(GrammarError::refused("the form allows no call"));
        }
        let mut lark = String::new();
        for (index, call) in form.calls.iter().enumerate() {
            let arguments = self.arguments(&call.arguments)?;
            let end = self.end(&call.end);
            let _ = writeln!(lark, "args_{index}: {arguments}");
            let _ = writeln!(lark, "rest_{index}: args_{index} {end}");
            let _ = writeln!(lark, "call_{index}: {}rest_{index}", self.text(&call.begin));
        }
        let calls: Vec<String> = (0..form.calls.len())
            .map(|index| format!("call_{index}"))
            .collect();
        let more = match form.parallel {
            true => format!("({}call)* ", self.text(&form.separator)),
            false => String::new(),
        };
        let _ = writeln!(lark, "call: {}", calls.join(" | "));
        let _ = writeln!(lark, "more: {more}{}", self.end(&form.end));
        if !form.optional {
            let _ = writeln!(lark, "start: {}call more", self.text(&form.begin));
            return Ok((lark, None));
        }
        let triggers = self.triggers(form);
        let specials: Option<Vec<TokenId>> = triggers.iter().map(|trigger| trigger.token).collect();
        if let Some(mut until) = specials {
            until.sort_unstable();
            until.dedup();
            let _ = writeln!(lark, "start: {}call more", self.text(&form.begin));
            let free = FreePart {
                until,
                end_is_bound: true,
            };
            return Ok((lark, Some(free)));
        }
        if triggers
            .iter()
            .any(|trigger| trigger.token.is_some() || trigger.text.is_empty())
        {
            return Err(GrammarError::refused(
                "free text before calls needs calls that all begin with a special token, or all with a text",
            ));
        }
        self.free_text(form, &triggers, &mut lark);
        Ok((lark, None))
    }

    /// Where each alternative of the beginning is told from free text.
    fn triggers<'a>(&self, form: &'a CallsForm) -> Vec<Trigger<'a>> {
        let begins: Vec<&'a str> = match form.begin.as_str() {
            "" => form
                .calls
                .iter()
                .map(|call: &CallForm| call.begin.as_str())
                .collect(),
            begin => vec![begin],
        };
        let trigger = |begin: &'a str| match self.pieces(begin).first() {
            Some(Piece::Special(token)) => Trigger {
                token: Some(*token),
                text: "",
            },
            Some(Piece::Text(text)) => {
                let head = text
                    .char_indices()
                    .find(|(_, next)| TRIGGER_ENDS.contains(next));
                let len = head.map_or(text.len(), |(at, end)| at + end.len_utf8());
                Trigger {
                    token: None,
                    text: &begin[..len],
                }
            }
            None => Trigger {
                token: None,
                text: "",
            },
        };
        begins.into_iter().map(trigger).collect()
    }

    /// Free text that ends at the first trigger in it, or has none.
    fn free_text(&self, form: &CallsForm, triggers: &[Trigger<'_>], lark: &mut String) {
        let mut texts: Vec<&str> = triggers.iter().map(|trigger| trigger.text).collect();
        texts.sort_unstable();
        texts.dedup();
        let any: Vec<String> = texts.iter().map(|text| literal(text)).collect();
        let _ = writeln!(lark, "ALL: /(?s:.*)/");
        let _ = writeln!(lark, "FREE: ALL & ~(ALL ({}) ALL)", any.join(" | "));
        let mut starts = vec!["FREE".to_owned()];
        for (number, text) in texts.iter().enumerate() {
            let rests: Vec<String> = match form.begin.as_str() {
                "" => triggers
                    .iter()
                    .enumerate()
                    .filter(|(_, trigger)| trigger.text == *text)
                    .map(|(call, _)| {
                        let begin = &form.calls[call].begin[text.len()..];
                        format!("{}rest_{call} more", self.text(begin))
                    })
                    .collect(),
                begin => vec![format!("{}call more", self.text(&begin[text.len()..]))],
            };
            let _ = writeln!(lark, "free_{number}[suffix={}]: ALL", literal(text));
            let _ = writeln!(lark, "after_{number}: {}", rests.join(" | "));
            starts.push(format!("free_{number} after_{number}"));
        }
        let _ = writeln!(lark, "start: {}", starts.join(" | "));
    }
}

struct Trigger<'a> {
    /// The special token that begins a call.
    token: Option<TokenId>,
    /// Otherwise the text by which a call is told from other text.
    text: &'a str,
}
