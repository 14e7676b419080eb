//! The form that an output must have.

use serde::{Deserialize, Serialize};

use crate::TokenId;

/// The form that an output must have: a constraint on its text, which decides the tokens that may be sampled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputForm {
    /// The token that ends the model's reasoning. The form holds for the tokens after it; all before it are free, and
    /// the output may end there. `None`: the form holds from the first token of the output.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<TokenId>,
    /// The token that begins the reasoning, where the model decides whether it reasons. The first token of the output
    /// is then this one, or the first one of the form, which holds from there. `None`: if there is `after`, the model
    /// reasons.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opened_by: Option<TokenId>,
    /// The text that is allowed.
    pub text: TextForm,
}

impl OutputForm {
    /// A form that holds from the first token of the output.
    pub fn new(text: TextForm) -> Self {
        OutputForm {
            after: None,
            opened_by: None,
            text,
        }
    }

    /// The number of tokens of this output before the form. `None`: all of them are free, and so is the next one.
    pub fn begin(&self, output: &[TokenId]) -> Option<usize> {
        let Some(after) = self.after else {
            return Some(0);
        };
        if self.opened_by.is_some() && output.first().copied() != self.opened_by {
            return Some(0);
        }
        let end = output.iter().position(|token| *token == after);
        end.map(|end| end + 1)
    }
}

impl TextForm {
    /// The bytes of its texts, schemas and grammars together.
    pub fn text_bytes(&self) -> usize {
        match self {
            TextForm::JsonObject => 0,
            TextForm::JsonSchema(text)
            | TextForm::Regex(text)
            | TextForm::Lark(text)
            | TextForm::Ebnf(text) => text.len(),
            TextForm::Choice(texts) => texts.iter().map(String::len).sum(),
            TextForm::Calls(form) => {
                let calls: usize = form.calls.iter().map(CallForm::text_bytes).sum();
                form.begin.len() + form.separator.len() + form.end.len() + calls
            }
            TextForm::AnyOf(forms) => forms.iter().map(TextForm::text_bytes).sum(),
        }
    }
}

impl CallForm {
    /// The bytes of its texts and schemas together.
    pub fn text_bytes(&self) -> usize {
        let arguments = match &self.arguments {
            ArgumentsForm::JsonSchema(text) => text.len(),
            ArgumentsForm::Parts(parts) => parts.iter().map(FormPart::text_bytes).sum(),
        };
        self.begin.len() + arguments + self.end.len()
    }
}

impl FormPart {
    /// The bytes of its texts and schemas together.
    pub fn text_bytes(&self) -> usize {
        match self {
            FormPart::Text(text) | FormPart::JsonSchema(text) | FormPart::Regex(text) => text.len(),
            FormPart::TextWithout(texts) | FormPart::BoundedText { without: texts, .. } => {
                texts.iter().map(String::len).sum()
            }
            FormPart::AnyOf(alternatives) => alternatives
                .iter()
                .flatten()
                .map(FormPart::text_bytes)
                .sum(),
            FormPart::Repeated(parts) => parts.iter().map(FormPart::text_bytes).sum(),
        }
    }
}

/// A set of texts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TextForm {
    /// Any JSON object.
    JsonObject,
    /// JSON that is valid by this JSON schema, which is itself JSON.
    JsonSchema(String),
    /// A text that this regular expression matches from end to end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A grammar in the dialect of Lark that llguidance reads.
    Lark(String),
    /// A grammar in EBNF, as llama.cpp (GBNF) and XGrammar read it, with `root` as its first rule.
    Ebnf(String),
    /// Calls of tools, in the format of the model.
    Calls(CallsForm),
    /// A text of any of these forms, none of which is itself of this kind.
    AnyOf(Vec<TextForm>),
}

/// Calls of tools in the format of a model, with free text around them where that is allowed.
///
/// The text is `begin`, one or more of `calls` with `separator` between them, and `end`. Where a text of the form is
/// the text of a special token of the tokenizer, the token is meant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallsForm {
    /// Whether the output may also be free text, up to a call. The form then holds from `begin` on, or from the
    /// beginning of a call where `begin` is empty. It is found by its first token where that is special, and
    /// otherwise by its text up to the first of `> ] : = ( |` or a line break. Otherwise the output is calls and
    /// nothing else.
    pub optional: bool,
    /// Whether more than one call is allowed.
    pub parallel: bool,
    /// Stands before all calls.
    pub begin: String,
    /// Stands between two calls.
    pub separator: String,
    /// Stands after all calls.
    pub end: String,
    /// The calls that are allowed, at least one.
    pub calls: Vec<CallForm>,
}

impl CallsForm {
    /// The beginnings of text by which calls are told from free text, without those that begin with another one.
    /// A beginning without any text is empty.
    pub fn triggers(&self) -> Vec<&str> {
        let mut triggers: Vec<&str> = match self.begin.as_str() {
            "" => self
                .calls
                .iter()
                .map(|call| call_trigger(&call.begin))
                .collect(),
            begin => vec![call_trigger(begin)],
        };
        triggers.sort_unstable();
        // A text stands right before those that begin with it.
        triggers.dedup_by(|next, kept| next.starts_with(*kept));
        triggers
    }
}

