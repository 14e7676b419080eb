//! Rollouts: their class, their limits, their chunks, and what the scheduler is told of them.

use std::time::Duration;

use refrain_gateway::GatewayConfig;
use refrain_protocol::error::code;
use refrain_protocol::prefix::prefix_hashes;
use refrain_protocol::scheduling::RequestClass;
use refrain_protocol::{ApiError, ErrorKind};
use serde_json::{Value, json};

use crate::mesh::{Bench, Mishap, chat, config, tuned};

const CHAT: &str = "/v1/chat/completions";

/// A request of each surface with some more fields.
fn bodies(fields: &Value) -> [(&'static str, Value); 4] {
    let with = |mut body: Value| {
        for (name, value) in fields.as_object().unwrap() {
            body[name] = value.clone();
        }
        body
    };
    [
        (CHAT, chat(fields.clone())),
        (
            "/v1/completions",
            with(json!({"model": "tiny", "prompt": "a", "max_tokens": 9})),
        ),
        (
            "/v1/messages",
            with(json!({"model": "tiny", "max_tokens": 9,
                "messages": [{"role": "user", "content": "a"}]})),
        ),
        (
            "/v1/responses",
            with(json!({"model": "tiny", "input": "a", "max_output_tokens": 16})),
        ),
    ]
}

#[tokio::test]
async fn every_surface_takes_a_class() {
    let bench = Bench::new().await;
    for (fields, class) in [
        (json!({}), RequestClass::Interactive),
        (json!({"group": "g"}), RequestClass::Rollout),
        (json!({"class": "rollout"}), RequestClass::Rollout),
        (
            json!({"class": "interactive", "group": "g"}),
            RequestClass::Interactive,
        ),
        (json!({"class": null, "group": "g"}), RequestClass::Rollout),
    ] {
        for (path, body) in bodies(&fields) {
            let (status, answer) = bench.json(path, &body).await;
            assert_eq!(status, 200, "{path}: {answer}");
            let log = bench.mesh.log();
            let asked = log.leases.last().unwrap();
            assert_eq!(asked.class, class, "{path}: {fields}");
        }
    }
    let leases = bench.mesh.log().leases.len();
    for class in [json!("batch"), json!(1), json!(["rollout"])] {
        for (path, body) in bodies(&json!({"class": class})) {
            let (status, answer) = bench.json(path, &body).await;
            assert_eq!(status, 400, "{path}: {answer}");
            let message = answer["error"]["message"].as_str().unwrap();
            assert!(message.contains("class"), "{path}: {message}");
            if path != "/v1/messages" {
                assert_eq!(answer["error"]["param"], "class", "{path}");
            }
        }
    }
    assert_eq!(bench.mesh.log().leases.len(), leases);
}

#[tokio::test]
async fn rollouts_have_limits_of_their_own() {
    let bench = Bench::with(GatewayConfig {
        tenant_requests_in_flight_max: 1,
        tenant_rollouts_in_flight_max: 5,
        ..config()
    })
    .await;
    for lease in 0..6 {
        bench.mesh.mishap(lease, Mishap::Hang(1));
    }
    let rollout = |n: u32| chat(json!({"class": "rollout", "n": n}));
    let mut running = Vec::new();
    for n in [3, 2] {
        running.push(tokio::spawn(bench.post(CHAT, &rollout(n)).send()));
    }
    bench.mesh.wait_for_streams(5).await;
    running.push(tokio::spawn(bench.post(CHAT, &chat(json!({}))).send()));
    bench.mesh.wait_for_streams(6).await;
    let in_flight = |what: &str| bench.metric(&format!("refrain_gateway_{what}_in_flight"));
    assert_eq!((in_flight("requests"), in_flight("rollouts")), (1.0, 5.0));
    // Both are at their limits, each at its own.
    let rejections = |limit: &str| {
        let metric = format!("refrain_gateway_rejections_total{{limit=\"{limit}\"}}");
        bench.metric(&metric)
    };
    let refused = bench.post(CHAT, &rollout(1)).send().await.unwrap();
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["retry-after"], "1");
    assert_eq!(bench.chat(json!({})).await.0, 429);
    assert!(rejections("tenant_requests") >= 1.0);
    running.pop().unwrap().abort();
    bench.mesh.wait_for_streams(5).await;
    // There is room for an interactive request again, and for no rollout.
    let before = rejections("tenant_rollouts");
    assert_eq!(bench.json(CHAT, &rollout(1)).await.0, 429);
    assert_eq!(rejections("tenant_rollouts"), before + 1.0);
    assert_eq!(bench.chat(json!({})).await.0, 200);
    for sent in running {
        sent.abort();
    }
    bench.mesh.settled().await;
    assert_eq!((in_flight("requests"), in_flight("rollouts")), (0.0, 0.0));
}

