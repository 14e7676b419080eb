//! Orders of trainers to third-party engines over HTTP, against a server with canned responses.

use refrain_protocol::ErrorKind;
use refrain_protocol::engine_order::{EngineCall, EngineOrder, PauseMode};
use refrain_worker::{EngineKind, RestoredWeights};

use crate::external::{Canned, Response, json, sglang};

fn pause(mode: PauseMode, clears_cache: bool) -> EngineOrder {
    EngineOrder::Pause { mode, clears_cache }
}

fn load() -> EngineOrder {
    EngineOrder::LoadWeights {
        directory: "/weights/5".into(),
        version: Some(5),
    }
}

#[tokio::test]
async fn sglang_is_paused_loaded_and_still_known_under_its_new_name() {
    let server = Canned::start(&sglang()).await;
    let engine = server.connect(EngineKind::Sglang).await.unwrap();
    server.set("/pause_generation", json("{\"status\":\"ok\"}"));
    server.set(
        "/flush_cache",
        Response(200, "text/plain", "Cache flushed.".into(), false),
    );
    engine.order(pause(PauseMode::Keep, true)).await.unwrap();
    assert!(server.received("/pause_generation")[0].ends_with("{\"mode\":\"retract\"}"));
    assert_eq!(server.received("/flush_cache").len(), 1);
    // It refuses weights in its answer, whatever the status is.
    let refused = "{\"success\":false,\"message\":\"no such folder\"}";
    server.set("/update_weights_from_disk", json(refused));
    let error = engine.order(load()).await.unwrap_err();
    assert!(error.message.ends_with("no such folder"), "{error}");
    let taken = "{\"success\":true,\"message\":\"ok\",\"num_paused_requests\":0}";
    server.set("/update_weights_from_disk", json(taken));
    engine.order(load()).await.unwrap();
    let asked = server.received("/update_weights_from_disk");
    assert!(
        asked[1].contains("\"model_path\":\"/weights/5\""),
        "{}",
        asked[1]
    );
    assert!(
        asked[1]
            .to_lowercase()
            .contains("authorization: bearer engine-key")
    );
    // It has another name for its model now.
    let renamed =
        "{\"data\":[{\"id\":\"/weights/5\",\"root\":\"/weights/5\",\"max_model_len\":400}]}";
    server.set("/v1/models", json(renamed));
    engine.confirm().await.unwrap();
    let foreign = "{\"data\":[{\"id\":\"/weights/5\",\"max_model_len\":9}]}";
    server.set("/v1/models", json(foreign));
    assert_eq!(
        engine.confirm().await.unwrap_err().kind,
        ErrorKind::Unavailable
    );
    server.set(
        "/v1/models",
        json("{\"data\":[{\"id\":\"other\",\"max_model_len\":400}]}"),
    );
    assert!(engine.confirm().await.is_err());
    server.set("/continue_generation", json("{}"));
    engine.order(EngineOrder::Resume).await.unwrap();
    // A server of an earlier version lacks a route, and says which.
    let error = engine
        .order(EngineOrder::SetVersion { version: 6 })
        .await
        .unwrap_err();
    assert!(error.has_code("unsupported_by_engine"), "{error}");
    assert!(error.message.contains("/update_weight_version"), "{error}");
}

#[tokio::test]
async fn an_sglang_that_empties_no_cache_while_requests_wait_gives_them_up() {
    let server = Canned::start(&sglang()).await;
    let engine = server.connect(EngineKind::Sglang).await.unwrap();
    server.set("/pause_generation", json("{\"status\":\"ok\"}"));
    let busy = Response(400, "text/plain", "Flush cache failed.".into(), false);
    server.set("/flush_cache", busy);
    let text = |body: &str| Response(200, "text/plain", body.into(), false);
    server.set("/abort_request", text(""));
    server.set("/flush_cache?timeout=5", text("Cache flushed."));
    engine.order(pause(PauseMode::Keep, true)).await.unwrap();
    assert!(server.received("/abort_request")[0].ends_with("{\"abort_all\":true}"));
    assert_eq!(server.received("/flush_cache?timeout=5").len(), 1);
    // Without a cache to be emptied nothing is given up.
    engine.order(pause(PauseMode::Keep, false)).await.unwrap();
    assert_eq!(server.received("/abort_request").len(), 1);
}

