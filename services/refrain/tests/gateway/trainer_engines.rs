//! Engines that register, in the words of slime and of SGLang's gateway.

use refrain_protocol::engine_order::{EngineOrder, PauseMode};
use reqwest::Method;
use serde_json::{Value, json};

use crate::adopters::ENGINES_MAX;
use crate::trainer::Lab;

/// A listener with two processes that adopt engines, and no worker yet.
async fn lab() -> Lab {
    let lab = Lab::with(|config| {
        config.trainer.adopters = vec!["http://first".into(), "http://second".into()];
    })
    .await;
    lab.bench.mesh.fleet.state().workers.clear();
    lab
}

/// Registers as slime does. Returns the id.
async fn register(lab: &Lab, url: &str) -> String {
    let body = json!({"url": url, "worker_type": "regular"});
    let request = lab.request(Method::POST, "/workers").json(&body);
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 202);
    let location = response.headers()["location"].to_str().unwrap().to_owned();
    let answer: Value = response.json().await.unwrap();
    assert_eq!(answer["status"], "accepted");
    assert_eq!(answer["location"], location.as_str());
    let id = answer["worker_id"].as_str().unwrap().to_owned();
    assert_eq!(location, format!("/workers/{id}"));
    id
}

/// The rows of `GET /workers`.
async fn rows(lab: &Lab) -> Vec<Value> {
    let (status, answer) = lab.get("/workers").await;
    assert_eq!(status, 200);
    let rows = answer["workers"].as_array().unwrap().clone();
    assert_eq!(answer["total"], rows.len());
    rows
}

/// The names of the workers.
fn workers(lab: &Lab) -> Vec<String> {
    lab.bench
        .mesh
        .fleet
        .state()
        .workers
        .keys()
        .cloned()
        .collect()
}

async fn delete(lab: &Lab, id: &str) -> (u16, Value) {
    let request = lab.request(Method::DELETE, &format!("/workers/{id}"));
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    (status, response.json().await.unwrap())
}

#[tokio::test]
async fn slime_registers_engines_generates_updates_weights_and_removes_one() {
    let lab = lab().await;
    let (one, other) = ("http://10.0.0.1:30000", "http://10.0.0.2:30000");
    let first = register(&lab, one).await;
    let second = register(&lab, other).await;
    // A repeat changes nothing.
    assert_eq!(register(&lab, &format!("{one}/")).await, first);
    assert_eq!(
        workers(&lab),
        ["first@10.0.0.1:30000", "second@10.0.0.2:30000"]
    );
    let listed = rows(&lab).await;
    // The listener comes first, so that an abort of all reaches what waits here.
    assert_eq!(listed[0]["url"], lab.url);
    let shown: Vec<_> = listed[1..]
        .iter()
        .map(|row| {
            let is_healthy = row["is_healthy"] == true && row["load"] == 3;
            assert!(is_healthy, "{row}");
            (row["id"].as_str().unwrap(), row["url"].as_str().unwrap())
        })
        .collect();
    assert_eq!(shown, [(&*first, one), (&*second, other)]);
    assert_eq!(
        lab.get("/list_workers").await.1,
        json!({"urls": [lab.url, one, other]})
    );
    let (status, row) = lab.get(&format!("/workers/{first}")).await;
    assert_eq!((status, &row), (200, &listed[1]));
    let rollout = json!({"input_ids": [5], "return_logprob": true});
    assert_eq!(lab.post("/generate", &rollout).await.0, 200);
    // Weights go to both.
    let load = json!({"model_path": "/w", "weight_version": "4"});
    let (status, answer) = lab.post("/update_weights_from_disk", &load).await;
    assert_eq!(
        (status, answer["workers"].as_array().unwrap().len()),
        (200, 2)
    );
    assert_eq!(lab.get("/weight_info").await.1["weight_version"], "4");
    // slime looks up the id by the URL.
    let (status, answer) = delete(&lab, &first).await;
    assert_eq!((status, &answer["worker_id"]), (202, &json!(first)));
    assert_eq!(workers(&lab), ["second@10.0.0.2:30000"]);
    assert_eq!(rows(&lab).await.len(), 2);
    assert_eq!(lab.post("/generate", &rollout).await.0, 200);
    let (status, answer) = delete(&lab, &first).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (404, &json!("engine_not_found"))
    );
    assert_eq!(lab.get(&format!("/workers/{first}")).await.0, 404);
}

