//! The cost of parsing a request, whatever its body: memory, and text given to the tokenizer.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

use bytes::Bytes;
use refrain_accounts::tenants::file::{Isolation, LimitsEntry};
use refrain_accounts::tenants::{Caller, StreamShape};
use refrain_output_parsers::{Delivery, ToolParserKind};
use refrain_protocol::scheduling::RequestClass;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_tokenization::ModelFiles;
use serde_json::{Value, json};

use super::{COMPLETION_MAX_TOKENS, ParsedRequest, RequestReader};
use crate::config::GatewayTuning;
use crate::models::{ModelConfig, Models};

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

fn read_chat(models: &Models, body: Bytes) -> Result<ParsedRequest, ApiError> {
    let reader = RequestReader {
        tenant: "a",
        models,
        limits: &GatewayTuning::default(),
        grammars: None,
        context_words: super::ContextWords::OpenAi,
        default_model: None,
        known_turns: None,
    };
    ParsedRequest::chat(body, &reader)
}

fn chat(models: &Models, body: &Value) -> Result<ParsedRequest, ApiError> {
    read_chat(models, Bytes::from(body.to_string()))
}

fn read_completion(models: &Models, body: Bytes) -> Result<ParsedRequest, ApiError> {
    let reader = RequestReader {
        tenant: "a",
        models,
        limits: &GatewayTuning::default(),
        grammars: None,
        context_words: super::ContextWords::OpenAi,
        default_model: None,
        known_turns: None,
    };
    ParsedRequest::completion(body, &reader, None, Some(COMPLETION_MAX_TOKENS))
}

fn completion(models: &Models, body: &Value) -> Result<ParsedRequest, ApiError> {
    read_completion(models, Bytes::from(body.to_string()))
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
        let read = if is_chat { read_chat } else { read_completion };
        let error = read(&models, Bytes::from(body)).expect_err(name);
        // The body was there before.
        let peak = (HELD_MAX.get() - held) as usize + bytes;
        let times = peak as f64 / bytes as f64;
        assert!(
            times <= 8.0,
            "{name} took {times:.1} times its {bytes} bytes"
        );
        assert_eq!(error.kind, ErrorKind::InvalidRequest, "{name}: {error:?}");
        // A single text of few bytes per token of the context is encoded rather than measured.
        let most = 16 * 4_096;
        assert!(encoded_bytes(&models) < most, "{name} was tokenized");
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
            error
                .message
                .contains("maximum context length is 4096 tokens"),
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
        read_chat(&models, body).map_err(|error| (error.param, error.message))
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
    assert_eq!(
        parse("[]").unwrap_err().1,
        "the body must be an object, not a list"
    );
}

#[test]
fn metadata_have_the_limits_of_openai() {
    let models = shipped();
    let pairs = |count: usize| -> serde_json::Map<String, Value> {
        (0..count)
            .map(|at| (format!("{at:064}"), json!("é".repeat(512))))
            .collect()
    };
    let of = |metadata: Value| asked(&models, json!({"metadata": metadata}));
    for allowed in [json!(null), json!({}), json!(pairs(16))] {
        assert!(of(allowed).is_ok());
    }
    for refused in [
        json!(pairs(17)),
        json!({"k".repeat(65): "v"}),
        json!({"k": "v".repeat(513)}),
        json!({"k": 1}),
        json!({"k": {"deep": "v"}}),
        json!(["k"]),
    ] {
        assert_eq!(of(refused).unwrap_err().0, "metadata");
    }
}

/// A caller who may do less than the request asks for.
fn held_caller() -> Caller {
    let mut caller = Caller {
        tenant: "a".parse().unwrap(),
        tenant_limits: LimitsEntry::default(),
        policy: Default::default(),
        key: None,
        fixed_key: None,
    };
    caller.policy.class_max = RequestClass::Rollout;
    caller.policy.isolation = Isolation::User;
    caller.policy.shape = Some(StreamShape::Size);
    caller.policy.hides_metrics = true;
    caller.policy.drafts.alpha = Some(2.0);
    caller
}

