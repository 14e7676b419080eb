//! Rollouts that wait for room: a trainer would lose those that are refused.

use std::time::Duration;

use refrain_protocol::{ApiError, ErrorKind};
use serde_json::{Value, json};

use crate::mesh::Mishap;
use crate::trainer::Lab;

const GENERATE: &str = "/generate";

fn rollout(rid: &str) -> Value {
    json!({"input_ids": [5], "rid": rid})
}

#[tokio::test]
async fn rollouts_past_the_limit_wait_in_order_and_past_the_limit_on_waiting_get_a_429() {
    let lab = Lab::with(|config| {
        config.trainer.in_flight_max = 2;
        config.trainer.held_max = 2;
    })
    .await;
    for lease in 0..2 {
        lab.bench.mesh.mishap(lease, Mishap::Hang(1));
    }
    let mut running = Vec::new();
    for rid in ["a", "b"] {
        running.push(lab.sent(GENERATE, &rollout(rid)));
    }
    lab.bench.mesh.wait_for_streams(2).await;
    let third = lab.sent(GENERATE, &rollout("c"));
    lab.wait_for_held(1.0).await;
    let fourth = lab.sent(GENERATE, &rollout("d"));
    lab.wait_for_held(2.0).await;
    let (status, answer) = lab.post(GENERATE, &rollout("e")).await;
    assert_eq!(status, 429, "{answer}");
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("gateway.trainer.held_max")
    );
    let rejections = "refrain_gateway_rejections_total{limit=\"trainer_held\"}";
    assert_eq!(lab.bench.metric(rejections), 1.0);
    let (_, loads) = lab.get("/v1/loads?include=core").await;
    assert_eq!(
        (&loads["num_reqs"], &loads["num_waiting_reqs"]),
        (&json!(4), &json!(2))
    );
    assert_eq!(loads["loads"][0]["num_total_reqs"], 4);
    lab.post("/abort_request", &json!({"rid": "a"})).await;
    lab.wait_for_held(0.0).await;
    lab.post("/abort_request", &json!({"rid": "b"})).await;
    for aborted in running {
        assert_eq!(
            aborted.await.unwrap().1["meta_info"]["finish_reason"]["type"],
            "abort"
        );
    }
    for one in [third, fourth] {
        let (status, answer) = one.await.unwrap();
        assert_eq!(status, 200);
        assert_eq!(answer["meta_info"]["finish_reason"]["type"], "stop");
    }
    assert_eq!(lab.get("/v1/loads").await.1["num_reqs"], 0);
}

#[tokio::test]
async fn a_full_queue_of_the_scheduler_is_waited_for() {
    let lab = Lab::with(|config| config.rollout_scheduler_wait_ms = 0).await;
    let full = || ApiError::new(ErrorKind::Overloaded, "full").with_code("queue_full");
    let errors = (0..8).map(|_| full());
    lab.bench.mesh.script().lease_errors = errors.collect();
    let (status, answer) = lab.post(GENERATE, &rollout("a")).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(lab.bench.mesh.log().lease_calls, 9);
    // A rollout of another listener is refused at once.
    lab.bench.mesh.script().lease_errors = [full()].into();
    assert_eq!(lab.bench.chat(json!({"class": "rollout"})).await.0, 429);
}

#[tokio::test]
async fn limits_of_the_tenant_and_of_the_gateway_make_rollouts_wait() {
    let lab = Lab::with(|config| config.tenant_rollouts_in_flight_max = 1).await;
    lab.bench.mesh.mishap(0, Mishap::Hang(1));
    let first = lab.sent(GENERATE, &rollout("a"));
    lab.bench.mesh.wait_for_streams(1).await;
    let second = lab.sent(GENERATE, &rollout("b"));
    lab.wait_for_held(1.0).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(!second.is_finished());
    lab.post("/abort_request", &json!({"rid": "a"})).await;
    assert_eq!(first.await.unwrap().0, 200);
    let (status, answer) = second.await.unwrap();
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["meta_info"]["finish_reason"]["type"], "stop");
}

#[tokio::test]
async fn the_tokens_per_minute_of_the_tenant_hold_rollouts_and_a_spent_budget_refuses_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tenants.toml");
    let tenants = "[[tenants]]\nname = \"slow\"\n[tenants.limits]\nrequests_per_minute = 1200\n\
                   [[tenants]]\nname = \"poor\"\n[tenants.limits]\ntokens_per_day = 10\n";
    std::fs::write(&path, tenants).unwrap();
    let lab = |tenant: &'static str| {
        let path = path.clone();
        Lab::with(move |config| {
            config.tenants_file = Some(path);
            config.limit_share = 0.01;
            config.trainer.tenant = Some(tenant.parse().unwrap());
        })
    };
    // Twelve requests per minute are this gateway's share: it takes twelve at once.
    let slow = lab("slow").await;
    let mut sent = Vec::new();
    for number in 0..13 {
        sent.push(slow.sent(GENERATE, &rollout(&number.to_string())));
    }
    let mut statuses = Vec::new();
    for one in sent {
        statuses.push(one.await.unwrap().0);
    }
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    let poor = lab("poor").await;
    let (status, answer) = poor.post(GENERATE, &rollout("a")).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (429, &json!("insufficient_quota")),
        "{answer}"
    );
}

#[tokio::test]
async fn rollouts_that_meet_several_limits_do_not_wait_for_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tenants.toml");
    let tenants = "[[tenants]]\nname = \"lab\"\n[tenants.limits]\nrequests_in_flight_max = 1\n";
    std::fs::write(&path, tenants).unwrap();
    let lab = Lab::with(|config| {
        config.tenants_file = Some(path);
        config.tenant_rollouts_in_flight_max = 2;
        config.trainer.tenant = Some("lab".parse().unwrap());
        config.trainer.in_flight_max = 3;
    })
    .await;
    lab.bench.mesh.script().step_pause = Duration::from_millis(2);
    let sent: Vec<_> = (0..12)
        .map(|number| lab.sent(GENERATE, &rollout(&number.to_string())))
        .collect();
    for one in sent {
        let (status, answer) = one.await.unwrap();
        assert_eq!(status, 200, "{answer}");
    }
    assert_eq!(lab.bench.mesh.log().lease_calls, 12);
}

#[tokio::test]
async fn a_request_that_is_held_ends_when_the_gateway_drains() {
    let lab = Lab::with(|config| config.trainer.in_flight_max = 1).await;
    lab.bench.mesh.mishap(0, Mishap::Hang(1));
    let first = lab.sent(GENERATE, &rollout("a"));
    lab.bench.mesh.wait_for_streams(1).await;
    let held = lab.sent(GENERATE, &rollout("b"));
    lab.wait_for_held(1.0).await;
    let Lab { bench, .. } = lab;
    let drained = tokio::spawn(bench.gateway.drain(Duration::from_millis(200)));
    let (status, answer) = held.await.unwrap();
    assert_eq!(
        (status, &answer["error"]["code"]),
        (503, &json!("server_is_draining")),
        "{answer}"
    );
    assert_eq!(first.await.unwrap().0, 503);
    assert_eq!(drained.await.unwrap(), 1);
}
