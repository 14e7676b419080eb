//! Verdicts of a real vLLM 0.32 with the shipped model.

use refrain_protocol::engine::Sampling;
use refrain_protocol::{DocumentId, ErrorKind};

use super::super::dialect::verify_request;
use super::super::streaming::Keeping;
use super::*;

fn vllm() -> Vllm {
    Vllm {
        model: "shipped".into(),
    }
}

#[test]
fn an_engine_with_the_drafts_inside_is_told_where_an_output_is_kept() {
    let mut asked = super::super::dialect::request(&[5, 6, 7], Sampling::default());
    assert!(vllm().body(&asked).unwrap().get("vllm_xargs").is_none());
    asked.prompt_len = 2;
    asked.keeping = Some(Keeping {
        token: "signed".into(),
        issued_at_s: 9,
        group: Some("g".into()),
        document: DocumentId(0xab),
        epoch: 3,
    });
    let fields = json!({
        "refrain_namespace": "signed",
        "refrain_group": "g",
        "refrain_document": "000000000000000000000000000000ab",
        "refrain_epoch": 3,
        "refrain_written": 1,
    });
    assert_eq!(vllm().body(&asked).unwrap()["vllm_xargs"], fields);
    // One end token would end it before anybody inside hears of it.
    let introduction = vllm().introduction(&asked).unwrap();
    assert_eq!(introduction["vllm_xargs"], fields);
    assert_eq!(introduction["ignore_eos"], true);
    assert!(vllm().body(&asked).unwrap().get("ignore_eos").is_none());
}

fn asked(way: VerifyWay, text: &[TokenId], draft: &[TokenId]) -> VerifyRequest {
    let parents: Vec<Option<u32>> = (0..draft.len() as u32)
        .map(|at| at.checked_sub(1))
        .collect();
    let mut asked = verify_request(way, draft, &parents, Sampling::default());
    asked.text.tokens = text.to_vec();
    asked
}

#[test]
fn a_chain_is_read_from_the_scores_of_its_prompt() {
    let recorded = include_str!("recorded/chain.json");
    let asked = asked(VerifyWay::Chain, &[1, 85, 406], &[426, 931, 14]);
    let read = |answer: &str| vllm().verified(&asked, answer.as_bytes()).unwrap().drawn;
    // None of the three is what it would have said; behind them it says 3.
    assert_eq!(read(recorded), [Some(201), Some(444), Some(16), Some(3)]);
    // The pass over the last token of the text was not made, nor those before it: their rows say nothing.
    let cached = |tokens: &str| recorded.replace("\"cached_tokens\":0", tokens);
    let found = read(&cached("\"cached_tokens\":2"));
    assert_eq!(found[0], Some(201));
    let found = read(&cached("\"cached_tokens\":4"));
    assert_eq!(found, [None, None, Some(16), Some(3)]);
    // A server that does not say what it found may have found anything.
    let found = read(&cached("\"other\":0"));
    assert_eq!(found, [None, None, None, Some(3)]);
    // Some versions leave the rows of what they found out.
    let rows = recorded.find("[null,{").unwrap()..recorded.find("{\"931\"").unwrap();
    let mut fewer = recorded.to_owned();
    fewer.replace_range(rows, "[");
    let fewer = fewer.replace("\"cached_tokens\":0", "\"cached_tokens\":3");
    assert_eq!(read(&fewer), [None, Some(444), Some(16), Some(3)]);
    // Behind the draft it would end by itself.
    let ended = recorded.replace("\"finish_reason\":\"length\"", "\"finish_reason\":\"stop\"");
    assert_eq!(read(&ended), [Some(201), Some(444), Some(16), None]);
    for garbage in ["{}", "<html>"] {
        let error = vllm().verified(&asked, garbage.as_bytes()).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Upstream);
    }
}

#[test]
fn a_chain_is_asked_for_within_the_namespace_and_from_the_cache() {
    let asked = asked(VerifyWay::Chain, &[1, 2], &[5, 6]);
    let (path, body) = vllm().verify(&asked).unwrap();
    assert_eq!(path, "/inference/v1/generate");
    assert_eq!(body["token_ids"], json!([1, 2, 5, 6]));
    assert_eq!(body["cache_salt"], "000000000000000000000000000000cd");
    let parameters = &body["sampling_params"];
    assert_eq!(parameters["skip_reading_prefix_cache"], json!(false));
    assert_eq!(parameters["detokenize"], json!(false));
    assert_eq!(parameters["max_tokens"], json!(1));
}

#[test]
fn prompts_of_a_fan_out_are_answered_by_their_index() {
    let asked_both = asked(VerifyWay::FanOut, &[1, 85], &[426]);
    let recorded = include_str!("recorded/fan_out.json");
    let verified = vllm().verified(&asked_both, recorded.as_bytes()).unwrap();
    assert_eq!(verified.drawn, [Some(406), Some(523)]);
    let turned = recorded.replace("\"index\":0", "\"index\":9");
    let turned = turned.replace("\"index\":1", "\"index\":0");
    let turned = turned.replace("\"index\":9", "\"index\":1");
    let verified = vllm().verified(&asked_both, turned.as_bytes()).unwrap();
    assert_eq!(verified.drawn, [Some(523), Some(406)]);
    let (path, body) = vllm().verify(&asked_both).unwrap();
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
fn priorities_are_told_only_where_the_engine_heeds_them() {
    let mut asked = asked(VerifyWay::Chain, &[1, 2], &[5]);
    for (priority, rank) in [
        (None, Value::Null),
        (Some(Priority::High), json!(-1)),
        (Some(Priority::Normal), json!(0)),
        (Some(Priority::Low), json!(1)),
    ] {
        asked.text.priority = priority;
        assert_eq!(vllm().body(&asked.text).unwrap()["priority"], rank);
        for way in [VerifyWay::Chain, VerifyWay::FanOut] {
            asked.way = way;
            assert_eq!(vllm().verify(&asked).unwrap().1["priority"], rank);
        }
    }
}
