//! Reasoning, and calls right after it.

use super::{check, options, thinking};
use crate::{OutputParser, ParserOptions, Piece, ReasoningParserKind, ToolParserKind};

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

#[test]
fn a_caller_can_ask_where_the_output_is_and_which_tokens_mark_something() {
    let is_open_after = |options: &ParserOptions, output: &str| {
        let mut parser = OutputParser::new(options.clone(), |_| None);
        parser.push(&[Piece::text(output)], &mut Vec::new());
        parser.is_reasoning()
    };
    let qwen3 = thinking(ReasoningParserKind::Qwen3, ToolParserKind::Hermes);
    let harmony = thinking(ReasoningParserKind::Harmony, ToolParserKind::Harmony);
    for (options, output, expected) in [
        (&qwen3, "", false),
        (&qwen3, "<think>a", true),
        (&qwen3, "<think>a</think>", false),
        (&qwen3, "b", false),
        (&harmony, "<|channel|>analysis<|message|>a", true),
        (&harmony, "<|channel|>analysis<|message|>a<|end|>", false),
        (&harmony, "<|channel|>final<|message|>a", false),
    ] {
        assert_eq!(is_open_after(options, output), expected, "{output}");
    }
    let parser = OutputParser::new(qwen3, |marker| (marker == "<think>").then_some(7));
    assert!(parser.is_marker(7) && !parser.is_marker(8));
}
