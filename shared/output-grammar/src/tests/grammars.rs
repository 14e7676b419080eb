//! Grammars in EBNF.

use refrain_protocol::engine::TextForm;

use super::{allows, refusal};

fn ebnf(text: &str) -> TextForm {
    TextForm::Ebnf(text.to_owned())
}

const JSON: &str = r##"# JSON, as llama.cpp has it.
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"##;

#[test]
fn the_json_of_llama_cpp() {
    for text in [
        "{}",
        r#"{"a": [1, 2.5, -3e1, true, null, "x\n\u00e4"], "b": {"c": []}}"#,
        "{\"name\":\n  \"v/w\"}",
    ] {
        assert!(allows(ebnf(JSON), text), "{text}");
    }
    for text in ["[1]", "{\"a\": 01x}", "{\"a\" 1}", "{\"a\": 1"] {
        assert!(!allows(ebnf(JSON), text), "{text}");
    }
}

#[test]
fn grammars_without_recursion_match_in_every_way() {
    // A longest match of one part would leave nothing for the next.
    let form =
        ebnf("root ::= word \"ing\" | [0-9]{2,3} digit\nword ::= [a-z]+\ndigit ::= \"7\" # last\n");
    for text in ["singing", "aing", "127", "1237"] {
        assert!(allows(form.clone(), text), "{text}");
    }
    for text in ["ing", "sing a", "27", "12"] {
        assert!(!allows(form.clone(), text), "{text}");
    }
    assert!(allows(
        ebnf("root ::= [/\\]^&-]{2,} . \"\\u00e9\""),
        "^/-x\u{e9}"
    ));
}

#[test]
fn errors_have_a_place() {
    for (text, place) in [
        ("root = \"a\"", "line 1, column 6"),
        ("root ::= \"a\nb ::= \"c\"", "line 1, column 12"),
        ("root ::= (\"a\" | b", "line 1, column 18"),
        ("root ::= [z-a]", "line 1, column 14"),
        ("root ::= \"a\"{3,2}", "line 1, column 14"),
        ("root ::= \"\\q\"", "line 1, column 13"),
    ] {
        let message = refusal(ebnf(text)).to_string();
        assert!(
            message.ends_with(&format!("(at {place})")),
            "{message} for {text}"
        );
    }
    for text in ["", "start ::= \"a\"", "root ::= other", "root ::= root"] {
        refusal(ebnf(text));
    }
    refusal(ebnf(&format!(
        "root ::= {}\"a\"{}",
        "(".repeat(500),
        ")".repeat(500)
    )));
}
