//! Tests of the HTTP listener.

use std::time::Duration;

use refrain_protocol::engine::{
    AbortRequest, CloseRequest, DetokenizeResponse, EngineCapabilities, EngineLoad, Sampling,
    StepRequest, StepResponse, TokenizeRequest, TokensBody,
};
use refrain_protocol::{EngineSessionId, ErrorKind};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{MeshAuth, MeshConfig};
use refrain_service_kit::telemetry::Metrics;

use crate::config::EngineConfig;
use crate::service::start;

use super::support::{item, opening};

#[tokio::test]
async fn every_route_answers_and_requires_the_secret() {
    let keys = MeshConfig::generate().unwrap();
    let mesh = MeshAuth::new(&keys).unwrap();
    let config = EngineConfig {
        listen: Some("127.0.0.1:0".parse().unwrap()),
        body_bytes_max: 10_000,
        ..EngineConfig::default()
    };
    let metrics = Metrics::new().unwrap();
    let running = start(config, mesh, metrics.clone()).await.unwrap();
    let url = format!("http://{}", running.addr().unwrap());
    let timeout = Duration::from_secs(120);
    let client = MeshClient::new(&url, &keys.secret, timeout).unwrap();

    let capabilities: EngineCapabilities =
        client.get_json("/engine/v1/capabilities").await.unwrap();
    assert_eq!(capabilities, running.handle().capabilities());
    let text = TokenizeRequest {
        text: "SELECT name FROM users".into(),
    };
    let prompt: TokensBody = client
        .post_json("/engine/v1/tokenize", &text, None)
        .await
        .unwrap();
    let back: DetokenizeResponse = client
        .post_json("/engine/v1/detokenize", &prompt, None)
        .await
        .unwrap();
    assert_eq!(back.text, text.text);

    let sampling = Sampling {
        top_logprobs: Some(2),
        ..Sampling::default()
    };
    let request = StepRequest {
        items: vec![opening(7, &sampling, &prompt.tokens), item(8, 0, &[1])],
    };
    let response: StepResponse = client
        .post_json("/engine/v1/step", &request, None)
        .await
        .unwrap();
    let output = response.results[0].as_ref().unwrap();
    assert_eq!(
        (
            output.emitted.len(),
            output.logprobs.as_ref().unwrap().len()
        ),
        (1, 1)
    );
    assert_eq!(
        response.results[1].as_ref().unwrap_err().kind,
        ErrorKind::NotFound
    );
    let load: EngineLoad = client.get_json("/engine/v1/load").await.unwrap();
    assert_eq!((load.sessions_open, load.kv_tokens), (1, 32));
    let close = CloseRequest {
        sessions: vec![EngineSessionId(7)],
        keep_kv: true,
        parks: false,
    };
    client
        .post_json::<_, ()>("/engine/v1/close", &close, None)
        .await
        .unwrap();
    let abort = AbortRequest {
        sessions: vec![EngineSessionId(7)],
    };
    client
        .post_json::<_, ()>("/engine/v1/abort", &abort, None)
        .await
        .unwrap();

    let twice = StepRequest {
        items: vec![item(8, 0, &[1]), item(8, 0, &[1])],
    };
    let error = client
        .post_json::<_, StepResponse>("/engine/v1/step", &twice, None)
        .await
        .unwrap_err();
    assert_eq!(
        (error.kind, error.param.as_deref()),
        (ErrorKind::InvalidRequest, Some("items"))
    );
    let large = TokenizeRequest {
        text: "x".repeat(20_000),
    };
    let error = client
        .post_json::<_, TokensBody>("/engine/v1/tokenize", &large, None)
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::TooLarge);

    let stranger = MeshClient::new(&url, &"x".repeat(64), timeout).unwrap();
    for route in ["capabilities", "load"] {
        let path = format!("/engine/v1/{route}");
        assert_eq!(
            stranger.get_json::<()>(&path).await.unwrap_err().kind,
            ErrorKind::Unauthorized
        );
    }
    for route in ["step", "close", "abort", "tokenize", "detokenize"] {
        let path = format!("/engine/v1/{route}");
        let error = stranger
            .post_json::<_, ()>(&path, &(), None)
            .await
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unauthorized);
    }
    let metrics = String::from_utf8(metrics.render()).unwrap();
    for name in [
        "refrain_engine_step_seconds_count 1",
        "refrain_engine_sessions_kept 1",
        "limit=\"session_not_found\"} 1",
    ] {
        assert!(metrics.contains(name), "{name} is missing");
    }
    running.stop().await;
}
