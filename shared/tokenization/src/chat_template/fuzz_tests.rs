//! Fuzz targets of chat templates. `cargo test` runs them for a second each, and `cargo bolero test -p
//! refrain-tokenization chat_template::fuzz_tests::NAME` runs one for as long as wanted, guided by coverage.

use super::*;
use crate::testing::byte_level_files;

/// Instructions per rendering, so that many renderings fit into a second.
const FUEL: u64 = 20_000;

/// Parts of templates. None of them contains a special token, or joins texts to one.
const TEMPLATE_PARTS: [&str; 40] = [
    "{% for m in messages %}",
    "{% for m in messages[1:] %}",
    "{% for t in tools or [] %}",
    "{% for i in range(10000) %}",
    "{% for c in x %}",
    "{% else %}",
    "{% endfor %}",
    "{% if m.role == 'user' and loop.first %}",
    "{% elif x is defined and x is string %}",
    "{% endif %}",
    "{% continue %}",
    "{% break %}",
    "{% set x = m.content %}",
    "{% set x = messages %}",
    "{% set x %}",
    "{% endset %}",
    "{% macro f(x, n=3) %}",
    "{{ f(x) }}",
    "{{ f(f) }}",
    "{% endmacro %}",
    "{% include 'chat_template' %}",
    "{% extends 'chat_template' %}",
    "{% block b %}",
    "{% endblock %}",
    "{{ m.content }}",
    "{{ m['role'].upper() }}",
    "{{ x.split('</think>')[-1].lstrip('\\n') }}",
    "{{ x[1:][:-1] | trim | length }}",
    "{{ messages | tojson(indent=99) }}",
    "{{ tools | tojson }}",
    "{{ x | tojson }}",
    "{{ -x / 0 ** 99 % x // 7 }}",
    "{{ raise_exception(x) }}",
    "text {# comment #}\n",
    "{% generation %}",
    "{%- endgeneration -%}",
    "{{ '%s %5.2f' % (x, 1) }}",
    "{{ ('%(a)s' ~ x) % m }}",
    "{{ strftime_now('%Y-%-d %c') }}",
    "{{ loop.previtem.role ~ messages | string }}",
];

/// Texts of users, some of which contain special tokens or could make one together.
const USER_TEXTS: [&str; 10] = [
    "",
    "hello",
    "<|im_end|>",
    "<|im_",
    "end|>",
    "<|im_start|>system\n<",
    "</think>\n",
    "\u{F0000}<\u{10FFFD}|im_end|>",
    "na\u{ef}ve \u{1f980}",
    "{{ messages }}{% for",
];

fn chat(texts: &[(u8, u8)]) -> ChatInput {
    let text = |at: u8| USER_TEXTS[usize::from(at) % USER_TEXTS.len()];
    let pairs = texts
        .iter()
        .map(|&(role, content)| (text(role), text(content)));
    ChatInput::from_messages(pairs)
}

/// Renders a template, if it compiles. Returns the tokens, if it accepts the messages.
fn run(source: &str, texts: &[(u8, u8)]) -> Option<(Tokenizer, Vec<TokenId>)> {
    let mut template = ChatTemplate::of_source(source).ok()?;
    template.environment.set_fuel(Some(FUEL));
    let tokenizer = byte_level_files().tokenizer().expect("a sound file");
    let input = chat(texts);
    let tokens = template.encode_within(&tokenizer, &input, true, 10_000);
    Some((tokenizer, tokens.ok()?))
}

/// No template makes a special token of the text of users, and none panics or runs without end.
#[test]
fn templates_of_common_parts_are_bounded_and_make_no_special_tokens() {
    bolero::check!()
        .with_type::<(Vec<u8>, Vec<(u8, u8)>)>()
        .with_max_len(64)
        .for_each(|(parts, texts)| {
            let part = |at: &u8| TEMPLATE_PARTS[usize::from(*at) % TEMPLATE_PARTS.len()];
            let source: String = parts.iter().map(part).collect();
            if let Some((tokenizer, tokens)) = run(&source, texts) {
                let special = tokens.iter().find(|token| tokenizer.is_special(**token));
                assert_eq!(special, None, "{source}");
            }
        });
}

/// Any text at all is a template or an error.
#[test]
fn templates_of_any_text_do_not_panic() {
    bolero::check!()
        .with_type::<(String, Vec<(u8, u8)>)>()
        .with_max_len(256)
        .for_each(|(text, texts)| {
            let _ = run(text, texts);
            let _ = run(&format!("{{{{ {text} }}}}"), texts);
            let _ = run(&format!("{{% {text} %}}"), texts);
        });
}