#[tokio::test]
async fn a_rollout_may_take_longer_than_an_interactive_request() {
    let limits = |rollout_ms_max| GatewayConfig {
        request_ms_max: 50,
        rollout_ms_max,
        ..config()
    };
    for (rollout_ms_max, status) in [(0, 200), (60_000, 200), (50, 504)] {
        let bench = Bench::with(limits(rollout_ms_max)).await;
        bench.mesh.script().step_pause = Duration::from_millis(20);
        assert_eq!(bench.chat(json!({})).await.0, 504);
        let (of_rollout, answer) = bench.chat(json!({"class": "rollout"})).await;
        assert_eq!(of_rollout, status, "{answer}");
        if status == 200 {
            // The worker does not end it either.
            let log = bench.mesh.log();
            let left_ms = log.chunks.last().unwrap().budget.time_left_ms.unwrap();
            assert!(left_ms > 50_000, "{left_ms}");
        }
    }
}

#[tokio::test]
async fn a_rollout_waits_longer_for_a_scheduler_and_for_a_worker() {
    let absent = || {
        ApiError::new(ErrorKind::Unavailable, "no scheduler").with_code(code::SCHEDULER_UNAVAILABLE)
    };
    let no_worker =
        || ApiError::new(ErrorKind::Unavailable, "no worker serves it").with_code("no_worker");
    let patient = |rollout_scheduler_wait_ms| GatewayConfig {
        scheduler_wait_ms: 0,
        rollout_scheduler_wait_ms,
        ..config()
    };
    for (error, message) in [
        (absent(), "cannot be reached"),
        (no_worker(), "no worker serves it"),
    ] {
        for (class, wait_ms, status) in [
            ("interactive", 600_000, 503),
            ("rollout", 600_000, 200),
            ("rollout", 0, 503),
        ] {
            let bench = Bench::with(patient(wait_ms)).await;
            for call in 0..4 {
                let refused = &mut bench.mesh.script().refused_calls;
                refused.insert(call, error.clone());
            }
            let (got, answer) = bench.chat(json!({"class": class})).await;
            assert_eq!(got, status, "{class}, {wait_ms} ms: {answer}");
            if status == 503 {
                let said = answer["error"]["message"].as_str().unwrap();
                assert!(said.contains(message), "{said}");
            } else {
                assert_eq!(bench.mesh.log().lease_calls, 5);
            }
            if wait_ms == 0 {
                let refused = "refrain_gateway_rejections_total{limit=\"scheduler_wait\"}";
                assert_eq!(bench.metric(refused), 1.0);
            }
        }
    }
}

#[tokio::test]
async fn a_full_queue_ends_no_rollout_that_has_output() {
    let bench = Bench::with(tuned(|tuning| tuning.failures_max = 1)).await;
    let full = || ApiError::new(ErrorKind::Overloaded, "the queue is full");
    for call in 1..4 {
        bench.mesh.script().refused_calls.insert(call, full());
    }
    let fields = json!({"class": "rollout", "chunk_tokens": 20});
    assert_eq!(bench.chat(fields.clone()).await.0, 200);
    // Without output it may come again later.
    let calls = bench.mesh.log().lease_calls;
    bench.mesh.script().refused_calls.insert(calls, full());
    assert_eq!(bench.chat(fields).await.0, 429);
}

