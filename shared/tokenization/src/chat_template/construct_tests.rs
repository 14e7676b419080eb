//! Constructs that published templates use, with what Jinja2 makes of them. `tests/templates/run` compares more of
//! them with the library itself.

use super::tests::{input, template};
use super::*;

/// The messages stay as they are: few of these templates show all of them.
pub(super) fn rendered(source: &str, body: &str) -> String {
    let mut template = template(source);
    template.roles = None;
    template.render(&input(body), true).unwrap()
}

pub(super) const CHAT: &str = r#"{"messages":[{"role":"user","content":"a"},{"role":"tool","content":"b"},{"role":"user","content":"c"}]}"#;

#[test]
fn expressions_mean_what_they_mean_in_python() {
    for (source, expected) in [
        (
            "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined }}<{{ loop.nextitem.role if loop.nextitem }}|{% endfor %}",
            "<tool|user<user|tool<|",
        ),
        (
            "{{ none is iterable }} {{ x is iterable }} {{ 'a' is iterable }} {{ 1 is iterable }}",
            "False True True False",
        ),
        (
            "{% if tools is iterable and tools | length > 0 %}tools{% endif %}-",
            "-",
        ),
        (
            "a\n  {%- generation %} {{ messages[0].content }}\n{% endgeneration %}\nb",
            "a a\nb",
        ),
        (
            "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
            "21",
        ),
        (
            "{% set f = '%s, %02d' %}{{ f % ('a', 7) }}{% set d = {'f': '<%s>'} %}{{ d.f % messages[0].content }}",
            "a, 07<a>",
        ),
        (
            "{% for i in range(-3, 4) %}{{ i % 3 }}{{ -i % 3 }} {% endfor %}{{ 7.5 % 2 }}",
            "00 12 21 00 12 21 00 1.5",
        ),
        (
            "{{ '%s and %s' % ('a', none) }} {{ '%d%%' % 5 }} {{ '%.2f' % 1.5 }} {{ 'x%s' % 'y' ~ 'z' }} {{ '%03d' % 7 }}",
            "a and None 5% 1.50 xyz 007",
        ),
        (
            "{{ {'a': [1.0, true, none, 'it']} }} {{ [1e-7] }} {{ (1,) }} {{ 1e20 }}",
            "{'a': [1.0, True, None, 'it']} [1e-07] (1,) 1e+20",
        ),
        (
            "{{ messages[1:] | length }}{{ messages[::-1][0].content }}{{ messages[-1]['content'] }}",
            "2cc",
        ),
        (
            "{{ {'b': 1, 'a': 'é<'} | tojson }} {{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}",
            r#"{"b": 1, "a": "é<"} {"a":2,"b":1}"#,
        ),
        (
            "{{ 'é🦀' | tojson(ensure_ascii=true) }} {{ [1, {}] | tojson(indent=2) }} {{ 1e-7 | tojson }}",
            "\"\\u00e9\\ud83e\\udd80\" [\n  1,\n  {}\n] 1e-07",
        ),
        (
            "{{ none in [none] }} {{ 'x' in undefined_thing }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 'a' ~ none ~ true }}",
            "True False 1 2 aNoneTrue",
        ),
        (
            "{% macro f(x, y='d') %}{{ x }}{{ y }}{% endmacro %}{{ f(1) }}{{ f(1, y=none) }}",
            "1d1None",
        ),
        (
            "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{{ loop.cycle('x', 'y') }}{% endfor %}{{ ns.a }}",
            "xyx4",
        ),
        (
            "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': 1} | items | list }}",
            "a1[('a', 1)]",
        ),
    ] {
        assert_eq!(rendered(source, CHAT), expected, "{source}");
    }
}

