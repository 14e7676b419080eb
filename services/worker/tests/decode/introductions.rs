//! An engine with the Refrain plugin inside that restarts.

use std::time::Duration;

use futures_util::StreamExt;
use refrain_protocol::chunk::DraftRules;
use refrain_protocol::{DocumentId, NamespaceId};
use refrain_service_kit::clock;
use refrain_worker::{
    AttachedDocument, EngineKind, GenerateRequest, IntroductionCounts, StreamingEngine,
};

use crate::bench::eventually;
use crate::external::{Canned, Response, events, json, request, vllm};

const COMPLETIONS: &str = "/v1/completions";
const ONE_TOKEN: &str = "data: {\"choices\":[{\"index\":0,\"token_ids\":[9],\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n";

/// Requests of these namespaces, with these tokens.
async fn ask(engine: &dyn StreamingEngine, namespaces: &[(u128, &str)]) {
    for (namespace, token) in namespaces {
        let asked = GenerateRequest {
            namespace: NamespaceId(*namespace),
            attached: Some(AttachedDocument {
                token: (*token).into(),
                issued_at_s: clock::unix_s(),
                group: Some("g".into()),
                document: DocumentId(7),
                epoch: 3,
                drafts: DraftRules::default(),
            }),
            ..request()
        };
        let mut stream = engine.generate(asked).await.unwrap();
        while let Some(piece) = stream.next().await {
            piece.unwrap();
        }
    }
}

/// The bodies of the calls after the first `before` ones, once `due` further calls have arrived.
async fn introduced(server: &Canned, before: usize, due: usize) -> Vec<serde_json::Value> {
    eventually("the introductions arrive", || {
        server.received(COMPLETIONS).len() >= before + due
    })
    .await;
    let calls = server.received(COMPLETIONS);
    assert_eq!(calls.len(), before + due);
    let body = |call: &String| {
        let (_, body) = call.split_once("\r\n\r\n").unwrap();
        serde_json::from_str(body).unwrap()
    };
    calls[before..].iter().map(body).collect()
}

#[tokio::test]
async fn recent_namespaces_are_introduced_to_an_engine_that_is_back() {
    let server = vllm(&[(COMPLETIONS, events(ONE_TOKEN, false))]).await;
    let engine = server.connect(EngineKind::Vllm).await.unwrap();
    ask(&*engine, &[(1, "old"), (2, "other"), (1, "new")]).await;
    // The engine was never away, so no namespace is introduced.
    engine.confirm().await.unwrap();
    let away = Response(503, "application/json", "{}".into(), false);
    for times in 0..2 {
        server.set("/health", away.clone());
        engine.confirm().await.unwrap_err();
        server.set("/health", json("{}"));
        engine.confirm().await.unwrap();
        engine.confirm().await.unwrap();
        let bodies = introduced(&server, 3 + 2 * times, 2).await;
        // The most recently used namespace comes last, since the engine evicts it last.
        for (body, token) in bodies.iter().zip(["other", "new"]) {
            let brought = &body["vllm_xargs"];
            assert_eq!(brought["refrain_namespace"], token);
            // A document of its own, which nobody uploads.
            assert_ne!(
                brought["refrain_document"],
                serde_json::to_value(DocumentId(7)).unwrap()
            );
            assert_eq!(body["max_tokens"], 2);
            assert_eq!(body["ignore_eos"], true);
            assert!(brought.get("refrain_group").is_none());
        }
    }
}

#[tokio::test]
async fn an_engine_that_answers_no_call_is_away() {
    let server = vllm(&[(COMPLETIONS, events(ONE_TOKEN, false))]).await;
    let engine = server.connect(EngineKind::Vllm).await.unwrap();
    ask(&*engine, &[(1, "one")]).await;
    server.set(
        "/health",
        Response(200, "application/json", "".into(), true),
    );
    // The caller waits for less time than the timeout of the call.
    tokio::time::timeout(Duration::from_millis(50), engine.confirm())
        .await
        .unwrap_err();
    server.set("/health", json("{}"));
    engine.confirm().await.unwrap();
    let bodies = introduced(&server, 1, 1).await;
    assert_eq!(bodies[0]["vllm_xargs"]["refrain_namespace"], "one");
}

#[tokio::test]
async fn refused_introductions_are_repeated() {
    let server = vllm(&[(COMPLETIONS, events(ONE_TOKEN, false))]).await;
    let engine = server.connect(EngineKind::Vllm).await.unwrap();
    ask(&*engine, &[(1, "one")]).await;
    let away = Response(503, "application/json", "{}".into(), false);
    server.set("/health", away.clone());
    engine.confirm().await.unwrap_err();
    server.set("/health", json("{}"));
    server.set(COMPLETIONS, away);
    engine.confirm().await.unwrap();
    eventually("it refused", || {
        engine.take_introduction_counts()
            == IntroductionCounts {
                failed: 1,
                ..IntroductionCounts::default()
            }
    })
    .await;
    server.set(COMPLETIONS, events(ONE_TOKEN, false));
    engine.confirm().await.unwrap();
    eventually("the introductions arrive", || {
        engine.take_introduction_counts().succeeded == 1
    })
    .await;
    engine.confirm().await.unwrap();
    assert_eq!(introduced(&server, 1, 2).await.len(), 2);
}
