//! Families with markers around names and values: DeepSeek, Kimi, GLM, Qwen3 Coder, pythonic, harmony.

use super::{check, check_all, check_both, options};
use crate::{Delivery, ParserOptions, ToolParserKind};

#[test]
fn deepseek_v3() {
    check_all(
        ToolParserKind::DeepSeekV3,
        &[
            (
                "Hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": \"```\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                "\"Hi\" f({\"a\": \"```\"}) g({})",
            ),
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜><｜tool▁calls▁end｜> bye",
                "f({}) \" bye\"",
            ),
            (
                "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>",
                "\"<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>\"",
            ),
        ],
    );
}

#[test]
fn deepseek_v31() {
    check_all(
        ToolParserKind::DeepSeekV31,
        &[
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": \"<｜tool▁call▁end｜>\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                "f({\"a\": \"<｜tool▁call▁end｜>\"}) g({})",
            ),
            (
                "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>",
                "f({})",
            ),
            ("<｜ <｜tool", "\"<｜ <｜tool\""),
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f g<｜tool▁sep｜>{}",
                "\"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f g<｜tool▁sep｜>{}\"",
            ),
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁call▁end｜>",
                "\"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁call▁end｜>\"",
            ),
        ],
    );
    let cut = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\"";
    check_both(
        ToolParserKind::DeepSeekV31,
        cut,
        "f({\"a\")!",
        &format!("\"{cut}\""),
    );
    let early = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\"<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>";
    check_both(
        ToolParserKind::DeepSeekV31,
        early,
        "f({\"a\")! g({})",
        "\"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\"<｜tool▁call▁end｜>\" g({})",
    );
}

#[test]
fn kimi_k2() {
    check_all(
        ToolParserKind::KimiK2,
        &[
            (
                "Hi <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Oslo\"}<|tool_call_end|><|tool_call_begin|>functions.a.b:1<|tool_call_argument_begin|> {} <|tool_call_end|><|tool_calls_section_end|>",
                "\"Hi \" get_weather#functions.get_weather:0({\"city\": \"Oslo\"}) a.b#functions.a.b:1({})",
            ),
            (
                "<|tool_calls_section_begin|> <|tool_call_begin|> search <|tool_call_argument_begin|>{}<|tool_call_end|> <|tool_calls_section_end|>\nSo",
                "search({}) \"\nSo\"",
            ),
            (
                "<|tool_calls_section_begin|><|tool_calls_section_end|>",
                "\"<|tool_calls_section_begin|><|tool_calls_section_end|>\"",
            ),
            (
                "<|tool_call_argument_begin|>{}",
                "\"<|tool_call_argument_begin|>{}\"",
            ),
        ],
    );
}

/// Forms that these models are known to emit beside those of their templates.
#[test]
fn forms_beside_the_templates_are_read_too() {
    check_all(
        ToolParserKind::KimiK2,
        &[
            // Lines and spaces around every part.
            (
                "On it.\n<|tool_calls_section_begin|>\n<|tool_call_begin|>\nfunctions.get_weather:0\n<|tool_call_argument_begin|>\n{\"city\": \"Oslo\"}\n<|tool_call_end|>\n<|tool_calls_section_end|>",
                "\"On it.\n\" get_weather#functions.get_weather:0({\"city\": \"Oslo\"})",
            ),
            // An id without its prefix, one that counts over the whole chat, and a name with a hyphen.
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>f:12<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_begin|>functions.web-search:13<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
                "f#f:12({}) web-search#functions.web-search:13({})",
            ),
            // No section around the call, and a section that is not closed.
            (
                "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
                "f#functions.f:0({})",
            ),
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
                "f#functions.f:0({})",
            ),
            // The section's name in the singular.
            (
                "<|tool_call_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_section_end|>",
                "f#functions.f:0({})",
            ),
        ],
    );
    check_all(
        ToolParserKind::Glm45,
        &[
            // All on one line, with spaces.
            (
                "I look: <tool_call>get_weather <arg_key>city</arg_key> <arg_value>Oslo</arg_value> <arg_key>days</arg_key> <arg_value>2</arg_value> </tool_call>",
                "\"I look: \" get_weather({\"city\": \"Oslo\", \"days\": 2})",
            ),
            // A line before the name, and text of several lines as a value.
            (
                "<tool_call>\nf\n<arg_key>city</arg_key>\n<arg_value>a\n\n  b</arg_value>\n</tool_call>\n",
                "f({\"city\": \"a\\n\\n  b\"})",
            ),
            // No value at the end of the output's call, and a call right after another.
            (
                "<tool_call>f</tool_call><tool_call>g<arg_key>days</arg_key><arg_value>-1</arg_value></tool_call>",
                "f({}) g({\"days\": -1})",
            ),
        ],
    );
    check_all(
        ToolParserKind::DeepSeekV31,
        &[
            // Lines between the calls, and arguments of several lines.
            (
                "I look.\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\n  \"city\": \"Oslo\"\n}<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n<｜tool▁calls▁end｜>",
                "\"I look.\n\n\" get_weather({\n  \"city\": \"Oslo\"\n}) f({})",
            ),
            // The section is not closed, since the end token comes instead.
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>",
                "f({\"a\": 1})",
            ),
        ],
    );
    check_all(
        ToolParserKind::Harmony,
        &[
            // A call in the channel of reasoning.
            (
                "<|channel|>analysis to=functions.f code<|message|>{\"a\": 1}<|call|>",
                "f({\"a\": 1})",
            ),
            // A line before the message, and the end token in the place of the call's marker.
            (
                "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json\n<|message|>{}<|return|>",
                "?Hm? f({})",
            ),
            // The type of the content without a space, and a recipient without its prefix.
            (
                "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|><|start|>assistant<|channel|>commentary to=g <|constrain|>json<|message|>{}<|call|>",
                "f({}) g({})",
            ),
            // Two parts of reasoning around a call.
            (
                "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>commentary to=functions.f json<|message|>{}<|call|><|start|>assistant<|channel|>analysis<|message|>B<|end|><|start|>assistant<|channel|>final<|message|>C<|return|>",
                "?A? f({}) ?B? \"C\"",
            ),
        ],
    );
}

