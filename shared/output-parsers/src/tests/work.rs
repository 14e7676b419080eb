//! The work is linear in the output, whatever it is and however it is cut.

use super::chunkings::KINDS;
use super::{options, pieces, token_of};
use crate::{Delivery, OutputParser, ReasoningParserKind, ToolParserKind};

/// The beginning of a call of a format, and its end. Between them stands a string.
pub(super) fn around(kind: ToolParserKind) -> (&'static str, &'static str) {
    match kind {
        ToolParserKind::None => ("", ""),
        ToolParserKind::Hermes => (
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"",
            "\"}}</tool_call>",
        ),
        ToolParserKind::Qwen3Coder => (
            "<tool_call><function=f><parameter=city>",
            "</parameter></function></tool_call>",
        ),
        ToolParserKind::Llama3Json => ("{\"name\": \"f\", \"parameters\": {\"a\": \"", "\"}}"),
        ToolParserKind::Mistral => ("[TOOL_CALLS]f[ARGS]{\"a\": \"", "\"}"),
        ToolParserKind::DeepSeekV3 => (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": \"",
            "\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ToolParserKind::DeepSeekV31 => (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": \"",
            "\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        ToolParserKind::KimiK2 => (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": \"",
            "\"}<|tool_call_end|><|tool_calls_section_end|>",
        ),
        ToolParserKind::Glm45 => (
            "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>",
            "</arg_value>\n</tool_call>",
        ),
        ToolParserKind::Harmony => (
            "<|channel|>commentary to=functions.f<|message|>{\"a\": \"",
            "\"}<|call|>",
        ),
        ToolParserKind::Pythonic => ("[f(a='", "')]"),
    }
}

fn work(
    kind: ToolParserKind,
    delivery: Delivery,
    output: &str,
    size: usize,
    by_token: bool,
) -> u64 {
    let mut options = options(kind);
    options.delivery = delivery;
    options.reasoning_as = ReasoningParserKind::Qwen3;
    let pieces = pieces(&options, output, &[size], by_token);
    let mut parser = OutputParser::new(options, token_of);
    for piece in pieces {
        parser.push(&[piece], &mut Vec::new());
    }
    parser.work()
}

#[test]
fn every_byte_is_looked_at_a_few_times() {
    let fillings = [
        "some text and ",
        "<tool_cal<tool_cal[TOOL_CAL<<<[[<",
        "\\\\ { [ 'no' ",
        "\n\n  \n",
        "1",
    ];
    for kind in KINDS {
        let (begin, end) = around(*kind);
        for filling in fillings {
            for frame in [(begin, end), ("", ""), (begin, "")] {
                for size in [1, 3, usize::MAX] {
                    for (delivery, by_token) in
                        [(Delivery::Streamed, true), (Delivery::Whole, false)]
                    {
                        let output = format!("{}{}{}", frame.0, filling.repeat(60), frame.1);
                        let work = work(*kind, delivery, &output, size, by_token);
                        let bound = 4 * output.len() as u64;
                        assert!(
                            work <= bound,
                            "{kind} {filling:?} {size}: {work} of {bound}"
                        );
                    }
                }
            }
        }
    }
}

/// Formats do not share a beginning between markers, so that text and tokens give the same.
#[test]
fn no_marker_overlaps_another() {
    for kind in KINDS {
        let family = crate::families::family(*kind, false);
        let markers = family.markers();
        for one in markers {
            for other in markers.iter().filter(|other| *other != one) {
                assert!(!one.contains(other), "{one} {other}");
            }
            for other in markers {
                let ends = one.char_indices().skip(1).map(|(at, _)| &one[at..]);
                for end in ends {
                    assert!(!other.starts_with(end), "{one} {other}");
                }
            }
        }
    }
}
