//! Responses in SGLang's documented shape, written by hand.

use refrain_protocol::TokenId;
use refrain_protocol::engine::Sampling;

use super::*;
use crate::engine::dialect::tests::{recorded_verdict, test_verify_request};

fn event(output_ids: &[TokenId], count: usize, finish: Value) -> Value {
    json!({
        "text": "", "output_ids": output_ids,
        "meta_info": {"id": "r", "finish_reason": finish, "prompt_tokens": 9, "weight_version": "default",
                      "completion_tokens": count, "cached_tokens": 4, "e2e_latency": 0.1},
    })
}

#[test]
fn a_chain_is_scored_from_the_end_of_the_text() {
    let parents = [None, Some(0), Some(1)];
    let asked = test_verify_request(
        VerifyMethod::Chain,
        &[5, 6, 7],
        &parents,
        Sampling::default(),
    );
    let (path, body, _) = SgLang.verify_call(&asked).unwrap();
    assert_eq!(path, "/generate");
    assert_eq!(body["input_ids"], json!([1, 2, 5, 6, 7]));
    assert_eq!(body["logprob_start_len"], json!(1));
    assert_eq!(body["sampling_params"]["max_new_tokens"], json!(1));
    assert_eq!(body["stream"], json!(false));
    let mut answer = event(&[9], 1, json!({"type": "length", "length": 1}));
    answer["meta_info"]["input_token_logprobs"] = json!([
        [null, 2, null],
        [-0.1, 5, null],
        [-0.9, 6, null],
        [-2.0, 7, null]
    ]);
    answer["meta_info"]["input_top_logprobs"] = json!([
        null,
        [[-0.1, 5, null], [-3.0, 4, null]],
        [[-0.9, 6, null], [-0.91, 8, null]],
        [[-0.2, 8, null], [-2.0, 7, null]]
    ]);
    let verdict = recorded_verdict(&SgLang, &asked, answer.to_string().as_bytes());
    // The second position is almost a tie.
    let drawn = [Some(5), None, Some(8), Some(9)];
    assert_eq!(verdict.unwrap().next_tokens, drawn);
    // Without scores only the token after the draft is known.
    let bare = event(&[9], 1, Value::Null).to_string();
    let verdict = recorded_verdict(&SgLang, &asked, bare.as_bytes()).unwrap();
    assert_eq!(verdict.next_tokens, [None, None, None, Some(9)]);
}

#[test]
fn one_abort_hits_all_prompts_of_a_fan_out() {
    let sampled = Sampling {
        temperature: 0.7,
        ..Sampling::default()
    };
    let asked = test_verify_request(VerifyMethod::FanOut, &[5, 6], &[None, None], sampled);
    let (_, body, _) = SgLang.verify_call(&asked).unwrap();
    assert_eq!(body["input_ids"], json!([[1, 2], [1, 2, 5], [1, 2, 6]]));
    let (_, abort) = SgLang.abort(&asked.text).unwrap();
    let name = abort["rid"].as_str().unwrap();
    for rid in body["rid"].as_array().unwrap() {
        assert!(rid.as_str().unwrap().starts_with(name));
    }
    assert!(body["sampling_params"].get("sampling_seed").is_none());
    let stop = json!({"type": "stop", "matched": 2});
    let length = || json!({"type": "length", "length": 1});
    let answers = json!([
        event(&[5], 1, length()),
        event(&[], 1, stop),
        event(&[7], 1, length())
    ]);
    let read = |asked: &VerifyRequest| {
        let verdict = recorded_verdict(&SgLang, asked, answers.to_string().as_bytes());
        verdict.unwrap().next_tokens
    };
    // An end that the request does not know is left open.
    assert_eq!(read(&asked), [Some(5), None, Some(7)]);
    let mut known = asked;
    known.text.sampling.stop_token_ids = vec![2];
    assert_eq!(read(&known), [Some(5), Some(2), Some(7)]);
}
