//! Tests of the model thread and its queue.

use std::sync::Arc;

use refrain_protocol::engine::{
    CloseRequest, Sampling, StepItem, StepRequest, TokenizeRequest, TokensBody,
};
use refrain_protocol::{EngineSessionId, ErrorKind};
use refrain_service_kit::telemetry::Metrics;

use crate::config::EngineConfig;
use crate::kernels::WeightFormat;
use crate::service::EngineHandle;

use super::support::{Random, item, load, opening, tensors, tiny, tiny_config};

fn engine(config: EngineConfig) -> EngineHandle {
    EngineHandle::with_model(
        &config,
        &Metrics::new().unwrap(),
        tiny(),
        None,
        "tiny".into(),
        None,
        Vec::new(),
    )
    .unwrap()
}

fn one(item: StepItem) -> StepRequest {
    StepRequest { items: vec![item] }
}

#[tokio::test]
async fn callers_share_one_engine() {
    let engine = engine(EngineConfig::default());
    let prompt = Random(1).tokens(30);
    let tasks: Vec<_> = (0..8u128)
        .map(|id| {
            let (engine, prompt) = (engine.clone(), prompt.clone());
            tokio::spawn(async move {
                let mut output: Vec<u32> = Vec::new();
                let mut next = opening(id, &Sampling::default(), &prompt);
                while output.len() < 20 {
                    let response = engine.step(one(next)).await.unwrap();
                    output.extend(&response.results[0].as_ref().unwrap().emitted);
                    next = item(id, 30 + output.len(), &[]);
                }
                output
            })
        })
        .collect();
    let mut outputs = Vec::new();
    for task in tasks {
        outputs.push(task.await.unwrap());
    }
    assert!(outputs.iter().all(|output| *output == outputs[0]));
    assert_eq!(engine.load().sessions_open, 8);
    let sessions = (0..8).map(EngineSessionId).collect();
    engine
        .close(CloseRequest {
            sessions,
            keep_kv: true,
            parks: false,
        })
        .await
        .unwrap();
    let load = engine.load();
    assert_eq!((load.sessions_open, load.sessions_kept), (0, 1));
    assert!(load.kv_tokens > 0 && load.kv_tokens <= load.kv_tokens_max);
}

#[tokio::test]
async fn a_full_queue_refuses_and_an_abort_overtakes() {
    let engine = engine(EngineConfig {
        queue_steps: 2,
        max_step_tokens: 200,
        ..EngineConfig::default()
    });
    let prompt = Random(1).tokens(190);
    // The runtime has one thread, so all steps are queued before the first is answered. Meanwhile the model thread
    // takes at most one.
    let steps: Vec<_> = (0..6)
        .map(|id| {
            let (engine, step) = (
                engine.clone(),
                one(opening(id, &Sampling::default(), &prompt)),
            );
            tokio::spawn(async move { engine.step(step).await })
        })
        .collect();
    tokio::task::yield_now().await;
    let mut refused = 0;
    for step in steps {
        if let Err(error) = step.await.unwrap() {
            assert_eq!(
                (error.kind, error.code.as_deref()),
                (ErrorKind::Overloaded, Some("engine_queue_full"))
            );
            assert!(error.retry_after_ms.is_some());
            refused += 1;
        }
    }
    assert!((1..=4).contains(&refused), "{refused}");
    engine
        .abort((0..6).map(EngineSessionId).collect())
        .await
        .unwrap();
    assert_eq!(
        (
            engine.load().sessions_open,
            engine.load().sessions_kept,
            engine.load().kv_tokens
        ),
        (0, 0, 0)
    );
    let response = engine.step(one(item(0, 190, &[]))).await.unwrap();
    assert_eq!(
        response.results[0].as_ref().unwrap_err().kind,
        ErrorKind::NotFound
    );
}