#[tokio::test]
async fn older_trainers_name_engines_by_their_urls() {
    let lab = lab().await;
    for (url, remove) in [
        ("http://10.0.0.1:30000", Method::POST),
        ("http://[fd00::5]:30000", Method::DELETE),
    ] {
        let (status, answer) = lab
            .post(&format!("/add_worker?url={url}"), &json!({}))
            .await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(workers(&lab).len(), 1);
        let status = if remove == Method::POST {
            lab.post(&format!("/remove_worker?url={url}"), &json!({}))
                .await
                .0
        } else {
            let quoted = url
                .replace(':', "%3A")
                .replace('/', "%2F")
                .replace('[', "%5B")
                .replace(']', "%5D");
            delete(&lab, &quoted).await.0
        };
        assert!([200, 202].contains(&status), "{url}: {status}");
        assert!(workers(&lab).is_empty());
    }
}

#[tokio::test]
async fn an_engine_that_joins_in_a_pause_starts_paused_and_old_weights_are_told() {
    let lab = lab().await;
    register(&lab, "http://10.0.0.1:1").await;
    let load = json!({"model_path": "/w", "weight_version": "4"});
    lab.post("/update_weights_from_disk", &load).await;
    let pause = json!({"mode": "in_place"});
    assert_eq!(lab.post("/pause_generation", &pause).await.0, 200);
    lab.bench.mesh.fleet.take_orders();
    let body = json!({"url": "http://10.0.0.2:1"});
    let (status, answer) = lab.post("/workers", &body).await;
    assert_eq!(
        (
            status,
            &answer["weight_version"],
            &answer["has_newest_weights"]
        ),
        (202, &json!("default"), &json!(false)),
        "{answer}"
    );
    // It was paused from the start, and not by an order afterwards.
    assert_eq!(lab.bench.mesh.fleet.take_orders(), []);
    let state = lab.bench.mesh.fleet.state().workers["second@10.0.0.2:1"];
    assert_eq!(state.pause, Some(PauseMode::Keep));
    let version = lab.get("/weight_info").await.1;
    assert_eq!(
        (&version["weight_version"], &version["is_everywhere"]),
        (&json!("default"), &json!(false))
    );
    assert_eq!(lab.post("/continue_generation", &json!({})).await.0, 200);
    let resumed = lab.bench.mesh.fleet.take_orders();
    assert_eq!(resumed.len(), 2);
    assert!(
        resumed
            .iter()
            .all(|(_, order)| *order == EngineOrder::Resume)
    );
}

#[tokio::test]
async fn an_engine_that_cannot_join_is_told_why() {
    let lab = lab().await;
    for (body, status, code) in [
        (json!({}), 400, Value::Null),
        (json!({"url": "10.0.0.1:1"}), 400, Value::Null),
        (
            json!({"url": "http://faulty:1"}),
            400,
            json!("engine_refused"),
        ),
        (
            json!({"url": "http://a:1", "worker_type": "prefill"}),
            400,
            Value::Null,
        ),
        (
            json!({"url": "http://a:1", "api_key": "k"}),
            400,
            Value::Null,
        ),
    ] {
        let (found, answer) = lab.post("/workers", &body).await;
        assert_eq!(
            (found, &answer["error"]["code"]),
            (status, &code),
            "{body}: {answer}"
        );
    }
    for number in 0..2 * ENGINES_MAX {
        register(&lab, &format!("http://10.0.0.{number}:1")).await;
    }
    let body = json!({"url": "http://10.0.1.0:1"});
    let (status, answer) = lab.post("/workers", &body).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (429, &json!("engines_limit"))
    );
    assert_eq!(lab.post("/add_worker", &json!({})).await.0, 400);
    // Both processes have as many as they may, and not one of them all.
    let of_first = workers(&lab);
    let of_first = of_first.iter().filter(|name| name.starts_with("first@"));
    assert_eq!(of_first.count(), ENGINES_MAX as usize);
}

#[tokio::test]
async fn slime_may_register_the_listener_itself_as_an_engine_that_it_did_not_start() {
    // No process adopts engines, and none is needed.
    let lab = Lab::new().await;
    let own = rows(&lab).await[0]["url"].as_str().unwrap().to_owned();
    for _ in 0..2 {
        assert_eq!(register(&lab, &own).await, "refrain");
    }
    assert_eq!(rows(&lab).await.len(), 1);
    let (status, answer) = lab
        .post("/workers", &json!({"url": "http://10.0.0.1:1"}))
        .await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (404, &json!("engines_not_adopted"))
    );
}
