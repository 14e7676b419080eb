//! Recognises a model's formats by its chat template and its special tokens.

use crate::registry::{ReasoningParserKind, ToolParserKind};

/// The formats of a model. `None` means that nothing was recognised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Detected {
    /// The format of tool calls.
    pub tools_as: ToolParserKind,
    /// The format of reasoning.
    pub reasoning_as: ReasoningParserKind,
}

/// A sign of a format: all words of one of its lists are there.
struct Sign<K: 'static> {
    kind: K,
    /// Words of the template or among the special tokens.
    words: &'static [&'static str],
}

const fn sign<K>(kind: K, words: &'static [&'static str]) -> Sign<K> {
    Sign { kind, words }
}

/// The first sign that fits decides, so the more particular ones stand first.
const TOOL_SIGNS: &[Sign<ToolParserKind>] = &[
    sign(
        ToolParserKind::Harmony,
        &["<|channel|>", "<|message|>", "<|call|>"],
    ),
    sign(
        ToolParserKind::DeepSeekV3,
        &["<｜tool▁calls▁begin｜>", "```json"],
    ),
    sign(ToolParserKind::DeepSeekV31, &["<｜tool▁calls▁begin｜>"]),
    sign(ToolParserKind::KimiK2, &["<|tool_calls_section_begin|>"]),
    sign(ToolParserKind::Glm45, &["<arg_key>", "<arg_value>"]),
    sign(ToolParserKind::Qwen3Coder, &["<function=", "<parameter="]),
    sign(ToolParserKind::Mistral, &["[TOOL_CALLS]"]),
    sign(ToolParserKind::Hermes, &["<tool_call>"]),
    sign(
        ToolParserKind::Llama3Json,
        &["{\"name\": function name, \"parameters\": dictionary"],
    ),
    sign(
        ToolParserKind::Llama3Json,
        &["answer with one JSON object: {\"name\": ..., \"arguments\": {...}}"],
    ),
    sign(ToolParserKind::Pythonic, &["[func_name1("]),
    sign(ToolParserKind::Pythonic, &["<|python_start|>"]),
    sign(ToolParserKind::Llama3Json, &["<|python_tag|>"]),
];

/// As for tools. A template that only cuts at `</think>` belongs to models that always reason.
const REASONING_SIGNS: &[Sign<ReasoningParserKind>] = &[
    sign(
        ReasoningParserKind::Harmony,
        &["<|channel|>", "<|message|>"],
    ),
    sign(ReasoningParserKind::SeedOss, &["<seed:think>"]),
    sign(ReasoningParserKind::Mistral, &["[THINK]"]),
    sign(ReasoningParserKind::Cohere, &["<|START_THINKING|>"]),
    sign(ReasoningParserKind::Kimi, &["◁think▷"]),
    sign(ReasoningParserKind::Qwen3, &["<think>"]),
    sign(ReasoningParserKind::DeepSeekR1, &["</think>"]),
];

/// The formats that a chat template and the texts of special tokens tell.
pub fn detect(template: &str, special_tokens: &[&str]) -> Detected {
    fn find<K: Clone + Default>(signs: &[Sign<K>], has: impl Fn(&str) -> bool) -> K {
        let fitting = signs
            .iter()
            .find(|sign| sign.words.iter().all(|word| has(word)));
        fitting.map(|sign| sign.kind.clone()).unwrap_or_default()
    }
    let has = |word: &str| template.contains(word) || special_tokens.contains(&word);
    Detected {
        tools_as: find(TOOL_SIGNS, has),
        reasoning_as: find(REASONING_SIGNS, has),
    }
}
