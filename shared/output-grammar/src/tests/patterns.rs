//! Grammars of texts that stand in JSON: what they allow, and which of them cannot be written so.

use std::fmt::Write as _;

use refrain_protocol::engine::TextForm;
use serde_json::{Value, json};

use super::{allows, encode, matcher, schema};
use crate::text_pattern;

/// The grammar of patches as Codex sends it with its tool `apply_patch`.
const PATCHES: &str = r#"
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"#;

fn lark(text: &str) -> TextForm {
    TextForm::Lark(text.to_owned())
}

/// The schema of a tool's argument that follows a grammar.
fn argument(grammar: &TextForm) -> TextForm {
    let pattern = text_pattern(grammar).unwrap();
    let input = json!({"type": "string", "pattern": pattern});
    let schema_of =
        json!({"type": "object", "properties": {"input": input}, "required": ["input"]});
    schema(&schema_of.to_string())
}

fn allows_input(grammar: &TextForm, input: &str) -> bool {
    let written = format!("{{\"input\": {}}}", Value::from(input));
    allows(argument(grammar), &written)
}

#[test]
fn patches_of_codex_are_told_from_other_texts() {
    let patches = lark(PATCHES);
    let patch = |body: &str| format!("*** Begin Patch\n{body}*** End Patch");
    for body in [
        "*** Add File: a/b.py\n+print(\"a\\n\")\n+\n",
        "*** Delete File: ä ö.txt\n",
        "*** Update File: a\n@@ def f():\n-\told </parameter>\n+\t\"new\" \\d 🙂\n keep\n*** End of File\n",
        "*** Update File: a\n*** Move to: b\n@@\n-x\n+y\n*** Delete File: c\n",
    ] {
        assert!(allows_input(&patches, &patch(body)), "{body}");
        assert!(
            allows_input(&patches, &format!("{}\n", patch(body))),
            "{body}"
        );
    }
    for input in [
        "",
        "*** Begin Patch\n*** End Patch",
        &patch("*** Add File: a\n"),
        &patch("*** Add File: a\nprint()\n"),
        &patch("*** Update File: \n+a\n"),
        &patch("*** Move to: b\n"),
        &format!("{}more", patch("*** Delete File: a\n")),
        "*** Begin Patch\n*** Delete File: a\n",
    ] {
        assert!(!allows_input(&patches, input), "{input}");
    }
}

#[test]
fn long_patches_stay_within_the_limits() {
    let mut patch = "*** Begin Patch\n*** Update File: a.rs\n".to_owned();
    for line in 0..3_000 {
        let sign = [" ", "+", "-"][line % 3];
        let _ = writeln!(
            patch,
            "{sign}\tlet name_{line} = \"text {}\"; // {line:x}",
            line * 7919
        );
    }
    patch.push_str("*** End Patch\n");
    let mut matcher = matcher(argument(&lark(PATCHES)));
    for token in encode(&format!("{{\"input\": {}}}", Value::from(patch))) {
        assert!(matcher.allowed().unwrap().unwrap().contains(token));
        matcher.advance(&[token]).unwrap();
    }
    assert!(matcher.may_end().unwrap());
}

#[test]
fn the_signs_of_lark_mean_the_same_in_a_pattern() {
    let ignoring = "start: a \",\" a\na: WORD [\"!\"]\n%import common (WORD, INT)\n%ignore \" \"\n%ignore /\\t/";
    for (grammar, right, wrong) in [
        (
            "start: \"a\"i /B/i | \"a.b\"",
            &["aB", "Ab", "a.b"][..],
            &["axb", "a"][..],
        ),
        (
            "start: \"a\"..\"c\" ~ 2..3",
            &["ab", "cab"],
            &["a", "abca", "ad"],
        ),
        (
            "start: [x] (\"y\" | \"z\")+\nx: \"x\" ~2 // twice\n",
            &["y", "xxzy"],
            &["xy", "xx"],
        ),
        (
            "?start.2: _a -> b\n    | C # or\n!_a: \"a\"\nC.1: \"\\\"\\u00e9\\n\"",
            &["a", "\"é\n"],
            &["C"],
        ),
        (ignoring, &["a,b", " a \t!,b "], &["a b", "a;b"]),
        (
            "start: N \"/\" S\n%import common.SIGNED_NUMBER -> N\n%import common.ESCAPED_STRING -> S",
            &["-1.5e3/\"a\\\"\"", "7/\"\""],
            &["x/\"\"", "1/\"a"],
        ),
    ] {
        for text in right {
            assert!(allows_input(&lark(grammar), text), "{grammar} {text}");
        }
        for text in wrong {
            assert!(!allows_input(&lark(grammar), text), "{grammar} {text}");
        }
    }
    let regex = TextForm::Regex("^[a-z]+|\\d{2}$".to_owned());
    assert!(allows_input(&regex, "abc") && allows_input(&regex, "42"));
    assert!(!allows_input(&regex, "abc42"));
}

#[test]
fn what_is_no_regular_expression_is_refused() {
    let doubled = (0..30).fold("start: r0\n".to_owned(), |text, rule| {
        format!("{text}r{rule}: r{} r{}\n", rule + 1, rule + 1)
    });
    let deep = (0..100).fold("start: r0\n".to_owned(), |text, rule| {
        format!("{text}r{rule}: r{}\n", rule + 1)
    });
    for grammar in [
        "start: \"(\" start \")\" | \"x\"",
        "start: a\na: b\nb: a",
        "start: missing",
        "begin: \"a\"",
        "start: \"a",
        "start: /a",
        "start: /a/x",
        "start: (\"a\"",
        "start: \"a\")",
        "start: [\"a\")",
        "start: \"ab\"..\"c\"",
        "start: \"a\" ~ 5..2",
        "start: \"a\"\nstart: \"b\"",
        "start: A\n%import common.NONE",
        "start: A\n%import .other (A)",
        "start: A\n%declare A",
        "start: sep{\"a\"}",
        "start: %json {}",
        "",
        "\u{0}",
        &format!("{doubled}r30: \"a\""),
        &format!("{deep}r100: \"a\""),
        &format!("start: \"{}\"", "a".repeat(70_000)),
    ] {
        let shown: String = grammar.chars().take(60).collect();
        assert!(text_pattern(&lark(grammar)).is_err(), "{shown}");
    }
    let long = TextForm::Regex("a".repeat(20_000));
    assert!(text_pattern(&long).is_err());
    assert!(text_pattern(&TextForm::JsonObject).is_err());
}
