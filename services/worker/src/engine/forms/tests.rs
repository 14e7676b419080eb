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
    let format = &structural_tag(&TextForm::Calls(one)).unwrap()["format"];
    assert_eq!(format["type"], "tags_with_separator");
    assert_eq!(format["stop_after_first"], true);
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
    assert_eq!(format["tags"][0]["content"]["type"], "tags_with_separator");
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
    let format = structural_tag(&form).unwrap()["format"].take();
    assert_eq!(
        format["tags"][0]["content"],
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
