//! Calls of tools.

use refrain_protocol::engine::{
    ArgumentsForm, CallForm, CallsForm, FormPart, OutputForm, TextForm,
};

use super::{MODEL, allows, encode, matcher, schema};

fn call(begin: &str, end: &str) -> CallForm {
    let schema = r#"{"properties":{"city":{"enum":["Rome","Oslo"]}},"required":["city"],"additionalProperties":false}"#;
    CallForm {
        begin: begin.to_owned(),
        arguments: ArgumentsForm::JsonSchema(schema.to_owned()),
        end: end.to_owned(),
    }
}

fn hermes(optional: bool, parallel: bool) -> TextForm {
    let begin = |name: &str| format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": ");
    TextForm::Calls(CallsForm {
        optional,
        parallel,
        begin: String::new(),
        separator: "\n".to_owned(),
        end: String::new(),
        calls: vec![
            call(&begin("weather"), "}\n</tool_call>"),
            call(&begin("weather_of_tomorrow"), "}\n</tool_call>"),
        ],
    })
}

const ROME: &str =
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";
const OSLO: &str = "<tool_call>\n{\"name\": \"weather_of_tomorrow\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>";

#[test]
fn calls_alone() {
    for text in [ROME, OSLO] {
        assert!(allows(hermes(false, false), text));
    }
    assert!(!allows(hermes(false, false), &format!("Well. {ROME}")));
    assert!(!allows(hermes(false, false), &format!("{ROME}\n{OSLO}")));
    assert!(allows(
        hermes(false, true),
        &format!("{ROME}\n{OSLO}\n{ROME}")
    ));
    assert!(!allows(hermes(false, true), &ROME.replace("Rome", "Paris")));
    let forced = matcher(hermes(false, false)).forced(50).unwrap();
    assert!(
        MODEL
            .tokenizer
            .decode(&forced)
            .starts_with("<tool_call>\n{\"name\": \"weather")
    );
}

#[test]
fn free_text_before_calls() {
    for text in ["", "Hello <there>, a < b", "Let me look.\n"] {
        assert!(allows(hermes(true, true), text));
        assert!(allows(hermes(true, true), &format!("{text}{ROME}\n{OSLO}")));
    }
    for bad in [
        "<tool_call>",
        "x <tool_call>\n{\"name\": \"other",
        "<tool_call>{}",
    ] {
        assert!(!allows(hermes(true, true), bad), "{bad}");
    }
    assert!(!allows(hermes(true, false), &format!("{ROME}\n{OSLO}")));
}

#[test]
fn special_tokens_in_a_form_are_meant() {
    let marker = "<|im_start|>";
    let form = |optional| {
        TextForm::Calls(CallsForm {
            optional,
            parallel: true,
            begin: marker.to_owned(),
            separator: ";".to_owned(),
            end: "<|im_end|>".to_owned(),
            calls: vec![call("go:", "!")],
        })
    };
    let text = format!("{marker}go:{{\"city\": \"Rome\"}}!;go:{{\"city\": \"Oslo\"}}!");
    assert!(allows(form(false), &text));
    assert!(allows(form(false), &format!("{text}<|im_end|>")));
    let mut free = matcher(form(true));
    assert_eq!(free.allowed().unwrap(), None);
    free.advance(&encode("I think that")).unwrap();
    assert!(free.may_end().unwrap() && !free.must_end());
    let before = free.len();
    free.advance(&encode(marker)).unwrap();
    assert!(free.allowed().unwrap().is_some() && !free.may_end().unwrap());
    free.rollback(1).unwrap();
    assert_eq!(free.allowed().unwrap(), None);
    free.advance(&encode(&format!("{text}<|im_end|>"))).unwrap();
    assert!(free.may_end().unwrap() && free.must_end());
    free.rollback(free.len() - before).unwrap();
    assert_eq!(free.allowed().unwrap(), None);
    // The marker as ordinary text is no marker.
    free.advance(&MODEL.tokenizer.encode(marker).unwrap())
        .unwrap();
    assert_eq!(free.allowed().unwrap(), None);
}

#[test]
fn the_form_holds_after_the_reasoning() {
    let after = MODEL.tokenizer.token_id("<|im_start|>").unwrap();
    let form = OutputForm {
        after: Some(after),
        ..OutputForm::new(TextForm::Choice(vec!["yes".into(), "no".into()]))
    };
    let mut matcher = MODEL.compiler.compile(&form).unwrap().matcher();
    matcher.advance(&encode("perhaps, perhaps not")).unwrap();
    assert!(matcher.allowed().unwrap().is_none() && matcher.may_end().unwrap());
    assert!(matcher.forced(5).unwrap().is_empty());
    matcher.advance(&[after]).unwrap();
    assert!(!matcher.may_end().unwrap());
    matcher.advance(&encode("yes")).unwrap();
    assert!(matcher.must_end());
    matcher.advance(&[MODEL.eos, MODEL.eos]).unwrap();
    matcher.rollback(1).unwrap();
    assert!(matcher.must_end() && matcher.accepts(MODEL.eos).unwrap());
    matcher.rollback(2).unwrap();
    assert!(!matcher.must_end());
    matcher.rollback(matcher.len()).unwrap();
    assert!(matcher.allowed().unwrap().is_none());
}

