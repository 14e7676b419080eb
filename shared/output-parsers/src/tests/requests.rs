//! Options of requests, and tokens against text.

use super::{check, options, shown, token_of};
use crate::{Event, OutputParser, ParserOptions, Piece, ReasoningParserKind, ToolParserKind};

const TWO_CALLS: &str = "Hi<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\n<tool_call>{\"name\": \"g\", \"arguments\": {\"a\": 1}}</tool_call>bye";

#[test]
fn only_the_first_call() {
    let options = ParserOptions {
        first_call_only: true,
        ..options(ToolParserKind::Hermes)
    };
    let counts = check(&options, TWO_CALLS, "\"Hi\" f({}) \"bye\"");
    assert_eq!((counts.calls, counts.failures, counts.dropped), (1, 0, 1));
}

fn parse(kind: ToolParserKind, pieces: &[Piece<'_>]) -> String {
    let mut parser = OutputParser::new(options(kind), token_of);
    let mut events = Vec::new();
    parser.push(pieces, &mut events);
    parser.finish(&mut events);
    shown(&events)
}

#[test]
fn text_of_other_tokens_is_no_marker() {
    let call = "{\"name\": \"f\", \"arguments\": {}}";
    let open = token_of("<tool_call>").expect("a token");
    let cases = [
        (
            Piece::token(1000, "<tool_call>"),
            format!("\"<tool_call>{call}\""),
        ),
        (Piece::text("<tool_call>"), "f({})".to_owned()),
        (Piece::hidden(open), "f({})".to_owned()),
        (
            Piece::token(open, "\u{fffd}<tool_call>"),
            "\"\u{fffd}\" f({})".to_owned(),
        ),
        // A hidden token that marks nothing is left out.
        (Piece::hidden(999), format!("\"{call}\"")),
    ];
    for (first, expected) in cases {
        let pieces = [first, Piece::token(1000, call)];
        assert_eq!(parse(ToolParserKind::Hermes, &pieces), expected);
    }
    // A marker without a token of its own is found in the text of tokens.
    let pieces = [
        Piece::token(open, "<tool_call>"),
        Piece::token(1000, "<func"),
        Piece::token(1001, "tion=f></function>"),
    ];
    assert_eq!(parse(ToolParserKind::Qwen3Coder, &pieces), "f({})");
}

#[test]
fn any_name_is_known_without_tools() {
    let options = ParserOptions {
        tools_as: ToolParserKind::Pythonic,
        ..ParserOptions::default()
    };
    check(&options, "[anything(a=1)]", "anything({\"a\": 1})");
}

#[test]
fn fragments_come_as_they_arrive() {
    let mut parser = OutputParser::new(options(ToolParserKind::Qwen3Coder), |_| None);
    let mut seen = Vec::new();
    for text in [
        "<function=f><parameter=city>Os",
        "lo <",
        "b></parameter></function>",
    ] {
        let mut events = Vec::new();
        parser.push(&[Piece::text(text)], &mut events);
        seen.push(events);
    }
    let delta = |delta: &str| Event::CallArguments {
        index: 0,
        delta: delta.to_owned(),
    };
    let start = Event::CallStart {
        index: 0,
        id: None,
        name: "f".to_owned(),
    };
    let end = Event::CallEnd {
        index: 0,
        intact: true,
    };
    assert_eq!(
        seen,
        [
            vec![start, delta("{\"city\": \"Os")],
            vec![delta("lo ")],
            vec![delta("<b>\"}"), end],
        ]
    );
    assert_eq!(parser.counts().calls, 1);
}

#[test]
fn names() {
    for (name, kind) in [
        ("hermes", ToolParserKind::Hermes),
        ("qwen3_xml", ToolParserKind::Qwen3Coder),
        ("llama4_json", ToolParserKind::Llama3Json),
        ("deepseekv31", ToolParserKind::DeepSeekV31),
        ("GLM45", ToolParserKind::Glm45),
        ("openai", ToolParserKind::Harmony),
        ("llama4_pythonic", ToolParserKind::Pythonic),
    ] {
        assert_eq!(name.parse(), Ok(kind));
        assert_eq!(kind.to_string().parse(), Ok(kind));
    }
    for (name, kind) in [
        ("deepseek_r1", ReasoningParserKind::DeepSeekR1),
        ("glm45", ReasoningParserKind::Qwen3),
        ("openai_gptoss", ReasoningParserKind::Harmony),
        ("mistral", ReasoningParserKind::Mistral),
        (
            "<a>...</a>",
            ReasoningParserKind::Markers {
                open: "<a>".to_owned(),
                close: "</a>".to_owned(),
            },
        ),
    ] {
        assert_eq!(kind.to_string().parse().as_ref(), Ok(&kind));
        assert_eq!(name.parse(), Ok(kind));
    }
    let error = "hermez".parse::<ToolParserKind>().expect_err("unknown");
    let message = error.to_string();
    assert!(message.starts_with("\"hermez\" is no tool parser; there are: none, hermes, "));
    assert!("".parse::<ReasoningParserKind>().is_err());
}
