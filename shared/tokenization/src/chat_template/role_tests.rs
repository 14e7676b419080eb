//! No text of a message is lost, whatever a template makes of roles and places.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::tests::{input, template};
use super::*;

/// Leaves roles out that it does not know, as Qwen3's does.
const KNOWS_FOUR_ROLES: &str = "{% for m in messages %}{% if m.role in ['system', 'user'] %}<{{ m.role }}>{{ m.content }}</>\
    {% elif m.role == 'assistant' %}<a>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}</>\
    {% elif m.role == 'tool' %}<t>{{ m.content }}</>{% endif %}{% endfor %}";

/// Wants one system message, at the beginning, as Qwen3.5's does.
const ONE_SYSTEM: &str = "{% for m in messages %}\
    {% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('System message must be at the beginning') }}{% endif %}\
    <s>{{ m.content | trim }}</>\
    {% elif m.role == 'user' %}<u>{{ m.content | trim }}</>\
    {% elif m.role == 'assistant' %}<a>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}</>\
    {% elif m.role == 'tool' %}<t>{{ m.content }}</>\
    {% else %}{{ raise_exception('Unexpected message role') }}{% endif %}{% endfor %}";

/// Wants turns to alternate and knows no system, as Gemma's does.
const ALTERNATES: &str = "{% for m in messages %}\
    {% if m.role not in ['user', 'assistant'] or (m.role == 'user') != (loop.index0 % 2 == 0) %}\
    {{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}\
    <{{ m.role }}>{{ m.content }}</>{% endfor %}";

/// Shows the last system message, calls without the text beside them, and no results, as first ones of DeepSeek's do.
const SHOWS_THE_LAST: &str = "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}\
    {% set ns.s = m.content %}{% endif %}{% endfor %}{{ ns.s }}{% for m in messages %}{% if m.role == 'user' %}\
    <u>{{ m.content }}</>{% elif m.role == 'assistant' %}<a>{% if m.tool_calls %}{% for c in m.tool_calls %}\
    [{{ c.function.name }}]{% endfor %}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}</>{% endif %}{% endfor %}";

const ALL: [&str; 4] = [KNOWS_FOUR_ROLES, ONE_SYSTEM, ALTERNATES, SHOWS_THE_LAST];

fn say(role: &str, text: &str) -> Value {
    json!({"role": role, "content": text})
}

