//! Responses in TensorRT-LLM's documented shape, written by hand.

use refrain_protocol::TokenId;
use refrain_protocol::engine::Sampling;
use serde_json::json;

use super::*;
use crate::engine::dialect::tests::{recorded_verdict, test_verify_request};

fn choice(token_ids: &[TokenId], finish_reason: Option<&str>, stop_reason: Value) -> Value {
    json!({
        "id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "text": "", "logprobs": null, "token_ids": token_ids,
                     "finish_reason": finish_reason, "stop_reason": stop_reason}],
        "usage": {"prompt_tokens": 9, "total_tokens": 10, "completion_tokens": 1,
                  "prompt_tokens_details": {"cached_tokens": 8}},
    })
}

#[test]
fn a_fan_out_requests_ids_and_no_unknown_fields() {
    let dialect = TensorRtLlm { model: "m".into() };
    let asked = test_verify_request(VerifyMethod::FanOut, &[5], &[None], Sampling::default());
    let (_, body, _) = dialect.verify_call(&asked).unwrap();
    assert_eq!(body["prompt"], json!([[1, 2], [1, 2, 5]]));
    assert_eq!(body["detokenize"], json!(false));
    assert!(body.get("stream_options").is_none());
    // A stop id that is missing in the ids is named as the stop reason.
    let mut answer = choice(&[7], Some("length"), Value::Null);
    let mut stopped = choice(&[], Some("stop"), json!(2))["choices"][0].take();
    stopped["index"] = json!(1);
    answer["choices"].as_array_mut().unwrap().push(stopped);
    let read = |asked: &VerifyRequest| {
        let verdict = recorded_verdict(&dialect, asked, answer.to_string().as_bytes());
        verdict.unwrap().next_tokens
    };
    // An end that the request does not know is left open.
    assert_eq!(read(&asked), [Some(7), None]);
    let mut known = asked;
    known.text.sampling.stop_token_ids = vec![2];
    assert_eq!(read(&known), [Some(7), Some(2)]);
    let chain = test_verify_request(VerifyMethod::Chain, &[5], &[None], Sampling::default());
    assert!(dialect.verify_call(&chain).is_none());
}
