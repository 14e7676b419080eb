//! Reasoning, and calls right after it.

use super::{check, options, thinking};
use crate::{ParserOptions, ReasoningParserKind, ToolParserKind};

#[test]
fn markers() {
    let qwen3 = thinking(ReasoningParserKind::Qwen3, ToolParserKind::Hermes);
    for (output, expected) in [
        ("", ""),
        ("  ", "\"  \""),
        ("Hi", "\"Hi\""),
        ("<think>Hm\n</think>\n\nHi", "?Hm\n? \"\n\nHi\""),
        ("\n<think></think>Hi", "\"Hi\""),
        ("<think>Hm <think> </thin", "?Hm <think> </thin?"),
        ("Hi <think>x</think>", "\"Hi <think>x</think>\""),
        ("<think>a</think>b</think>c", "?a? \"b</think>c\""),
        ("Hi</think>", "\"Hi</think>\""),
        (
            "<think>a</think>\n\n<tool_call>{\"name\": \"f\", \"arguments\": {\"t\": \"<think>\"}}</tool_call>",
            "?a? f({\"t\": \"<think>\"})",
        ),
        (
            "<think>a<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
            "?a? f({})",
        ),
        ("<think>a <tool_call> b", "?a ? \"<tool_call> b\""),
    ] {
        check(&qwen3, output, expected);
    }
}

#[test]
fn reasoning_that_is_open_from_the_beginning() {
    let r1 = thinking(ReasoningParserKind::DeepSeekR1, ToolParserKind::Hermes);
    let open = ParserOptions {
        reasoning_is_open: Some(true),
        ..thinking(ReasoningParserKind::Qwen3, ToolParserKind::Hermes)
    };
    for options in [r1, open] {
        for (output, expected) in [
            ("Hm</think>Hi", "?Hm? \"Hi\""),
            ("\n<think>Hm</think>Hi", "?\nHm? \"Hi\""),
            ("Hm", "?Hm?"),
            ("</think>Hi", "\"Hi\""),
            ("Hm<think></think>", "?Hm<think>?"),
        ] {
            check(&options, output, expected);
        }
    }
    let kind = ReasoningParserKind::Qwen3;
    assert!(kind.is_open_after("<|im_start|>assistant\n<think>\n"));
    assert!(!kind.is_open_after("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
    assert!(!kind.is_open_after("what is <think>?<|im_start|>assistant\n"));
    assert!(!ReasoningParserKind::Harmony.is_open_after("<think>"));
}

#[test]
fn markers_of_other_models() {
    for (kind, open, close) in [
        (ReasoningParserKind::Mistral, "[THINK]", "[/THINK]"),
        (
            ReasoningParserKind::SeedOss,
            "<seed:think>",
            "</seed:think>",
        ),
        (
            ReasoningParserKind::Cohere,
            "<|START_THINKING|>",
            "<|END_THINKING|>",
        ),
        (ReasoningParserKind::Kimi, "◁think▷", "◁/think▷"),
        ("<r>...</r>".parse().expect("markers"), "<r>", "</r>"),
    ] {
        let options = thinking(kind, ToolParserKind::Mistral);
        let output = format!("{open}a [b] ◁ <{close}Hi[TOOL_CALLS]f[ARGS]{{}}");
        check(&options, &output, "?a [b] ◁ <? \"Hi\" f({})");
    }
}

#[test]
fn either_parser_of_harmony_does_both() {
    let output =
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi";
    for options in [
        options(ToolParserKind::Harmony),
        thinking(ReasoningParserKind::Harmony, ToolParserKind::None),
    ] {
        check(&options, output, "?Hm? \"Hi\"");
    }
}
