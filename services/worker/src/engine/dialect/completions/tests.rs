//! Streams of a real vLLM 0.32 with the shipped model, and streams in the documented shapes of vLLM and TensorRT-LLM
//! that are written by hand.

use refrain_protocol::engine::Sampling;
use refrain_protocol::{ErrorKind, TokenId};

use super::super::tests::{decode_recorded, test_request};
use super::super::{Dialect, TensorRtLlm, Vllm};
use super::*;
use crate::engine::generate::GeneratedEnd;

fn read(events: &[Value], sampling: Sampling) -> Result<Vec<Generated>, ApiError> {
    let lines: Vec<String> = events
        .iter()
        .map(|event| format!("data: {event}\n\n"))
        .collect();
    let recorded = lines.concat() + "data: [DONE]\n\n";
    decode_recorded(Box::new(CompletionsDecoder::new(&sampling)), &recorded)
}

fn choice(token_ids: &[TokenId], finish_reason: Option<&str>, stop_reason: Value) -> Value {
    json!({
        "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "text": "", "logprobs": null, "token_ids": token_ids,
                     "finish_reason": finish_reason, "stop_reason": stop_reason}],
        "usage": {"prompt_tokens": 9, "total_tokens": 10, "completion_tokens": 1,
                  "prompt_tokens_details": {"cached_tokens": 8}},
    })
}

fn tokens(tokens: &[TokenId]) -> Generated {
    Generated::Tokens {
        tokens: tokens.to_vec(),
        logprobs: None,
    }
}

fn read_text(recorded: &str, sampling: Sampling) -> Result<Vec<Generated>, ApiError> {
    decode_recorded(Box::new(CompletionsDecoder::new(&sampling)), recorded)
}

#[test]
fn a_recorded_stream_ends_with_its_stop_id() {
    let recorded = include_str!("recorded/stop.sse");
    let pieces = read_text(recorded, Sampling::default()).unwrap();
    let output = pieces.iter().flat_map(|piece| match piece {
        Generated::Tokens { tokens, .. } => tokens.clone(),
        _ => Vec::new(),
    });
    let output: Vec<TokenId> = output.collect();
    assert_eq!(output, [523, 524, 1354, 490, 295, 466, 359, 525]);
    let place = pieces.len() - 3;
    assert_eq!(pieces[place], Generated::Cached { tokens: 0 });
    assert_eq!(
        pieces[place + 1..],
        [tokens(&[525]), Generated::End(GeneratedEnd::Stop)]
    );
    // The stream of a server that sends no usage ends too.
    let without: String = recorded
        .split_inclusive("\n\n")
        .filter(|event| !event.contains("\"choices\":[]"))
        .collect();
    let pieces = read_text(&without, Sampling::default()).unwrap();
    assert_eq!(pieces.last(), Some(&Generated::End(GeneratedEnd::Stop)));
}

#[test]
fn recorded_log_probabilities_are_read() {
    let asks = Sampling {
        top_logprobs: Some(1),
        ..Sampling::default()
    };
    let pieces = read_text(include_str!("recorded/logprobs.sse"), asks.clone()).unwrap();
    let Generated::Tokens {
        tokens,
        logprobs: Some(logprobs),
    } = &pieces[0]
    else {
        panic!("{pieces:?}");
    };
    assert_eq!((tokens[0], logprobs.len()), (523, 1));
    assert!((logprobs[0].logprob + 2.379).abs() < 1e-3);
    assert_eq!(logprobs[0].top, [(523, logprobs[0].logprob)]);
    let error = read_text(include_str!("recorded/refused.sse"), asks).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidRequest);
    assert!(
        error.message.contains("max allowed: 20"),
        "{}",
        error.message
    );
}

#[test]
fn tokens_end_and_cached_length_are_read() {
    let usage = json!({"id": "c", "choices": [], "usage": {"prompt_tokens": 9}});
    let events = [
        choice(&[5, 6], None, Value::Null),
        choice(&[], None, Value::Null),
        choice(&[7], Some("length"), Value::Null),
        usage,
    ];
    let read = read(&events, Sampling::default()).unwrap();
    let expected = [
        Generated::Cached { tokens: 8 },
        tokens(&[5, 6]),
        tokens(&[7]),
        Generated::End(GeneratedEnd::Length),
    ];
    assert_eq!(read, expected);
}

#[test]
fn a_stop_id_is_emitted_from_the_ids_or_the_stop_reason() {
    for sent in [&[7, 2][..], &[7]] {
        let events = [choice(sent, Some("stop"), json!(2))];
        let read = read(&events, Sampling::default()).unwrap();
        assert_eq!(
            read[1..],
            [tokens(&[7, 2]), Generated::End(GeneratedEnd::Stop)]
        );
    }
}

