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

use crate::family::Family;
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
