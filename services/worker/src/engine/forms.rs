//! Forms of outputs: which of them an engine can hold an output to, and the words that several engines share.

use refrain_protocol::engine::{ArgumentsForm, CallForm, CallsForm, FormPart, TextForm};
use serde_json::{Value, json};

/// The forms that an engine can hold an output to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FormAbilities {
    /// JSON objects and JSON schemas.
    pub json: bool,
    /// Regular expressions.
    pub regex: bool,
    /// One of some texts.
    pub choice: bool,
    /// Grammars in EBNF.
    pub ebnf: bool,
    /// Grammars in Lark.
    pub lark: bool,
    /// XGrammar's structural tags, by which calls are written.
    pub structural_tags: bool,
}

impl FormAbilities {
    /// The field by which most clients ask for this form, and its name, if the engine cannot hold an output to it.
    pub(crate) fn lacks(&self, form: &TextForm) -> Option<(&'static str, &'static str)> {
        let tag = || self.structural_tags && structural_tag(form).is_some();
        let (can, field, name) = match form {
            TextForm::JsonObject | TextForm::JsonSchema(_) => {
                (self.json, "response_format", "JSON")
            }
            TextForm::Regex(_) => (
                self.regex,
                "structured_outputs.regex",
                "a regular expression",
            ),
            TextForm::Choice(_) => (
                self.choice,
                "structured_outputs.choice",
                "a choice of texts",
            ),
            TextForm::Ebnf(_) => (self.ebnf, "structured_outputs.grammar", "a grammar in EBNF"),
            TextForm::Lark(_) => (self.lark, "structured_outputs.grammar", "a grammar in Lark"),
            TextForm::Calls(_) => (tag(), "tool_choice", "calls of tools"),
            TextForm::AnyOf(_) => (tag(), "tools", "calls of tools or an answer"),
        };
        (!can).then_some((field, name))
    }
}

/// A choice of texts as a grammar, in the EBNF that llama.cpp and XGrammar read.
pub(crate) fn choice_as_ebnf(texts: &[String]) -> String {
    let texts: Vec<String> = texts.iter().map(|text| ebnf_text(text)).collect();
    format!("root ::= {}", texts.join(" | "))
}

fn ebnf_text(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            other if other.is_control() => {
                quoted.push_str(&format!("\\x{:02X}", u32::from(other)));
            }
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

/// A schema, which is JSON by the time that it gets here.
pub(crate) fn schema(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| json!({"type": "object"}))
}

/// The schema of any JSON object.
pub(crate) fn any_object() -> Value {
    json!({"type": "object"})
}

/// A form as XGrammar's structural tag. `None`: there is no such tag.
pub(crate) fn structural_tag(form: &TextForm) -> Option<Value> {
    Some(json!({"type": "structural_tag", "format": format(form)?}))
}

fn format(form: &TextForm) -> Option<Value> {
    Some(match form {
        TextForm::JsonObject => json!({"type": "json_schema", "json_schema": any_object()}),
        TextForm::JsonSchema(text) => json!({"type": "json_schema", "json_schema": schema(text)}),
        TextForm::Regex(pattern) => json!({"type": "regex", "pattern": pattern}),
        TextForm::Choice(texts) => json!({"type": "grammar", "grammar": choice_as_ebnf(texts)}),
        TextForm::Ebnf(text) => json!({"type": "grammar", "grammar": text}),
        TextForm::Lark(_) => return None,
        TextForm::Calls(form) => calls(form)?,
        TextForm::AnyOf(forms) => {
            let forms: Option<Vec<Value>> = forms.iter().map(format).collect();
            json!({"type": "or", "elements": forms?})
        }
    })
}

fn calls(form: &CallsForm) -> Option<Value> {
    if form.optional {
        return optional_calls(form);
    }
    let tags: Option<Vec<Value>> = form.calls.iter().map(tag).collect();
    let list = json!({
        "type": "tags_with_separator",
        "tags": tags?,
        "separator": form.separator,
        "at_least_one": true,
        "stop_after_first": !form.parallel,
    });
    let around = [text(&form.begin), Some(list), text(&form.end)];
    Some(sequence(around.into_iter().flatten().collect()))
}

