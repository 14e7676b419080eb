//! Responses of a real llama-server (of llama-cpp-python 0.3.36) with the shipped model.

use refrain_protocol::ErrorKind;
use refrain_protocol::engine::Sampling;
use refrain_tokenization::ModelFiles;

use super::super::tests::{decode_recorded, test_request};
use super::*;
use crate::engine::client::status_error;

fn dialect() -> LlamaCpp {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../reference-engine/model");
    let files = ModelFiles::from_dir(model).unwrap();
    LlamaCpp::new(Arc::new(files.tokenizer().unwrap()), true)
}

fn read(recorded: &str, top_logprobs: Option<u32>) -> Result<Vec<Generated>, ApiError> {
    let sampling = Sampling {
        top_logprobs,
        ..Sampling::default()
    };
    decode_recorded(dialect().decoder(&test_request(&[1], sampling)), recorded)
}

fn ids(pieces: &[Generated]) -> Vec<TokenId> {
    let tokens = pieces.iter().filter_map(|piece| match piece {
        Generated::Tokens { tokens, .. } => Some(tokens.clone()),
        _ => None,
    });
    tokens.flatten().collect()
}

#[test]
fn unsent_ids_are_recovered_from_the_text() {
    let pieces = read(include_str!("recorded/characters.sse"), None).unwrap();
    assert_eq!(pieces[0], Generated::Cached { tokens: 3 });
    let text = ids(&pieces);
    assert_eq!(
        text,
        [
            67, 223, 130, 105, 223, 175, 256, 249, 225, 165, 248, 101, 16, 2
        ]
    );
    let tokenizer = &dialect().fragments;
    assert_eq!(pieces.last(), Some(&Generated::End(GeneratedEnd::Stop)));
    assert_eq!(tokenizer.decode(&text), "a é 😀日.");
}

#[test]
fn an_incomplete_character_at_the_end_is_dropped() {
    let pieces = read(include_str!("recorded/cut_character.sse"), None).unwrap();
    assert_eq!(
        pieces,
        [
            Generated::Cached { tokens: 3 },
            Generated::End(GeneratedEnd::Length)
        ]
    );
}

#[test]
fn log_probabilities_belong_to_their_tokens() {
    let pieces = read(include_str!("recorded/logprobs.sse"), Some(1)).unwrap();
    assert_eq!(ids(&pieces), [523, 524, 1354]);
    let Generated::Tokens {
        logprobs: Some(logprobs),
        ..
    } = &pieces[1]
    else {
        panic!("{pieces:?}");
    };
    assert_eq!(logprobs.len(), 1);
    assert!((logprobs[0].logprob + 2.3782).abs() < 1e-3);
    assert_eq!(logprobs[0].top, [(523, logprobs[0].logprob)]);
    // Parts of a character have no log-probabilities, so such an output is an error if they are requested.
    let character = "data: {\"content\":\"é\",\"tokens\":[105],\"stop\":false,\"tokens_predicted\":2,\
                     \"completion_probabilities\":[{\"id\":105,\"logprob\":-1.0}]}\n\n";
    let error = read(character, Some(0)).unwrap_err();
    assert_eq!(error.kind, ErrorKind::InvalidRequest);
}

#[test]
fn errors_and_garbage_are_distinguished() {
    let refused = include_str!("recorded/refused.json");
    let error = status_error(400, refused.as_bytes());
    assert!(
        error.message.contains("invalid tokens"),
        "{}",
        error.message
    );
    let event = format!("data: {refused}\n\n");
    assert_eq!(
        read(&event, None).unwrap_err().kind,
        ErrorKind::InvalidRequest
    );
    // Implausible counts of tokens.
    let event = |drawn: u64| {
        let content = if drawn > 1 { "é" } else { "a" };
        format!(
            "data: {{\"content\":\"{content}\",\"tokens\":[105],\"stop\":false,\"tokens_predicted\":{drawn}}}\n\n"
        )
    };
    for counts in [&[u64::MAX][..], &[1, u64::MAX], &[1, 0, 0]] {
        let recorded: String = counts.iter().map(|drawn| event(*drawn)).collect();
        assert_eq!(
            read(&recorded, None).is_ok(),
            counts.len() == 3,
            "{counts:?}"
        );
    }
    for garbage in [
        "data: {\n\n",
        "data: {\"stop\": 1}\n\n",
        "data: {\"stop\": false}\n\n",
        "data: {\"stop\": true}\n\n",
        "data: \u{1}\n\n",
    ] {
        let error = read(garbage, None).unwrap_err();
        assert_eq!(error.code.as_deref(), Some("engine_garbage"), "{garbage}");
    }
}

#[test]
fn the_body_turns_other_samplers_off() {
    let sampling = Sampling {
        temperature: 0.5,
        top_k: 4,
        logit_bias: vec![(9, -1.5)],
        top_logprobs: Some(0),
        seed: u64::MAX,
        ..Sampling::default()
    };
    let body = dialect().body(&test_request(&[1, 2], sampling)).unwrap();
    assert_eq!(body["n_predict"], 7);
    assert_eq!(
        body["samplers"],
        json!(["temperature", "top_k", "top_p", "min_p"])
    );
    assert_eq!(body["logit_bias"], json!([[9, -1.5]]));
    assert_eq!(body["n_probs"], 1);
    assert!(body["seed"].as_u64().unwrap() < u64::from(u32::MAX));
}

#[test]
fn a_call_is_long_enough_for_a_whole_character() {
    for (tokens_max, asked) in [(1, 4), (4, 4), (50, 50)] {
        let request = GenerateRequest {
            tokens_max,
            ..test_request(&[1], Sampling::default())
        };
        assert_eq!(dialect().body(&request).unwrap()["n_predict"], asked);
    }
}
