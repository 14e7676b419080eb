//! Tests that hold for every dialect: documented streams are read, and no event makes a decoder panic.

use std::sync::Arc;
use std::time::Duration;

use refrain_protocol::engine::{
    ArgumentsForm, CallForm, CallsForm, OutputForm, Sampling, TextForm,
};
use refrain_protocol::{NamespaceId, RequestId};
use refrain_tokenization::testing::byte_level_files;
use serde_json::json;

use super::*;
use crate::engine::call_body::CallBody;
use crate::engine::sse::SseParser;

/// The pieces of a recorded response, up to its first error.
pub(super) fn decode_recorded(
    mut decoder: Box<dyn Decoder>,
    recorded: &str,
) -> Result<Vec<Generated>, ApiError> {
    let mut parser = SseParser::default();
    parser.push(recorded.as_bytes().to_vec().into());
    let mut pieces = VecDeque::new();
    while let Some(data) = parser.next_event().expect("events of ordinary length") {
        if *data == *b"[DONE]" {
            decoder.done(&mut pieces);
        } else {
            decoder.decode(&data, &mut pieces)?;
        }
    }
    Ok(pieces.into())
}

/// A request.
pub(super) fn test_request(tokens: &[TokenId], sampling: Sampling) -> GenerateRequest {
    GenerateRequest {
        request: RequestId(0xab),
        call: 0xef,
        namespace: NamespaceId(0xcd),
        tokens: tokens.to_vec(),
        prompt_len: tokens.len() as u32,
        tokens_max: 7,
        sampling,
        priority: None,
        attached: None,
    }
}

/// The decoder of a dialect for a request with or without log-probabilities.
fn decoder(dialect: &dyn Dialect, top_logprobs: Option<u32>) -> Box<dyn Decoder> {
    let sampling = Sampling {
        top_logprobs,
        ..Sampling::default()
    };
    dialect.decoder(&test_request(&[1], sampling))
}

/// The tokens of pieces, and the pieces before and after them.
fn summary(pieces: &[Generated]) -> (Option<u32>, Vec<TokenId>, Option<GeneratedEnd>) {
    let mut cached = None;
    let mut all = Vec::new();
    let mut end = None;
    for piece in pieces {
        match piece {
            Generated::Cached { tokens } => cached = Some(*tokens),
            Generated::Weights { .. } => {}
            Generated::Tokens { tokens, .. } => all.extend(tokens),
            Generated::End(reason) => end = Some(*reason),
        }
    }
    (cached, all, end)
}

#[test]
fn a_documented_stream_of_sglang_is_read() {
    let recorded = include_str!("sglang/documented/stream.sse");
    let pieces = decode_recorded(decoder(&SgLang, None), recorded).unwrap();
    let expected = vec![523, 524, 1354, 490];
    assert_eq!(
        summary(&pieces),
        (Some(4), expected, Some(GeneratedEnd::Stop))
    );
}

#[test]
fn a_documented_stream_of_tensorrt_llm_is_read() {
    let recorded = include_str!("tensorrt_llm/documented/stream.sse");
    let dialect = TensorRtLlm { model: "m".into() };
    let pieces = decode_recorded(decoder(&dialect, None), recorded).unwrap();
    let expected = vec![523, 524, 1354, 490];
    assert_eq!(
        summary(&pieces),
        (Some(4), expected, Some(GeneratedEnd::Length))
    );
}

#[test]
fn a_documented_stream_of_text_is_read() {
    let recorded = include_str!("text_only/documented/stream.sse");
    let tokenizer = Arc::new(byte_level_files().tokenizer().unwrap());
    let dialect = TextOnly {
        model: "m".into(),
        tokenizer: tokenizer.clone(),
    };
    let pieces = decode_recorded(decoder(&dialect, None), recorded).unwrap();
    let (cached, tokens, end) = summary(&pieces);
    assert_eq!((cached, end), (None, Some(GeneratedEnd::Stop)));
    assert_eq!(tokenizer.decode(&tokens), "hello é 😀");
}

/// The fields that any dialect reads.
const FIELDS: &[&str] = &[
    "choices",
    "index",
    "text",
    "token_ids",
    "logprobs",
    "token_logprobs",
    "top_logprobs",
    "finish_reason",
    "stop_reason",
    "usage",
    "prompt_tokens_details",
    "cached_tokens",
    "error",
    "code",
    "message",
    "content",
    "tokens",
    "stop",
    "stop_type",
    "tokens_predicted",
    "prompt_progress",
    "cache",
    "completion_probabilities",
    "id",
    "logprob",
    "output_ids",
    "meta_info",
    "completion_tokens",
    "output_token_logprobs",
    "output_top_logprobs",
    "type",
    "matched",
    "token_id:5",
];

/// Values that mean something to some dialect.
const STRINGS: &[&str] = &[
    "", "a", "é", "stop", "length", "abort", "limit", "eos", "word",
];

