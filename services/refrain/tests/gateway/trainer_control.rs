//! Orders of trainers: pauses, caches, weights and calls in an engine's own words.

use std::time::Duration;

use refrain_protocol::engine_order::{EngineAnswer, EngineCall, EngineOrder, PauseMode};
use refrain_protocol::{ApiError, ErrorKind};
use reqwest::Method;
use serde_json::{Value, json};

use crate::mesh::Mishap;
use crate::trainer::Lab;

/// The orders that the only worker got.
fn orders(lab: &Lab) -> Vec<EngineOrder> {
    let orders = lab.bench.mesh.fleet.take_orders();
    orders.into_iter().map(|(_, order)| order).collect()
}

fn pause(mode: PauseMode, clears_cache: bool) -> EngineOrder {
    EngineOrder::Pause { mode, clears_cache }
}

#[tokio::test]
async fn pauses_have_the_words_of_vllm_and_sglang() {
    let lab = Lab::new().await;
    for (path, body, order) in [
        ("/pause", json!({}), pause(PauseMode::Abort, true)),
        (
            "/pause?mode=keep&clear_cache=false",
            json!({}),
            pause(PauseMode::Keep, false),
        ),
        (
            "/pause?mode=wait&clear_cache=true",
            json!({}),
            pause(PauseMode::Wait, true),
        ),
        (
            "/pause?wait_for_inflight_requests=true",
            json!({}),
            pause(PauseMode::Wait, true),
        ),
        (
            "/pause_generation",
            json!({}),
            pause(PauseMode::Abort, false),
        ),
        (
            "/pause_generation",
            json!({"mode": "abort"}),
            pause(PauseMode::Abort, false),
        ),
        (
            "/pause_generation",
            json!({"mode": "retract"}),
            pause(PauseMode::Keep, true),
        ),
        (
            "/pause_generation",
            json!({"mode": "in_place"}),
            pause(PauseMode::Keep, false),
        ),
    ] {
        let (status, answer) = lab.post(path, &body).await;
        assert_eq!(status, 200, "{path}: {answer}");
        assert_eq!(orders(&lab), [order], "{path} {body}");
        assert_eq!(lab.get("/is_paused").await.1["is_paused"], true);
        assert_eq!(answer["workers"][0]["worker"], "w0");
        let resume = match path.starts_with("/pause_") {
            true => "/continue_generation",
            false => "/resume",
        };
        assert_eq!(lab.post(resume, &json!({})).await.0, 200);
        assert_eq!(orders(&lab), [EngineOrder::Resume]);
        assert_eq!(lab.get("/is_paused").await.1["is_paused"], false);
    }
    // AReaL sends no body, or an empty one.
    let bare = lab
        .request(Method::POST, "/pause_generation")
        .send()
        .await
        .unwrap();
    assert_eq!(bare.status(), 200);
    for (path, body) in [
        ("/pause?mode=never", json!({})),
        ("/pause?clear_cache=maybe", json!({})),
        ("/pause_generation", json!({"mode": "never"})),
        ("/pause_generation", json!([])),
    ] {
        let (status, answer) = lab.post(path, &body).await;
        assert_eq!(status, 400, "{path}: {answer}");
    }
    let done = "refrain_gateway_trainer_orders_total{order=\"pause\",outcome=\"done\"}";
    assert_eq!(lab.bench.metric(done), 9.0);
}

#[tokio::test]
async fn a_pause_by_abort_answers_what_runs_before_the_workers_pause() {
    let lab = Lab::new().await;
    lab.bench.mesh.mishap(0, Mishap::Hang(1));
    let sent = lab.sent(
        "/generate",
        &json!({"input_ids": [5], "return_logprob": true}),
    );
    lab.bench.mesh.wait_for_hanging(1).await;
    assert_eq!(lab.post("/pause_generation", &json!({})).await.0, 200);
    let (status, answer) = sent.await.unwrap();
    assert_eq!(status, 200);
    assert_eq!(answer["meta_info"]["finish_reason"]["type"], "abort");
    assert_eq!(answer["output_ids"].as_array().unwrap().len(), 3);
    // A new request waits until the workers go on.
    let waits = lab.sent("/generate", &json!({"input_ids": [5]}));
    lab.bench.mesh.wait_for_streams(1).await;
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert!(!waits.is_finished());
    lab.post("/continue_generation", &json!({})).await;
    assert_eq!(
        waits.await.unwrap().1["meta_info"]["finish_reason"]["type"],
        "stop"
    );
}

