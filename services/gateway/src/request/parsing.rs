//! How the output of a chat is to be parsed.

use refrain_output_parsers::{Delivery, ParserOptions, ReasoningParserKind, Tool, ToolParserKind};
use refrain_protocol::{ApiError, TokenId};
use refrain_tokenization::JsonValue;

use super::body::ChatFields;
use crate::models::Model;

/// Tokens at the end of a prompt that show whether the template opened the reasoning. The marker itself has at most some
/// ten, and only blanks follow.
const PROMPT_END_TOKENS: usize = 64;

/// The tools that the model may call. Without any, calls are not parsed.
pub(super) fn tools(chat: &ChatFields) -> Result<Vec<Tool>, ApiError> {
    let is_none = chat.tool_choice.as_ref().and_then(JsonValue::as_str) == Some("none");
    let tools = chat.tools.iter().filter(|_| !is_none);
    let tools = tools.flat_map(|tools| tools.items());
    let functions = tools.filter_map(|tool| tool.get("function"));
    let tool = |function: JsonValue| {
        Some(Tool {
            name: function.get("name")?.as_str()?.to_owned(),
            parameters: function.get("parameters").unwrap_or_default().to_json(),
        })
    };
    Ok(functions.filter_map(tool).collect())
}

/// The options of the parser. `None` if all of the output is text.
pub(super) fn options(
    tools: Vec<Tool>,
    model: &Model,
    prompt: &[TokenId],
    is_stream: bool,
) -> Option<ParserOptions> {
    let tools_as = match tools.is_empty() {
        true => ToolParserKind::None,
        false => model.formats.tools_as,
    };
    let reasoning_as = model.formats.reasoning_as.clone();
    if tools_as == ToolParserKind::None && reasoning_as == ReasoningParserKind::None {
        return None;
    }
    let from = prompt.len().saturating_sub(PROMPT_END_TOKENS);
    let bytes: Vec<u8> = prompt[from..]
        .iter()
        .flat_map(|token| model.tokenizer.token_bytes(*token))
        .copied()
        .collect();
    let end = String::from_utf8_lossy(&bytes);
    Some(ParserOptions {
        reasoning_is_open: is_open_after(&reasoning_as, &end),
        tools_as,
        reasoning_as,
        tools,
        delivery: match is_stream {
            true => Delivery::Streamed,
            false => Delivery::Whole,
        },
        ..ParserOptions::default()
    })
}

/// Whether the output begins within the reasoning. `None` if the prompt does not say so.
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