#[test]
fn glm45() {
    check_all(
        ToolParserKind::Glm45,
        &[
            (
                "Hi<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>42</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>f\n</tool_call>",
                "\"Hi\" get_weather({\"city\": \"42\", \"days\": 2}) f({})",
            ),
            (
                "<tool_call>get_weather<arg_key>city</arg_key><arg_value> \"a\\b\"\n{<tool_call></arg_value></tool_call>",
                "get_weather({\"city\": \" \\\"a\\\\b\\\"\\n{<tool_call>\"})",
            ),
            (
                "<tool_call>f<arg_key>where</arg_key><arg_value>{\"x\":  [1]}</arg_value><arg_key>u</arg_key><arg_value>{'y': (True, None)}</arg_value><arg_key>w</arg_key><arg_value>plain words</arg_value></tool_call>",
                "f({\"where\": {\"x\":  [1]}, \"u\": {\"y\": [true, null]}, \"w\": \"plain words\"})",
            ),
            (
                "<tool_call>f<arg_key>note</arg_key><arg_value>null</arg_value><arg_key>city</arg_key><arg_value></arg_value></tool_call>",
                "f({\"note\": null, \"city\": \"\"})",
            ),
            ("<tool_call></tool_call>", "\"<tool_call></tool_call>\""),
            (
                "<tool_call>{\"name\": 1}</tool_call>",
                "\"<tool_call>{\"name\": 1}</tool_call>\"",
            ),
            (
                "<tool_call>f\nwhat</tool_call>",
                "\"<tool_call>f\nwhat</tool_call>\"",
            ),
            (
                "<tool_call>f<arg_value>1</arg_value></tool_call>",
                "\"<tool_call>f<arg_value>1</arg_value></tool_call>\"",
            ),
        ],
    );
    check(
        &options(ToolParserKind::Glm45),
        "<tool_call>f<arg_key>days</arg_key><arg_value>12",
        "f({\"days\": 12)!",
    );
    let cut = "<tool_call>f<arg_key>city</arg_key><arg_value>Os";
    check_both(
        ToolParserKind::Glm45,
        cut,
        "f({\"city\": \"Os)!",
        &format!("\"{cut}\""),
    );
}

#[test]
fn qwen3_coder() {
    check_all(
        ToolParserKind::Qwen3Coder,
        &[
            (
                "Hi\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>",
                "\"Hi\n\" get_weather({\"city\": \"Oslo\", \"days\": 2, \"exact\": true})",
            ),
            (
                "<tool_call><function=f></function></tool_call><tool_call><function=g></function></tool_call>",
                "f({}) g({})",
            ),
            // Strings keep their lines, quotes and tags; other values fall back to strings.
            (
                "<tool_call><function=f><parameter=city>\n\n a \"b\" \\ \n\n<b></function><tool_call>\n</parameter><parameter=days>two</parameter><parameter=other>3</parameter></function></tool_call>",
                "f({\"city\": \"\\n a \\\"b\\\" \\\\ \\n\\n<b></function><tool_call>\", \"days\": \"two\", \"other\": \"3\"})",
            ),
            (
                "<tool_call><function=f><parameter=where>\n{\"a\": {\"b\": \"</x>\"}}\n</parameter><parameter=list>['a', 1.]</parameter><parameter=ratio>5.0</parameter><parameter=note>None</parameter></function></tool_call>",
                "f({\"where\": {\"a\": {\"b\": \"</x>\"}}, \"list\": [\"a\", 1.0], \"ratio\": 5.0, \"note\": null})",
            ),
            (
                "<tool_call><function=f><parameter=note>nul</parameter><parameter=city>null</parameter><parameter=days>null</parameter></function></tool_call>",
                "f({\"note\": \"nul\", \"city\": \"null\", \"days\": null})",
            ),
            // Tags that models forget.
            (
                "<function=f>\n<parameter=city>\nOslo\n<parameter=days>\n1\n</function>\n</tool_call>ok",
                "f({\"city\": \"Oslo\", \"days\": 1}) \"ok\"",
            ),
            (
                "<tool_call><function=f><parameter=city>x</parameter></tool_call>",
                "f({\"city\": \"x\"})",
            ),
            (
                "<tool_call>text</tool_call>",
                "\"<tool_call>text</tool_call>\"",
            ),
            ("<function=a b>", "\"<function=a b>\""),
            ("<function=>", "\"<function=>\""),
            ("if a <function", "\"if a <function\""),
        ],
    );
    let cut = "<tool_call><function=f><parameter=city>Os</para";
    check_both(
        ToolParserKind::Qwen3Coder,
        cut,
        "f({\"city\": \"Os</para)!",
        &format!("\"{cut}\""),
    );
    let mut options = options(ToolParserKind::Qwen3Coder);
    options.limits.value_bytes = 4;
    check(
        &options,
        "<function=f><parameter=days>12345</parameter><parameter=days>1234</parameter></function>",
        "f({\"days\": \"12345\", \"days\": 1234})",
    );
}

