//! Any output, cut in any way, gives the same events, and no text is lost.

use proptest::prelude::*;

use super::{assert_calls_are_json, options, parse, shown};
use crate::{Delivery, Event, ParserOptions, ReasoningParserKind, ToolParserKind};

pub(super) const KINDS: &[ToolParserKind] = &[
    ToolParserKind::None,
    ToolParserKind::Hermes,
    ToolParserKind::Qwen3Coder,
    ToolParserKind::Llama3Json,
    ToolParserKind::Mistral,
    ToolParserKind::DeepSeekV3,
    ToolParserKind::DeepSeekV31,
    ToolParserKind::KimiK2,
    ToolParserKind::Glm45,
    ToolParserKind::Harmony,
    ToolParserKind::Pythonic,
];

/// Parts of outputs that every format may meet.
const COMMON: &[&str] = &[
    " ",
    "\n",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "\"",
    "'",
    "\\",
    "<",
    "|",
    ":",
    ",",
    "=",
    ";",
    "a",
    "é",
    "🦀",
    "x y",
    "12",
    "1.5",
    "true",
    "None",
    "{}",
    "{\"a\": 1}",
    "\"b\": \"c\"",
    "\\u00e9",
    "\\ud83e",
    "\\n",
    "f",
    "get_weather",
    "city",
    "days",
    "<think>",
    "</think>",
    "Hello",
];

/// Parts of a format's calls.
fn parts(kind: ToolParserKind) -> &'static [&'static str] {
    match kind {
        ToolParserKind::None => &["<tool_call>"],
        ToolParserKind::Hermes => &[
            "<tool_call>",
            "</tool_call>",
            "<tool_",
            "{\"name\": \"f\", \"arguments\": ",
            "{\"name\": \"f\", \"arguments\": {\"a\": \"",
            "\"}}</tool_call>",
            "{\"arguments\": {}, \"name\": \"g\"}",
            "{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1",
            "}\"}",
        ],
        ToolParserKind::Qwen3Coder => &[
            "<tool_call>",
            "</tool_call>",
            "<function=f>",
            "</function>",
            "<parameter=city>",
            "<parameter=days>",
            "<parameter=note>",
            "</parameter>",
            "<param",
            "<function=",
            ">",
            "null",
        ],
        ToolParserKind::Llama3Json => &[
            "<|python_tag|>",
            "{\"name\": \"f\", \"parameters\": {\"a\": \"",
            "\"}}",
            "; ",
            "brave.call(query=\"",
            "\")",
            ".call(",
        ],
        ToolParserKind::Mistral => &[
            "[TOOL_CALLS]",
            "[ARGS]",
            "[CALL_ID]",
            "[{\"name\": \"f\", \"arguments\": {}}",
            ", {\"name\": \"g\", \"arguments\": {\"a\": \"",
            "\"}}]",
            "[TOOL",
        ],
        ToolParserKind::DeepSeekV3 | ToolParserKind::DeepSeekV31 => &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "function",
            "\n```json\n",
            "\n```",
            "<｜tool",
        ],
        ToolParserKind::KimiK2 => &[
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
            "functions.f:0",
            "<|tool_call",
        ],
        ToolParserKind::Glm45 => &[
            "<tool_call>",
            "</tool_call>",
            "<tool_call>f\n",
            "<arg_key>days</arg_key>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "</arg_va",
        ],
        ToolParserKind::Harmony => &[
            "<|start|>assistant",
            "<|start|>",
            "<|channel|>analysis",
            "<|channel|>final",
            "<|channel|>commentary to=functions.f ",
            "<|constrain|>json",
            "<|message|>",
            "<|end|>",
            "<|call|>",
            "<|return|>",
            "to=",
        ],
        ToolParserKind::Pythonic => &[
            "<|python_start|>",
            "<|python_end|>",
            "[f(",
            "a=",
            "city='",
            "', ",
            ")]",
            "), get_weather(",
            "{'k': ",
        ],
    }
}

/// An output of a format, with a bias to whole and broken calls.
fn outputs(kind: ToolParserKind) -> impl Strategy<Value = String> {
    let part = prop_oneof![
        4 => proptest::sample::select(parts(kind)),
        3 => proptest::sample::select(COMMON),
    ];
    proptest::collection::vec(part, 0..30).prop_map(|parts| parts.concat())
}

/// Options and outputs of all formats.
fn all_options() -> impl Strategy<Value = (ParserOptions, String)> {
    let kinds = proptest::sample::select(KINDS);
    kinds.prop_flat_map(|kind| {
        let reasoning = prop_oneof![
            Just(ReasoningParserKind::None),
            Just(ReasoningParserKind::Qwen3),
            Just(ReasoningParserKind::DeepSeekR1),
        ];
        let settings = (reasoning, any::<[bool; 4]>(), 1usize..80);
        (settings, outputs(kind)).prop_map(move |((reasoning_as, flags, limit), output)| {
            let [whole, first_call_only, bounded, forced] = flags;
            let mut options = options(kind);
            options.reasoning_as = reasoning_as;
            options.first_call_only = first_call_only;
            if whole {
                options.delivery = Delivery::Whole;
            }
            if forced && first_call_only {
                options.forced_tool = Some("f".to_owned());
            }
            if bounded {
                options.limits.head_bytes = limit;
                options.limits.call_bytes = 2 * limit;
                options.limits.value_bytes = limit / 8;
            }
            (options, output)
        })
    })
}

/// Everything that has to hold for one output.
pub(super) fn assert_parses(options: &ParserOptions, output: &str, sizes: &[usize], step: usize) {
    let (expected, counts) = parse(options.clone(), output, &[usize::MAX], 1, false);
    for (sizes, by_token) in [
        (&[1usize][..], false),
        (&[1][..], true),
        (sizes, false),
        (sizes, true),
    ] {
        let (events, other) = parse(options.clone(), output, sizes, step, by_token);
        assert_eq!(
            (shown(&events), other),
            (shown(&expected), counts),
            "{output:?} {sizes:?} {by_token}"
        );
        assert_eq!(events, expected);
    }
    assert_calls_are_json(&expected);
    let calls = |event: &Event| !matches!(event, Event::Text(_) | Event::Reasoning(_));
    let is_plain = counts.dropped == 0 && !expected.iter().any(calls);
    let is_harmony = options.tools_as == ToolParserKind::Harmony;
    let is_thinking = options.reasoning_as != ReasoningParserKind::None;
    // Harmony's headers, and the ends of its messages, are no text.
    let is_message = is_harmony && output.contains("<|");
    if is_plain && !is_thinking && !is_message {
        let text = match expected.as_slice() {
            [] => "",
            [Event::Text(text)] => text,
            other => panic!("{other:?}"),
        };
        assert_eq!(text, output);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn events_do_not_depend_on_the_chunks(
        (options, output) in all_options(),
        sizes in proptest::collection::vec(1usize..9, 1..6),
        step in 1usize..5,
    ) {
        assert_parses(&options, &output, &sizes, step);
    }
}
