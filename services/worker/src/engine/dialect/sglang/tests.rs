//! Streams in SGLang's documented shape, written by hand.

use refrain_protocol::chunk::DraftRules;
use refrain_protocol::engine::Sampling;
use refrain_protocol::{DocumentId, ErrorKind};

use super::super::tests::{decode_recorded, test_request};
use super::*;
use crate::engine::AttachedDocument;

fn read(events: &[Value], sampling: Sampling) -> Result<Vec<Generated>, ApiError> {
    let lines: Vec<String> = events
        .iter()
        .map(|event| format!("data: {event}\n\n"))
        .collect();
    let recorded = lines.concat() + "data: [DONE]\n\n";
    let pieces = decode_recorded(SgLang.decoder(&test_request(&[1], sampling)), &recorded)?;
    // One test below is about these.
    let is_output = |piece: &Generated| !matches!(piece, Generated::Weights { .. });
    Ok(pieces.into_iter().filter(is_output).collect())
}

fn event(output_ids: &[TokenId], count: usize, finish: Value) -> Value {
    json!({
        "text": "", "output_ids": output_ids,
        "meta_info": {"id": "r", "finish_reason": finish, "prompt_tokens": 9, "weight_version": "default",
                      "completion_tokens": count, "cached_tokens": 4, "e2e_latency": 0.1},
    })
}

fn tokens(tokens: &[TokenId]) -> Generated {
    Generated::Tokens {
        tokens: tokens.to_vec(),
        logprobs: None,
    }
}

#[test]
fn whole_outputs_and_increments_read_the_same() {
    let length = json!({"type": "length", "length": 4});
    let whole = [
        event(&[5], 1, Value::Null),
        event(&[5, 6, 7], 3, Value::Null),
        event(&[5, 6, 7, 8], 4, length.clone()),
    ];
    let pieces = [
        event(&[5], 1, Value::Null),
        event(&[6, 7], 3, Value::Null),
        event(&[8], 4, length),
    ];
    let expected = [
        Generated::Cached { tokens: 4 },
        tokens(&[5]),
        tokens(&[6, 7]),
        tokens(&[8]),
        Generated::End(GeneratedEnd::Length),
    ];
    for events in [whole, pieces] {
        assert_eq!(read(&events, Sampling::default()).unwrap(), expected);
    }
}

#[test]
fn a_matched_stop_id_ends_the_output() {
    let stop = json!({"type": "stop", "matched": 2});
    for sent in [&[5, 2][..], &[5]] {
        let events = [event(sent, sent.len(), stop.clone())];
        let read = read(&events, Sampling::default()).unwrap();
        assert_eq!(
            read[1..],
            [tokens(&[5, 2]), Generated::End(GeneratedEnd::Stop)]
        );
    }
}

#[test]
fn log_probabilities_are_aligned_at_the_end() {
    let mut first = event(&[5], 1, Value::Null);
    first["meta_info"]["output_token_logprobs"] = json!([[-0.5, 5, null]]);
    first["meta_info"]["output_top_logprobs"] = json!([[[-0.5, 5, null], [-2.0, 9, null]]]);
    let mut second = event(&[5, 6], 2, Value::Null);
    second["meta_info"]["output_token_logprobs"] = json!([[-0.5, 5, null], [-0.25, 6, "x"]]);
    second["meta_info"]["output_top_logprobs"] = json!([[[-0.5, 5, null]], null]);
    let asks = Sampling {
        top_logprobs: Some(1),
        ..Sampling::default()
    };
    let pieces = read(&[first, second.clone()], asks.clone()).unwrap();
    let scored = |logprob, top: &[(TokenId, f32)]| TokenLogprob {
        logprob,
        top: top.to_vec(),
    };
    let expected = [scored(-0.5, &[(5, -0.5)]), scored(-0.25, &[])];
    for (piece, expected) in pieces[1..].iter().zip(expected) {
        let Generated::Tokens { logprobs, .. } = piece else {
            panic!("{pieces:?}");
        };
        assert_eq!(logprobs.as_deref(), Some(&[expected][..]));
    }
    second["meta_info"]["output_token_logprobs"] = Value::Null;
    assert!(read(&[second], asks).is_err());
}

#[test]
fn an_abort_ends_the_output_without_the_tokens_that_were_not_sent() {
    let abort = json!({"type": "abort", "message": "Abort in waiting queue"});
    let mut last = event(&[8], 4, abort);
    last["meta_info"]
        .as_object_mut()
        .unwrap()
        .remove("cached_tokens");
    let read = read(&[event(&[5], 1, Value::Null), last], Sampling::default()).unwrap();
    assert_eq!(
        read[1..],
        [tokens(&[5]), Generated::End(GeneratedEnd::Aborted)]
    );
}

#[test]
fn unknown_ends_and_garbage_are_errors() {
    let unknown = json!({"type": "expired", "message": "x"});
    let refused = json!({"error": {"message": "too long", "code": 400}});
    for (event, kind) in [
        (event(&[5], 1, unknown), ErrorKind::Upstream),
        (event(&[5], 3, Value::Null), ErrorKind::Upstream),
        (json!({"output_ids": [1]}), ErrorKind::Upstream),
        (refused, ErrorKind::InvalidRequest),
    ] {
        assert_eq!(read(&[event], Sampling::default()).unwrap_err().kind, kind);
    }
}

