//! An engine with the drafts inside that was away.

use futures_util::StreamExt;
use refrain_protocol::{DocumentId, NamespaceId};
use refrain_worker::{EngineKind, GenerateRequest, Keeping};

use crate::bench::eventually;
use crate::external::{Answer, events, json, request, vllm};

const COMPLETIONS: &str = "/v1/completions";

#[tokio::test]
async fn an_engine_that_comes_back_is_told_of_the_namespaces_of_late() {
    let said = "data: {\"choices\":[{\"index\":0,\"token_ids\":[9],\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n";
    let server = vllm(&[(COMPLETIONS, events(said, false))]).await;
    let engine = server.connect(EngineKind::Vllm).await.unwrap();
    for (namespace, token) in [(1, "old"), (2, "other"), (1, "new")] {
        let asked = GenerateRequest {
            namespace: NamespaceId(namespace),
            keeping: Some(Keeping {
                token: token.into(),
                group: Some("g".into()),
                document: DocumentId(7),
                epoch: 3,
            }),
            ..request()
        };
        let mut stream = engine.generate(asked).await.unwrap();
        while let Some(piece) = stream.next().await {
            piece.unwrap();
        }
    }
    // It was never away: there is nobody to introduce.
    engine.confirm().await.unwrap();
    let away = Answer(503, "application/json", "{}".into(), false);
    for times in 1..=2 {
        server.set("/health", away.clone());
        engine.confirm().await.unwrap_err();
        server.set("/health", json("{}"));
        engine.confirm().await.unwrap();
        engine.confirm().await.unwrap();
        let heard = 3 + 2 * times;
        eventually("it was told of both", || {
            server.heard(COMPLETIONS).len() >= heard
        })
        .await;
        let calls = server.heard(COMPLETIONS);
        assert_eq!(calls.len(), heard);
        for (call, token) in calls[heard - 2..].iter().zip(["new", "other"]) {
            let (_, body) = call.split_once("\r\n\r\n").unwrap();
            let body: serde_json::Value = serde_json::from_str(body).unwrap();
            let brought = &body["vllm_xargs"];
            assert_eq!(brought["refrain_namespace"], token);
            // An output of its own, which nobody keeps.
            assert_ne!(
                brought["refrain_document"],
                serde_json::to_value(DocumentId(7)).unwrap()
            );
            assert_eq!(body["max_tokens"], 2);
            assert!(brought.get("refrain_group").is_none());
        }
    }
}