fn call(text: &str) -> Value {
    let call = json!({"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    json!({"role": "assistant", "content": text, "tool_calls": [call]})
}

fn prompt(source: &str, messages: &[Value]) -> Result<String, TokenizationError> {
    let body = json!({ "messages": messages }).to_string();
    template(source).render(&input(&body), true)
}

#[test]
fn a_developer_is_the_system_where_no_template_knows_it() {
    let chat = [say("developer", "Be a coder."), say("user", "Hi.")];
    for (source, expected) in [
        (KNOWS_FOUR_ROLES, "<system>Be a coder.</><user>Hi.</>"),
        (ONE_SYSTEM, "<s>Be a coder.</><u>Hi.</>"),
        (ALTERNATES, "<user>Be a coder.\n\nHi.</>"),
        (SHOWS_THE_LAST, "Be a coder.<u>Hi.</>"),
    ] {
        assert_eq!(prompt(source, &chat).unwrap(), expected);
    }
}

#[test]
fn leading_instructions_are_one_message_where_the_template_wants_one() {
    let chat = [
        say("system", "Be kind."),
        say("developer", "Be a coder."),
        say("user", "Hi."),
    ];
    for (source, expected) in [
        (
            KNOWS_FOUR_ROLES,
            "<system>Be kind.</><system>Be a coder.</><user>Hi.</>",
        ),
        (ONE_SYSTEM, "<s>Be kind.\n\nBe a coder.</><u>Hi.</>"),
        (ALTERNATES, "<user>Be kind.\n\nBe a coder.\n\nHi.</>"),
        (SHOWS_THE_LAST, "Be kind.\n\nBe a coder.<u>Hi.</>"),
    ] {
        assert_eq!(prompt(source, &chat).unwrap(), expected);
    }
}

#[test]
fn later_instructions_stay_in_their_place_so_that_the_beginning_does_not_change() {
    let begins = [say("system", "Be kind."), say("user", "Hi.")];
    let goes_on = [begins.as_slice(), &[say("system", "It is noon.")]].concat();
    for (source, expected) in [
        (
            KNOWS_FOUR_ROLES,
            "<system>Be kind.</><user>Hi.</><system>It is noon.</>",
        ),
        (ONE_SYSTEM, "<s>Be kind.</><u>Hi.</><u>It is noon.</>"),
        (ALTERNATES, "<user>Be kind.\n\nHi.\n\nIt is noon.</>"),
        (SHOWS_THE_LAST, "Be kind.<u>Hi.</><u>It is noon.</>"),
    ] {
        let (before, after) = (prompt(source, &begins), prompt(source, &goes_on).unwrap());
        assert_eq!(after, expected);
        assert!(after.starts_with(before.unwrap().trim_end_matches("</>")));
    }
}

#[test]
fn texts_beside_calls_and_results_are_carried_to_where_they_are_shown() {
    let chat = [say("user", "Hi."), call("I look."), say("tool", "rain")];
    for (source, expected) in [
        (ONE_SYSTEM, "<u>Hi.</><a>I look.[f]</><t>rain</>"),
        (SHOWS_THE_LAST, "<u>Hi.</><a>I look.</><a>[f]</><u>rain</>"),
    ] {
        assert_eq!(prompt(source, &chat).unwrap(), expected);
    }
}

#[test]
fn what_a_template_cuts_out_of_a_text_is_no_loss() {
    let cuts = "{% for m in messages %}<{{ m.role }}>{{ m.content.replace('/no_think', '') | trim | tojson }}</>{% endfor %}";
    for (role, text) in [
        ("system", "/no_think"),
        ("user", "/no_think\nSay \"a\"\nand \"b\""),
        ("user", "{\"degrees\": 12}"),
        ("assistant", "<think>\nhm\n</think>\n\n4"),
        ("user", "  ...  "),
    ] {
        let chat = [say("user", "Hi."), say(role, text)];
        assert!(prompt(cuts, &chat).is_ok(), "{role}: {text}");
    }
    let chat = [
        say("user", "2+2?"),
        say("assistant", "<think>hm</think>4"),
        say("user", "So?"),
    ];
    let expected = "<u>2+2?</><a>4</><u>So?</>";
    assert_eq!(prompt(SHOWS_THE_LAST, &chat).unwrap(), expected);
}

#[test]
fn a_chat_that_no_arrangement_shows_is_refused_by_its_role() {
    let last_only = "{{ messages[-1].content }}";
    let error = prompt(last_only, &[say("user", "one"), say("assistant", "two")]).unwrap_err();
    assert!(
        matches!(&error, TokenizationError::NotShown(role) if role == "user"),
        "{error}"
    );
    let error = prompt(ALTERNATES, &[say("assistant", "one")]).unwrap_err();
    assert!(matches!(error, TokenizationError::Refused(_)), "{error}");
}

#[test]
fn the_search_for_lost_texts_ends() {
    let messages: Vec<_> = (0..2_000).map(|_| say("user", "\"x\"")).collect();
    let shown = "\\\"x\\\"".repeat(2_000);
    let body = json!({ "messages": messages }).to_string();
    let value = super::Value::from(input(&body).messages().0.clone());
    assert_eq!(lost_role(&value, &shown), None);
    assert_eq!(lost_role(&value, "y"), Some("user".to_owned()));
}

fn messages() -> impl Strategy<Value = Vec<Value>> {
    let roles = ["system", "developer", "user", "assistant", "calls", "tool"];
    let kinds = (
        proptest::sample::select(roles.to_vec()),
        0..3_u8,
        "[b-z]{9}",
    );
    proptest::collection::vec(kinds, 1..8).prop_map(|kinds| {
        let each = kinds.into_iter().enumerate().map(|(place, (role, form, text))| {
            let text = format!("{text}{place}x");
            let content = match form {
                0 => json!(text),
                1 => json!(format!(" {text}\n")),
                _ => json!([{"type": "text", "text": text}, {"type": "text", "text": format!("B{text}")}]),
            };
            let mut message = match role {
                "calls" => call(""),
                role => say(role, ""),
            };
            message["content"] = content;
            message
        });
        each.collect()
    })
}

fn texts(message: &Value) -> Vec<String> {
    match &message["content"] {
        Value::String(text) => vec![text.trim().to_owned()],
        parts => {
            let parts = parts.as_array().into_iter().flatten();
            parts
                .filter_map(|part| part["text"].as_str().map(str::to_owned))
                .collect()
        }
    }
}

proptest! {
    #[test]
    fn a_prompt_has_the_text_of_every_message(messages in messages(), source in 0..ALL.len()) {
        match prompt(ALL[source], &messages) {
            Ok(prompt) => {
                for text in messages.iter().flat_map(texts) {
                    prop_assert!(prompt.contains(&text), "{text} is not in {prompt}");
                }
            }
            // Only the one that wants turns to alternate has a reason to refuse one of these chats.
            Err(error) => prop_assert!(ALL[source] == ALTERNATES, "{error}"),
        }
    }
}