/// Calls after free text. They begin with a text that no free text has.
fn optional_calls(form: &CallsForm) -> Option<Value> {
    let (tags, trigger) = match form.begin.as_str() {
        "" => {
            let tags: Option<Vec<Value>> = form.calls.iter().map(tag).collect();
            let begins: Vec<&str> = form.calls.iter().map(|call| call.begin.as_str()).collect();
            (tags?, common_begin(&begins))
        }
        begin => {
            let calls = calls(&CallsForm {
                optional: false,
                begin: String::new(),
                end: String::new(),
                ..form.clone()
            });
            let tag = json!({"type": "tag", "begin": begin, "content": calls?, "end": form.end});
            (vec![tag], begin.to_owned())
        }
    };
    // After the first call, text without a trigger may follow, which the output's parser takes as text.
    (!trigger.is_empty()).then(|| {
        json!({
            "type": "triggered_tags",
            "triggers": [trigger],
            "tags": tags,
            "at_least_one": false,
            "stop_after_first": !form.parallel || !form.begin.is_empty(),
        })
    })
}

/// The longest text with which all of these begin.
fn common_begin(texts: &[&str]) -> String {
    let Some((first, others)) = texts.split_first() else {
        return String::new();
    };
    let is_common = |end: usize| others.iter().all(|other| other.starts_with(&first[..end]));
    let ends = first.char_indices().map(|(at, next)| at + next.len_utf8());
    let end = ends.take_while(|end| is_common(*end)).last().unwrap_or(0);
    first[..end].to_owned()
}

fn tag(call: &CallForm) -> Option<Value> {
    let content = match &call.arguments {
        ArgumentsForm::JsonSchema(text) => {
            json!({"type": "json_schema", "json_schema": schema(text)})
        }
        ArgumentsForm::Parts(all) => parts(all),
    };
    Some(json!({"type": "tag", "begin": call.begin, "content": content, "end": call.end}))
}

/// Parts one after the other. Free text is a tag that ends with the text after it.
fn parts(all: &[FormPart]) -> Value {
    let mut elements = Vec::new();
    let mut rest = all.iter().peekable();
    while let Some(part) = rest.next() {
        elements.push(match part {
            FormPart::Text(text) => json!({"type": "const_string", "value": text}),
            FormPart::JsonSchema(text) => {
                json!({"type": "json_schema", "json_schema": schema(text)})
            }
            FormPart::Regex(pattern) => json!({"type": "regex", "pattern": pattern}),
            FormPart::TextWithout(texts) => {
                let any = json!({"type": "any_text", "excludes": texts});
                match rest.next_if(|next| matches!(next, FormPart::Text(_))) {
                    Some(FormPart::Text(end)) => {
                        json!({"type": "tag", "begin": "", "content": any, "end": end})
                    }
                    _ => any,
                }
            }
            FormPart::AnyOf(alternatives) => any_of(alternatives),
            FormPart::Repeated(inner) => json!({"type": "star", "content": parts(inner)}),
        });
    }
    sequence(elements)
}

fn any_of(alternatives: &[Vec<FormPart>]) -> Value {
    let written = alternatives.iter().filter(|parts| !parts.is_empty());
    let mut elements: Vec<Value> = written.map(|alternative| parts(alternative)).collect();
    let has_none = elements.len() < alternatives.len();
    let some = match elements.len() {
        1 => elements.remove(0),
        _ => json!({"type": "or", "elements": elements}),
    };
    match has_none {
        true => json!({"type": "optional", "content": some}),
        false => some,
    }
}

fn sequence(mut elements: Vec<Value>) -> Value {
    match elements.len() {
        1 => elements.remove(0),
        _ => json!({"type": "sequence", "elements": elements}),
    }
}

fn text(text: &str) -> Option<Value> {
    (!text.is_empty()).then(|| json!({"type": "const_string", "value": text}))
}

#[cfg(test)]
mod tests;