#[test]
fn the_model_may_choose_to_reason() {
    let token = |text| MODEL.tokenizer.token_id(text).unwrap();
    let (open, close) = (token("<|im_start|>"), token("<|endoftext|>"));
    let form = OutputForm {
        after: Some(close),
        opened_by: Some(open),
        ..OutputForm::new(TextForm::Choice(vec!["yes".into(), "no".into()]))
    };
    let mut matcher = MODEL.compiler.compile(&form).unwrap().matcher();
    let (yes, thought) = (encode("yes"), encode("hm"));
    for _ in 0..2 {
        let mask = matcher.allowed().unwrap().unwrap();
        assert!(mask.contains(open) && mask.contains(yes[0]) && !mask.contains(close));
        assert_eq!(matcher.advance_while_allowed(&thought).unwrap(), 0);
        matcher.advance(&yes).unwrap();
        assert!(matcher.must_end());
        matcher.rollback(yes.len()).unwrap();
        matcher.advance(&[open]).unwrap();
        assert!(matcher.allowed().unwrap().is_none());
        matcher.advance(&thought).unwrap();
        matcher.advance(&[close]).unwrap();
        let mask = matcher.allowed().unwrap().unwrap();
        assert!(mask.contains(yes[0]) && !mask.contains(open));
        matcher.advance(&yes).unwrap();
        assert!(matcher.must_end());
        matcher.rollback(matcher.len()).unwrap();
    }
}

#[test]
fn arguments_that_are_not_json() {
    let text = |text: &str| FormPart::Text(text.to_owned());
    let end = "</p>";
    let free = || FormPart::TextWithout(vec![end.to_owned(), "<p".to_owned()]);
    let unit = FormPart::AnyOf(vec![vec![text("C")], vec![free()]]);
    let form = TextForm::Calls(CallsForm {
        optional: false,
        parallel: true,
        begin: String::new(),
        separator: "\n".to_owned(),
        end: String::new(),
        calls: vec![CallForm {
            begin: "<f=weather>\n".to_owned(),
            arguments: ArgumentsForm::Parts(vec![
                text("<p=city>\n"),
                free(),
                text("\n</p>\n"),
                text("<p=days>\n"),
                FormPart::JsonSchema(r#"{"type":"integer","minimum":0,"maximum":9}"#.to_owned()),
                text("\n</p>\n"),
                FormPart::AnyOf(vec![
                    vec![text("<p=unit>\n"), unit, text("\n</p>\n")],
                    Vec::new(),
                ]),
                FormPart::Repeated(vec![
                    text("<p=x>"),
                    FormPart::Regex("^[0-9]{2}$".into()),
                    text("</p>\n"),
                ]),
            ]),
            end: "</f>".to_owned(),
        }],
    });
    let call = "<f=weather>\n<p=city>\nRome\nand <Ostia\n</p>\n<p=days>\n7\n</p>\n</f>";
    let unit = call.replace("</f>", "<p=unit>\nKelvin\n</p>\n</f>");
    let more = unit.replace("</f>", "<p=x>12</p>\n<p=x>34</p>\n</f>");
    for text in [call, &unit, &more, &format!("{call}\n{more}")] {
        assert!(allows(form.clone(), text), "{text}");
    }
    for text in [
        "<f=weather>\n</f>",
        &call.replace('7', "10"),
        &more.replace("34", "345"),
    ] {
        assert!(!allows(form.clone(), text), "{text}");
    }
}

#[test]
fn one_of_several_forms() {
    let answer = TextForm::Regex("(?s:[^\\s\\{].*)?".to_owned());
    let form = TextForm::AnyOf(vec![hermes(false, true), answer, schema(r#"{"const":7}"#)]);
    for text in [ROME, "", "Hello {there}", "7"] {
        assert!(allows(form.clone(), text), "{text}");
    }
    assert!(!allows(form, "{}"));
    let form = TextForm::AnyOf(vec![hermes(true, true), TextForm::JsonObject]);
    for text in [
        ROME.to_owned(),
        format!("Well. {ROME}\n{OSLO}"),
        "{}".to_owned(),
    ] {
        assert!(allows(form.clone(), &text), "{text}");
    }
}
