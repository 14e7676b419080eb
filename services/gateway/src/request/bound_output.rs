//! The form that binds an output: what the body asks for, and the calls that are forced, as the model writes them.

use refrain_output_grammar::close_objects;
use refrain_output_parsers::{
    CallsWanted, NoForm, ReasoningParserKind, Tool, ToolParserKind, answer_form, calls_form,
};
use refrain_protocol::engine::{OutputForm, TextForm};
use refrain_protocol::{ApiError, TokenId};
use serde_json::{Value, json};

use super::output_form::AskedForm;
use super::refusal::unsupported;
use super::tools::{CallDemand, Tools};
use crate::models::Model;

/// A form, and where in the body its parts are described.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BoundOutput {
    /// The form.
    pub(crate) form: OutputForm,
    /// The parts that the client wrote, with their places in the body.
    pub(crate) parts: Vec<FormSource>,
    /// The form where no call but those of strict tools is held to its schema. It is for schemas that cannot be
    /// compiled; `None` if it is the same.
    pub(crate) loose: Option<OutputForm>,
    /// Whether all that begins as a call becomes one, unless the output ends before.
    pub(crate) binds_calls: bool,
}

impl FormSource {
    /// The place in the body of a fault that no part of a form has alone.
    pub(crate) fn place_of_all(sources: &[FormSource]) -> &str {
        match sources {
            [only] => &only.place,
            _ => "tools",
        }
    }
}

/// A part of a form that the client wrote.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct FormSource {
    /// Its place in the body.
    pub(crate) place: String,
    /// The part alone.
    pub(crate) text: TextForm,
}

/// The tokens between which the reasoning stands that an output may begin with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ReasoningTokens {
    after: Option<TokenId>,
    opened_by: Option<TokenId>,
}

/// The tokens of the reasoning before a form. `is_open` says what the end of the prompt tells about it.
///
/// # Errors
/// The reasoning would have to be free, and its end is no token.
fn reasoning_tokens(model: &Model, is_open: Option<bool>) -> Result<ReasoningTokens, ApiError> {
    let kind = &model.formats.reasoning_as;
    // This model's reasoning is a message like its answer, so it is a part of the form.
    if *kind == ReasoningParserKind::Harmony && is_open != Some(true) {
        return Ok(ReasoningTokens::default());
    }
    let Some(end) = kind.end_marker().filter(|_| is_open != Some(false)) else {
        return Ok(ReasoningTokens::default());
    };
    let reasons = is_open == Some(true) || kind.is_usually_open();
    let opened_by = kind
        .markers()
        .and_then(|(open, _)| model.tokenizer.token_id(open));
    match (model.tokenizer.token_id(end), reasons, opened_by) {
        (after @ Some(_), true, _) => Ok(ReasoningTokens {
            after,
            opened_by: None,
        }),
        (after @ Some(_), false, opened_by @ Some(_)) => Ok(ReasoningTokens { after, opened_by }),
        (None, true, _) => unsupported(
            "model",
            "model: the end of this model's reasoning is no token, so the form of its output cannot begin there; \
             leave out the form, or turn the reasoning off",
        ),
        (_, false, _) => Ok(ReasoningTokens::default()),
    }
}

/// The form that binds the output of a chat, if any does. Calls that are forced go before a form of the answer.
///
/// # Errors
/// The model's format cannot express it.
pub(super) fn bound_chat(
    tools: &Tools,
    asked: Option<AskedForm>,
    model: &Model,
    reasoning_is_open: Option<bool>,
) -> Result<Option<BoundOutput>, ApiError> {
    let is_harmony = model.formats.reasoning_as == ReasoningParserKind::Harmony;
    let format = match is_harmony {
        true => ToolParserKind::Harmony,
        false => model.formats.tools_as,
    };
    let is_forced = tools.demand != CallDemand::Free;
    let has_strict = tools.callable.iter().any(|tool| tool.is_strict);
    // Without a parser, calls come as text.
    let may_call = !tools.callable.is_empty() && format != ToolParserKind::None;
    let binds_calls = is_forced || has_strict || (may_call && asked.is_some());
    if !binds_calls && asked.is_none() {
        return Ok(None);
    }
    let reasoning = reasoning_tokens(model, reasoning_is_open)?;
    let mut parts = Vec::new();
    let bound = |is_loose: bool| {
        let wanted = CallsWanted {
            tools: &bound_tools(tools, is_forced && !is_loose),
            optional: !is_forced && asked.is_none(),
            parallel: !tools.first_call_only,
            after_reasoning: reasoning.after.is_some(),
        };
        let is_token = |text: &str| model.tokenizer.token_id(text).is_some();
        calls_form(format, &wanted, &is_token).map_err(|error| no_calls(tools, &error))
    };
    let has_loose = is_forced && tools.callable.iter().any(|tool| !tool.is_strict);
    let (calls, loose) = match (binds_calls, has_loose) {
        (false, _) => (None, None),
        (true, false) => (Some(bound(false)?), None),
        (true, true) => match (bound(false), bound(true)) {
            (Ok(calls), loose) => (Some(calls), loose.ok()),
            // A client that did not say strict can do without its schema.
            (Err(_), Ok(loose)) => (Some(loose), None),
            (Err(error), Err(_)) => return Err(error),
        },
    };
    if binds_calls {
        let bound = bound_tools(tools, is_forced);
        for (callable, tool) in tools.callable.iter().zip(bound) {
            parts.push(FormSource {
                place: format!("{}.parameters", callable.place),
                text: TextForm::JsonSchema(match &tool.parameters {
                    Value::Null => "{}".to_owned(),
                    schema => schema.to_string(),
                }),
            });
        }
    }
    // Where nothing but its first character marks a call, the beginning of an answer may look the same.
    let is_certain = is_forced || asked.is_none() || format.marks_calls();
    let answer = match asked.filter(|_| !is_forced) {
        None => None,
        Some(AskedForm { text, place }) => {
            let form = answer_form(format, text.clone(), reasoning.after.is_some());
            let form = form.or_else(|error| unsupported(&place, &format!("{place}: {error}")))?;
            parts.push(FormSource { place, text });
            Some(form)
        }
    };
    let text = match (calls, answer) {
        (None, None) => return Ok(None),
        (Some(form), None) | (None, Some(form)) => form,
        (Some(calls), Some(answer)) => TextForm::AnyOf(vec![calls, answer]),
    };
    let form = |text: TextForm| OutputForm {
        after: reasoning.after,
        opened_by: reasoning.opened_by,
        text,
    };
    Ok(Some(BoundOutput {
        form: form(text),
        parts,
        loose: loose.map(form),
        binds_calls: binds_calls && is_certain,
    }))
}

