//! The cost of parsing a request, whatever its body: memory, and text given to the tokenizer.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

use bytes::Bytes;
use refrain_output_parsers::{Delivery, ToolParserKind};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_tokenization::ModelFiles;
use serde_json::{Value, json};

use super::GenerateRequest;
use crate::config::{GatewayTuning, ModelConfig};
use crate::models::Models;

/// Counts the bytes that the current thread has allocated, and their peak.
struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static HELD_MAX: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // At the end of a thread its counters are gone.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = HELD_MAX.try_with(|most| most.set(most.get().max(held.get())));
    });
}

// SAFETY: all calls are passed on unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as promised by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both blocks exist while one is copied to the other.
        count(size as isize);
        // SAFETY: as promised by the caller.
        let moved = unsafe { System.realloc(place, layout, size) };
        count(-(layout.size() as isize));
        moved
    }
}

/// The model that the repository ships, with its context of 4,096 tokens.
fn shipped() -> Models {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../reference-engine/model");
    let config = ModelConfig {
        id: "m".into(),
        files: "x".into(),
        ..ModelConfig::default()
    };
    let signer = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
    let files = |_: &str| Ok(ModelFiles::from_dir(&folder)?);
    Models::new(&[config], &files, signer).unwrap()
}

fn chat(models: &Models, body: &Value) -> Result<GenerateRequest, ApiError> {
    GenerateRequest::chat(
        Bytes::from(body.to_string()),
        "a",
        models,
        &GatewayTuning::default(),
    )
}

fn completion(models: &Models, body: &Value) -> Result<GenerateRequest, ApiError> {
    GenerateRequest::completion(
        Bytes::from(body.to_string()),
        "a",
        models,
        &GatewayTuning::default(),
    )
}

fn says(text: &str) -> Value {
    json!({"model": "m", "messages": [{"role": "user", "content": text}]})
}

fn encoded_bytes(models: &Models) -> u64 {
    models.get("a", "m").unwrap().tokenizer.encoded_bytes()
}

/// Bytes of a large body.
const LARGE_BYTES: usize = 7_900_000;

/// Repeats `part` to the size of a large body.
fn many(part: &str) -> String {
    part.repeat(LARGE_BYTES / part.len())
}

/// A list of `item`s with the size of a large body.
fn list(item: &str) -> String {
    let mut items = many(&format!("{item},"));
    items.pop();
    format!("[{items}]")
}

/// Random letters, which form no words.
fn noise() -> String {
    let mut state = 7u64;
    let letters = std::iter::repeat_with(|| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        char::from(b'a' + ((state >> 33) % 26) as u8)
    });
    letters.take(LARGE_BYTES).collect()
}