#[test]
fn the_date_is_that_of_the_request_or_that_of_the_configuration() {
    let source = "{{ strftime_now('%d %b %Y') }}";
    let mut dated = input(CHAT);
    let today = template(source).render(&dated, true).unwrap();
    let day = Moment::now().format("%d %b %Y");
    // Midnight may pass between both.
    assert!(today == day || today <= Moment::now().format("%d %b %Y"));
    let fixed = template(source).with_date("2026-03-04").unwrap();
    assert_eq!(fixed.render(&dated, true).unwrap(), "04 Mar 2026");
    dated.kwargs = serde_json::from_str(r#"{"strftime_now": "2025-01-02T10:00:00"}"#).ok();
    assert_eq!(fixed.render(&dated, true).unwrap(), "02 Jan 2025");
    dated.kwargs = serde_json::from_str(r#"{"strftime_now": 5}"#).ok();
    let error = fixed.render(&dated, true).unwrap_err();
    assert!(matches!(error, TokenizationError::Input(_)), "{error}");
    assert!(error.to_string().contains("2026-01-31"), "{error}");
    assert!(template(source).with_date("tomorrow").is_err());
}

#[test]
fn a_request_sets_documents_and_no_special_token() {
    let template = template("{{ bos_token }}{% if documents %}{{ documents[0] }}{% endif %}");
    let mut chat = input(CHAT);
    assert_eq!(template.render(&chat, true).unwrap(), "<|endoftext|>");
    chat.kwargs = serde_json::from_str(r#"{"bos_token": "x", "documents": ["d"]}"#).ok();
    assert_eq!(template.render(&chat, true).unwrap(), "<|endoftext|>d");
}

#[test]
fn chats_with_tools_have_a_template_of_their_own_where_there_is_one() {
    let config = br#"{"chat_template":[{"name":"tool_use","template":"t"},{"name":"default","template":"d"}],"image_token":"I"}"#;
    let template = ChatTemplate::from_files(None, None, Some(config))
        .unwrap()
        .unwrap();
    let plain = input(CHAT);
    assert_eq!(template.render(&plain, true).unwrap(), "d");
    let tools = input(r#"{"messages":[],"tools":[{"type":"function"}]}"#);
    assert_eq!(template.render(&tools, true).unwrap(), "t");
    assert_eq!(template.names, ["image_token"]);
    let file = ChatTemplate::from_files(Some(b"file"), None, Some(config))
        .unwrap()
        .unwrap();
    assert_eq!(file.render(&tools, true).unwrap(), "file");
}

const CALL: &str = r#"{"messages":[{"role":"user","content":"q"},{"role":"assistant","content":null,"reasoning":"r","tool_calls":[
    {"type":"function","function":{"name":"f","arguments":"{\"b\":1,  \"a\":2}"}}]}],"tools":[{"type":"function","function":{"name":"f"}}]}"#;

#[test]
fn arguments_are_objects_or_the_clients_text_where_the_template_joins_texts() {
    let objects = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}";
    assert_eq!(rendered(objects, CALL), r#"{"b": 1, "a": 2}"#);
    let text = "{% for m in messages %}{{ m.content + '/' }}{% for c in m.tool_calls %}{{ 'f' + c.function.arguments }}{% endfor %}{% endfor %}";
    assert_eq!(rendered(text, CALL), r#"q//f{"b":1,  "a":2}"#);
    let parameters = "{{ tools[0].function.parameters | tojson }}";
    assert_eq!(rendered(parameters, CALL), "{}");
    let without = r#"{"messages":[{"role":"user","content":"q"}],"tools":[{"type":"function","function":{"name":"f"}}]}"#;
    assert_eq!(rendered(parameters, without), "{}");
}

#[test]
fn null_fields_are_missing_and_reasoning_has_the_names_that_templates_read() {
    let source = "{% for m in messages %}{{ 'content' in m }}{{ m.reasoning_content }}{{ m.thinking }}|{% endfor %}";
    assert_eq!(rendered(source, CALL), "True|Falserr|");
}

#[test]
fn content_has_the_form_that_the_template_reads() {
    let body = r#"{"messages":[{"role":"user","content":"s"},{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}"#;
    let text = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
    assert_eq!(rendered(text, body), "<s><a\nb>");
    let either = "{% for m in messages %}<{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}>{% endfor %}";
    assert_eq!(rendered(either, body), "<s><ab>");
    let parts = "{% for m in messages %}<{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}>{% endfor %}";
    assert_eq!(rendered(parts, body), "<s><ab>");
    let one = "{% for m in messages %}<{{ m.content[0].text + '.' }}>{% endfor %}";
    assert_eq!(rendered(one, body), "<s.><a\nb.>");
}

#[test]
fn a_template_that_fails_on_every_chat_is_known_at_the_start() {
    let failing = template("{{ messages[0].content.nothing.more }}")
        .check()
        .unwrap_err();
    assert!(matches!(failing, TokenizationError::Render(_)), "{failing}");
    assert!(template("{{ unknown_function() }}").check().is_err());
    template("{{ raise_exception('there is no system message') }}")
        .check()
        .unwrap();
    let refused = "{% macro f() %}{{ raise_exception('no') }}{% endmacro %}{{ f() }}";
    let error = template(refused).render(&input(CHAT), true).unwrap_err();
    assert!(matches!(error, TokenizationError::Refused(_)), "{error}");
}
