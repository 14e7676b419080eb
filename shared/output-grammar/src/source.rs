//! Writes a form in the languages that llguidance compiles.

use llguidance::api::TopLevelGrammar;
use refrain_protocol::engine::{OutputForm, TextForm};
use serde_json::Value;

use crate::lark::{Context, LarkWriter, without_anchors};
use crate::matcher::FreePart;
use crate::{GrammarError, ebnf, schema};

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

impl Source {
    /// Writes a form.
    pub(crate) fn new(context: Context<'_>, form: &OutputForm) -> Result<Self, GrammarError> {
        let mut free_parts: Vec<FreePart> = form
            .after
            .map(|token| FreePart {
                until: vec![token],
                end_is_bound: false,
            })
            .into_iter()
            .collect();
        let (grammar, language) = match &form.text {
            TextForm::JsonObject => (
                TopLevelGrammar::from_json_schema(schema::any_object()),
                Language::Other,
            ),
            TextForm::JsonSchema(text) => {
                let schema = schema::read(text, context.limits)?;
                let grammar = TopLevelGrammar::from_json_schema(schema.clone());
                (grammar, Language::Schema(schema))
            }
            TextForm::Regex(pattern) => (
                TopLevelGrammar::from_regex(without_anchors(pattern)),
                Language::Regex,
            ),
            TextForm::Lark(text) => {
                schema::check_in_lark(text, context.limits)?;
                (TopLevelGrammar::from_lark(text.clone()), Language::Lark)
            }
            TextForm::Ebnf(text) => (
                TopLevelGrammar::from_lark(ebnf::to_lark(text, context.limits)?),
                Language::Ebnf,
            ),
            TextForm::Choice(_) | TextForm::Calls(_) | TextForm::AnyOf(_) => {
                let (lark, free) = LarkWriter::new(context).grammar(&form.text)?;
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
}
