//! Weights that are replaced while the engine runs.

use std::sync::Arc;

use refrain_protocol::engine::{Sampling, StepItem, StepRequest, StepResponse};
use refrain_protocol::engine_order::{EngineCall, EngineOrder, EngineState, PauseMode};
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind, TokenId};
use refrain_service_kit::telemetry::Metrics;
use safetensors::Dtype;
use serde_json::json;

use crate::config::{EngineConfig, KvPoolConfig};
use crate::service::EngineHandle;

use super::support::{item, load, opening, tensors, tiny_config, write_model};
use super::weight_files::FileTensor;

const PROMPT: [TokenId; 40] = {
    let mut prompt = [0; 40];
    let mut at = 0;
    while at < 40 {
        prompt[at] = (at as TokenId * 7) % 31;
        at += 1;
    }
    prompt
};

/// The random model of this seed.
fn tensors_of(seed: u64) -> std::collections::HashMap<String, FileTensor> {
    tensors(&tiny_config(), Dtype::F32, seed)
}

/// An engine with a pool, whose blocks of old weights must not serve new ones.
fn engine(seed: u64) -> EngineHandle {
    let pool = KvPoolConfig {
        memory_bytes_max: 1 << 20,
        ..KvPoolConfig::default()
    };
    engine_with_pool(seed, pool)
}

fn engine_with_pool(seed: u64, kv_pool: KvPoolConfig) -> EngineHandle {
    let model = load(&tiny_config(), &tensors_of(seed)).unwrap();
    let config = EngineConfig {
        weights: crate::kernels::WeightFormat::F32,
        weight_version: 3,
        kv_pool,
        ..EngineConfig::default()
    };
    let metrics = Metrics::new().unwrap();
    let (model, name) = (Arc::new(model), "m".to_owned());
    EngineHandle::with_model(&config, &metrics, model, None, name, None, Vec::new()).unwrap()
}

/// A folder with the random model of this seed.
fn folder(seed: u64) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    write_model(folder.path(), &tiny_config(), &tensors_of(seed));
    folder
}

fn loading(folder: &tempfile::TempDir, version: Option<u64>) -> EngineOrder {
    EngineOrder::LoadWeights {
        directory: folder.path().to_str().unwrap().to_owned(),
        version,
    }
}

async fn step(engine: &EngineHandle, item: StepItem) -> StepResponse {
    let items = vec![item];
    engine.step(StepRequest { items }).await.unwrap()
}

fn emitted(response: StepResponse) -> Vec<TokenId> {
    response
        .results
        .into_iter()
        .next()
        .unwrap()
        .unwrap()
        .emitted
}

fn sampling() -> Sampling {
    Sampling {
        temperature: 1.0,
        seed: 5,
        ..Sampling::default()
    }
}

/// Decodes on from a text in a new session.
async fn decode(
    engine: &EngineHandle,
    session: u128,
    text: &[TokenId],
    count: usize,
) -> Vec<TokenId> {
    let opened = StepItem {
        max_emit: 1,
        ..opening(session, &sampling(), text)
    };
    let mut output = emitted(step(engine, opened).await);
    while output.len() < count {
        let next = item(session, text.len() + output.len(), &[]);
        output.extend(emitted(step(engine, next).await));
    }
    output
}

async fn state(engine: &EngineHandle) -> EngineState {
    engine.order(EngineOrder::Report).await.unwrap().state
}

#[tokio::test]
async fn an_output_goes_on_as_a_fresh_engine_with_the_new_weights_would() {
    let running = engine(11);
    let before = decode(&running, 1, &PROMPT, 12).await;
    assert_eq!(before, decode(&engine(11), 1, &PROMPT, 12).await);
    let new = folder(12);
    let reply = running.order(loading(&new, None)).await.unwrap();
    assert_eq!((reply.state.weight_version, reply.state.running), (4, 0));
    // The session is lost, and no KV of the old weights is found when it is opened again.
    let text = [&PROMPT[..], &before].concat();
    let lost = step(&running, item(1, text.len(), &[])).await;
    assert_eq!(
        lost.results[0].as_ref().unwrap_err().kind,
        ErrorKind::NotFound
    );
    let opened = step(&running, opening(2, &sampling(), &text)).await;
    assert_eq!(opened.weight_version, 4);
    assert_eq!(opened.results[0].as_ref().unwrap().cached_tokens, 0);
    let after = decode(&running, 3, &text, 30).await;
    assert_eq!(after, decode(&engine(12), 1, &text, 30).await);
    assert_ne!(after, decode(&engine(11), 1, &text, 30).await);
    // And back, under a number that the caller chose.
    let old = folder(11);
    let reply = running.order(loading(&old, Some(90))).await.unwrap();
    assert_eq!(reply.state.weight_version, 90);
    assert_eq!(decode(&running, 4, &PROMPT, 12).await, before);
}