#[test]
fn log_probabilities_are_read_by_token_id() {
    let mut event = choice(&[5, 6], None, Value::Null);
    event["choices"][0]["logprobs"] = json!({
        "tokens": ["token_id:5", "token_id:6"], "text_offset": [0, 1],
        "token_logprobs": [-0.5, null],
        "top_logprobs": [{"token_id:5": -0.5, "token_id:8": -0.25, "token_id:9": -4.0}, null],
    });
    let asks = Sampling {
        top_logprobs: Some(2),
        ..Sampling::default()
    };
    let pieces = read(&[event.clone()], asks.clone()).unwrap();
    let expected = vec![
        TokenLogprob {
            logprob: -0.5,
            top: vec![(8, -0.25), (5, -0.5)],
        },
        TokenLogprob {
            logprob: LOGPROB_MIN,
            top: Vec::new(),
        },
    ];
    let Generated::Tokens { logprobs, .. } = &pieces[1] else {
        panic!("{pieces:?}");
    };
    assert_eq!(logprobs.as_ref(), Some(&expected));
    event["choices"][0]["logprobs"]["top_logprobs"] = json!([{"the": -0.5}, null]);
    assert!(read(&[event], asks).is_err());
}

#[test]
fn an_abort_comes_with_the_tokens_that_it_has() {
    let aborted = choice(&[1], Some("abort"), Value::Null);
    let pieces = read(&[aborted], Sampling::default()).unwrap();
    let token = Generated::Tokens {
        tokens: vec![1],
        logprobs: None,
    };
    assert!(pieces.contains(&token));
    assert_eq!(pieces.last(), Some(&Generated::End(GeneratedEnd::Aborted)));
}

#[test]
fn other_streams_are_errors() {
    let text_only = json!({"choices": [{"index": 0, "text": "hi", "finish_reason": null}]});
    let unknown = choice(&[1], Some("expired"), Value::Null);
    let failed =
        json!({"error": {"message": "out of memory", "type": "InternalServerError", "code": 500}});
    for event in [text_only, unknown, failed, json!([]), json!({"choices": 1})] {
        let error = read(std::slice::from_ref(&event), Sampling::default()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Upstream, "{event}");
    }
}

#[test]
fn neutral_sampling_parameters_are_sent_too() {
    let plain = test_request(&[1, 2], Sampling::default());
    let vllm = Vllm { model: "m".into() }.body(&plain).unwrap();
    let tensorrt = TensorRtLlm { model: "m".into() }.body(&plain).unwrap();
    for body in [vllm, tensorrt] {
        for (field, off) in [
            ("top_k", 0.0),
            ("top_p", 1.0),
            ("min_p", 0.0),
            ("repetition_penalty", 1.0),
            ("presence_penalty", 0.0),
            ("frequency_penalty", 0.0),
        ] {
            assert_eq!(body[field].as_f64(), Some(off), "{field}");
        }
    }
}

#[test]
fn optional_fields_are_sent_only_on_request() {
    let plain = test_request(&[1, 2], Sampling::default());
    let vllm = Vllm { model: "m".into() };
    let body = vllm.body(&plain).unwrap();
    for absent in ["logit_bias", "logprobs", "priority"] {
        assert!(body.get(absent).is_none(), "{absent}");
    }
    assert_eq!(body["max_tokens"], 7);
    assert_eq!(body["return_token_ids"], true);
    // Tenants do not share KV cache.
    assert_eq!(body["cache_salt"], "000000000000000000000000000000cd");
    let all = Sampling {
        temperature: 0.7,
        top_k: 3,
        min_p: 0.25,
        logit_bias: vec![(4, 2.0)],
        top_logprobs: Some(0),
        stop_token_ids: vec![2],
        ..Sampling::default()
    };
    let body = vllm.body(&test_request(&[1], all.clone())).unwrap();
    assert_eq!(body["logit_bias"], json!({"4": 2.0}));
    assert_eq!((&body["top_k"], &body["min_p"]), (&json!(3), &json!(0.25)));
    assert_eq!(
        (&body["logprobs"], &body["stop_token_ids"]),
        (&json!(0), &json!([2]))
    );
    assert!(body["seed"].as_i64().is_some_and(|seed| seed >= 0));
    // trtllm-serve forbids fields that it does not know.
    let strict = TensorRtLlm { model: "m".into() }
        .body(&test_request(&[1], all))
        .unwrap();
    for foreign in ["return_token_ids", "cache_salt", "request_id", "logprobs"] {
        assert!(strict.get(foreign).is_none(), "{foreign}");
    }
    assert_eq!(strict["detokenize"], false);
}
