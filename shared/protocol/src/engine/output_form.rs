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
    /// One of these sequences of parts. An empty one stands for no text.
    AnyOf(Vec<Vec<FormPart>>),
    /// These parts any number of times, or not at all.
    Repeated(Vec<FormPart>),
}

#[cfg(test)]
mod tests {
    use super::*;

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
