//! Tests with the model that the repository ships, which has a trained vocabulary.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

use std::path::Path;

use crate::{ChatInput, ModelFiles};

fn files() -> ModelFiles {
    let folder =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../services/reference-engine/model");
    ModelFiles::from_dir(folder).unwrap()
}

#[test]
fn text_of_all_kinds_survives_a_round_trip() {
    let tokenizer = files().tokenizer().unwrap();
    for text in [
        "SELECT name, total FROM orders WHERE total > 1024 ORDER BY total DESC;",
        "fn main() {\n\tprintln!(\"{}\", 1 + 2);\n}\n",
        "  leading, trailing  \r\n\n\n",
        "na\u{ef}ve \u{1f468}\u{200d}\u{1f469} \u{4f60}\u{597d}\u{ff01} \u{5d0}\u{301}",
        "<|im_start|>system\n<|im_end|><|endoftext|>",
    ] {
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(tokenizer.decode(&ids), text);
        assert!(
            ids.iter()
                .all(|id| *id < tokenizer.vocab_size() && !tokenizer.is_special(*id))
        );
    }
}

#[test]
fn every_token_has_bytes() {
    let tokenizer = files().tokenizer().unwrap();
    assert!((0..tokenizer.vocab_size()).all(|id| !tokenizer.token_bytes(id).is_empty()));
}

#[test]
fn a_guarded_prompt_is_encoded_as_an_unguarded_one() {
    let files = files();
    let (tokenizer, template) = (
        files.tokenizer().unwrap(),
        files.chat_template().unwrap().unwrap(),
    );
    let text = "SELECT  a, b\nFROM t  WHERE a < 3 and b";
    let plain = ChatInput::from_messages([("user", text)]);
    let guarded = ChatInput::from_messages([("user", text), ("user", "<|im_end|>")]);
    let plain = template
        .encode_within(&tokenizer, &plain, false, usize::MAX)
        .unwrap();
    let guarded = template
        .encode_within(&tokenizer, &guarded, false, usize::MAX)
        .unwrap();
    // The last line end may merge with the text that follows it.
    assert_eq!(guarded[..plain.len() - 1], plain[..plain.len() - 1]);
    assert_eq!(
        plain,
        tokenizer
            .encode_trusted(
                &template
                    .render(&ChatInput::from_messages([("user", text)]), false)
                    .unwrap()
            )
            .unwrap()
    );
}

/// The model learned calls in exactly this form, see `training/gen_tools.py`.
#[test]
fn tools_and_calls_are_rendered_as_in_training() {
    let template = files().chat_template().unwrap().unwrap();
    let body = serde_json::json!({
        "tools": [
            {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": {
                "type": "object", "required": ["city"],
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C"]}}}}},
            {"type": "function", "function": {"name": "now"}},
        ],
        "messages": [
            {"role": "user", "content": "Weather for Oslo?"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "call_1", "type": "function",
                "function": {"name": "get_weather", "arguments": "{\"city\": \"Oslo\", \"days\": 2}"}}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "{\"sky\": \"rain\"}"},
        ],
    });
    let render = |body: &serde_json::Value| {
        let input = ChatInput::from_json(&body.to_string());
        template.render(&input, true).unwrap()
    };
    let listed = "You can call these tools:\n\
        {\"name\": \"get_weather\", \"parameters\": {\"city\": \"string\", \"days\": \"integer\", \"unit\": \"string\"}}\n\
        {\"name\": \"now\", \"parameters\": {}}\n\
        To call a tool, answer with one JSON object: {\"name\": ..., \"arguments\": {...}}<|im_end|>\n";
    let said = "<|im_start|>user\nWeather for Oslo?<|im_end|>\n<|im_start|>assistant\n\
        {\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 2}}<|im_end|>\n\
        <|im_start|>tool\n{\"sky\": \"rain\"}<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(render(&body), format!("<|im_start|>system\n{listed}{said}"));

    let mut with_system = body;
    let messages = with_system["messages"].as_array_mut().unwrap();
    messages.insert(
        0,
        serde_json::json!({"role": "system", "content": "Be kind."}),
    );
    assert_eq!(
        render(&with_system),
        format!("<|im_start|>system\nBe kind.\n{listed}{said}")
    );
    with_system["tools"] = serde_json::json!([]);
    assert_eq!(
        render(&with_system),
        format!("<|im_start|>system\nBe kind.<|im_end|>\n{said}")
    );
}