#[tokio::test]
async fn an_abort_keeps_waiting_steps_from_opening_sessions() {
    let engine = engine(EngineConfig::default());
    let prompt = Random(1).tokens(190);
    let steps: Vec<_> = (0..20)
        .map(|id| {
            let (engine, step) = (
                engine.clone(),
                one(opening(id, &Sampling::default(), &prompt)),
            );
            tokio::spawn(async move { engine.step(step).await })
        })
        .collect();
    tokio::task::yield_now().await;
    engine
        .abort((0..20).map(EngineSessionId).collect())
        .await
        .unwrap();
    for step in steps {
        let result = step.await.unwrap().unwrap().results.remove(0);
        assert!(result.is_ok() || result.unwrap_err().kind == ErrorKind::NotFound);
    }
    assert_eq!(engine.load().sessions_open, 0);
}

#[tokio::test]
async fn a_panic_costs_its_batch_and_nothing_more() {
    let config = tiny_config();
    let mut broken = load(&config, &tensors(&config, safetensors::Dtype::F32, 1)).unwrap();
    // The last token of the vocabulary has no embedding.
    broken.embedding.truncate(broken.embedding.len() - 1);
    let last = broken.architecture.vocab_size as u32 - 1;
    let engine = EngineHandle::with_model(
        &EngineConfig::default(),
        &Metrics::new().unwrap(),
        Arc::new(broken),
        None,
        "broken".into(),
        None,
        Vec::new(),
    )
    .unwrap();
    let greedy = Sampling::default();
    engine.step(one(opening(1, &greedy, &[1]))).await.unwrap();
    engine.step(one(opening(2, &greedy, &[1]))).await.unwrap();
    let error = engine.step(one(item(1, 1, &[last]))).await.unwrap_err();
    assert_eq!(
        (error.kind, error.message.as_str()),
        (ErrorKind::Internal, "internal error")
    );
    let results = engine
        .step(StepRequest {
            items: vec![item(1, 1, &[]), item(2, 1, &[])],
        })
        .await
        .unwrap()
        .results;
    assert_eq!(results[0].as_ref().unwrap_err().kind, ErrorKind::NotFound);
    assert!(results[1].is_ok());
}

#[tokio::test]
async fn shutdown_finishes_waiting_steps_and_refuses_new_ones() {
    let engine = engine(EngineConfig::default());
    let step = {
        let (engine, step) = (
            engine.clone(),
            one(opening(1, &Sampling::default(), &[1, 2])),
        );
        tokio::spawn(async move { engine.step(step).await })
    };
    tokio::task::yield_now().await;
    engine.ready().unwrap();
    engine.shutdown();
    assert!(step.await.unwrap().is_ok());
    let error = engine.step(one(item(1, 2, &[]))).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert!(engine.ready().is_err());
}

#[tokio::test]
async fn idle_sessions_are_closed() {
    let engine = engine(EngineConfig {
        session_idle_ms: 1,
        ..EngineConfig::default()
    });
    engine
        .step(one(opening(1, &Sampling::default(), &[1, 2])))
        .await
        .unwrap();
    let mut published = engine.watch_load();
    let load = published.wait_for(|load| load.sessions_open == 0).await;
    assert_eq!(load.unwrap().sessions_kept, 1);
}

#[tokio::test]
async fn the_compiled_in_model_tokenizes_text() {
    let config = EngineConfig {
        text_max: 100,
        weights: WeightFormat::Bf16,
        ..EngineConfig::default()
    };
    let engine = EngineHandle::start(&config, &Metrics::new().unwrap()).unwrap();
    let capabilities = engine.capabilities();
    assert_eq!(
        (capabilities.model.as_str(), capabilities.tokenizer.len()),
        ("refrain-tiny", 64)
    );
    let text = "def add(a, b): return a + b";
    let tokens = engine
        .tokenize(TokenizeRequest { text: text.into() })
        .await
        .unwrap();
    assert!(!tokens.tokens.is_empty());
    assert_eq!(engine.detokenize(tokens).await.unwrap().text, text);
    let error = engine
        .tokenize(TokenizeRequest {
            text: "x".repeat(101),
        })
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::TooLarge);
    let unknown = TokensBody {
        tokens: vec![capabilities.vocab_size],
    };
    assert_eq!(
        engine.detokenize(unknown).await.unwrap_err().kind,
        ErrorKind::InvalidRequest
    );
    let none = self::engine(EngineConfig::default());
    let error = none
        .tokenize(TokenizeRequest { text: "x".into() })
        .await
        .unwrap_err();
    assert_eq!(error.code.as_deref(), Some("no_tokenizer"));
}
