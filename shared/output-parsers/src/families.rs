//! All families, one file each.

mod deepseek_kimi;
mod forced_tool;
mod glm45;
mod harmony;
mod hermes;
mod llama3_json;
mod mistral;
mod plain;
mod pythonic;
mod qwen3_coder;

use deepseek_kimi::{DEEPSEEK_V3, DEEPSEEK_V31, DeepSeekKimi, KIMI_K2};
pub(crate) use forced_tool::ForcedTool;

use refrain_protocol::engine::TextForm;

use crate::family::Family;
use crate::form::{CallsWanted, NoForm};
use crate::registry::ToolParserKind;

/// The family of a kind. In harmony, reasoning and calls are one format.
pub(crate) fn family(kind: ToolParserKind, is_harmony: bool) -> Box<dyn Family> {
    match kind {
        ToolParserKind::Harmony => Box::new(harmony::Harmony::new()),
        _ if is_harmony => Box::new(harmony::Harmony::new()),
        ToolParserKind::None => Box::new(plain::Plain),
        ToolParserKind::Hermes => Box::new(hermes::Hermes::new()),
        ToolParserKind::Qwen3Coder => Box::new(qwen3_coder::Qwen3Coder::new()),
        ToolParserKind::Llama3Json => Box::new(llama3_json::Llama3Json::new()),
        ToolParserKind::Mistral => Box::new(mistral::Mistral::new()),
        ToolParserKind::DeepSeekV3 => Box::new(DeepSeekKimi::new(&DEEPSEEK_V3)),
        ToolParserKind::DeepSeekV31 => Box::new(DeepSeekKimi::new(&DEEPSEEK_V31)),
        ToolParserKind::KimiK2 => Box::new(DeepSeekKimi::new(&KIMI_K2)),
        ToolParserKind::Glm45 => Box::new(glm45::Glm45::new()),
        ToolParserKind::Pythonic => Box::new(pythonic::Pythonic::new()),
    }
}

/// The form of calls in a model's format. `is_token` tells whether the tokenizer has a token for exactly this text.
///
/// # Errors
/// The format cannot express such calls, or there is none.
pub fn calls_form(
    kind: ToolParserKind,
    wanted: &CallsWanted<'_>,
    is_token: &dyn Fn(&str) -> bool,
) -> Result<TextForm, NoForm> {
    match kind {
        ToolParserKind::None => Err(NoForm {
            tool: None,
            fault: "the format in which this model writes calls is not known; set tool_parser of the model".into(),
        }),
        ToolParserKind::Hermes => hermes::form(wanted),
        ToolParserKind::Qwen3Coder => qwen3_coder::form(wanted),
        ToolParserKind::Llama3Json => llama3_json::form(wanted),
        ToolParserKind::Mistral => mistral::form(wanted, is_token),
        ToolParserKind::DeepSeekV3 => deepseek_kimi::form(&DEEPSEEK_V3, wanted),
        ToolParserKind::DeepSeekV31 => deepseek_kimi::form(&DEEPSEEK_V31, wanted),
        ToolParserKind::KimiK2 => deepseek_kimi::form(&KIMI_K2, wanted),
        ToolParserKind::Glm45 => glm45::form(wanted),
        ToolParserKind::Harmony => harmony::form(wanted),
        ToolParserKind::Pythonic => pythonic::form(wanted),
    }
}

/// The form of an answer in text that a model writes in its format.
///
/// # Errors
/// The format has something around an answer, and this form of a text cannot be put into it.
pub fn answer_form(
    kind: ToolParserKind,
    text: TextForm,
    after_reasoning: bool,
) -> Result<TextForm, NoForm> {
    match kind {
        ToolParserKind::Harmony => harmony::answer_form(text, after_reasoning),
        _ => Ok(text),
    }
}