#[tokio::test]
async fn a_chunk_has_the_fewer_tokens_of_lease_and_request() {
    let penalty = json!({"presence_penalty": 1.0});
    for (lease, fields, compiles_forms, expected) in [
        (None, json!({}), false, None),
        (Some(5), json!({}), false, Some(5)),
        (Some(5), json!({"chunk_tokens": 3}), false, Some(3)),
        (Some(5), json!({"chunk_tokens": 9}), false, Some(5)),
        (None, json!({"chunk_tokens": 9}), false, Some(9)),
        (Some(0), json!({}), false, Some(1)),
        // Not every engine can continue such an output.
        (Some(5), penalty.clone(), false, None),
        (Some(5), penalty, true, Some(5)),
        (
            Some(5),
            json!({"response_format": {"type": "json_object"}}),
            false,
            None,
        ),
        (
            Some(5),
            json!({"presence_penalty": 1.0, "chunk_tokens": 3}),
            false,
            Some(3),
        ),
    ] {
        let config = tuned(|tuning| tuning.models_poll = Duration::from_millis(10));
        let bench = Bench::with(config).await;
        {
            let mut script = bench.mesh.script();
            script.lease_chunk_tokens = lease;
            script.compiles_forms = compiles_forms;
        }
        let asked = bench.mesh.log().polls;
        while bench.mesh.log().polls < asked + 3 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let (status, answer) = bench.chat(fields.clone()).await;
        assert_eq!(status, 200, "{answer}");
        let log = bench.mesh.log();
        assert_eq!(log.leases[0].chunk_tokens.is_some(), {
            fields.get("chunk_tokens").is_some()
        });
        for chunk in &log.chunks {
            assert_eq!(chunk.chunk_tokens, expected, "{lease:?} {fields}");
        }
    }
}

#[tokio::test]
async fn the_scheduler_learns_the_hashes_of_a_context_as_it_grows() {
    let poll = || tuned(|tuning| tuning.models_poll = Duration::from_millis(10));
    for workers in [3, 1] {
        let bench = Bench::with(poll()).await;
        bench.mesh.script().workers = workers;
        let asked = bench.mesh.log().polls;
        while bench.mesh.log().polls < asked + 3 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        bench.mesh.reply(&"word ".repeat(20));
        let prompt = "x".repeat(100);
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 90,
            "chunk_tokens": 30, "n": 2});
        let (status, answer) = bench.json("/v1/completions", &body).await;
        assert_eq!(status, 200, "{answer}");
        let log = bench.mesh.log();
        assert_eq!(log.leases.len(), 6);
        let mut longest = 0;
        for lease in &log.leases {
            let chunk = log
                .chunks
                .iter()
                .find(|chunk| {
                    chunk.request == lease.request
                        && chunk.tokens.len() == lease.context_tokens as usize
                })
                .unwrap();
            let namespace = lease.namespace.namespace.id();
            let expected = match workers {
                1 => Vec::new(),
                _ => prefix_hashes(&namespace, &chunk.tokens),
            };
            assert_eq!(lease.prefixes, expected);
            longest = longest.max(lease.prefixes.len());
        }
        // Marks in the prompt and in the output are there.
        assert_eq!(longest, if workers == 1 { 0 } else { 2 });
    }
}

#[tokio::test]
async fn a_scored_prompt_is_hashed_as_far_as_it_is_context() {
    let bench = Bench::new().await;
    bench.mesh.reply(&"a".repeat(80));
    let prompt = "a".repeat(80);
    // All but the first token are output, which the worker is forced to emit.
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 0, "echo": true,
        "logprobs": 1, "chunk_tokens": 70});
    let (status, answer) = bench.json("/v1/completions", &body).await;
    assert_eq!(status, 200, "{answer}");
    let log = bench.mesh.log();
    assert_eq!(log.leases.len(), 2);
    assert_eq!(log.leases[0].prefixes, []);
    let namespace = log.leases[1].namespace.namespace.id();
    let expected = prefix_hashes(&namespace, &log.chunks[1].tokens);
    assert_eq!((&log.leases[1].prefixes, expected.len()), (&expected, 1));
}

/// The group of the last lease, and that of its chunk.
fn last_group(bench: &Bench) -> Option<String> {
    let log = bench.mesh.log();
    let (lease, chunk) = (log.leases.last().unwrap(), log.chunks.last().unwrap());
    assert_eq!(lease.group, chunk.group);
    lease.group.clone()
}

#[tokio::test]
async fn the_choices_of_a_request_are_a_group_and_stay_interactive() {
    for window_ms in [60_000, 0] {
        let bench = Bench::with(GatewayConfig {
            implicit_group_window_ms: window_ms,
            ..config()
        })
        .await;
        assert_eq!(bench.chat(json!({"n": 3})).await.0, 200);
        let group = last_group(&bench).unwrap();
        for lease in &bench.mesh.log().leases {
            assert_eq!(lease.group.as_ref(), Some(&group));
            assert_eq!(lease.class, RequestClass::Interactive);
        }
        // A request with two prompts has two groups.
        let body = json!({"model": "tiny", "prompt": ["a", "b"], "n": 2, "max_tokens": 4});
        assert_eq!(bench.json("/v1/completions", &body).await.0, 200);
        let log = bench.mesh.log();
        let mut groups: Vec<_> = log.leases[3..].iter().map(|lease| &lease.group).collect();
        groups.sort();
        assert!(groups[0].is_some() && groups[0] == groups[1]);
        assert!(groups[2] == groups[3] && groups[1] != groups[2]);
        assert!(!groups.contains(&&Some(group)));
    }
}