#[tokio::test]
async fn no_limit_on_time_ends_a_request_while_the_workers_are_paused() {
    let lab = Lab::with(|config| {
        config.request_ms_max = 4_000;
        config.rollout_ms_max = 4_000;
        config.scheduler_wait_ms = 4_000;
        config.rollout_scheduler_wait_ms = 4_000;
        config.tuning.worker_silence_max = Duration::from_secs(4);
        config.tuning.stream_head_wait = Duration::from_millis(50);
        config.tuning.stream_keep_alive = Duration::from_millis(50);
    })
    .await;
    lab.post("/pause?mode=keep&clear_cache=false", &json!({}))
        .await;
    let whole = lab.sent("/generate", &json!({"input_ids": [5]}));
    let streamed = json!({"input_ids": [6], "stream": true});
    let streamed = lab
        .request(Method::POST, "/generate")
        .json(&streamed)
        .send();
    let streamed = tokio::spawn(async move { streamed.await.unwrap().text().await.unwrap() });
    let chat = lab
        .bench
        .post("/v1/chat/completions", &crate::mesh::chat(json!({})))
        .send();
    let chat = tokio::spawn(chat);
    lab.bench.mesh.wait_for_streams(3).await;
    // Longer than every limit, and than the check of those that nobody reads.
    tokio::time::sleep(Duration::from_millis(6_500)).await;
    assert!(!whole.is_finished() && !streamed.is_finished() && !chat.is_finished());
    assert_eq!(lab.get("/v1/loads").await.1["num_reqs"], 2);
    lab.post("/resume", &json!({})).await;
    let (status, answer) = whole.await.unwrap();
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["meta_info"]["finish_reason"]["type"], "stop");
    let text = streamed.await.unwrap();
    assert!(
        text.contains(": keep-alive") && text.ends_with("data: [DONE]\n\n"),
        "{text}"
    );
    assert!(!text.contains("\"error\""), "{text}");
    assert_eq!(chat.await.unwrap().unwrap().status(), 200);
    assert_eq!(
        lab.bench.mesh.log().leases.len(),
        3,
        "nothing was tried again"
    );
    // Without a pause the limits hold.
    lab.bench.mesh.mishap(3, Mishap::Hang(1));
    lab.bench.mesh.mishap(4, Mishap::Hang(0));
    assert_eq!(
        lab.post("/generate", &json!({"input_ids": [5]})).await.0,
        504
    );
}

#[tokio::test]
async fn time_goes_on_after_a_worker_that_was_paused_has_been_started_anew() {
    let lab = Lab::with(|config| config.rollout_ms_max = 300).await;
    lab.post("/pause?mode=keep", &json!({})).await;
    lab.bench
        .mesh
        .fleet
        .state()
        .workers
        .get_mut("w0")
        .unwrap()
        .pause = None;
    assert_eq!(lab.get("/is_paused").await.1["is_paused"], false);
    lab.bench.mesh.mishap(0, Mishap::Hang(1));
    assert_eq!(
        lab.post("/generate", &json!({"input_ids": [5]})).await.0,
        504
    );
}

#[tokio::test]
async fn a_pause_that_no_worker_takes_is_no_pause() {
    let lab = Lab::with(|config| config.rollout_ms_max = 300).await;
    let broken = ApiError::new(
        ErrorKind::NotFound,
        "this worker takes no orders of trainers",
    );
    lab.bench
        .mesh
        .fleet
        .state()
        .failing
        .insert("w0".into(), broken);
    let (status, answer) = lab.post("/pause?mode=keep", &json!({})).await;
    assert_eq!(status, 404, "{answer}");
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("w0: this worker takes no orders")
    );
    lab.bench.mesh.mishap(0, Mishap::Hang(1));
    assert_eq!(
        lab.post("/generate", &json!({"input_ids": [5]})).await.0,
        504
    );
}