/// Characters after which the beginning of a call is told from other text.
const TRIGGER_ENDS: [char; 7] = ['>', ']', ':', '=', '(', '|', '\n'];

/// The part of a call's beginning that tells it from free text. A model may write the rest in another way, such as
/// with other white space, so it does not count.
pub fn call_trigger(begin: &str) -> &str {
    let end = begin
        .char_indices()
        .find(|(_, next)| TRIGGER_ENDS.contains(next));
    let len = end.map_or(begin.len(), |(at, end)| at + end.len_utf8());
    &begin[..len]
}

/// One call: the text before its arguments, the arguments, and the text after them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallForm {
    /// The text up to the arguments, the tool's name included.
    pub begin: String,
    /// The arguments.
    pub arguments: ArgumentsForm,
    /// The text after the arguments.
    pub end: String,
}

/// The arguments of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArgumentsForm {
    /// A JSON object that is valid by this JSON schema, which is itself JSON.
    JsonSchema(String),
    /// These parts, one after the other, for formats that do not write arguments as JSON.
    Parts(Vec<FormPart>),
}

/// A part of a text. As in a call, the text of a special token stands for the token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FormPart {
    /// Exactly this text.
    Text(String),
    /// JSON that is valid by this JSON schema, which is itself JSON.
    JsonSchema(String),
    /// A text that this regular expression matches from end to end.
    Regex(String),
    /// Any text that has none of these texts in it.
    TextWithout(Vec<String>),
    /// Any text of this length that has none of some texts in it.
    BoundedText {
        /// The texts that it does not have.
        without: Vec<String>,
        /// Least length, Unicode characters.
        chars_min: u64,
        /// Most length, Unicode characters. `None`: any.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        chars_max: Option<u64>,
    },
    /// One of these sequences of parts. An empty one stands for no text.
    AnyOf(Vec<Vec<FormPart>>),
    /// These parts any number of times, or not at all.
    Repeated(Vec<FormPart>),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_all_texts_count() {
        let parts = vec![
            FormPart::Text("ab".into()),
            FormPart::AnyOf(vec![vec![FormPart::Regex("c".into())], Vec::new()]),
            FormPart::Repeated(vec![FormPart::JsonSchema("{}".into())]),
            FormPart::TextWithout(vec!["d".into(), "e".into()]),
        ];
        let call = |arguments| CallForm {
            begin: "f(".into(),
            arguments,
            end: ")".into(),
        };
        let calls = TextForm::Calls(CallsForm {
            optional: false,
            parallel: false,
            begin: "<".into(),
            separator: ",".into(),
            end: ">".into(),
            calls: vec![
                call(ArgumentsForm::Parts(parts)),
                call(ArgumentsForm::JsonSchema("true".into())),
            ],
        });
        let choice = TextForm::Choice(vec!["yes".into(), "no".into()]);
        assert_eq!(choice.text_bytes(), 5);
        let either = TextForm::AnyOf(vec![calls, choice, TextForm::JsonObject]);
        assert_eq!(either.text_bytes(), 3 + (3 + 7) + (3 + 4) + 5);
    }

    #[test]
    fn triggers_end_where_models_write_differently() {
        let call = |begin: &str| CallForm {
            begin: begin.into(),
            arguments: ArgumentsForm::Parts(Vec::new()),
            end: String::new(),
        };
        let form = |begin: &str, calls: &[&str]| CallsForm {
            optional: true,
            parallel: true,
            begin: begin.into(),
            separator: String::new(),
            end: String::new(),
            calls: calls.iter().map(|begin| call(begin)).collect(),
        };
        for (begin, calls, triggers) in [
            (
                "",
                &["<call>\n{\"name\": \"f\"", "<call>\n{\"name\": \"g\""][..],
                &["<call>"][..],
            ),
            ("", &["g(", "f("], &["f(", "g("]),
            ("", &["<a", "<ab>", "<b>"], &["<a", "<b>"]),
            ("[CALLS] [", &["f"], &["[CALLS]"]),
            ("", &["", "f"], &[""]),
        ] {
            assert_eq!(form(begin, calls).triggers(), triggers, "{begin} {calls:?}");
        }
    }

    #[test]
    fn a_form_begins_after_the_reasoning() {
        let plain = OutputForm::new(TextForm::JsonObject);
        assert_eq!(plain.begin(&[]), Some(0));
        let reasons = OutputForm {
            after: Some(9),
            ..plain
        };
        for (output, begin) in [
            (&[][..], None),
            (&[1, 2], None),
            (&[1, 9], Some(2)),
            (&[1, 9, 3, 9], Some(2)),
        ] {
            assert_eq!(reasons.begin(output), begin, "{output:?}");
        }
        let may_reason = OutputForm {
            opened_by: Some(8),
            ..reasons
        };
        for (output, begin) in [
            (&[][..], Some(0)),
            (&[1, 9], Some(0)),
            (&[8, 1], None),
            (&[8, 1, 9, 2], Some(3)),
        ] {
            assert_eq!(may_reason.begin(output), begin, "{output:?}");
        }
    }
}