/// An arbitrary value, made of the next bytes.
fn value(bytes: &mut std::slice::Iter<'_, u8>, depth: u32) -> Value {
    let Some(byte) = bytes.next() else {
        return Value::Null;
    };
    let len = usize::from(byte >> 4) % 4;
    match byte % 8 {
        0 => Value::Null,
        1 => json!(byte & 16 != 0),
        2 => json!(u64::from(bytes.next().copied().unwrap_or(0))),
        3 => json!([u64::MAX, 1 << 33, 0][usize::from(*byte >> 4) % 3]),
        4 => json!(-f64::from(*byte)),
        5 => json!(STRINGS[usize::from(*byte >> 3) % STRINGS.len()]),
        6 if depth > 0 => (0..len).map(|_| value(bytes, depth - 1)).collect(),
        7 if depth > 0 => object(bytes, depth, 1 + len * 2),
        _ => Value::Null,
    }
}

fn object(bytes: &mut std::slice::Iter<'_, u8>, depth: u32, len: usize) -> Value {
    let mut fields = serde_json::Map::new();
    for _ in 0..len {
        let Some(byte) = bytes.next() else { break };
        let field = FIELDS[usize::from(*byte) % FIELDS.len()];
        fields.insert(field.to_owned(), value(bytes, depth - 1));
    }
    fields.into()
}

/// Feeds a decoder with arbitrary events until it reports an error.
fn feed(mut decoder: Box<dyn Decoder>, events: &[Vec<u8>]) {
    let mut pieces = VecDeque::new();
    for bytes in events {
        let is_raw = bytes.first().is_some_and(|byte| *byte < 8);
        let event = match is_raw {
            true => bytes.clone(),
            false => object(&mut bytes.iter(), 6, 12).to_string().into_bytes(),
        };
        if decoder.decode(&event, &mut pieces).is_err() {
            return;
        }
    }
    decoder.done(&mut pieces);
    for piece in pieces {
        if let Generated::Tokens { tokens, logprobs } = piece {
            assert!(!tokens.is_empty());
            assert!(logprobs.is_none_or(|logprobs| logprobs.len() == tokens.len()));
        }
    }
}

/// Defines a fuzz target that feeds a dialect's decoder with arbitrary events, with and without log-probabilities.
macro_rules! no_event_makes_it_panic {
    ($name:ident, $dialect:expr) => {
        #[test]
        fn $name() {
            let dialect = $dialect;
            bolero::check!()
                .with_type::<(bool, Vec<Vec<u8>>)>()
                .with_test_time(Duration::from_secs(1))
                .for_each(|(scores, events)| {
                    feed(decoder(&dialect, scores.then_some(2)), events);
                });
        }
    };
}

no_event_makes_it_panic!(no_event_makes_sglang_panic, SgLang);
no_event_makes_it_panic!(no_event_makes_vllm_panic, Vllm { model: "m".into() });
no_event_makes_it_panic!(
    no_event_makes_llama_cpp_panic,
    LlamaCpp::new(Arc::new(byte_level_files().tokenizer().unwrap()), true)
);
no_event_makes_it_panic!(
    no_event_makes_text_panic,
    TextOnly {
        model: "m".into(),
        tokenizer: Arc::new(byte_level_files().tokenizer().unwrap()),
    }
);

#[test]
fn the_tokens_of_the_text_are_in_the_body_once() {
    let request = test_request(&[7, 8, 9], Sampling::default());
    let tokenizer = Arc::new(byte_level_files().tokenizer().unwrap());
    let dialects: [(&dyn Dialect, &str); 4] = [
        (&SgLang, "input_ids"),
        (&Vllm { model: "m".into() }, "prompt"),
        (&TensorRtLlm { model: "m".into() }, "prompt"),
        (&LlamaCpp::new(tokenizer, true), "prompt"),
    ];
    for (dialect, field) in dialects {
        let fields = dialect.body(&request).unwrap();
        let body = CallBody::new(&fields, dialect.tokens_field(), &request);
        let text = String::from_utf8(body.to_json().unwrap()).unwrap();
        assert_eq!(text.matches("[7,8,9]").count(), 1, "{text}");
        let mut body: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(body[field].take(), json!([7, 8, 9]));
        // All other fields are those of the dialect.
        body.as_object_mut().unwrap().remove(field);
        assert_eq!(body, fields);
    }
}