#[tokio::test]
async fn a_new_epoch_begins_new_groups_of_equal_prompts() {
    let lab = Lab::new().await;
    let body = json!({"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}});
    let mut groups = Vec::new();
    for sample in 0..4 {
        if sample == 2 {
            let weights = json!({"model_path": "/w/8", "weight_version": "8"});
            let (status, answer) = lab.post("/update_weights_from_disk", &weights).await;
            assert_eq!(status, 200, "{answer}");
            lab.bench.mesh.script().versions = vec![8];
        }
        assert_eq!(lab.post("/generate", &body).await.0, 200);
        groups.push(lab.bench.mesh.log().leases.last().unwrap().group.clone());
    }
    assert!(groups[1].is_some() && groups[3].is_some(), "{groups:?}");
    assert_eq!((&groups[0], &groups[2]), (&None, &None));
    assert_ne!(groups[1], groups[3]);
}

#[tokio::test]
async fn weights_from_a_directory_have_a_version_in_the_words_of_each_trainer() {
    let lab = Lab::new().await;
    let load = |directory: &str, version| EngineOrder::LoadWeights {
        directory: directory.into(),
        version,
    };
    let (_, first) = lab.get("/get_weight_version").await;
    assert_eq!(first["weight_version"], "default");
    for (path, body, order, version) in [
        (
            "/update_weights_from_disk",
            json!({"model_path": "/w/1", "weight_version": "4", "load_format": null, "flush_cache": true}),
            load("/w/1", Some(4)),
            "4",
        ),
        (
            "/update_weights",
            json!({"weight_dir": "/w/step_2"}),
            load("/w/step_2", None),
            "5",
        ),
        (
            "/areal_update_weights",
            json!({"model_path": "/w/3"}),
            load("/w/3", None),
            "6",
        ),
        (
            "/update_weight_version",
            json!({"new_version": "9"}),
            EngineOrder::SetVersion { version: 9 },
            "9",
        ),
    ] {
        let (status, answer) = lab.post(path, &body).await;
        assert_eq!(status, 200, "{path}: {answer}");
        assert_eq!(orders(&lab), [order]);
        assert_eq!(answer["workers"][0]["weight_version"], version);
        for path in ["/get_weight_version", "/weight_info", "/weight_version"] {
            assert_eq!(lab.get(path).await.1["weight_version"], version, "{path}");
        }
        assert_eq!(lab.get("/server_info").await.1["weight_version"], version);
    }
    for (path, body) in [
        ("/update_weights_from_disk", json!({"weight_version": "4"})),
        (
            "/update_weights_from_disk",
            json!({"model_path": "/w", "weight_version": "v4"}),
        ),
        ("/update_weights", json!({"weight_dir": 7})),
        ("/update_weight_version", json!({})),
        ("/areal_update_weights", json!({"model_path": ""})),
    ] {
        let (status, answer) = lab.post(path, &body).await;
        assert_eq!(status, 400, "{path} {body}: {answer}");
    }
    assert_eq!(orders(&lab), []);
}

#[tokio::test]
async fn new_weights_abort_what_runs_if_the_trainer_says_so() {
    let lab = Lab::new().await;
    for (lease, field) in [(0, "abort_all_requests"), (1, "abort_all_request")] {
        lab.bench.mesh.mishap(lease, Mishap::Hang(1));
        let sent = lab.sent("/generate", &json!({"input_ids": [5]}));
        lab.bench.mesh.wait_for_streams(1).await;
        let body = json!({"model_path": "/w", field: true});
        assert_eq!(lab.post("/update_weights_from_disk", &body).await.0, 200);
        let (_, answer) = sent.await.unwrap();
        assert_eq!(
            answer["meta_info"]["finish_reason"]["type"], "abort",
            "{field}"
        );
        lab.bench.mesh.settled().await;
    }
}

#[tokio::test]
async fn an_order_that_fails_on_one_of_two_workers_names_both() {
    let lab = Lab::new().await;
    lab.bench.mesh.fleet.add("w1");
    let full = ApiError::new(ErrorKind::Upstream, "the disk is full");
    lab.bench
        .mesh
        .fleet
        .state()
        .failing
        .insert("w1".into(), full);
    let body = json!({"model_path": "/w", "weight_version": 3});
    let (status, answer) = lab.post("/update_weights_from_disk", &body).await;
    assert_eq!(status, 502, "{answer}");
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("1 of 2") && message.contains("w1: the disk is full"),
        "{message}"
    );
    assert!(
        message.contains("These have carried it out: w0"),
        "{message}"
    );
    assert_eq!(answer["success"], false);
    let workers = answer["workers"].as_array().unwrap();
    assert_eq!(
        (&workers[0]["done"], &workers[0]["weight_version"]),
        (&json!(true), &json!("3"))
    );
    assert_eq!(
        (&workers[1]["done"], &workers[1]["error"]["message"]),
        (&json!(false), &json!("the disk is full"))
    );
    // The version that never arrived on one of them shows.
    for path in ["/get_weight_version", "/weight_info"] {
        let (_, answer) = lab.get(path).await;
        assert_eq!(answer["weight_version"], "default", "{path}");
        assert_eq!(answer["is_everywhere"], false);
        assert_eq!(answer["workers"][0]["weight_version"], "3");
        assert_eq!(answer["workers"][1]["weight_version"], "default");
    }
    // A pause of one worker is none of both, and the time of requests stands still all the same.
    assert_eq!(lab.post("/pause?mode=keep", &json!({})).await.0, 502);
    assert_eq!(lab.get("/is_paused").await.1["is_paused"], false);
    lab.bench.mesh.fleet.state().failing.clear();
    assert_eq!(lab.post("/update_weights_from_disk", &body).await.0, 200);
    let (_, answer) = lab.get("/get_weight_version").await;
    assert_eq!(
        (&answer["weight_version"], &answer["is_everywhere"]),
        (&json!("3"), &json!(true))
    );
    let failed = "refrain_gateway_trainer_orders_total{order=\"load_weights\",outcome=\"failed\"}";
    assert_eq!(lab.bench.metric(failed), 1.0);
}

#[tokio::test]
async fn the_cache_is_flushed_only_while_nothing_runs() {
    let lab = Lab::new().await;
    lab.bench
        .mesh
        .fleet
        .state()
        .workers
        .get_mut("w0")
        .unwrap()
        .running = 2;
    assert_eq!(lab.post("/flush_cache", &json!({})).await.0, 400);
    assert_eq!(orders(&lab), []);
    // Held requests have no cache.
    {
        let mut state = lab.bench.mesh.fleet.state();
        let worker = state.workers.get_mut("w0").unwrap();
        (worker.running, worker.held) = (0, 5);
    }
    assert_eq!(lab.post("/flush_cache", &json!({})).await.0, 200);
    assert_eq!(orders(&lab), [EngineOrder::FlushCache]);
}

#[tokio::test]
async fn calls_in_an_engines_own_words_reach_it_unchanged() {
    let lab = Lab::new().await;
    let body = json!({"names": ["a"], "shapes": [[1]], "weight_version": "5"});
    let (status, answer) = lab
        .post("/update_weights_from_distributed?x=1", &body)
        .await;
    assert_eq!(
        (status, &answer["success"]),
        (200, &json!(true)),
        "{answer}"
    );
    let call = EngineCall {
        is_post: true,
        path: "/update_weights_from_distributed?x=1".into(),
        body: body.to_string(),
    };
    let set = EngineOrder::SetVersion { version: 5 };
    assert_eq!(orders(&lab), [EngineOrder::PassOn(call), set]);
    assert_eq!(
        lab.get("/get_weight_version").await.1["weight_version"],
        "5"
    );
    // vLLM's own weight transfer names no directory.
    let (status, _) = lab
        .post("/update_weights", &json!({"update_info": {}}))
        .await;
    assert_eq!(status, 200);
    assert!(matches!(orders(&lab)[..], [EngineOrder::PassOn(_)]));
    let started = lab.request(Method::POST, "/start_profile").send();
    assert_eq!(started.await.unwrap().status(), 200);
    assert!(
        matches!(&orders(&lab)[..], [EngineOrder::PassOn(call)] if call.is_post && call.body.is_empty())
    );
    // A call that the engine refuses is refused with its status and its words.
    lab.bench.mesh.fleet.state().engine = EngineAnswer {
        status: 404,
        body: "{\"detail\": \"Not Found\"}".into(),
    };
    let (status, answer) = lab.post("/init_broadcaster", &json!({"host": "h"})).await;
    assert_eq!(status, 404, "{answer}");
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("Not Found")
    );
}

