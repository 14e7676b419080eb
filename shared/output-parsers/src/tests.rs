//! Tests of whole outputs. Each case runs in several chunkings, by tokens and by text alone.

mod chunkings;
mod detection;
mod forms;
mod fuzz;
mod json_families;
mod marked_families;
mod readers;
mod reasoning;
mod requests;
mod work;

use serde_json::{Value, json};

use crate::{
    Counts, Delivery, Event, OutputParser, ParserOptions, Piece, ReasoningParserKind, TokenId,
    Tool, ToolParserKind,
};

/// Markers that are tokens in the tokenizers of models that use them.
const TOKENS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
];
/// A token that is no marker.
const ORDINARY: TokenId = 1000;

fn token_of(marker: &str) -> Option<TokenId> {
    let at = TOKENS.iter().position(|token| *token == marker)?;
    Some(at as TokenId)
}

fn tools() -> Vec<Tool> {
    let parameters = json!({"type": "object", "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "ratio": {"type": "number"},
        "where": {"type": "object"},
        "list": {"type": "array"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }});
    let tool = |name: &str, parameters: &Value| Tool {
        name: name.to_owned(),
        parameters: parameters.clone(),
    };
    vec![tool("get_weather", &parameters), tool("f", &parameters)]
}

fn options(tools_as: ToolParserKind) -> ParserOptions {
    ParserOptions {
        tools_as,
        tools: tools(),
        ..ParserOptions::default()
    }
}

/// A way to cut an output.
#[derive(Clone, Copy, Debug)]
struct Chunking {
    /// Characters of a piece of text, in turn.
    sizes: &'static [usize],
    /// Pieces of a step.
    step: usize,
    by_token: bool,
}

const CHUNKINGS: &[Chunking] = &[
    chunking(&[usize::MAX], 1, false),
    chunking(&[1], 1, false),
    chunking(&[3, 1, 7], 2, false),
    chunking(&[usize::MAX], 1, true),
    chunking(&[1], 3, true),
    chunking(&[5, 2], 1, true),
];

const fn chunking(sizes: &'static [usize], step: usize, by_token: bool) -> Chunking {
    Chunking {
        sizes,
        step,
        by_token,
    }
}

/// Whether a parser with these options looks for a marker.
fn is_wanted(options: &ParserOptions, marker: &str) -> bool {
    let is_harmony = options.reasoning_as.is_harmony();
    let family = crate::families::family(options.tools_as, is_harmony);
    let reasoning = options.reasoning_as.markers();
    let reasoning = reasoning.filter(|_| options.tools_as != ToolParserKind::Harmony);
    family.markers().contains(&marker)
        || reasoning.is_some_and(|(open, close)| [open, close].contains(&marker))
}

/// Cuts an output into pieces.
fn pieces<'a>(
    options: &ParserOptions,
    output: &'a str,
    sizes: &[usize],
    by_token: bool,
) -> Vec<Piece<'a>> {
    let mut pieces = Vec::new();
    let mut sizes = sizes.iter().cycle();
    let mut rest = output;
    while !rest.is_empty() {
        let token = TOKENS.iter().position(|token| rest.starts_with(token));
        if let (true, Some(at)) = (by_token, token) {
            // Some tokenizers hide the text of markers, and some do not.
            let is_hidden = at % 2 == 0 && is_wanted(options, TOKENS[at]);
            pieces.push(match is_hidden {
                true => Piece::hidden(at as TokenId),
                false => Piece::token(at as TokenId, TOKENS[at]),
            });
            rest = &rest[TOKENS[at].len()..];
            continue;
        }
        let size = sizes.next().copied().unwrap_or(1);
        let mut end = rest
            .char_indices()
            .nth(size)
            .map_or(rest.len(), |(at, _)| at);
        if by_token {
            // A marker that begins before the end of this piece ends it.
            let near = &rest[..crate::sink::floor(rest, end.saturating_add(64))];
            let markers = TOKENS.iter().filter_map(|token| near.find(token));
            end = markers.chain([end]).min().unwrap_or(end);
        }
        pieces.push(match by_token {
            true => Piece::token(ORDINARY, &rest[..end]),
            false => Piece::text(&rest[..end]),
        });
        rest = &rest[end..];
    }
    pieces
}