/// The fields that only some requests have, as a dialect sends them after 3 tokens of prompt and 2 of output.
fn rare_fields(dialect: &dyn Dialect, sampling: Sampling) -> Value {
    let mut request = test_request(&[1, 2, 3, 4, 5], sampling);
    request.prompt_len = 3;
    let body = dialect.body(&request).unwrap();
    let parameters = body.get("sampling_params").unwrap_or(&body);
    let names = [
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "repeat_penalty",
        "repeat_last_n",
        "prompt_ignore_length",
        "samplers",
        "min_tokens",
        "min_new_tokens",
        "ignore_eos",
        "bad_words",
    ];
    let fields = names.iter().filter_map(|name| {
        let value = parameters.get(*name)?;
        Some(((*name).to_owned(), value.clone()))
    });
    fields.collect::<serde_json::Map<_, _>>().into()
}

#[test]
fn every_engine_is_asked_in_its_own_words() {
    let sampling = Sampling {
        presence_penalty: 0.5,
        frequency_penalty: -0.5,
        repetition_penalty: 1.5,
        min_tokens: 6,
        ignore_eos: true,
        bad_words: vec!["no".into()],
        ..Sampling::default()
    };
    let files = byte_level_files();
    let tokenizer = Arc::new(files.tokenizer().unwrap());
    let penalties =
        json!({"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5});
    let with = |fields: Value| {
        let mut all = penalties.clone();
        for (name, value) in fields.as_object().unwrap() {
            all[name] = value.clone();
        }
        all
    };
    let model = || "m".to_owned();
    let cases: [(&str, Box<dyn Dialect>, Value); 5] = [
        (
            "vllm",
            Box::new(Vllm { model: model() }),
            with(json!({"min_tokens": 4, "ignore_eos": true, "bad_words": ["no"]})),
        ),
        (
            "tensorrt-llm",
            Box::new(TensorRtLlm { model: model() }),
            with(json!({"min_tokens": 4, "ignore_eos": true, "prompt_ignore_length": 3})),
        ),
        (
            "sglang",
            Box::new(SgLang),
            with(json!({"min_new_tokens": 4, "ignore_eos": true})),
        ),
        (
            "llama-cpp",
            Box::new(LlamaCpp::new(tokenizer.clone(), true)),
            json!({"repeat_penalty": 1.5, "repeat_last_n": -1, "ignore_eos": true,
                   "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"]}),
        ),
        (
            "openai",
            Box::new(TextOnly {
                model: model(),
                tokenizer,
            }),
            json!({"presence_penalty": 0.5, "frequency_penalty": -0.5}),
        ),
    ];
    for (name, dialect, expected) in cases {
        assert_eq!(rare_fields(&*dialect, sampling.clone()), expected, "{name}");
        // A parameter that a dialect cannot express is refused before the engine is asked.
        let able = dialect.capabilities();
        let says = |field: &str| expected.get(field).is_some();
        assert_eq!(able.output_penalties, says("presence_penalty"), "{name}");
        // SGLang has a field of this name with another meaning.
        let repeats = says("repetition_penalty") || says("repeat_penalty");
        assert_eq!(
            able.repetition_penalty,
            repeats && name != "sglang",
            "{name}"
        );
        assert_eq!(
            able.min_tokens,
            says("min_tokens") || says("min_new_tokens"),
            "{name}"
        );
        assert_eq!(able.ignore_eos, says("ignore_eos"), "{name}");
        assert_eq!(able.bad_words, says("bad_words"), "{name}");
    }
}

/// The fields of a body that say the form of the output.
fn form_fields(dialect: &dyn Dialect, text: TextForm) -> Result<Value, ApiError> {
    let sampling = Sampling {
        form: Some(Box::new(OutputForm::new(text))),
        ..Sampling::default()
    };
    let body = dialect.body(&test_request(&[1], sampling))?;
    let parameters = body.get("sampling_params").unwrap_or(&body);
    let names = [
        "structured_outputs",
        "response_format",
        "json_schema",
        "regex",
        "ebnf",
        "structural_tag",
        "grammar",
    ];
    let fields = names.iter().filter_map(|name| {
        let value = parameters.get(*name)?;
        Some(((*name).to_owned(), value.clone()))
    });
    Ok(fields.collect::<serde_json::Map<_, _>>().into())
}

#[test]
fn a_form_is_said_in_the_words_of_the_engine() {
    let tokenizer = Arc::new(byte_level_files().tokenizer().unwrap());
    let model = || "m".to_owned();
    let dialects: [Box<dyn Dialect>; 5] = [
        Box::new(Vllm { model: model() }),
        Box::new(SgLang),
        Box::new(TensorRtLlm { model: model() }),
        Box::new(LlamaCpp::new(tokenizer.clone(), true)),
        Box::new(TextOnly {
            model: model(),
            tokenizer,
        }),
    ];
    let schema = r#"{"type":"integer"}"#;
    let choice = || TextForm::Choice(vec!["a".into(), "b".into()]);
    let ebnf = r#"root ::= "a" | "b""#;
    let lark = r#"start: "a""#;
    let calls = TextForm::Calls(CallsForm {
        optional: false,
        parallel: false,
        begin: String::new(),
        separator: String::new(),
        end: String::new(),
        calls: vec![CallForm {
            begin: "<f>".into(),
            arguments: ArgumentsForm::JsonSchema(schema.into()),
            end: "</f>".into(),
        }],
    });
    let tag = structural_tag(&calls).unwrap();
    let nothing = || Value::Null;
    // vLLM, SGLang, TensorRT-LLM, llama.cpp; a server of text alone has no words for any of them.
    let cases: [(TextForm, [Value; 4]); 7] = [
        (
            TextForm::JsonObject,
            [
                json!({"structured_outputs": {"json_object": true}}),
                json!({"json_schema": r#"{"type":"object"}"#}),
                json!({"response_format": {"type": "json_object"}}),
                json!({"json_schema": {"type": "object"}}),
            ],
        ),
        (
            TextForm::JsonSchema(schema.into()),
            [
                json!({"structured_outputs": {"json": schema}}),
                json!({"json_schema": schema}),
                json!({"response_format": {"type": "json", "schema": {"type": "integer"}}}),
                json!({"json_schema": {"type": "integer"}}),
            ],
        ),
        (
            TextForm::Regex("a+".into()),
            [
                json!({"structured_outputs": {"regex": "a+"}}),
                json!({"regex": "a+"}),
                json!({"response_format": {"type": "regex", "regex": "a+"}}),
                nothing(),
            ],
        ),
        (
            choice(),
            [
                json!({"structured_outputs": {"choice": ["a", "b"]}}),
                json!({"ebnf": ebnf}),
                json!({"response_format": {"type": "ebnf", "ebnf": ebnf}}),
                json!({"grammar": ebnf}),
            ],
        ),
        (
            TextForm::Ebnf(ebnf.into()),
            [
                json!({"structured_outputs": {"grammar": ebnf}}),
                json!({"ebnf": ebnf}),
                json!({"response_format": {"type": "ebnf", "ebnf": ebnf}}),
                json!({"grammar": ebnf}),
            ],
        ),
        (
            TextForm::Lark(lark.into()),
            [
                json!({"structured_outputs": {"grammar": lark}}),
                nothing(),
                nothing(),
                nothing(),
            ],
        ),
        (
            calls,
            [
                json!({"structured_outputs": {"structural_tag": tag.to_string()}}),
                json!({"structural_tag": tag.to_string()}),
                json!({"response_format": tag}),
                nothing(),
            ],
        ),
    ];
    for (text, expected) in cases {
        let expected = expected.into_iter().chain([nothing()]);
        for (dialect, expected) in dialects.iter().zip(expected) {
            // A form that a dialect cannot say is refused before the engine is asked.
            let lacks = dialect.capabilities().forms.lacks(&text);
            assert_eq!(lacks.is_some(), expected.is_null(), "{text:?}");
            if !expected.is_null() {
                let fields = form_fields(&**dialect, text.clone()).unwrap();
                assert_eq!(fields, expected, "{text:?}");
            }
        }
    }
}

#[test]
fn an_output_is_continued_only_where_the_engine_samples_as_before() {
    let continued = |sampling: Sampling, prompt_len| {
        let mut request = test_request(&[1, 2, 3], sampling);
        request.prompt_len = prompt_len;
        request
            .check_continuation()
            .map_err(|error| error.param.unwrap())
    };
    let plain = Sampling::default;
    for (sampling, field) in [
        (
            Sampling {
                presence_penalty: 1.0,
                ..plain()
            },
            "presence_penalty",
        ),
        (
            Sampling {
                frequency_penalty: 1.0,
                ..plain()
            },
            "frequency_penalty",
        ),
        (
            Sampling {
                bad_tokens: vec![vec![1, 2]],
                ..plain()
            },
            "bad_words",
        ),
    ] {
        assert_eq!(continued(sampling.clone(), 3), Ok(()));
        assert_eq!(continued(sampling, 2), Err(field.to_owned()));
    }
    let form = |after| Sampling {
        form: Some(Box::new(OutputForm {
            after,
            ..OutputForm::new(TextForm::JsonObject)
        })),
        ..plain()
    };
    // The last token is the output: within the form, at the end of the reasoning, or within it.
    let refused = Err("a form of the output".to_owned());
    assert_eq!(continued(form(None), 2), refused);
    assert_eq!(continued(form(Some(2)), 1), refused);
    for (after, prompt_len) in [(Some(3), 2), (Some(9), 2), (None, 3)] {
        assert_eq!(continued(form(after), prompt_len), Ok(()));
    }
    for sampling in [
        plain(),
        Sampling {
            repetition_penalty: 1.5,
            min_tokens: 9,
            ..plain()
        },
        Sampling {
            bad_tokens: vec![vec![1]],
            ..plain()
        },
    ] {
        assert_eq!(continued(sampling, 2), Ok(()));
    }
}