#[tokio::test]
async fn the_pool_is_emptied_with_the_caches_and_names_blocks_by_the_new_weights() {
    let folder_of_pool = tempfile::tempdir().unwrap();
    let running = engine_with_pool(
        11,
        KvPoolConfig {
            memory_bytes_max: 16 << 20,
            file: Some(folder_of_pool.path().join("engine.kvpool")),
            ..KvPoolConfig::default()
        },
    );
    // The sessions are aborted, so only the pool can have their KV.
    let read = async |session: u128| {
        let opened = step(&running, opening(session, &sampling(), &PROMPT)).await;
        let sessions = vec![EngineSessionId(session)];
        running.abort(sessions).await.unwrap();
        opened.results[0].as_ref().unwrap().clone()
    };
    assert_eq!(read(1).await.cached_tokens, 0);
    let old = read(2).await;
    assert_eq!(old.cached_tokens, 32);
    running.order(EngineOrder::FlushCache).await.unwrap();
    assert_eq!(read(3).await.cached_tokens, 0);
    let new = folder(12);
    running.order(loading(&new, None)).await.unwrap();
    let first = read(4).await;
    let again = read(5).await;
    assert_eq!((first.cached_tokens, again.cached_tokens), (0, 32));
    let expected = decode(&engine(12), 1, &PROMPT, 1).await;
    assert_eq!((first.emitted, again.emitted), (expected.clone(), expected));
    // The same weights under another number are not taken for the same.
    let version = EngineOrder::SetVersion { version: 9 };
    running.order(version).await.unwrap();
    assert_eq!(read(6).await.cached_tokens, 0);
}

#[tokio::test]
async fn steps_go_on_while_weights_are_read() {
    let running = engine(11);
    let new = folder(12);
    let order = running.order(loading(&new, None));
    let stepping = async {
        let mut output = Vec::new();
        let mut session = 1;
        let mut versions = std::collections::BTreeSet::new();
        while versions.len() < 2 {
            let text = [&PROMPT[..], &output].concat();
            let response = match session {
                1 if output.is_empty() => step(&running, opening(1, &sampling(), &text)).await,
                _ => step(&running, item(session, text.len(), &[])).await,
            };
            let version = response.weight_version;
            match response.results.into_iter().next().unwrap() {
                Ok(step) => {
                    versions.insert(version);
                    output.extend(step.emitted);
                }
                Err(error) => {
                    assert_eq!((error.kind, version), (ErrorKind::NotFound, 4));
                    session += 1;
                    let opened = step(&running, opening(session, &sampling(), &text)).await;
                    versions.insert(opened.weight_version);
                    output.extend(emitted(opened));
                }
            }
            if output.len() > 100 {
                session += 1;
                output.clear();
                let opened = step(&running, opening(session, &sampling(), &PROMPT)).await;
                versions.insert(opened.weight_version);
                output.extend(emitted(opened));
            }
        }
    };
    let (reply, ()) = tokio::join!(order, stepping);
    assert_eq!(reply.unwrap().state.weight_version, 4);
}