#[tokio::test]
async fn vllm_is_paused_and_loads_by_either_of_its_ways() {
    let server = Canned::start(&[
        ("/health", json("{}")),
        (
            "/v1/models",
            json("{\"data\":[{\"id\":\"m\",\"root\":\"/weights/0\",\"max_model_len\":400}]}"),
        ),
        ("/detokenize", json("{\"prompt\":\"hellhellhello\"}")),
        (
            "/pause?mode=keep&clear_cache=false",
            json("{\"status\":\"paused\"}"),
        ),
        ("/resume", json("{\"status\":\"resumed\"}")),
        (
            "/reset_prefix_cache",
            Response(200, "text/plain", String::new(), false),
        ),
        ("/collective_rpc", json("{\"results\":[null]}")),
    ])
    .await;
    let engine = server.connect(EngineKind::Vllm).await.unwrap();
    engine.order(pause(PauseMode::Keep, false)).await.unwrap();
    engine.order(EngineOrder::FlushCache).await.unwrap();
    engine.order(EngineOrder::Resume).await.unwrap();
    engine.order(load()).await.unwrap();
    assert_eq!(server.received("/update_weights").len(), 1);
    assert!(server.received("/collective_rpc")[0].contains("\"weights_path\":\"/weights/5\""));
    server.set("/update_weights", json("{\"status\":\"ok\"}"));
    engine.order(load()).await.unwrap();
    assert_eq!(server.received("/collective_rpc").len(), 1);
    let failing = Response(
        500,
        "application/json",
        "{\"error\":\"out of memory\"}".into(),
        false,
    );
    server.set("/update_weights", failing);
    let error = engine.order(load()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Upstream);
    assert!(error.message.contains("out of memory"), "{error}");
    // The directory may hold half of other weights now, so it is told to read those of its start.
    assert_eq!(engine.restore_weights().await, RestoredWeights::Initial);
    let reloads = || server.received("/collective_rpc");
    assert!(reloads()[1].contains("\"weights_path\":\"/weights/0\""));
    // Weights that it has read, and that others did not replace, come back.
    server.set("/update_weights", json("{\"status\":\"ok\"}"));
    engine.order(load()).await.unwrap();
    assert_eq!(engine.restore_weights().await, RestoredWeights::Earlier);
    assert!(reloads()[2].contains("\"weights_path\":\"/weights/5\""));
    // After weights of another source, their directory says nothing.
    let version = EngineOrder::SetVersion { version: 6 };
    engine.order(version).await.unwrap();
    assert_eq!(engine.restore_weights().await, RestoredWeights::Initial);
    engine.order(load()).await.unwrap();
    let weights = EngineCall {
        is_post: true,
        path: "/update_weights_from_distributed".into(),
        body: "{}".into(),
    };
    engine.order(EngineOrder::PassOn(weights)).await.unwrap();
    assert_eq!(engine.restore_weights().await, RestoredWeights::Initial);
    // Calls in the engine's own words come back as they are.
    let call = |path: &str| {
        EngineOrder::PassOn(EngineCall {
            is_post: false,
            path: path.into(),
            body: String::new(),
        })
    };
    let answer = engine.order(call("/health?a=b")).await.unwrap().unwrap();
    assert_eq!((answer.status, &*answer.body), (404, "{}"));
    assert!(server.received("/health?a=b")[0].starts_with("GET "));
    let error = engine.order(call("@127.0.0.1:9/")).await.unwrap_err();
    assert_eq!(error.param.as_deref(), Some("path"));
}

#[tokio::test]
async fn other_engines_refuse_orders_in_clear_words() {
    let server = Canned::start(&[
        ("/health", json("{}")),
        ("/v1/models", json("{\"data\":[{\"id\":\"m\"}]}")),
    ])
    .await;
    for kind in [EngineKind::TensorrtLlm, EngineKind::Openai] {
        let engine = server.connect(kind).await.unwrap();
        for order in [pause(PauseMode::Keep, false), EngineOrder::Resume, load()] {
            let error = engine.check_order(&order).unwrap_err();
            assert!(error.has_code("unsupported_by_engine"));
            assert!(error.message.contains("SGLang, vLLM"), "{error}");
            assert_eq!(engine.order(order).await.unwrap_err(), error);
        }
    }
}