#[tokio::test]
async fn equal_prompts_of_a_tenant_are_a_group_from_the_second_on() {
    let bench = Bench::new().await;
    let mut groups = Vec::new();
    for _ in 0..3 {
        assert_eq!(bench.chat(json!({"temperature": 1})).await.0, 200);
        groups.push(last_group(&bench));
    }
    assert_eq!(groups[0], None);
    assert!(groups[1].is_some() && groups[1] == groups[2]);
    assert_eq!(bench.metric("refrain_gateway_implicit_groups"), 1.0);
    // A named group stays what it is, and another prompt is another matter.
    assert_eq!(bench.chat(json!({"group": "g"})).await.0, 200);
    assert_eq!(last_group(&bench).as_deref(), Some("g"));
    let other = json!({"messages": [{"role": "user", "content": "ho"}]});
    assert_eq!(bench.chat(other).await.0, 200);
    assert_eq!(last_group(&bench), None);
    // So is the same prompt of another tenant.
    let url = format!("{}{CHAT}", bench.url);
    let mut of_bolt = Vec::new();
    for _ in 0..2 {
        let sent = bench.client.post(&url).bearer_auth("sk-bolt");
        let answer = sent.json(&chat(json!({}))).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        of_bolt.push(last_group(&bench));
    }
    assert_eq!(of_bolt[0], None);
    assert!(of_bolt[1].is_some() && of_bolt[1] != groups[1]);
}

#[tokio::test]
async fn equal_prompts_begin_a_new_group_when_the_weights_have_changed() {
    let bench = Bench::new().await;
    let mut groups = Vec::new();
    for version in [3, 3, 4, 4, 3, 4] {
        bench.mesh.script().versions = vec![version];
        assert_eq!(bench.chat(json!({"temperature": 1})).await.0, 200);
        groups.push(last_group(&bench));
    }
    // The third sample is the first one whose answer tells of version 4. A worker that lags behind divides nothing.
    let [first, of_three, third, fourth, fifth, sixth] = &groups[..] else {
        panic!("{groups:?}");
    };
    assert_eq!((first, fourth), (&None, &None));
    assert!(of_three.is_some() && third == of_three, "{groups:?}");
    assert!(
        fifth.is_some() && fifth == sixth && fifth != third,
        "{groups:?}"
    );
}

#[tokio::test]
async fn equal_prompts_are_no_group_where_that_is_turned_off() {
    let bench = Bench::with(GatewayConfig {
        implicit_group_window_ms: 0,
        ..config()
    })
    .await;
    for _ in 0..3 {
        assert_eq!(bench.chat(json!({})).await.0, 200);
        assert_eq!(last_group(&bench), None);
    }
    assert_eq!(bench.metric("refrain_gateway_implicit_groups"), 0.0);
}

#[tokio::test]
async fn the_first_of_equal_prompts_joins_the_others_with_its_next_chunk() {
    let bench = Bench::new().await;
    bench.mesh.script().step_pause = Duration::from_millis(300);
    let sent = bench.post(CHAT, &chat(json!({"chunk_tokens": 9})));
    let first = tokio::spawn(sent.send());
    bench.mesh.wait_for_streams(1).await;
    assert_eq!(bench.chat(json!({"max_tokens": 1})).await.0, 200);
    assert_eq!(first.await.unwrap().unwrap().status(), 200);
    let log = bench.mesh.log();
    let first = log.leases[0].request;
    let of_first = log.leases.iter().filter(|lease| lease.request == first);
    let groups: Vec<_> = of_first.map(|lease| lease.group.clone()).collect();
    let second = log.leases.iter().find(|lease| lease.request != first);
    assert!(groups.len() > 2 && groups[0].is_none());
    let last = groups.last().unwrap();
    assert!(last.is_some() && *last == second.unwrap().group);
}
