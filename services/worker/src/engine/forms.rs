//! Forms of outputs: which of them an engine can hold an output to, and the words that several engines share.

use refrain_protocol::ApiError;
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
    /// The field by which most clients ask for this form, if the engine cannot hold an output to it. The second text
    /// is the name of the form and what to do.
    pub(crate) fn lacks(&self, form: &TextForm) -> Option<(&'static str, &'static str)> {
        let tag = || self.structural_tags && structural_tag(form).is_some();
        let (can, field, name) = match form {
            TextForm::JsonObject | TextForm::JsonSchema(_) => {
                (self.json, "response_format", "JSON; leave it out")
            }
            TextForm::Regex(_) => (
                self.regex,
                "structured_outputs.regex",
                "a regular expression; leave it out",
            ),
            TextForm::Choice(_) => (
                self.choice,
                "structured_outputs.choice",
                "a choice of texts; leave it out",
            ),
            TextForm::Ebnf(_) => (
                self.ebnf,
                "structured_outputs.grammar",
                "a grammar in EBNF; leave it out",
            ),
            TextForm::Lark(_) => (
                self.lark,
                "structured_outputs.grammar",
                "a grammar in Lark; leave it out",
            ),
            TextForm::Calls(calls) if calls.optional => (
                tag(),
                "tools",
                "the schemas of strict tools; send strict: false with them",
            ),
            TextForm::Calls(_) => (
                tag(),
                "tool_choice",
                "calls of tools; send tool_choice: auto",
            ),
            TextForm::AnyOf(_) => (
                tag(),
                "tools",
                "calls of tools or an answer of a form; send tools, or the form, or strict: false",
            ),
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

/// A schema as JSON. `None`: it is not JSON.
fn schema(text: &str) -> Option<Value> {
    serde_json::from_str(text).ok()
}

/// A schema as JSON.
///
/// # Errors
/// It is not JSON, which the gateway should have found.
pub(crate) fn checked_schema(text: &str) -> Result<Value, ApiError> {
    schema(text).ok_or_else(|| {
        let message = "response_format: the schema is not JSON";
        ApiError::invalid("response_format", message)
    })
}

/// The schema of any JSON object.
pub(crate) fn any_object() -> Value {
    json!({"type": "object"})
}

/// A form as XGrammar's structural tag. `None`: there is no such tag, or a schema in it is not JSON.
pub(crate) fn structural_tag(form: &TextForm) -> Option<Value> {
    Some(json!({"type": "structural_tag", "format": format(form)?}))
}

fn format(form: &TextForm) -> Option<Value> {
    Some(match form {
        TextForm::JsonObject => json!({"type": "json_schema", "json_schema": any_object()}),
        TextForm::JsonSchema(text) => json!({"type": "json_schema", "json_schema": schema(text)?}),
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
    let triggers = form.triggers();
    let tags = match form.begin.as_str() {
        "" => form.calls.iter().map(tag).collect::<Option<Vec<Value>>>()?,
        begin => {
            let calls = calls(&CallsForm {
                optional: false,
                begin: String::new(),
                end: String::new(),
                ..form.clone()
            });
            let tag = json!({"type": "tag", "begin": begin, "content": calls?, "end": form.end});
            vec![tag]
        }
    };
    // After the first call, text without a trigger may follow, which the output's parser takes as text.
    let has_text = triggers.iter().all(|trigger| !trigger.is_empty());
    (has_text && !triggers.is_empty()).then(|| {
        json!({
            "type": "triggered_tags",
            "triggers": triggers,
            "tags": tags,
            "at_least_one": false,
            "stop_after_first": !form.parallel || !form.begin.is_empty(),
        })
    })
}

fn tag(call: &CallForm) -> Option<Value> {
    let content = match &call.arguments {
        ArgumentsForm::JsonSchema(text) => {
            json!({"type": "json_schema", "json_schema": schema(text)?})
        }
        ArgumentsForm::Parts(all) => parts(all)?,
    };
    Some(json!({"type": "tag", "begin": call.begin, "content": content, "end": call.end}))
}

/// Parts one after the other. Free text is a tag that ends with the text after it.
fn parts(all: &[FormPart]) -> Option<Value> {
    let mut elements = Vec::new();
    let mut rest = all.iter().peekable();
    while let Some(part) = rest.next() {
        elements.push(match part {
            FormPart::Text(text) => json!({"type": "const_string", "value": text}),
            FormPart::JsonSchema(text) => {
                json!({"type": "json_schema", "json_schema": schema(text)?})
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
            // XGrammar has no tag for a length with texts that end it, so its expression has no `<` at all.
            FormPart::BoundedText {
                chars_min,
                chars_max,
                ..
            } => {
                let most = chars_max.map_or_else(String::new, |most| most.to_string());
                json!({"type": "regex", "pattern": format!("[^<]{{{chars_min},{most}}}")})
            }
            FormPart::AnyOf(alternatives) => any_of(alternatives)?,
            FormPart::Repeated(inner) => json!({"type": "star", "content": parts(inner)?}),
        });
    }
    Some(sequence(elements))
}

fn any_of(alternatives: &[Vec<FormPart>]) -> Option<Value> {
    let written = alternatives.iter().filter(|parts| !parts.is_empty());
    let elements: Option<Vec<Value>> = written.map(|alternative| parts(alternative)).collect();
    let mut elements = elements?;
    let has_none = elements.len() < alternatives.len();
    let some = match elements.len() {
        1 => elements.remove(0),
        _ => json!({"type": "or", "elements": elements}),
    };
    Some(match has_none {
        true => json!({"type": "optional", "content": some}),
        false => some,
    })
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