#[test]
fn pythonic() {
    check_all(
        ToolParserKind::Pythonic,
        &[
            (
                "[get_weather(city='O\\'s\"lo', days=2), f()]",
                "get_weather({\"city\": \"O's\\\"lo\", \"days\": 2}) f({})",
            ),
            (
                " [f(a=[1, -2.5, .5, 1_000], b={'x': (True, None), \"y\": {}}, c=\"\\u00e9\\n)]\",)]",
                "f({\"a\": [1, -2.5, 0.5, 1000], \"b\": {\"x\": [true, null], \"y\": {}}, \"c\": \"é\\n)]\"})",
            ),
            (
                "<|python_start|>[new.tool(a=1)]<|python_end|>",
                "new.tool({\"a\": 1})",
            ),
            ("[f()] and more", "f({}) \" and more\""),
            // Text that begins like a list.
            ("[1, 2]", "\"[1, 2]\""),
            ("[link](http://x)", "\"[link](http://x)\""),
            ("[unknown(a=1)]", "\"[unknown(a=1)]\""),
            ("[f(x)]", "\"[f(x)]\""),
            ("[f", "\"[f\""),
            ("text [f()]", "\"text [f()]\""),
            ("[f(), 3]", "f({}) \", 3]\""),
        ],
    );
    check_both(
        ToolParserKind::Pythonic,
        "[f(a=\"x",
        "f({\"a\": \"x)!",
        "\"[f(a=\"x\"",
    );
    check_both(
        ToolParserKind::Pythonic,
        "[f(a=g(1))]",
        "f({\"a\": g)! \"(1))]\"",
        "\"[f(a=g(1))]\"",
    );
}

#[test]
fn an_answer_in_brackets_is_no_failed_call() {
    let options = options(ToolParserKind::Pythonic);
    for (output, failures) in [
        ("[1, 2]", 0),
        ("[link](http://x)", 0),
        ("[unknown(a=1)]", 0),
        ("[f", 0),
        ("[get_weather, f]", 0),
        ("[f(x)]", 1),
        ("[f(a=1", 1),
        ("<|python_start|>[1, 2]", 1),
    ] {
        let options = ParserOptions {
            delivery: Delivery::Whole,
            ..options.clone()
        };
        let counts = check(&options, output, &format!("\"{output}\""));
        assert_eq!((counts.calls, counts.failures), (0, failures), "{output}");
    }
    let counts = check(&options, "[f(), 3]", "f({}) \", 3]\"");
    assert_eq!((counts.calls, counts.failures), (1, 1));
}

#[test]
fn harmony() {
    check_all(
        ToolParserKind::Harmony,
        &[
            (
                "<|channel|>analysis<|message|>Hm <b><|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
                "?Hm <b>? \"Hi\"",
            ),
            (
                "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"city\": \"<|call|>\"}<|call|>",
                "?Hm? get_weather({\"city\": \"<|call|>\"})",
            ),
            (
                "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|><|call|>",
                "\"I look.\" f({}) g({})",
            ),
            (
                " to=functions.f<|channel|>commentary<|message|>{\"a\": 1}",
                "f({\"a\": 1})",
            ),
            ("Plain text", "\"Plain text\""),
            (" to be", "\" to be\""),
            ("<|message|>Hi", "\"Hi\""),
            (
                "<|channel|>commentary to=python<|message|>print(1)<|call|>",
                "\"<|channel|>commentary to=python<|message|>print(1)\"",
            ),
            ("<|channel|>final", "\"<|channel|>final\""),
            (
                "<|channel|>final<|start|>assistant<|channel|>final<|message|>x",
                "\"<|channel|>finalx\"",
            ),
        ],
    );
    let cut = "<|channel|>commentary to=functions.f<|message|>{\"a\": ";
    check_both(
        ToolParserKind::Harmony,
        cut,
        "f({\"a\": )!",
        &format!("\"{cut}\""),
    );
}
