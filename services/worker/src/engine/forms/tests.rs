use super::*;

fn json_call(begin: &str, end: &str) -> CallForm {
    CallForm {
        begin: begin.into(),
        arguments: ArgumentsForm::JsonSchema(r#"{"type":"object"}"#.into()),
        end: end.into(),
    }
}

fn calls(optional: bool, parallel: bool, begin: &str, calls: Vec<CallForm>) -> CallsForm {
    CallsForm {
        optional,
        parallel,
        begin: begin.into(),
        separator: "\n".into(),
        end: String::new(),
        calls,
    }
}

#[test]
fn texts_of_a_choice_are_quoted() {
    let texts = ["a", "say \"no\"", "a\\b\n\t\u{1}é"].map(String::from);
    assert_eq!(
        choice_as_ebnf(&texts),
        r#"root ::= "a" | "say \"no\"" | "a\\b\n\t\x01é""#
    );
}

#[test]
fn forced_calls_are_tags_with_a_separator() {
    let form = calls(
        false,
        true,
        "<calls>",
        vec![json_call("<f>", "</f>"), json_call("<g>", "</g>")],
    );
    let tag = |begin: &str, end: &str| {
        json!({"type": "tag", "begin": begin, "end": end,
            "content": {"type": "json_schema", "json_schema": {"type": "object"}}})
    };
    let list = json!({
        "type": "tags_with_separator",
        "tags": [tag("<f>", "</f>"), tag("<g>", "</g>")],
        "separator": "\n",
        "at_least_one": true,
        "stop_after_first": false,
    });
    let expected = json!({
        "type": "structural_tag",
        "format": {"type": "sequence", "elements": [
            {"type": "const_string", "value": "<calls>"}, list]},
    });
    assert_eq!(
        structural_tag(&TextForm::Calls(form.clone())),
        Some(expected)
    );
    let one = CallsForm {
        parallel: false,
        begin: String::new(),
        ..form
    };
    let format = &structural_tag(&TextForm::Calls(one.clone())).unwrap()["format"];
    assert_eq!(
        *format,
        json!({"type": "or", "elements": [tag("<f>", "</f>"), tag("<g>", "</g>")]})
    );
    // Text after all calls is the end of a tag, as XGrammar demands.
    let around = CallsForm {
        parallel: true,
        begin: "[".into(),
        end: "]".into(),
        ..one
    };
    let format = &structural_tag(&TextForm::Calls(around)).unwrap()["format"];
    assert_eq!(format["type"], "tag");
    assert_eq!(
        (&format["begin"], &format["end"]),
        (&json!("["), &json!("]"))
    );
    assert_eq!(format["content"]["type"], "tags_with_separator");
}

#[test]
fn optional_calls_have_a_trigger() {
    let two = vec![
        json_call("<call>{\"name\": \"f\"", "}"),
        json_call("<call>{\"name\":\"get\"", "}"),
    ];
    let form = TextForm::Calls(calls(true, true, "", two.clone()));
    let format = &structural_tag(&form).unwrap()["format"];
    assert_eq!(format["type"], "triggered_tags");
    // A model that writes other white space writes a call as well.
    assert_eq!(format["triggers"], json!(["<call>"]));
    assert_eq!(format["stop_after_first"], false);
    // All calls together are one tag where something stands around them.
    let form = TextForm::Calls(calls(true, true, "<calls>", two));
    let format = &structural_tag(&form).unwrap()["format"];
    assert_eq!(format["triggers"], json!(["<calls>"]));
    let content = &format["tags"][0]["content"];
    assert_eq!(content["elements"][1]["type"], "repeat");
    // Calls that begin differently have a trigger each.
    let other = vec![json_call("f(", ")"), json_call("g(", ")")];
    let form = TextForm::Calls(calls(true, true, "", other));
    let format = &structural_tag(&form).unwrap()["format"];
    assert_eq!(format["triggers"], json!(["f(", "g("]));
    // Nothing tells calls without a beginning from text.
    let form = TextForm::Calls(calls(true, true, "", vec![json_call("", "")]));
    assert_eq!(structural_tag(&form), None);
}

#[test]
fn parts_are_elements() {
    let parts = vec![
        FormPart::Text("<a>".into()),
        FormPart::TextWithout(vec!["</".into()]),
        FormPart::Text("</a>".into()),
        FormPart::AnyOf(vec![vec![FormPart::Regex("[0-9]+".into())], Vec::new()]),
        FormPart::Repeated(vec![FormPart::JsonSchema("true".into())]),
        FormPart::TextWithout(Vec::new()),
    ];
    let call = CallForm {
        begin: "f".into(),
        arguments: ArgumentsForm::Parts(parts),
        end: String::new(),
    };
    let form = TextForm::Calls(calls(false, false, "", vec![call]));
    // Nothing may follow what has no end of its own.
    assert_eq!(structural_tag(&form), None);
    let TextForm::Calls(form) = form else {
        panic!("not calls");
    };
    let content = tag(&form.calls[0]).unwrap()["content"].take();
    assert_eq!(
        content,
        json!({"type": "sequence", "elements": [
            {"type": "const_string", "value": "<a>"},
            {"type": "tag", "begin": "", "content": {"type": "any_text", "excludes": ["</"]}, "end": "</a>"},
            {"type": "optional", "content": {"type": "regex", "pattern": "[0-9]+"}},
            {"type": "star", "content": {"type": "json_schema", "json_schema": true}},
            {"type": "any_text", "excludes": []},
        ]})
    );
}

#[test]
fn alternatives_have_an_end() {
    let form = |parallel| {
        let call = vec![json_call("f(", ")"), json_call("g(", ")")];
        TextForm::AnyOf(vec![
            TextForm::Calls(calls(false, parallel, "", call)),
            TextForm::JsonObject,
        ])
    };
    let one = structural_tag(&form(false)).unwrap();
    assert_eq!(one["format"]["elements"][0]["type"], "or");
    let several = structural_tag(&form(true)).unwrap();
    let more = &several["format"]["elements"][0]["elements"][1];
    assert_eq!(
        (&more["type"], &more["max"]),
        (&json!("repeat"), &json!(63))
    );
    assert_eq!(more["content"]["elements"][0]["value"], "\n");
    // A string that may be null ends with the text after it.
    let parts = [
        FormPart::AnyOf(vec![
            vec![FormPart::TextWithout(vec!["</p>".into()])],
            vec![FormPart::Text("null".into())],
        ]),
        FormPart::Text("</p>".into()),
    ];
    let format = parts_of(&parts);
    assert_eq!(is_open_ended(&format), Some(false));
    assert_eq!(format["elements"][0]["end"], "</p>");
    assert_eq!(format["elements"][1]["elements"][1]["value"], "</p>");
}

#[test]
fn a_call_without_parameters_has_an_empty_content() {
    let empty = json!({"type": "const_string", "value": ""});
    assert_eq!(parts_of(&[]), empty);
    assert_eq!(parts_of(&[FormPart::AnyOf(vec![Vec::new()])]), empty);
}

fn parts_of(all: &[FormPart]) -> Value {
    parts(all).unwrap()
}

#[test]
fn a_schema_that_is_not_json_is_not_weakened() {
    let call = CallForm {
        arguments: ArgumentsForm::JsonSchema("{".into()),
        ..json_call("<f>", "</f>")
    };
    for form in [
        TextForm::JsonSchema("{".into()),
        TextForm::Calls(calls(false, false, "", vec![call])),
        TextForm::AnyOf(vec![TextForm::JsonSchema("{".into())]),
    ] {
        assert_eq!(structural_tag(&form), None, "{form:?}");
    }
}

#[test]
fn an_error_names_the_field_that_was_sent() {
    let none = FormAbilities::default();
    let tools = |optional| TextForm::Calls(calls(optional, true, "", vec![json_call("f(", ")")]));
    let lacks = |form: &TextForm| none.lacks(form).unwrap();
    // A client with strict tools may have sent no tool_choice.
    assert_eq!(lacks(&tools(true)).0, "tools");
    assert!(lacks(&tools(true)).1.contains("strict: false"));
    assert_eq!(lacks(&tools(false)).0, "tool_choice");
}

#[test]
fn lark_has_no_tag() {
    let lark = TextForm::Lark("start: \"a\"".into());
    assert_eq!(structural_tag(&lark), None);
    assert_eq!(
        structural_tag(&TextForm::AnyOf(vec![TextForm::JsonObject, lark])),
        None
    );
    let either = TextForm::AnyOf(vec![TextForm::JsonObject, TextForm::Regex("a".into())]);
    let format = &structural_tag(&either).unwrap()["format"];
    assert_eq!(format["type"], "or");
}