#[test]
fn a_chunk_is_aborted_by_its_own_name() {
    let request_of = |tokens: &[TokenId]| test_request(tokens, Sampling::default());
    let request = request_of(&[1, 2, 3]);
    let body = SgLang.body(&request).unwrap();
    let (path, abort) = SgLang.abort(&request).unwrap();
    assert_eq!(path, "/abort_request");
    assert_eq!(abort["rid"], body["rid"]);
    // Aborts match by prefix, and must hit neither another attempt nor a later chunk.
    let name = |len: usize, call| {
        let request = GenerateRequest {
            call,
            ..request_of(&vec![1; len])
        };
        SgLang.body(&request).unwrap()["rid"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let names = [name(3, 1), name(3, 2), name(30, 3), name(30_000, u64::MAX)];
    for (place, one) in names.iter().enumerate() {
        for other in names.iter().skip(place + 1) {
            assert!(
                !one.starts_with(other) && !other.starts_with(one),
                "{one} {other}"
            );
        }
    }
    assert_eq!(body["extra_key"], "000000000000000000000000000000cd");
    assert_eq!(body["sampling_params"]["top_k"], -1);
    assert_eq!(body["sampling_params"]["repetition_penalty"], 1.0);
}

#[test]
fn orders_have_words() {
    use refrain_protocol::engine_order::{EngineCall, EngineOrder, PauseMode};

    let calls = |order: &EngineOrder| -> Vec<(String, Value)> {
        let calls = SgLang.order_calls(order).unwrap();
        calls
            .into_iter()
            .map(|call| (call.path, call.body))
            .collect()
    };
    let call = |path: &str, body: Value| (path.to_owned(), body);
    let flush = || call("/flush_cache?timeout=5", json!({}));
    let kept_flush = || call("/flush_cache", json!({}));
    for (mode, clears_cache, word, flush) in [
        (PauseMode::Abort, false, "abort", None),
        (PauseMode::Abort, true, "abort", Some(flush())),
        (PauseMode::Keep, false, "in_place", None),
        (PauseMode::Keep, true, "retract", Some(kept_flush())),
        (PauseMode::Wait, false, "in_place", None),
        (PauseMode::Wait, true, "retract", Some(kept_flush())),
    ] {
        let mut expected = vec![call("/pause_generation", json!({ "mode": word }))];
        expected.extend(flush);
        assert_eq!(calls(&EngineOrder::Pause { mode, clears_cache }), expected);
    }
    assert_eq!(
        calls(&EngineOrder::Resume),
        [call("/continue_generation", json!({}))]
    );
    assert_eq!(calls(&EngineOrder::FlushCache), [flush()]);
    let load = EngineOrder::LoadWeights {
        directory: "/w/5".into(),
        version: Some(5),
    };
    let body = json!({
        "model_path": "/w/5", "flush_cache": true, "abort_all_requests": false, "weight_version": "5",
    });
    assert_eq!(calls(&load), [call("/update_weights_from_disk", body)]);
    let body = json!({ "new_version": "6", "abort_all_requests": false });
    let set = EngineOrder::SetVersion { version: 6 };
    assert_eq!(calls(&set), [call("/update_weight_version", body)]);
    let foreign = EngineCall {
        is_post: true,
        path: "/x".into(),
        body: String::new(),
    };
    assert!(SgLang.order_calls(&EngineOrder::PassOn(foreign)).is_err());
}

#[test]
fn the_version_of_the_weights_is_told_when_it_changes() {
    let with = |version: &str, count: usize, finish: Value| {
        let mut event = event(&[5], count, finish);
        event["meta_info"]["weight_version"] = json!(version);
        format!("data: {event}\n\n")
    };
    let recorded = [
        with("3", 1, Value::Null),
        with("3", 2, Value::Null),
        with("4", 3, json!({"type": "abort", "message": "paused"})),
    ]
    .concat();
    let decoder = SgLang.decoder(&test_request(&[1], Sampling::default()));
    let pieces = decode_recorded(decoder, &recorded).unwrap();
    let told: Vec<&Generated> = pieces
        .iter()
        .filter(|piece| !matches!(piece, Generated::Cached { .. }))
        .collect();
    let token = Generated::Tokens {
        tokens: vec![5],
        logprobs: None,
    };
    let version = |version| Generated::Weights { version };
    // An abort comes with the tokens that it has.
    let end = Generated::End(GeneratedEnd::Aborted);
    let expected = [&version(3), &token, &token, &version(4), &token, &end];
    assert_eq!(told, expected);
}

#[test]
fn versions_of_weights_are_numbers() {
    for (version, number) in [
        (json!("default"), Some(0)),
        (json!("12"), Some(12)),
        (json!(7), Some(7)),
        (json!("step-3"), None),
        (json!(null), None),
    ] {
        assert_eq!(super::version_number(&version), number, "{version}");
    }
}

#[test]
fn an_attached_engine_receives_the_document_of_an_output() {
    let mut asked = test_request(&[5, 6, 7], Sampling::default());
    let body = SgLang.body(&asked).unwrap();
    assert!(body["sampling_params"].get("custom_params").is_none());
    asked.prompt_len = 2;
    asked.attached = Some(AttachedDocument {
        token: "signed".into(),
        issued_at_s: 9,
        group: None,
        document: DocumentId(0xab),
        epoch: 3,
        drafts: DraftRules::NO_DRAFTS,
    });
    let fields = json!({
        "refrain_namespace": "signed",
        "refrain_document": "000000000000000000000000000000ab",
        "refrain_epoch": 3,
        "refrain_written": 1,
        "refrain_max_spec_tokens": 0,
    });
    let body = SgLang.body(&asked).unwrap();
    assert_eq!(body["sampling_params"]["custom_params"], fields);
    // An end token must not end it before the plugin sees it.
    let introduction = &SgLang.introduction(&asked).unwrap()["sampling_params"];
    assert_eq!(introduction["custom_params"], fields);
    assert_eq!(introduction["ignore_eos"], true);
}