#[tokio::test]
async fn wrong_and_damaged_weights_change_nothing() {
    let running = engine(11);
    let before = decode(&running, 1, &PROMPT, 8).await;
    let refused = async |folder: &tempfile::TempDir| -> ApiError {
        running.order(loading(folder, Some(9))).await.unwrap_err()
    };
    let missing = tempfile::tempdir().unwrap();
    let damaged = folder(12);
    let file = damaged.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let mut deeper = tiny_config();
    deeper["num_hidden_layers"] = json!(3);
    let other = tempfile::tempdir().unwrap();
    write_model(other.path(), &deeper, &tensors(&deeper, Dtype::F32, 12));
    let lacking = tempfile::tempdir().unwrap();
    let mut few = tensors_of(12);
    few.remove("model.layers.1.mlp.down_proj.weight");
    write_model(lacking.path(), &tiny_config(), &few);
    let diverged = tempfile::tempdir().unwrap();
    let mut values = tensors_of(12);
    let norm = FileTensor::floats(Dtype::F32, &[40], &[f32::NAN; 40]);
    values.insert("model.norm.weight".into(), norm);
    write_model(diverged.path(), &tiny_config(), &values);
    let endless = folder(12);
    let config = endless.path().join("config.json");
    std::fs::remove_file(&config).unwrap();
    std::os::unix::fs::symlink("/dev/zero", config).unwrap();
    for (folder, part) in [
        (&missing, "config.json"),
        (&endless, "config.json: it is not a regular file"),
        (&diverged, "model.norm.weight"),
        (&damaged, "model.safetensors"),
        (&other, "num_hidden_layers is 3 instead of 2"),
        (&lacking, "model.layers.1.mlp.down_proj.weight"),
    ] {
        let error = refused(folder).await;
        assert_eq!(error.kind, ErrorKind::InvalidRequest);
        assert!(error.has_code("weights_not_loaded"));
        assert!(error.message.contains(part), "{}", error.message);
    }
    let state = state(&running).await;
    assert_eq!((state.weight_version, state.running), (3, 1));
    // The session is still open, and goes on with the old weights.
    let text_len = PROMPT.len() + before.len();
    let next = emitted(step(&running, item(1, text_len, &[])).await);
    let whole = decode(&engine(11), 1, &PROMPT, 9).await;
    assert_eq!([before, next].concat(), whole);
}

#[tokio::test]
async fn one_load_runs_at_a_time() {
    let running = engine(11);
    let new = folder(12);
    let order = || running.order(loading(&new, None));
    let (first, second) = tokio::join!(order(), order());
    assert_eq!(first.unwrap().state.weight_version, 4);
    assert_eq!(second.unwrap_err().kind, ErrorKind::Conflict);
    assert_eq!(order().await.unwrap().state.weight_version, 5);
}

#[tokio::test]
async fn caches_are_forgotten_as_the_order_says() {
    let running = engine(11);
    let close = async |session: u128| {
        let request = refrain_protocol::engine::CloseRequest {
            sessions: vec![refrain_protocol::EngineSessionId(session)],
            keep_kv: true,
            parks: false,
        };
        running.close(request).await.unwrap();
    };
    let cached = async |session: u128| {
        let response = step(&running, opening(session, &sampling(), &PROMPT)).await;
        let cached = response.results[0].as_ref().unwrap().cached_tokens;
        close(session).await;
        cached
    };
    assert_eq!(cached(1).await, 0);
    assert_eq!(cached(2).await, 39);
    running.order(EngineOrder::FlushCache).await.unwrap();
    assert_eq!(cached(3).await, 0);
    // A pause leaves the caches, unless it clears them. Then open sessions are lost as well.
    let pause = |clears_cache| EngineOrder::Pause {
        mode: PauseMode::Keep,
        clears_cache,
    };
    running.order(pause(false)).await.unwrap();
    assert_eq!(cached(4).await, 39);
    step(&running, opening(5, &sampling(), &PROMPT)).await;
    running.order(pause(true)).await.unwrap();
    let lost = step(&running, item(5, PROMPT.len(), &[])).await;
    assert_eq!(
        lost.results[0].as_ref().unwrap_err().kind,
        ErrorKind::NotFound
    );
    assert_eq!(cached(6).await, 0);
    // KV caches of another version are not used.
    running
        .order(EngineOrder::SetVersion { version: 8 })
        .await
        .unwrap();
    assert_eq!(cached(7).await, 0);
    running.order(EngineOrder::Resume).await.unwrap();
    assert_eq!(state(&running).await.weight_version, 8);
    let call = EngineCall {
        is_post: true,
        path: "/pause".into(),
        body: String::new(),
    };
    let error = running.order(EngineOrder::PassOn(call)).await.unwrap_err();
    assert!(error.has_code("unsupported_by_engine"));
}