/// Large bodies with their names, and whether each is a chat.
fn large_bodies() -> Vec<(&'static str, bool, String)> {
    let user = |content: String| format!("{{\"role\":\"user\",\"content\":{content}}}");
    let chat = |name, fields: String| (name, true, format!("{{\"model\":\"m\",{fields}}}"));
    let text = |name, prompt: String| {
        let body = format!("{{\"model\":\"m\",\"prompt\":{prompt}}}");
        (name, false, body)
    };
    let said = |name, content: String| {
        let message = user(format!("\"{content}\""));
        chat(name, format!("\"messages\":[{message}]"))
    };
    let beside = |name, field: &str, value: String| {
        let message = user("\"a\"".into());
        chat(
            name,
            format!("\"messages\":[{message}],\"{field}\":{value}"),
        )
    };
    let texts = vec![format!("\"{}\"", "word ".repeat(12_000)); 128].join(",");
    vec![
        said("one letter", many("a")),
        said("spaces", many(" ")),
        said("special tokens", many("<|im_end|>")),
        said("a word", noise()),
        said("escapes", many("\\n")),
        said("long escapes", many("\\u4f60")),
        said("three bytes each", many("\u{4f60}")),
        chat(
            "messages",
            format!("\"messages\":{}", list(&user("\"a\"".into()))),
        ),
        chat(
            "numbers for messages",
            format!("\"messages\":{}", list("0")),
        ),
        chat(
            "parts",
            format!(
                "\"messages\":[{}]",
                user(list("{\"type\":\"text\",\"text\":\"\"}"))
            ),
        ),
        chat(
            "a field of a message",
            format!(
                "\"messages\":[{{\"role\":\"user\",\"content\":\"a\",\"x\":{}}}]",
                list("[]")
            ),
        ),
        beside(
            "prediction",
            "prediction",
            format!("{{\"type\":\"content\",\"content\":\"{}\"}}", many("a")),
        ),
        beside(
            "parts of a prediction",
            "prediction",
            format!(
                "{{\"type\":\"content\",\"content\":{}}}",
                list("{\"type\":\"text\",\"text\":\"\"}")
            ),
        ),
        beside("tools", "tools", list("{}")),
        beside(
            "variables",
            "chat_template_kwargs",
            format!("{{\"x\":{}}}", list("0")),
        ),
        beside("a choice of tools", "tool_choice", list("0")),
        beside("stops", "stop", list("\"\"")),
        beside("tokens that stop", "stop_token_ids", list("1")),
        beside("keys of biases", "logit_bias", {
            let biases: Vec<String> = (0..500_000).map(|id| format!("\"{id}\":1")).collect();
            format!("{{{}}}", biases.join(","))
        }),
        text("a text", format!("\"{}\"", many("ab "))),
        text("texts", format!("[{texts}]")),
        text("empty texts", list("\"\"")),
        text("tokens", list("4")),
        text("large tokens", list("1024")),
        text("lists of tokens", list("[4]")),
    ]
}

#[test]
fn a_large_body_takes_a_few_times_its_bytes_and_is_refused_without_being_tokenized() {
    let models = shipped();
    for (name, is_chat, body) in large_bodies() {
        let bytes = body.len();
        let held = HELD.get();
        HELD_MAX.set(held);
        let read = if is_chat {
            GenerateRequest::chat
        } else {
            GenerateRequest::completion
        };
        let error =
            read(Bytes::from(body), "a", &models, &GatewayTuning::default()).expect_err(name);
        // The body was there before.
        let peak = (HELD_MAX.get() - held) as usize + bytes;
        let times = peak as f64 / bytes as f64;
        assert!(
            times <= 8.0,
            "{name} took {times:.1} times its {bytes} bytes"
        );
        assert_eq!(error.kind, ErrorKind::InvalidRequest, "{name}: {error:?}");
        assert!(encoded_bytes(&models) < 1_000, "{name} was tokenized");
    }
}

#[test]
fn a_large_body_of_which_nothing_is_used_is_no_fault() {
    let models = shipped();
    let mut body = says("a");
    body["padding"] = many("a").into();
    assert!(chat(&models, &body).is_ok());
}

#[test]
fn a_prompt_is_refused_from_the_first_token_that_does_not_fit_and_not_before() {
    let models = shipped();
    let tokenizer = models.get("a", "m").unwrap().tokenizer.clone();
    let line = "SELECT a FROM t;\n";
    let tokens = |lines: usize| tokenizer.encode(&line.repeat(lines)).unwrap().len();
    // The longest text of whole lines that leaves a place for the output.
    let (mut lines, mut too_many) = (0, 4096);
    while too_many - lines > 1 {
        let middle = (lines + too_many) / 2;
        if tokens(middle) < 4096 {
            lines = middle;
        } else {
            too_many = middle;
        }
    }
    let fits = line.repeat(lines);
    let request = completion(
        &models,
        &json!({"model": "m", "prompt": fits, "max_tokens": 1}),
    );
    assert_eq!(
        *request.unwrap().prompts[0].tokens,
        *tokenizer.encode_sequence(&fits).unwrap()
    );
    let long = line.repeat(lines + 200);
    let error = completion(&models, &json!({"model": "m", "prompt": long})).unwrap_err();
    assert_eq!(error.code.as_deref(), Some("context_length_exceeded"));
}