#[test]
fn a_request_has_the_standing_of_its_caller_as_soon_as_it_can_be_carried_out() {
    let models = shipped();
    let of_user = |user: &str| {
        let fields = json!({"user": user, "class": "interactive", "priority": "high"});
        asked(&models, fields).unwrap()
    };
    let mut caller = held_caller();
    let ann = of_user("ann").admit(&caller, false);
    assert!(
        ann.standing().scope.starts_with("a\u{1f}user:"),
        "{}",
        ann.standing().scope
    );
    assert!(ann.standing().shape == Some(StreamShape::Size) && ann.standing().hides_metrics);
    assert_eq!(ann.standing().class, RequestClass::Rollout);
    assert_eq!(ann.standing().weight, caller.policy.weight);
    assert_eq!(ann.standing().drafts.alpha, Some(2.0));
    assert!(ann.asked_urgency.is_urgent() && !ann.standing().urgency.is_urgent());
    let ben = of_user("ben").admit(&caller, true);
    assert_ne!(ben.standing().scope, ann.standing().scope);
    assert!(ben.standing().urgency.is_urgent());
    caller.policy = Default::default();
    let free = of_user("ann").admit(&caller, true);
    assert_eq!(
        (&*free.standing().scope, free.standing().class),
        ("a", RequestClass::Interactive)
    );
    assert!(
        free.standing().shape.is_none()
            && !free.standing().hides_metrics
            && free.standing().drafts.is_empty()
    );
}

/// The sampling of a chat with these fields, or the parameter at fault and its code.
fn asked(models: &Models, fields: Value) -> Result<ParsedRequest, (String, Option<String>)> {
    let mut body = says("a");
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    chat(models, &body).map_err(|error| (error.param.unwrap_or_default(), error.code))
}

#[test]
fn parameters_of_other_servers_are_carried_out() {
    let models = shipped();
    let ends = models.get("a", "m").unwrap().stop_token_ids.clone();
    let request = asked(
        &models,
        json!({"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "min_tokens": 3,
               "ignore_eos": true, "stop_token_ids": [9], "include_stop_str_in_output": true,
               "skip_special_tokens": false, "return_token_ids": true, "bad_words": [" note"],
               "stop": vec!["x"; 64], "user": "u", "metadata": {"a": "b"}, "guided_json": null,
               "length_penalty": 1, "early_stopping": false, "no_such_field": [1]}),
    )
    .unwrap();
    let sampling = &request.sampling;
    assert_eq!(
        (
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty
        ),
        (0.5, -0.5, 1.5)
    );
    assert_eq!((sampling.min_tokens, sampling.ignore_eos), (3, true));
    assert_eq!(sampling.stop_token_ids, [9]);
    let output = request.output;
    assert!(output.has_stop_text && output.shows_special && output.has_token_ids);
    assert_eq!(
        (request.stops.len(), request.unknown_fields),
        (64, vec!["no_such_field".to_owned()])
    );
    let tokenizer = &request.model.tokenizer;
    assert_eq!(sampling.bad_words, [" note"]);
    assert_eq!(sampling.bad_tokens[0], tokenizer.encode("note").unwrap());
    let request = asked(&models, json!({"stop_token_ids": [9, ends[0]]})).unwrap();
    assert_eq!(request.sampling.stop_token_ids, [&*ends, &[9]].concat());
    assert!(!request.sampling.depends_on_text());
}

