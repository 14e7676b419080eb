//! Request bodies of vLLM.

use refrain_protocol::DocumentId;
use refrain_protocol::chunk::DraftRules;
use refrain_protocol::engine::Sampling;

use super::super::tests::test_request;
use super::*;
use crate::engine::AttachedDocument;

fn vllm() -> Vllm {
    Vllm {
        model: "shipped".into(),
    }
}

#[test]
fn an_attached_engine_receives_the_document_of_an_output() {
    let mut asked = test_request(&[5, 6, 7], Sampling::default());
    assert!(vllm().body(&asked).unwrap().get("vllm_xargs").is_none());
    asked.prompt_len = 2;
    asked.attached = Some(AttachedDocument {
        token: "signed".into(),
        issued_at_s: 9,
        group: Some("g".into()),
        document: DocumentId(0xab),
        epoch: 3,
        drafts: DraftRules::default(),
    });
    let fields = json!({
        "refrain_namespace": "signed",
        "refrain_group": "g",
        "refrain_document": "000000000000000000000000000000ab",
        "refrain_epoch": 3,
        "refrain_written": 1,
    });
    assert_eq!(vllm().body(&asked).unwrap()["vllm_xargs"], fields);
    // An end token must not end it before the plugin sees it.
    let introduction = vllm().introduction(&asked).unwrap();
    assert_eq!(introduction["vllm_xargs"], fields);
    assert_eq!(introduction["ignore_eos"], true);
    assert!(vllm().body(&asked).unwrap().get("ignore_eos").is_none());
}

#[test]
fn an_attached_engine_receives_the_rules_of_drafts_that_are_set() {
    let mut asked = test_request(&[5, 6, 7], Sampling::default());
    let mut fields = |drafts| {
        asked.attached = Some(AttachedDocument {
            token: "signed".into(),
            issued_at_s: 9,
            group: None,
            document: DocumentId(0xab),
            epoch: 3,
            drafts,
        });
        let body = vllm().body(&asked).unwrap();
        let rules = ["alpha", "min_token_prob", "max_spec_tokens"];
        rules.map(|rule| body["vllm_xargs"][format!("refrain_{rule}")].clone())
    };
    let all = DraftRules {
        alpha: Some(2.5),
        min_token_prob: Some(0.25),
        max_spec_tokens: Some(7),
    };
    assert_eq!(fields(all), [json!(2.5), json!(0.25), json!(7)]);
    let none = [Value::Null, Value::Null, json!(0)];
    assert_eq!(fields(DraftRules::NO_DRAFTS), none);
}

#[test]
fn priorities_are_sent_only_where_the_engine_uses_them() {
    let mut asked = test_request(&[1, 2], Sampling::default());
    for (priority, rank) in [
        (None, Value::Null),
        (Some(Priority::High), json!(-1)),
        (Some(Priority::Normal), json!(0)),
        (Some(Priority::Low), json!(1)),
    ] {
        asked.priority = priority;
        assert_eq!(vllm().body(&asked).unwrap()["priority"], rank);
    }
}

#[test]
fn orders_have_words() {
    use refrain_protocol::engine_order::{EngineOrder, PauseMode};

    let vllm = Vllm { model: "m".into() };
    let paths = |order: &EngineOrder| -> Vec<String> {
        let calls = vllm.order_calls(order).unwrap();
        calls.into_iter().map(|call| call.path).collect()
    };
    for (mode, clears_cache, path) in [
        (PauseMode::Abort, true, "/pause?mode=abort&clear_cache=true"),
        (PauseMode::Wait, false, "/pause?mode=wait&clear_cache=false"),
        (PauseMode::Keep, false, "/pause?mode=keep&clear_cache=false"),
    ] {
        assert_eq!(paths(&EngineOrder::Pause { mode, clears_cache }), [path]);
    }
    assert_eq!(paths(&EngineOrder::Resume), ["/resume"]);
    assert_eq!(paths(&EngineOrder::FlushCache), ["/reset_prefix_cache"]);
    assert!(paths(&EngineOrder::SetVersion { version: 1 }).is_empty());
    let load = EngineOrder::LoadWeights {
        directory: "/w/5".into(),
        version: Some(5),
    };
    let call = vllm.order_calls(&load).unwrap().remove(0);
    assert_eq!(
        (&*call.path, &call.body["weight_dir"]),
        ("/update_weights", &json!("/w/5"))
    );
    assert!(call.is_replaced(404) && call.is_replaced(400) && !call.is_replaced(500));
    let other = &call.otherwise[0];
    assert_eq!(other.path, "/collective_rpc");
    assert_eq!(other.body["kwargs"]["weights_path"], "/w/5");
    assert!(!other.is_replaced(404));
}
