//! Families whose calls are JSON objects: Hermes, Llama, Mistral, and a forced tool.

use super::{check, check_all, check_both, options};
use crate::{Delivery, ParserOptions, ToolParserKind};

#[test]
fn hermes() {
    check_all(
        ToolParserKind::Hermes,
        &[
            ("", ""),
            ("Hello {\"name\": 1} <b>", "\"Hello {\"name\": 1} <b>\""),
            ("  \n ", "\"  \n \""),
            (
                "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":  [1, {}]}}\n</tool_call>",
                "f({\"a\":  [1, {}]})",
            ),
            (
                "Hi.\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>\n<tool_call>{\"arguments\": {\"b\": 2}, \"name\": \"g\"}</tool_call>\nBye",
                "\"Hi.\n\" f({}) g({\"b\": 2}) \"\nBye\"",
            ),
            // Braces, quotes, escapes and markers within strings.
            (
                r#"<tool_call>{"name": "f", "arguments": {"a": "}]\"\\ </tool_call> <tool_call> é\u00e9 {"}}</tool_call>"#,
                r#"f({"a": "}]\"\\ </tool_call> <tool_call> é\u00e9 {"})"#,
            ),
            // Other keys, no arguments, arguments that are null or a string.
            (
                r#"<tool_call>{"type": "function", "id": "c1", "x": [{}, -1.5e3, true, null], "name": "f", "arguments": {}}</tool_call>"#,
                "f#c1({})",
            ),
            (r#"<tool_call>{"name": "f"}</tool_call>"#, "f({})"),
            (
                r#"<tool_call>{"name": "f", "arguments": null}</tool_call>"#,
                "f({})",
            ),
            (
                r#"<tool_call>{"name": "f", "arguments": " {\"a\": \"x\\n\"} "}</tool_call>"#,
                r#"f( {"a": "x\n"} )"#,
            ),
            (
                r#"<tool_call>{"name": "\u0066\ud83e\udd80", "arguments": {}}</tool_call>"#,
                "f🦀({})",
            ),
            // Ends that models forget.
            (r#"<tool_call>{"name": "f", "arguments": {}}"#, "f({})"),
            (r#"<tool_call>{"name": "f", "arguments": {}"#, "f({})"),
            (
                r#"<tool_call>{"name": "f", "arguments": {}</tool_call>ok"#,
                r#"f({}) "ok""#,
            ),
            (
                r#"<tool_call>{"name": "f", "arguments": {}} {"name": "g", "arguments": {}}</tool_call>"#,
                "f({}) g({})",
            ),
            (
                r#"<tool_call>{"name": "f", "arguments": {}}}</tool_call>"#,
                r#"f({}) "}</tool_call>""#,
            ),
            // No calls at all: the text is exactly as emitted.
            ("<tool_call>", "\"<tool_call>\""),
            (
                " <tool_call> </tool_call> x",
                "\" <tool_call> </tool_call> x\"",
            ),
            ("a</tool_call>b", "\"a</tool_call>b\""),
            (
                "<tool_call>what</tool_call>",
                "\"<tool_call>what</tool_call>\"",
            ),
            (
                r#"<tool_call>{"name": "a b", "arguments": {}}</tool_call>"#,
                r#""<tool_call>{"name": "a b", "arguments": {}}</tool_call>""#,
            ),
            (
                r#"<tool_call>{"name": "f", "arguments": [1]}</tool_call>"#,
                r#""<tool_call>{"name": "f", "arguments": [1]}</tool_call>""#,
            ),
            (
                r#"<tool_call>{"arguments": {}}</tool_call>"#,
                r#""<tool_call>{"arguments": {}}</tool_call>""#,
            ),
            (
                r#"<tool_call>{"na<tool_call>{"name": "f", "arguments": {}}</tool_call>"#,
                r#""<tool_call>{"na<tool_call>{"name": "f", "arguments": {}}</tool_call>""#,
            ),
            (
                r#"<tool_call>{"name"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#,
                r#""<tool_call>{"name"" f({})"#,
            ),
            ("<tool_cal", "\"<tool_cal\""),
            ("<<tool_<tool_call", "\"<<tool_<tool_call\""),
        ],
    );
}

#[test]
fn hermes_that_breaks_within_arguments() {
    // Cut off, a mistake that is only found at the end, and a closing marker too early.
    let cut = r#"Hi <tool_call>{"name": "f", "arguments": {"a": "x"#;
    check_both(
        ToolParserKind::Hermes,
        cut,
        r#""Hi " f({"a": "x)!"#,
        &format!("\"{cut}\""),
    );
    for arguments in [
        r#"{"a": 1,}"#,
        r#"{"a": 'b'}"#,
        r#"{"a": "\d"}"#,
        "{\"a\": \"\n\"}",
        r#"{a: {"b": "}"}}"#,
        r#"{"a": [1}}"#,
        r#"{"a": "\u12", "b": 01}"#,
    ] {
        let call =
            format!("<tool_call>{{\"name\": \"f\", \"arguments\": {arguments}}}</tool_call> rest");
        check_both(
            ToolParserKind::Hermes,
            &call,
            &format!("f({arguments})! \" rest\""),
            &format!("\"{call}\""),
        );
    }
    let early = r#"<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> rest"#;
    check_both(
        ToolParserKind::Hermes,
        early,
        "f({\"a\": 1)! \" rest\"",
        &format!("\"{early}\""),
    );
    let counts = check(
        &options(ToolParserKind::Hermes),
        early,
        "f({\"a\": 1)! \" rest\"",
    );
    assert_eq!((counts.calls, counts.failures, counts.dropped), (1, 1, 0));
}

#[test]
fn hermes_within_bounds() {
    let mut options = options(ToolParserKind::Hermes);
    options.limits.head_bytes = 40;
    options.limits.call_bytes = 60;
    let long_head = format!(
        "<tool_call>{{{}\"name\": \"f\"}}</tool_call>",
        " ".repeat(40)
    );
    let counts = check(&options, &long_head, &format!("\"{long_head}\""));
    assert_eq!((counts.calls, counts.failures), (0, 1));
    let long = r#"<tool_call>{"name": "f", "arguments": {"a": "0123456789"}}</tool_call>"#;
    check(&options, long, r#"f({"a": "0123456789"})"#);
    options.delivery = Delivery::Whole;
    options.limits.call_bytes = 50;
    check(&options, long, &format!("\"{long}\""));
}

#[test]
fn llama3_json() {
    check_all(
        ToolParserKind::Llama3Json,
        &[
            (
                r#" {"name": "f", "parameters": {"a": "};"}}"#,
                r#"f({"a": "};"})"#,
            ),
            (
                r#"{"type": "function", "name": "f", "parameters": {}}; {"name": "get_weather", "arguments": {"b": 1}}"#,
                r#"f({}) get_weather({"b": 1})"#,
            ),
            (
                "<|python_tag|>{\"name\": \"new\", \"parameters\": {}}\n{\"name\": \"f\", \"parameters\": {}}",
                "new({}) f({})",
            ),
            (
                "I call: <|python_tag|>{\"name\": \"f\", \"parameters\": {\"t\": \"<|python_tag|>\"}} done",
                "\"I call: \" f({\"t\": \"<|python_tag|>\"}) \" done\"",
            ),
            (
                r#"<|python_tag|>brave_search.call(query="weather in \"Oslo\"", n=2)"#,
                r#"brave_search({"query": "weather in \"Oslo\"", "n": 2})"#,
            ),
            ("<|python_tag|>f.call()", "f({})"),
            // Answers that are JSON, and unknown tools.
            (
                r#"{"city": "Oslo", "name": "f"}"#,
                r#""{"city": "Oslo", "name": "f"}""#,
            ),
            (
                r#"{"name": "Bob", "parameters": {}}"#,
                r#""{"name": "Bob", "parameters": {}}""#,
            ),
            (r#"{"name": "f"}"#, r#""{"name": "f"}""#),
            (
                r#"Like {"name": "f", "parameters": {}}"#,
                r#""Like {"name": "f", "parameters": {}}""#,
            ),
            (
                "<|python_tag|>import os\nf()",
                "\"<|python_tag|>import os\nf()\"",
            ),
            ("<|python_tag|>", "\"<|python_tag|>\""),
            (
                r#"{"name": "f", "parameters": {}}; nothing"#,
                r#"f({}) "; nothing""#,
            ),
            (r#"{"name": "f", "para"#, r#""{"name": "f", "para""#),
        ],
    );
    check_both(
        ToolParserKind::Llama3Json,
        r#"{"name": "f", "parameters": {"a": "#,
        r#"f({"a": )!"#,
        r#""{"name": "f", "parameters": {"a": ""#,
    );
}

#[test]
fn mistral() {
    check_all(
        ToolParserKind::Mistral,
        &[
            (
                r#"[TOOL_CALLS] [{"name": "f", "arguments": {"a": "]}"}, "id": "late"}, {"id": "abcdefghi", "name": "g", "arguments": {}}]"#,
                r#"f({"a": "]}"}) g#abcdefghi({})"#,
            ),
            (
                r#"Hi[TOOL_CALLS]f[ARGS]{"a": "[ARGS]"}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{} x"#,
                r#""Hi" f({"a": "[ARGS]"}) g#abc({}) " x""#,
            ),
            (
                r#"[TOOL_CALLS]get_weather {"city": "Oslo"}"#,
                r#"get_weather({"city": "Oslo"})"#,
            ),
            (r#"[TOOL_CALLS]{"name": "f", "arguments": {}}"#, "f({})"),
            ("[TOOL_CALLS][]", "\"[TOOL_CALLS][]\""),
            ("[TOOL_CALLS]", "\"[TOOL_CALLS]\""),
            ("[TOOL_CALLS]two words", "\"[TOOL_CALLS]two words\""),
            (
                "[TOOL_CALLS]f[ARGS]none[TOOL_CALLS]g[ARGS]{}",
                "\"[TOOL_CALLS]f[ARGS]none\" g({})",
            ),
            (
                r#"[TOOL_CALLS][{"name": "f", "arguments": {}}, oops]"#,
                r#"f({}) ", oops]""#,
            ),
            ("[a] [TOOL] [ARGS]", "\"[a] [TOOL] [ARGS]\""),
        ],
    );
    let cut = r#"[TOOL_CALLS]f[ARGS]{"a": [1, "#;
    check_both(
        ToolParserKind::Mistral,
        cut,
        r#"f({"a": [1, )!"#,
        &format!("\"{cut}\""),
    );
    let wrong = r#"[TOOL_CALLS]f[ARGS]{'a': 1}[TOOL_CALLS]g[ARGS]{}"#;
    check_both(
        ToolParserKind::Mistral,
        wrong,
        "f({'a': 1})! g({})",
        r#""[TOOL_CALLS]f[ARGS]{'a': 1}" g({})"#,
    );
}

#[test]
fn forced_tool() {
    let options = ParserOptions {
        forced_tool: Some("get_weather".to_owned()),
        ..options(ToolParserKind::Hermes)
    };
    check(
        &options,
        " {\"city\": \"<tool_call>\"}\n",
        "get_weather({\"city\": \"<tool_call>\"})",
    );
    check(
        &options,
        "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
        "f({})",
    );
    check(&options, "No.", "\"No.\"");
}

#[test]
fn an_answer_in_json_is_no_failed_call() {
    let options = options(ToolParserKind::Llama3Json);
    for (output, failures) in [
        ("{\"city\": \"Oslo\"}", 0),
        ("{\"name\": \"nobody\", \"arguments\": {}}", 0),
        ("{\"city\": ", 0),
        ("{\"name\": \"f\", \"other\": 1}", 1),
        ("<|python_tag|>{\"city\": 1}", 1),
    ] {
        let counts = check(&options, output, &format!("\"{output}\""));
        assert_eq!((counts.calls, counts.failures), (0, failures), "{output}");
    }
}
