//! Random forms of all kinds, and a judge of the texts that have them.

use refrain_protocol::TokenId;
use refrain_protocol::engine::{ArgumentsForm, CallForm, CallsForm, OutputForm, TextForm};
use serde_json::Value;

use super::{byte_model, schemas};
use crate::tests::support::Random;

/// A form, and what its texts must be.
#[derive(Clone, Debug)]
pub(super) struct Kind {
    pub(super) form: OutputForm,
    judge: Judge,
}

#[derive(Clone, Debug)]
enum Judge {
    Schema(Value),
    /// Words of these letters, and numbers behind them.
    Words,
    /// Lists in brackets of single letters and lists.
    Lists,
    /// Calls with arguments by a schema.
    Calls(Value),
    /// This text.
    Fixed(String),
}

fn valid(value: &str, schema: &Value) -> bool {
    let judge = jsonschema::options()
        .should_validate_formats(true)
        .build(schema)
        .unwrap();
    serde_json::from_str(value).is_ok_and(|value| judge.is_valid(&value))
}

fn is_list(text: &str) -> bool {
    let mut depth = 0;
    let mut was_item = false;
    text.char_indices().all(|(at, letter)| {
        let (is_good, is_item) = match letter {
            '[' => (depth > 0 && !was_item || at == 0, false),
            ',' => (depth > 0 && was_item, false),
            ']' => (depth > 0 && was_item, true),
            'a'..='f' => (depth > 0 && !was_item, true),
            _ => (false, false),
        };
        depth += i32::from(letter == '[') - i32::from(letter == ']');
        was_item = is_item;
        is_good
    }) && depth == 0
}

impl Kind {
    pub(super) fn random(random: &mut Random) -> Self {
        let schema = schemas::schema(random);
        let (text, judge) = match random.below(8) {
            0 => (
                TextForm::Regex("[a-c]{2,9}( [0-9]{1,3}){1,4}".into()),
                Judge::Words,
            ),
            1 => {
                let ebnf =
                    "root ::= \"[\" item (\",\" item){0,3} \"]\"\nitem ::= [a-f] | [a-f] | root";
                (TextForm::Ebnf(ebnf.into()), Judge::Lists)
            }
            2 => {
                let calls = ["add", "add_all"].map(|name| CallForm {
                    begin: format!("<call>{name}("),
                    arguments: ArgumentsForm::JsonSchema(schema.to_string()),
                    end: ")</call>".into(),
                });
                let calls = CallsForm {
                    optional: false,
                    parallel: random.below(2) == 0,
                    begin: String::new(),
                    separator: "\n".into(),
                    end: String::new(),
                    calls: calls.into(),
                };
                (TextForm::Calls(calls), Judge::Calls(schema))
            }
            _ => (
                TextForm::JsonSchema(schema.to_string()),
                Judge::Schema(schema),
            ),
        };
        let token = |text: &str| byte_model().tokenizer.encode(text).unwrap()[0];
        let (after, opened_by) = match random.below(4) {
            0 => (Some(token("~")), None),
            1 => (Some(token("~")), Some(token("^"))),
            _ => (None, None),
        };
        let form = OutputForm {
            after,
            opened_by,
            text,
        };
        Kind { form, judge }
    }

    /// A form with one text.
    pub(super) fn fixed(text: &str) -> Self {
        Kind {
            form: OutputForm::new(TextForm::Choice(vec![text.to_owned()])),
            judge: Judge::Fixed(text.to_owned()),
        }
    }

    /// Whether the whole output is JSON by a schema.
    pub(super) fn is_schema(&self) -> bool {
        matches!(self.judge, Judge::Schema(_))
    }

    /// Biases under which free text ends soon.
    pub(super) fn biases(&self) -> Vec<(TokenId, f32)> {
        let open = self.form.opened_by.map(|token| (token, 4.0));
        let close = self.form.after.map(|token| (token, 6.0));
        open.into_iter().chain(close).collect()
    }

    /// Checks an output that ended by itself.
    pub(super) fn validate(&self, output: &[TokenId]) {
        let is_free = match (self.form.after, self.form.opened_by) {
            (Some(_), Some(open)) => output.first() == Some(&open),
            (after, _) => after.is_some(),
        };
        let from = match self.form.after.filter(|_| is_free) {
            Some(after) => match output.iter().position(|token| *token == after) {
                Some(at) => at + 1,
                // It ended in its free text.
                None => return,
            },
            None => 0,
        };
        let text = byte_model().tokenizer.decode(&output[from..]);
        let is_valid = match &self.judge {
            Judge::Schema(schema) => valid(&text, schema),
            Judge::Words => {
                let mut words = text.split(' ');
                let letters = words.next().unwrap_or_default();
                let numbers: Vec<&str> = words.collect();
                (2..=9).contains(&letters.len())
                    && letters.chars().all(|letter| ('a'..='c').contains(&letter))
                    && (1..=4).contains(&numbers.len())
                    && numbers
                        .iter()
                        .all(|number| number.parse::<u16>().is_ok_and(|n| n < 1_000))
            }
            Judge::Lists => is_list(&text),
            Judge::Fixed(fixed) => text == *fixed,
            Judge::Calls(schema) => text.split("</call>").all(|call| {
                let call = call.trim_start_matches('\n');
                let arguments = call.strip_prefix("<call>add(");
                let arguments = arguments.or_else(|| call.strip_prefix("<call>add_all("));
                call.is_empty()
                    || arguments
                        .and_then(|arguments| arguments.strip_suffix(')'))
                        .is_some_and(|arguments| valid(arguments, schema))
            }),
        };
        assert!(is_valid, "{text:?} by {self:?}");
    }
}