#[tokio::test]
async fn each_engine_gets_its_own_ranks_in_the_order_of_the_workers() {
    let lab = Lab::new().await;
    let call = json!({"rank_offset": 1, "world_size": 7, "group_name": "g"});
    // One engine gets the call as it is, whether or not it tells its size.
    assert_eq!(lab.post("/init_weights_update_group", &call).await.0, 200);
    let (passed, body) = (lab.bench.mesh.fleet.take_orders(), call.to_string());
    assert!(matches!(&passed[..], [(_, EngineOrder::PassOn(passed))] if passed.body == body));
    lab.bench.mesh.fleet.add("w1");
    // An engine that does not tell its size gets no ranks, and neither does any other one.
    let (status, answer) = lab.post("/init_weights_update_group", &call).await;
    let message = answer["error"]["message"].as_str().unwrap_or_default();
    assert!(status == 400 && message.contains("devices"), "{answer}");
    assert_eq!(orders(&lab), []);
    assert_eq!(lab.get("/get_world_size").await.0, 400);
    let facts = [
        ("w0", "{\"tp_size\": 4, \"pp_size\": 1}"),
        ("w1", "{\"tp_size\": 2}"),
    ];
    let facts = facts.map(|(name, facts)| (name.to_owned(), facts.to_owned()));
    lab.bench.mesh.fleet.state().facts = facts.into();
    assert_eq!(
        lab.get("/get_world_size").await,
        (200, json!({"world_size": 6}))
    );
    let info = lab.get("/server_info").await.1;
    assert_eq!(
        (&info["tp_size"], &info["enable_memory_saver"]),
        (&json!(6), &json!(false))
    );
    for (path, call, offsets) in [
        ("/init_weights_update_group", call.clone(), [1, 5]),
        (
            "/init_weight_transfer_engine",
            json!({"init_info": call}),
            [1, 5],
        ),
        (
            "/init_broadcaster",
            json!({"rank_offset": 0, "inference_world_size": 6}),
            [0, 4],
        ),
    ] {
        let (status, answer) = lab.post(path, &call).await;
        assert_eq!(status, 200, "{answer}");
        let mut passed = lab.bench.mesh.fleet.take_orders();
        passed.sort_by(|one, other| one.0.cmp(&other.0));
        let passed = passed.into_iter().map(|(worker, order)| {
            let EngineOrder::PassOn(call) = order else {
                panic!("{order:?}")
            };
            assert!(call.is_post && call.path == path);
            let body: Value = serde_json::from_str(&call.body).unwrap();
            let ranks = body.get("init_info").unwrap_or(&body);
            (worker, ranks["rank_offset"].as_u64().unwrap())
        });
        let expected = [("w0", offsets[0]), ("w1", offsets[1])];
        let expected = expected.map(|(worker, offset)| (worker.to_owned(), offset));
        assert_eq!(passed.collect::<Vec<_>>(), expected, "{path}");
    }
    // A group without room is refused before any engine waits for it, and so are servers by number.
    for (path, call) in [
        (
            "/init_weights_update_group",
            json!({"rank_offset": 1, "world_size": 6}),
        ),
        (
            "/init_broadcaster",
            json!({"server_rank": 0, "num_inference_server": 1}),
        ),
    ] {
        let (status, answer) = lab.post(path, &call).await;
        assert_eq!(status, 400, "{answer}");
    }
    assert_eq!(orders(&lab), []);
    let (status, answer) = lab
        .post("/release_memory_occupation", &json!({"tags": []}))
        .await;
    assert_eq!(
        (status, answer["workers"].as_array().unwrap().len()),
        (200, 2)
    );
}