#[test]
fn what_cannot_be_carried_out_is_refused_by_name() {
    let models = shipped();
    let unsupported = Some("unsupported_parameter".to_owned());
    for (field, value) in [
        ("structural_tag", json!("{}")),
        ("chat_template", json!("{{ messages }}")),
        ("logits_processors", json!(["a"])),
        ("use_beam_search", json!(true)),
        ("length_penalty", json!(0.5)),
        ("allowed_token_ids", json!([1])),
        ("echo", json!(true)),
    ] {
        let error = asked(&models, json!({ field: value })).unwrap_err();
        assert_eq!(error, (field.to_owned(), unsupported.clone()));
    }
    for (fields, param) in [
        (json!({"presence_penalty": 2.1}), "presence_penalty"),
        (json!({"frequency_penalty": -2.1}), "frequency_penalty"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"min_tokens": 5, "max_tokens": 4}), "min_tokens"),
        (json!({"min_tokens": -1}), "min_tokens"),
        (json!({"bad_words": [""]}), "bad_words"),
        (
            json!({"truncate_prompt_tokens": 0}),
            "truncate_prompt_tokens",
        ),
        (
            json!({"continue_final_message": true, "add_generation_prompt": true}),
            "continue_final_message",
        ),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"stop": vec!["x"; 65]}), "stop"),
        (json!({"priority": "urgent"}), "priority"),
    ] {
        assert_eq!(
            asked(&models, fields).unwrap_err(),
            (param.to_owned(), None)
        );
    }
}

#[test]
fn faults_are_told_in_plain_words() {
    let models = shipped();
    for (body, message) in [
        (r#"[]"#, "the body must be an object, not a list"),
        (r#"7"#, "the body must be an object, not a whole number"),
        (r#"{"model":"m"}"#, "messages: is missing"),
        (
            r#"{"model":"m","messages":[],"temperature":"hot"}"#,
            "temperature: must be a number, not a text",
        ),
        (
            r#"{"model":"m","messages":[],"n":1.5}"#,
            "n: must be a whole number that is not negative, not a number with a decimal point",
        ),
        (
            r#"{"model":"m","messages":[],"seed":"x"}"#,
            "seed: must be a whole number, not a text",
        ),
        (
            r#"{"model":"m","messages":[],"stream":1}"#,
            "stream: must be true or false, not a whole number",
        ),
        (
            r#"{"model":"m","messages":[],"priority":"urgent"}"#,
            "priority: must be low, normal, high or a whole number",
        ),
        (
            r#"{"model":"m","messages":[],"speculation":"warp"}"#,
            "speculation: must be one of \"auto\", \"suffix\", \"eagle3\", \"draft_model\", \"off\"",
        ),
        (
            r#"{"model":"m","messages":[],"stop":7}"#,
            "stop: must be a text or a list of texts, not a whole number",
        ),
        (
            r#"{"model":"m","messages":[],"stream_options":[]}"#,
            "stream_options: must be an object, not a list",
        ),
    ] {
        let body = Bytes::from(body.to_owned());
        let error = read_chat(&models, body).unwrap_err();
        assert_eq!(error.message, message);
    }
}

#[test]
fn prompts_end_where_the_client_wants() {
    let models = shipped();
    let tokenizer = models.get("a", "m").unwrap().tokenizer.clone();
    let prompt = |fields: Value| {
        let mut body = json!({"model": "m", "messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "so far "}]});
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        let tokens = chat(&models, &body).unwrap().prompts.remove(0).tokens;
        (tokenizer.decode(&tokens), tokens.to_vec())
    };
    let (opened, _) = prompt(json!({}));
    let (closed, all) = prompt(json!({"add_generation_prompt": false}));
    let (continued, _) = prompt(json!({"continue_final_message": true}));
    assert!(
        opened.len() > closed.len() && opened.starts_with(&closed),
        "{opened:?}, {closed:?}"
    );
    assert!(continued.trim_end().ends_with("so far"), "{continued:?}");
    let (_, last) = prompt(json!({"add_generation_prompt": false, "truncate_prompt_tokens": 3}));
    assert_eq!(last, all[all.len() - 3..]);
    let long = json!({"model": "m", "prompt": "a b ".repeat(5_000), "truncate_prompt_tokens": -1, "max_tokens": 1});
    assert_eq!(
        completion(&models, &long).unwrap().prompts[0].tokens.len(),
        4095
    );
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