#[test]
fn a_prompt_that_cannot_fit_is_told_how_many_tokens_it_has_at_least() {
    let models = shipped();
    let long = "a b ".repeat(50_000);
    let refused = [
        chat(&models, &says(&long)),
        completion(&models, &json!({"model": "m", "prompt": long})),
        completion(&models, &json!({"model": "m", "prompt": ["a", long]})),
    ];
    for (error, param) in refused.into_iter().zip(["messages", "prompt", "prompt"]) {
        let error = error.unwrap_err();
        assert_eq!(error.code.as_deref(), Some("context_length_exceeded"));
        assert_eq!(error.param.as_deref(), Some(param));
        assert!(
            error.message.contains("context is 4096 tokens"),
            "{}",
            error.message
        );
        assert!(error.message.contains("at least"), "{}", error.message);
    }
    let mut predicts = says("a");
    predicts["prediction"] = json!({"type": "content", "content": long});
    let error = chat(&models, &predicts).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("prediction.content"));
    assert!(error.message.contains("at least"), "{}", error.message);
    assert!(encoded_bytes(&models) < 1_000);
}

#[test]
fn fields_of_both_kinds_are_read_in_one_pass_and_their_faults_keep_their_places() {
    let models = shipped();
    let parse = |body: &str| {
        let body = Bytes::from(body.to_owned());
        GenerateRequest::chat(body, "a", &models, &GatewayTuning::default())
            .map_err(|error| (error.param, error.message))
    };
    let message = r#""messages":[{"role":"user","content":"a"}]"#;
    let whole = format!(
        r#"{{{message},"n":2,"logprobs":true,"model":"m","top_logprobs":3,"tools":null,"x":[{{}}]}}"#
    );
    let request = parse(&whole).unwrap();
    assert_eq!(
        (request.choices_per_prompt, request.sampling.top_logprobs),
        (2, Some(3))
    );
    for (body, param) in [
        (
            format!(r#"{{"model":"m",{message},{message}}}"#),
            "messages",
        ),
        (format!(r#"{{"model":"m","model":"m",{message}}}"#), "model"),
        (
            format!(r#"{{"model":"m",{message},"logprobs":7}}"#),
            "logprobs",
        ),
        (
            format!(r#"{{"model":"m",{message},"tools":{{}}}}"#),
            "tools",
        ),
        (format!(r#"{{"model":"m",{message},"n":"x"}}"#), "n"),
        (r#"{"model":"m","messages":null}"#.into(), "messages"),
        (r#"{"model":"m","messages":[7]}"#.into(), "messages[0]"),
        (
            r#"{"model":"m","messages":[{"role":"user","content":"a","tool_calls":{}}]}"#.into(),
            "messages[0].tool_calls",
        ),
        (
            r#"{"model":"m","messages":[{"role":"user","content":[{"type":"text"}]}]}"#.into(),
            "messages[0].content[0].text",
        ),
    ] {
        let (found, text) = parse(&body).unwrap_err();
        assert!(
            found.as_deref() == Some(param) || text.contains(&format!("`{param}`")),
            "{body}: {found:?}, {text}"
        );
    }
    assert!(parse("[]").unwrap_err().1.contains("a JSON object"));
}

#[test]
fn the_shipped_model_calls_tools_in_the_form_that_its_template_tells() {
    let models = shipped();
    let model = models.get("a", "m").unwrap();
    assert_eq!(model.formats.tools_as, ToolParserKind::Llama3Json);
    assert!(model.shows_tools);
    let mut body = says("Weather for Oslo?");
    assert!(chat(&models, &body).unwrap().parsing.is_none());
    body["tools"] = json!([{"type": "function", "function": {"name": "get_weather"}}]);
    let parsing = chat(&models, &body).unwrap().parsing.unwrap();
    assert_eq!(parsing.tools[0].name, "get_weather");
    assert_eq!(parsing.delivery, Delivery::Whole);
}
