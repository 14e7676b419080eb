//! Responses of a real llama-server (of llama-cpp-python 0.3.36) with the shipped model.

use std::sync::Arc;

use refrain_protocol::ErrorKind;
use refrain_protocol::engine::Sampling;
use refrain_tokenization::ModelFiles;

use super::*;
use crate::engine::dialect::tests::{recorded_verdict, test_verify_request};

fn dialect() -> LlamaCpp {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../reference-engine/model");
    let files = ModelFiles::from_dir(model).unwrap();
    LlamaCpp::new(Arc::new(files.tokenizer().unwrap()), true)
}

#[test]
fn a_fan_out_returns_the_token_of_each_prompt() {
    let dialect = dialect();
    // The response for the text, for 679 after it, for 29 after that, and for 5 after the text.
    let recorded = r#"[{"index":0,"tokens":[679]},{"index":1,"tokens":[29]},{"index":2,"tokens":[2]},{"index":3,"tokens":[679]}]"#;
    let parents = [None, Some(0), None];
    let greedy = Sampling::default();
    let asked = test_verify_request(
        VerifyMethod::FanOut,
        &[679, 29, 5],
        &parents,
        greedy.clone(),
    );
    let verdict = recorded_verdict(&dialect, &asked, recorded.as_bytes()).unwrap();
    assert_eq!(
        verdict.next_tokens,
        [Some(679), Some(29), Some(2), Some(679)]
    );
    let (path, body, _) = dialect.verify_call(&asked).unwrap();
    assert_eq!(path, "/completion");
    assert_eq!(
        body["prompt"],
        json!([[1, 2], [1, 2, 679], [1, 2, 679, 29], [1, 2, 5]])
    );
    assert_eq!(
        (&body["n_predict"], &body["stream"]),
        (&json!(1), &json!(false))
    );
    // Parts of characters have ids of their own here. A token that is missing stays open.
    let asked = test_verify_request(VerifyMethod::FanOut, &[223], &[None], greedy.clone());
    let partial = br#"[{"index":1,"tokens":[130]},{"index":0,"tokens":[]}]"#;
    let verdict = recorded_verdict(&dialect, &asked, partial).unwrap();
    assert_eq!(verdict.next_tokens, [None, Some(130)]);
    // A position where the engine ends is open, unless the request ends with that token too.
    let ended = br#"[{"index":0,"tokens":[2],"stop_type":"eos"},{"index":1,"tokens":[3],"stop_type":"limit"}]"#;
    let verdict = recorded_verdict(&dialect, &asked, ended).unwrap();
    assert_eq!(verdict.next_tokens, [None, Some(3)]);
    let mut known = asked.clone();
    known.text.sampling.stop_token_ids = vec![2];
    let verdict = recorded_verdict(&dialect, &known, ended).unwrap();
    assert_eq!(verdict.next_tokens, [Some(2), Some(3)]);
    for garbage in [&b"{}"[..], b"<html>", br#"[{"index":2,"tokens":[1]}]"#] {
        let error = recorded_verdict(&dialect, &asked, garbage).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Upstream);
    }
    // Every prompt draws its own noise, whatever the seed of the request.
    let sampled = Sampling {
        temperature: 0.7,
        seed: 5,
        ..greedy.clone()
    };
    let asked = test_verify_request(VerifyMethod::FanOut, &[5], &[None], sampled);
    assert_eq!(
        dialect.verify_call(&asked).unwrap().1["seed"],
        json!(u32::MAX)
    );
    let chain = test_verify_request(VerifyMethod::Chain, &[5], &[None], greedy);
    assert!(dialect.verify_call(&chain).is_none());
}