/// The tools that may be called. Without `binds_all`, only the arguments of strict ones are held to their schema.
fn bound_tools(tools: &Tools, binds_all: bool) -> Vec<Tool> {
    let bound = tools.callable.iter().map(|callable| Tool {
        name: callable.tool.name.clone(),
        parameters: match binds_all || callable.is_strict {
            true => {
                let mut parameters = callable.tool.parameters.clone();
                close_objects(&mut parameters);
                parameters
            }
            false => json!({"type": "object"}),
        },
    });
    bound.collect()
}

/// The form that binds a text completion, if the body asks for one.
pub(super) fn bound_completion(asked: Option<AskedForm>) -> Option<BoundOutput> {
    asked.map(|AskedForm { text, place }| BoundOutput {
        form: OutputForm::new(text.clone()),
        parts: vec![FormSource { place, text }],
        loose: None,
        binds_calls: false,
    })
}

/// The error of calls that cannot be bound, at the tool, or else at what demands them.
fn no_calls(tools: &Tools, error: &NoForm) -> ApiError {
    let at = tools
        .callable
        .iter()
        .find(|callable| Some(&callable.tool.name) == error.tool.as_ref());
    let place = match (at, tools.demand) {
        (Some(callable), _) => callable.place.clone(),
        (None, CallDemand::Free) => tools.field().to_owned(),
        (None, _) if tools.are_functions => "function_call".to_owned(),
        (None, _) => "tool_choice".to_owned(),
    };
    let message = format!("{place}: calls cannot be bound to a form: {error}");
    ApiError::invalid(place, message).with_code("unsupported_parameter")
}

#[cfg(test)]
mod tests {
    use refrain_tokenization::testing::byte_level_files;

    use super::*;
    use crate::models::ModelConfig;

    fn model(reasoning: &str) -> Model {
        let config = ModelConfig {
            reasoning_parser: Some(reasoning.into()),
            ..ModelConfig::default()
        };
        Model::new(&config, &byte_level_files()).unwrap()
    }

    #[test]
    fn a_form_leaves_the_reasoning_free() {
        // The only special tokens of these files stand for the markers of reasoning.
        let model_with = model("<|im_start|>...<|im_end|>");
        let token = |text: &str| model_with.tokenizer.token_id(text);
        let (open, close) = (token("<|im_start|>"), token("<|im_end|>"));
        assert!(open.is_some() && close.is_some());
        let asked = || {
            Some(AskedForm {
                text: TextForm::JsonObject,
                place: "response_format".into(),
            })
        };
        let bound = |model: &Model, is_open| {
            let bound = bound_chat(&Tools::default(), asked(), model, is_open)?;
            let form = bound.unwrap().form;
            Ok::<_, ApiError>((form.after, form.opened_by))
        };
        for (is_open, tokens) in [
            (Some(true), (close, None)),
            (Some(false), (None, None)),
            (None, (close, open)),
        ] {
            assert_eq!(bound(&model_with, is_open), Ok(tokens), "{is_open:?}");
        }
        assert_eq!(bound(&model("none"), None), Ok((None, None)));
        // The end of this reasoning is no token, so the form could not begin there.
        let by_text = model("<a>...</a>");
        assert_eq!(bound(&by_text, None), Ok((None, None)));
        let error = bound(&by_text, Some(true)).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("model"));
        // This model's reasoning is a part of the form, unless the prompt has begun it.
        assert_eq!(bound(&model("harmony"), None), Ok((None, None)));
        // Without a form nothing is refused.
        let none = bound_chat(&Tools::default(), None, &by_text, Some(true));
        assert_eq!(none, Ok(None));
    }
}