fn parse(
    options: ParserOptions,
    output: &str,
    sizes: &[usize],
    step: usize,
    by_token: bool,
) -> (Vec<Event>, Counts) {
    let pieces = pieces(&options, output, sizes, by_token);
    let mut parser = OutputParser::new(options, token_of);
    let mut events = Vec::new();
    for step in pieces.chunks(step.max(1)) {
        let mut new = Vec::new();
        parser.push(step, &mut new);
        new.into_iter().for_each(|event| event.append(&mut events));
    }
    let mut new = Vec::new();
    let counts = parser.finish(&mut new);
    new.into_iter().for_each(|event| event.append(&mut events));
    (events, counts)
}

/// Events as one line: `"text"`, `?reasoning?`, `name#id(arguments)`, and an exclamation mark after a broken call.
fn shown(events: &[Event]) -> String {
    let mut out = String::new();
    for (at, event) in events.iter().enumerate() {
        match event {
            Event::Text(text) => out += &format!(" \"{text}\""),
            Event::Reasoning(text) => out += &format!(" ?{text}?"),
            Event::CallStart { index, id, name } => {
                let calls = events[..at].iter();
                let before = calls
                    .filter(|e| matches!(e, Event::CallStart { .. }))
                    .count();
                assert_eq!(before, *index as usize, "{events:?}");
                let id = id.as_ref().map_or(String::new(), |id| format!("#{id}"));
                out += &format!(" {name}{id}(");
            }
            Event::CallArguments { delta, .. } => out += delta,
            Event::CallEnd { intact, .. } => out += if *intact { ")" } else { ")!" },
        }
    }
    out.trim_start().to_owned()
}

/// Checks an output in all chunkings, and that intact arguments are JSON objects.
#[track_caller]
fn check(options: &ParserOptions, output: &str, expected: &str) -> Counts {
    let mut last = Counts::default();
    for chunking in CHUNKINGS {
        let Chunking {
            sizes,
            step,
            by_token,
        } = *chunking;
        let (events, counts) = parse(options.clone(), output, sizes, step, by_token);
        assert_eq!(shown(&events), expected, "{chunking:?}");
        assert_calls_are_json(&events);
        last = counts;
    }
    last
}

/// A case is the output, and what comes of it, streamed and whole.
#[track_caller]
fn check_both(tools_as: ToolParserKind, output: &str, streamed: &str, whole: &str) {
    check(&options(tools_as), output, streamed);
    let options = ParserOptions {
        delivery: Delivery::Whole,
        ..options(tools_as)
    };
    check(&options, output, whole);
}

/// Cases whose events are the same streamed and whole.
#[track_caller]
fn check_all(tools_as: ToolParserKind, cases: &[(&str, &str)]) {
    for (output, expected) in cases {
        check_both(tools_as, output, expected, expected);
    }
}

#[track_caller]
fn assert_calls_are_json(events: &[Event]) {
    let mut arguments = String::new();
    for event in events {
        match event {
            Event::CallStart { .. } => arguments.clear(),
            Event::CallArguments { delta, .. } => arguments += delta,
            Event::CallEnd { intact: true, .. } => {
                let value: Result<Value, _> = serde_json::from_str(&arguments);
                assert!(
                    value.as_ref().is_ok_and(Value::is_object) || has_lone_surrogate(&arguments),
                    "{arguments}: {value:?}"
                );
            }
            _ => {}
        }
    }
}

/// `serde_json` refuses half a surrogate pair, which JSON's grammar allows.
fn has_lone_surrogate(json: &str) -> bool {
    let json = json.to_ascii_lowercase();
    json.contains("\\ud")
}

fn thinking(reasoning_as: ReasoningParserKind, tools_as: ToolParserKind) -> ParserOptions {
    ParserOptions {
        reasoning_as,
        ..options(tools_as)
    }
}