#[tokio::test]
async fn a_trainer_sees_one_worker_which_is_this_listener() {
    let lab = Lab::new().await;
    lab.bench.mesh.fleet.add("w1");
    let (_, answer) = lab.get("/workers").await;
    let workers = answer["workers"].as_array().unwrap();
    assert_eq!(workers.len(), 1);
    assert_eq!(workers[0]["url"], lab.url);
    assert!(workers[0]["id"].is_string());
    assert_eq!(lab.get("/list_workers").await.1, json!({"urls": [lab.url]}));
    for path in ["/health", "/health_generate", "/liveness"] {
        assert_eq!(lab.get(path).await, (200, Value::Null), "{path}");
    }
    for path in ["/server_info", "/get_server_info", "/get_model_info"] {
        let (status, answer) = lab.get(path).await;
        assert_eq!(
            (status, &answer["max_model_len"]),
            (200, &json!(256)),
            "{path}"
        );
    }
    assert_eq!(lab.get("/server_info").await.1["tp_size"], 1);
}

#[tokio::test]
async fn engines_save_memory_if_each_of_them_does() {
    let lab = Lab::new().await;
    lab.bench.mesh.fleet.add("w1");
    let saver = "{\"enable_memory_saver\": true}";
    for (other, told) in [("{}", false), (saver, true)] {
        let facts = [("w0", saver), ("w1", other)];
        let facts = facts.map(|(name, facts)| (name.to_owned(), facts.to_owned()));
        lab.bench.mesh.fleet.state().facts = facts.into();
        let info = lab.get("/server_info").await.1;
        assert_eq!(info["enable_memory_saver"], told);
    }
}

#[tokio::test]
async fn orders_without_a_worker_or_a_scheduler_are_errors() {
    let lab = Lab::new().await;
    lab.bench.mesh.fleet.state().workers.clear();
    for (method, path) in [
        (Method::POST, "/pause"),
        (Method::POST, "/resume"),
        (Method::GET, "/get_weight_version"),
        (Method::POST, "/release_memory_occupation"),
    ] {
        let response = lab.request(method, path).send().await.unwrap();
        assert_eq!(response.status(), 503, "{path}");
    }
}
