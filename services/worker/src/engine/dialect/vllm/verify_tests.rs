//! Verdicts of a real vLLM 0.32 with the shipped model.

use refrain_protocol::ErrorKind;
use refrain_protocol::chunk::Priority;
use refrain_protocol::engine::Sampling;

use super::*;
use crate::engine::dialect::tests::{recorded_verdict, test_verify_request};

fn vllm() -> Vllm {
    Vllm {
        model: "shipped".into(),
    }
}

fn asked(method: VerifyMethod, text: &[TokenId], draft: &[TokenId]) -> VerifyRequest {
    let parents: Vec<Option<u32>> = (0..draft.len() as u32)
        .map(|at| at.checked_sub(1))
        .collect();
    let mut asked = test_verify_request(method, draft, &parents, Sampling::default());
    asked.text.tokens = text.to_vec();
    asked
}

#[test]
fn a_chain_is_read_from_the_scores_of_its_prompt() {
    let recorded = include_str!("recorded/chain.json");
    let asked = asked(VerifyMethod::Chain, &[1, 85, 406], &[426, 931, 14]);
    let read = |answer: &str| {
        recorded_verdict(&vllm(), &asked, answer.as_bytes())
            .unwrap()
            .next_tokens
    };
    // Greedy decoding differs at all three positions; the token after the draft is 3.
    assert_eq!(read(recorded), [Some(201), Some(444), Some(16), Some(3)]);
    // The passes up to the last token of the text were cached, so their rows do not count.
    let cached = |tokens: &str| recorded.replace("\"cached_tokens\":0", tokens);
    let found = read(&cached("\"cached_tokens\":2"));
    assert_eq!(found[0], Some(201));
    let found = read(&cached("\"cached_tokens\":4"));
    assert_eq!(found, [None, None, Some(16), Some(3)]);
    // A server that does not report cache hits may have cached everything.
    let found = read(&cached("\"other\":0"));
    assert_eq!(found, [None, None, None, Some(3)]);
    // Some versions leave out the rows of cached tokens.
    let rows = recorded.find("[null,{").unwrap()..recorded.find("{\"931\"").unwrap();
    let mut fewer = recorded.to_owned();
    fewer.replace_range(rows, "[");
    let fewer = fewer.replace("\"cached_tokens\":0", "\"cached_tokens\":3");
    assert_eq!(read(&fewer), [None, Some(444), Some(16), Some(3)]);
    // The engine would end after the draft.
    let ended = recorded.replace("\"finish_reason\":\"length\"", "\"finish_reason\":\"stop\"");
    assert_eq!(read(&ended), [Some(201), Some(444), Some(16), None]);
    for garbage in ["{}", "<html>"] {
        let error = recorded_verdict(&vllm(), &asked, garbage.as_bytes()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Upstream);
    }
}

#[test]
fn a_chain_uses_the_cache_of_its_namespace() {
    let asked = asked(VerifyMethod::Chain, &[1, 2], &[5, 6]);
    let (path, body, _) = vllm().verify_call(&asked).unwrap();
    assert_eq!(path, "/inference/v1/generate");
    assert_eq!(body["token_ids"], json!([1, 2, 5, 6]));
    assert_eq!(body["cache_salt"], "000000000000000000000000000000cd");
    let parameters = &body["sampling_params"];
    assert_eq!(parameters["skip_reading_prefix_cache"], json!(false));
    assert_eq!(parameters["detokenize"], json!(false));
    assert_eq!(parameters["max_tokens"], json!(1));
}

#[test]
fn a_fan_out_is_read_by_index() {
    let asked_both = asked(VerifyMethod::FanOut, &[1, 85], &[426]);
    let recorded = include_str!("recorded/fan_out.json");
    let verdict = recorded_verdict(&vllm(), &asked_both, recorded.as_bytes()).unwrap();
    assert_eq!(verdict.next_tokens, [Some(406), Some(523)]);
    let turned = recorded.replace("\"index\":0", "\"index\":9");
    let turned = turned.replace("\"index\":1", "\"index\":0");
    let turned = turned.replace("\"index\":9", "\"index\":1");
    let verdict = recorded_verdict(&vllm(), &asked_both, turned.as_bytes()).unwrap();
    assert_eq!(verdict.next_tokens, [Some(523), Some(406)]);
    let (path, body, _) = vllm().verify_call(&asked_both).unwrap();
    assert_eq!(path, "/v1/completions");
    assert_eq!(body["prompt"], json!([[1, 85], [1, 85, 426]]));
    assert_eq!(
        (&body["stream"], &body["max_tokens"]),
        (&json!(false), &json!(1))
    );
    for of_streams in ["seed", "stream_options"] {
        assert!(body.get(of_streams).is_none(), "{of_streams}");
    }
}

#[test]
fn verify_calls_have_the_priority_of_their_request() {
    let mut asked = asked(VerifyMethod::Chain, &[1, 2], &[5]);
    for (priority, rank) in [(None, Value::Null), (Some(Priority::High), json!(-1))] {
        asked.text.priority = priority;
        for method in VerifyMethod::ALL {
            asked.method = method;
            assert_eq!(vllm().verify_call(&asked).unwrap().1["priority"], rank);
        }
    }
}
