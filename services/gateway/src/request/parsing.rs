//! How the output of a chat is to be parsed.

use refrain_output_parsers::{Delivery, ParserOptions, ReasoningParserKind, ToolParserKind};
use refrain_protocol::TokenId;

use super::tools::Tools;
use crate::models::Model;

/// Tokens at the end of a prompt that show whether the template opened the reasoning. The marker itself has at most
/// some ten, and only blanks follow.
const PROMPT_END_TOKENS: usize = 64;

/// Whether the output begins within the reasoning. `None` if the end of the prompt does not say so.
pub(super) fn reasoning_is_open(model: &Model, prompt: &[TokenId]) -> Option<bool> {
    model.formats.reasoning_as.markers()?;
    let from = prompt.len().saturating_sub(PROMPT_END_TOKENS);
    let bytes: Vec<u8> = prompt[from..]
        .iter()
        .flat_map(|token| model.tokenizer.token_bytes(*token))
        .copied()
        .collect();
    let end = String::from_utf8_lossy(&bytes);
    is_open_after(&model.formats.reasoning_as, &end)
}

/// The options of the parser. `None` if all of the output is text.
pub(super) fn options(
    tools: Tools,
    model: &Model,
    reasoning_is_open: Option<bool>,
    is_stream: bool,
) -> Option<ParserOptions> {
    let tools_as = match tools.callable.is_empty() {
        true => ToolParserKind::None,
        false => model.formats.tools_as,
    };
    let reasoning_as = model.formats.reasoning_as.clone();
    if tools_as == ToolParserKind::None && reasoning_as == ReasoningParserKind::None {
        return None;
    }
    let callable = tools.callable.into_iter();
    Some(ParserOptions {
        reasoning_is_open,
        tools_as,
        reasoning_as,
        tools: callable.map(|callable| callable.tool).collect(),
        first_call_only: tools.first_call_only,
        delivery: match is_stream {
            true => Delivery::Streamed,
            false => Delivery::Whole,
        },
        ..ParserOptions::default()
    })
}

/// As [`reasoning_is_open`], by the text of the end.
fn is_open_after(kind: &ReasoningParserKind, prompt_end: &str) -> Option<bool> {
    let (_, close) = kind.markers()?;
    if kind.is_open_after(prompt_end) {
        return Some(true);
    }
    prompt_end.trim_end().ends_with(close).then_some(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_prompt_tells_where_the_reasoning_is() {
        for (kind, prompt, expected) in [
            ("qwen3", "<|im_start|>assistant\n<think>\n", Some(true)),
            (
                "qwen3",
                "<|im_start|>assistant\n<think>\n\n</think>\n\n",
                Some(false),
            ),
            ("qwen3", "<|im_start|>assistant\n", None),
            ("deepseek_r1", "<think> a </think>", Some(false)),
            ("none", "<think>", None),
        ] {
            let kind: ReasoningParserKind = kind.parse().unwrap();
            assert_eq!(is_open_after(&kind, prompt), expected, "{kind} {prompt:?}");
        }
    }
}
