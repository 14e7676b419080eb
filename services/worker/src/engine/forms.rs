//! Forms of outputs: which of them an engine can hold an output to, and the words that several engines share.

use refrain_protocol::ApiError;
use refrain_protocol::engine::{ArgumentsForm, CallForm, CallsForm, FormPart, TextForm};
use serde_json::{Value, json};

/// Maximum number of calls of an output whose calls are one of several forms, or have no text after them.
const CALLS_MAX: usize = 64;

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
    /// All forms but grammars in Lark.
    pub(super) const ALL_BUT_LARK: Self = FormAbilities {
        json: true,
        regex: true,
        choice: true,
        ebnf: true,
        lark: false,
        structural_tags: true,
    };

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
    let format = format(form)?;
    is_open_ended(&format)?;
    Some(json!({"type": "structural_tag", "format": format}))
}

/// Whether XGrammar finds no end of this format by itself. `None`: it refuses the format. Only the last element of a
/// sequence may be without an end, alternatives must be alike, and a tag needs an end after such a content.
fn is_open_ended(format: &Value) -> Option<bool> {
    let elements = || format["elements"].as_array().into_iter().flatten();
    let content = || is_open_ended(&format["content"]);
    Some(match format["type"].as_str()? {
        "any_text" => true,
        "triggered_tags" | "tags_with_separator" => {
            let tags = format["tags"].as_array().into_iter().flatten();
            for tag in tags {
                is_open_ended(tag)?;
            }
            true
        }
        "star" => content().map(|_| true)?,
        "repeat" => content().map(|_| false)?,
        "optional" => content()?,
        "tag" if content()? && format["end"] == "" => return None,
        "tag" => false,
        "sequence" => {
            let ends: Vec<bool> = elements().map(is_open_ended).collect::<Option<_>>()?;
            let (last, others) = ends.split_last()?;
            if others.contains(&true) {
                return None;
            }
            *last
        }
        "or" => {
            let ends: Vec<bool> = elements().map(is_open_ended).collect::<Option<_>>()?;
            let first = *ends.first()?;
            if ends.contains(&!first) {
                return None;
            }
            first
        }
        _ => false,
    })
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
            let with_end = |form: &TextForm| match form {
                TextForm::Calls(form) if !form.optional => calls_with_end(form),
                form => format(form),
            };
            let forms: Option<Vec<Value>> = forms.iter().map(with_end).collect();
            json!({"type": "or", "elements": forms?})
        }
    })
}

fn calls(form: &CallsForm) -> Option<Value> {
    if form.optional {
        return optional_calls(form);
    }
    if !form.parallel {
        return calls_with_end(form);
    }
    let tags: Option<Vec<Value>> = form.calls.iter().map(tag).collect();
    let list = json!({
        "type": "tags_with_separator",
        "tags": tags?,
        "separator": form.separator,
        "at_least_one": true,
        "stop_after_first": false,
    });
    Some(match form.end.as_str() {
        "" => sequence(text(&form.begin).into_iter().chain([list]).collect()),
        end => json!({"type": "tag", "begin": form.begin, "content": list, "end": end}),
    })
}

/// Calls whose end XGrammar finds by itself.
fn calls_with_end(form: &CallsForm) -> Option<Value> {
    let tags: Option<Vec<Value>> = form.calls.iter().map(tag).collect();
    let call = one_of(tags?);
    let mut elements: Vec<Value> = text(&form.begin).into_iter().collect();
    elements.push(call.clone());
    if form.parallel {
        let more = text(&form.separator).into_iter().chain([call]).collect();
        elements.push(json!({
            "type": "repeat", "min": 0, "max": CALLS_MAX - 1, "content": sequence(more),
        }));
    }
    elements.extend(text(&form.end));
    Some(sequence(elements))
}

/// Calls after free text. They begin with a text that no free text has.
fn optional_calls(form: &CallsForm) -> Option<Value> {
    let triggers = form.triggers();
    let tags = match form.begin.as_str() {
        "" => form.calls.iter().map(tag).collect::<Option<Vec<Value>>>()?,
        begin => {
            let alone = CallsForm {
                optional: false,
                begin: String::new(),
                end: String::new(),
                ..form.clone()
            };
            let calls = match form.end.as_str() {
                "" => calls_with_end(&alone),
                _ => calls(&alone),
            };
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
            FormPart::AnyOf(alternatives) => {
                // Text without an end of its own takes the end that follows.
                let is_text =
                    |parts: &Vec<FormPart>| matches!(parts.last(), Some(FormPart::TextWithout(_)));
                let has_text = alternatives.iter().any(is_text);
                let ends = |next: &&FormPart| has_text && matches!(next, FormPart::Text(_));
                match rest.next_if(ends) {
                    Some(end) => {
                        let mut alternatives = alternatives.clone();
                        for parts in &mut alternatives {
                            parts.push(end.clone());
                        }
                        any_of(&alternatives)?
                    }
                    None => any_of(alternatives)?,
                }
            }
            FormPart::Repeated(inner) => json!({"type": "star", "content": parts(inner)?}),
        });
    }
    Some(sequence(elements))
}

fn any_of(alternatives: &[Vec<FormPart>]) -> Option<Value> {
    let written = alternatives.iter().filter(|parts| !parts.is_empty());
    let elements: Option<Vec<Value>> = written.map(|alternative| parts(alternative)).collect();
    let elements = elements?;
    if elements.is_empty() {
        return Some(no_text());
    }
    let has_none = elements.len() < alternatives.len();
    let some = one_of(elements);
    Some(match has_none {
        true => json!({"type": "optional", "content": some}),
        false => some,
    })
}

/// No text at all. XGrammar has no empty sequence.
fn no_text() -> Value {
    json!({"type": "const_string", "value": ""})
}

fn one_of(mut elements: Vec<Value>) -> Value {
    match elements.len() {
        0 => no_text(),
        1 => elements.remove(0),
        _ => json!({"type": "or", "elements": elements}),
    }
}

fn sequence(mut elements: Vec<Value>) -> Value {
    match elements.len() {
        0 => no_text(),
        1 => elements.remove(0),
        _ => json!({"type": "sequence", "elements": elements}),
    }
}

fn text(text: &str) -> Option<Value> {
    (!text.is_empty()).then(|| json!({"type": "const_string", "value": text}))
}

#[cfg(test)]
mod tests;
