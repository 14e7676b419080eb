//! Forms that are refused, and where they are wrong.

use std::time::{Duration, Instant};

use refrain_protocol::engine::TextForm;

use super::{MODEL, form, refusal, schema};

#[test]
fn errors_of_schemas_have_a_pointer() {
    for (text, place) in [
        (
            r#"{"properties":{"a/b":{"not":{}}}}"#,
            "/properties/a~1b/not",
        ),
        (r#"{"items":{"if":{},"then":{}}}"#, "/items/if"),
        (r#"{"anyOf":[{},{"$ref":"http://x/y"}]}"#, "/anyOf/1/$ref"),
        (
            r#"{"properties":{"s":{"type":"string","pattern":"(?=x)y"}}}"#,
            "/properties/s",
        ),
        (
            r#"{"properties":{"s":{"type":"string","pattern":"("}},"required":["s"]}"#,
            "/properties/s",
        ),
        (
            r#"{"properties":{"s":{"type":"string","format":"secret-format"}}}"#,
            "/properties/s",
        ),
        (
            r#"{"type":"object","properties":{"n":{"type":"array","minItems":1,"items":{"type":"integer","minimum":5,"maximum":4}}},"required":["n"]}"#,
            "/properties/n/items",
        ),
        (
            r#"{"oneOf":[{"type":"string"},{"type":"string"}]}"#,
            "the root of the schema",
        ),
        (r##"{"$ref":"#/$defs/missing"}"##, "the root of the schema"),
        ("{\n  \"type\": }", "line 2, column 11"),
        ("false", "the root of the schema"),
        ("3", "the root of the schema"),
    ] {
        let message = refusal(schema(text)).to_string();
        assert!(
            message.ends_with(&format!("(at {place})")),
            "{message}, not {place}, for {text}"
        );
        assert!(!message.contains("secret"), "{message}");
    }
    // Properties may have the names of keywords.
    let named = schema(
        r#"{"properties":{"not":{"type":"null"},"if":true},"x-guidance":{"lenient":true,"bad":1}}"#,
    );
    MODEL.compiler.compile(&form(named)).unwrap();
}

#[test]
fn parts_that_multiply_are_refused() {
    let strings = format!(
        r#"{{"anyOf":[{}]}}"#,
        vec![r#"{"type":"string"}"#; 150].join(",")
    );
    let literal = format!(r#"{{"const":"{}"}}"#, "x".repeat(200_000));
    for (text, place) in [
        (format!(r#"{{"allOf":[{strings},{strings},{literal}]}}"#), "the root of the schema"),
        (format!(r#"{{"items":{{"allOf":[{strings},{literal}]}}}}"#), "/items"),
        (
            format!(r##"{{"items":{{"allOf":[{{"$ref":"#/$defs/a"}},{{"$ref":"#/$defs/a"}}]}},"$defs":{{"a":{strings}}}}}"##),
            "/items",
        ),
        (
            r#"{"allOf":[{"type":"integer","multipleOf":65536},{"multipleOf":65537,"type":"integer"}]}"#.to_owned(),
            "the root of the schema",
        ),
        (
            r##"{"items":{"$ref":"#/$defs/n","multipleOf":0.5},"$defs":{"n":{"type":"number","multipleOf":0.3}}}"##.to_owned(),
            "/items",
        ),
    ] {
        let message = refusal(schema(&text)).to_string();
        assert!(message.ends_with(&format!("(at {place})")), "{message}");
    }
    for text in [
        r#"{"allOf":[{"type":"integer","multipleOf":4},{"multipleOf":6}]}"#.to_owned(),
        format!(r#"{{"allOf":[{},{{"maxLength":3}}]}}"#, strings),
        r#"{"anyOf":[{"type":"integer","multipleOf":4096},{"type":"integer","multipleOf":4097}]}"#
            .to_owned(),
    ] {
        let outcome = MODEL.compiler.compile(&form(schema(&text)));
        assert!(outcome.is_ok(), "{:?} for {text}", outcome.err());
    }
}

#[test]
fn keywords_without_effect_are_allowed() {
    for text in [
        r#"{"type":"object","propertyNames":{"type":"string"},"additionalProperties":{"type":"number"}}"#,
        r#"{"type":"object","propertyNames":{},"unevaluatedProperties":true,"dependentRequired":{}}"#,
        r#"{"type":"array","items":{"type":"array","minContains":1,"uniqueItems":false,"unevaluatedItems":true}}"#,
        r#"{"properties":{"a":{"then":{"type":"null"},"type":"string"}},"$defs":{"b":{"if":{}}}}"#,
    ] {
        let outcome = MODEL.compiler.compile(&form(schema(text)));
        assert!(outcome.is_ok(), "{:?} for {text}", outcome.err());
    }
    for text in [
        r#"{"propertyNames":{"type":"string","maxLength":3}}"#,
        r#"{"contains":{},"minContains":1}"#,
        r#"{"unevaluatedProperties":false}"#,
        r#"{"if":{},"then":{"type":"null"}}"#,
    ] {
        refusal(schema(text));
    }
}

#[test]
fn errors_of_grammars_have_a_place() {
    // A pointer would name a field of the body, and the grammar is a text.
    let lark = "start: \"a\" value\nvalue: %json {\"properties\": {\"a\": {\"not\": {}}}}";
    let message = refusal(TextForm::Lark(lark.into())).to_string();
    let place = "(at the schema in line 2, /properties/a/not)";
    assert!(message.ends_with(place), "{message}");
    let message = refusal(TextForm::Lark("start: \"a\"\nother: \"b\" ?? %".into())).to_string();
    assert!(message.ends_with("(at line 2, column 16)"), "{message}");
    let message = refusal(TextForm::Lark("start: [secret".into())).to_string();
    assert!(!message.contains("secret"), "{message}");
    for lark in [
        "",
        "other: \"a\"",
        "start: missing",
        "start[max_tokens=3]: /a*/",
        "start: start",
    ] {
        refusal(TextForm::Lark(lark.into()));
    }
    for regex in ["(", "(?=a)"] {
        let message = refusal(TextForm::Regex(regex.into())).to_string();
        assert!(
            message.starts_with("the regular expression cannot be compiled"),
            "{message}"
        );
    }
    refusal(TextForm::Choice(Vec::new()));
}

/// Forms that are built to cost much. They are refused or compiled, but within seconds, and without a crash.
#[test]
fn work_is_bounded() {
    let nested =
        |depth: usize| format!("{}{{}}{}", r#"{"items":"#.repeat(depth), "}".repeat(depth));
    let chain: Vec<String> = (0..3_000)
        .map(|n| format!(r##""d{n}":{{"$ref":"#/$defs/d{}"}}"##, n + 1))
        .collect();
    let options: Vec<String> = (0..2_000).map(|n| format!(r#""option-{n}""#)).collect();
    let any: Vec<String> = (0..12)
        .map(|n| format!(r#"{{"properties":{{"p{n}":{{"type":"null"}}}}}}"#))
        .collect();
    let any = format!(r#"{{"anyOf":[{}]}}"#, any.join(","));
    let rules: Vec<String> = (0..5_000).map(|n| format!("r{n}: r{}", n + 1)).collect();
    let references = format!(
        r##"{{"$ref":"#/$defs/d0","$defs":{{{},"d2900":{{"type":"null"}}}}}}"##,
        chain[..2_900].join(",")
    );
    let patterns: Vec<String> = (0..2_000).map(|n| format!(r#""(a|b)*{n}":{{}}"#)).collect();
    let forms = [
        schema(&references),
        TextForm::Lark(format!(
            "start: %json {{\"patternProperties\": {{{}}}}}",
            patterns.join(",")
        )),
        TextForm::Ebnf(format!(
            "root ::= r0\n{}\nr4000 ::= \"x\"",
            (0..4_000)
                .map(|n| format!("r{n} ::= r{}\n", n + 1))
                .collect::<String>()
        )),
        schema(&nested(60)),
        schema(&nested(1_000)),
        schema(&format!(
            r##"{{"$ref":"#/$defs/d0","$defs":{{{},"d3000":{{"type":"null"}}}}}}"##,
            chain.join(",")
        )),
        schema(&format!(r#"{{"enum":[{}]}}"#, options.join(","))),
        schema(&format!(r#"{{"allOf":[{}]}}"#, vec![any; 10].join(","))),
        schema(r#"{"type":"array","minItems":4000000000,"items":{}}"#),
        schema(r#"{"type":"string","minLength":100000000,"maxLength":200000000}"#),
        schema(r#"{"type":"string","pattern":"^(a|b|ab)*(a{1,500}){1,500}$"}"#),
        schema(&format!(r#"{{"type":"{}"}}"#, "x".repeat(300_000))),
        TextForm::Lark(format!("start: r0\n{}\nr5000: \"x\"", rules.join("\n"))),
        TextForm::Lark(format!(
            "start: {}\"a\"{}",
            "(".repeat(5_000),
            ")".repeat(5_000)
        )),
        TextForm::Lark("start: a\na: a a | \"x\" | ".into()),
        TextForm::Regex("((((a{0,99}){0,99}){0,99}){0,99})".into()),
        TextForm::Regex("(".repeat(20_000)),
    ];
    for (index, text) in forms.into_iter().enumerate() {
        let started = Instant::now();
        let outcome = MODEL
            .compiler
            .compile(&form(text))
            .map(|grammar| grammar.matcher().allowed().is_ok());
        println!(
            "form {index}: {:?} in {:?}",
            outcome.map_err(|error| error.to_string()),
            started.elapsed()
        );
        assert!(started.elapsed() < Duration::from_secs(120), "form {index}");
    }
}

#[test]
fn any_bytes_are_refused_or_compiled() {
    bolero::check!()
        .with_type::<(u8, Vec<u8>)>()
        .with_max_len(200)
        .for_each(|(kind, bytes)| {
            let text = String::from_utf8_lossy(bytes).into_owned();
            let text = match kind % 6 {
                0 => TextForm::JsonSchema(text),
                1 => TextForm::Regex(text),
                2 => TextForm::Lark(text),
                3 => TextForm::Lark(format!("start: {text}")),
                4 => TextForm::Ebnf(format!("root ::= {text}")),
                _ => TextForm::Choice(vec![text]),
            };
            if let Ok(grammar) = MODEL.compiler.compile(&form(text)) {
                let _ = grammar.matcher().forced(4);
            }
        });
}
