//! The time for a long call that arrives in small steps, in every format.
//!
//! ```text
//! cargo bench -p refrain-output-parsers --bench long_call
//! ```
//!
//! The call's argument is a string of 200 KB. A step brings three bytes of text, or one token of about four. Each
//! measurement is a whole output, so it grows with the square of the size if a parser looks back.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a measurement that cannot run should stop"
)]

use divan::counter::BytesCount;
use divan::{Bencher, Divan};
use refrain_output_parsers::{OutputParser, ParserOptions, Piece, TokenId, ToolParserKind};

const BYTES: usize = 200_000;

/// The formats with the beginning and the end of a call with one string.
const FORMATS: &[(&str, &str, &str)] = &[
    ("none", "", ""),
    (
        "hermes",
        "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"",
        "\"}}</tool_call>",
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=a>",
        "</parameter></function></tool_call>",
    ),
    (
        "llama3_json",
        "{\"name\": \"f\", \"parameters\": {\"a\": \"",
        "\"}}",
    ),
    ("mistral", "[TOOL_CALLS]f[ARGS]{\"a\": \"", "\"}"),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": \"",
        "\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": \"",
        "\"}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    (
        "glm45",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>",
        "</arg_value>\n</tool_call>",
    ),
    (
        "harmony",
        "<|channel|>commentary to=functions.f<|message|>{\"a\": \"",
        "\"}<|call|>",
    ),
    ("pythonic", "[f(a='", "')]"),
];

fn main() {
    Divan::from_args().main();
}

fn output(format: &str) -> (ToolParserKind, String) {
    let (name, begin, end) = FORMATS.iter().find(|(name, ..)| *name == format).unwrap();
    let text = "if a < b { return [a, b]; } // a comment of some length, ";
    let text = text.repeat(BYTES / text.len());
    (name.parse().unwrap(), format!("{begin}{text}{end}"))
}

fn measure(bencher: Bencher<'_, '_>, format: &str, step_bytes: usize, token: Option<TokenId>) {
    let (kind, output) = output(format);
    let mut pieces = Vec::new();
    let mut rest = output.as_str();
    while !rest.is_empty() {
        let mut at = step_bytes.min(rest.len());
        while !rest.is_char_boundary(at) {
            at += 1;
        }
        pieces.push(Piece {
            token,
            text: &rest[..at],
            hidden: false,
        });
        rest = &rest[at..];
    }
    bencher
        .counter(BytesCount::of_str(&output))
        .bench_local(|| {
            let options = ParserOptions {
                tools_as: kind,
                ..ParserOptions::default()
            };
            let mut parser = OutputParser::new(options, |_| None);
            let mut events = Vec::new();
            let mut calls = 0;
            for piece in &pieces {
                parser.push(std::slice::from_ref(piece), &mut events);
                calls += events.len();
                events.clear();
            }
            calls + parser.finish(&mut events).calls as usize
        });
}

#[divan::bench(args = FORMATS.iter().map(|(name, ..)| *name))]
fn three_bytes_of_text(bencher: Bencher<'_, '_>, format: &str) {
    measure(bencher, format, 3, None);
}

#[divan::bench(args = FORMATS.iter().map(|(name, ..)| *name))]
fn one_token(bencher: Bencher<'_, '_>, format: &str) {
    measure(bencher, format, 4, Some(1));
}
