//! Tests that engines take blocks from each other over HTTP.

use std::path::Path;
use std::time::{Duration, Instant};

use refrain_protocol::engine::{CloseRequest, Sampling, StepItem, StepOutput, StepRequest};
use refrain_protocol::forgetting::{ForgetTenant, TenantForgotten};
use refrain_protocol::{EngineSessionId, ErrorKind, NamespaceId, TenantId, TokenId};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::{MeshAuth, MeshConfig};
use refrain_service_kit::telemetry::Metrics;

use super::super::support::{item, opening};
use super::{KV_LOADING, greedy, in_blocks};
use crate::config::{EngineConfig, KvPoolConfig};
use crate::service::{EngineHandle, EngineServer, start};

/// An engine with the compiled-in model, and its metrics.
struct Running {
    server: EngineServer,
    metrics: Metrics,
}

impl Running {
    async fn start(keys: &MeshConfig, peers: &[String], wait_ms: u64) -> Self {
        Running::start_with(
            keys,
            KvPoolConfig {
                memory_bytes_max: 64 << 20,
                peers: peers.to_vec(),
                fetch_tokens_min: 32,
                wait_ms,
                ..KvPoolConfig::default()
            },
        )
        .await
    }

    async fn start_with(keys: &MeshConfig, kv_pool: KvPoolConfig) -> Self {
        let metrics = Metrics::new().unwrap();
        let config = EngineConfig {
            listen: Some("127.0.0.1:0".parse().unwrap()),
            kv_pool,
            ..EngineConfig::default()
        };
        let mesh = MeshAuth::new(keys).unwrap();
        let server = start(config, mesh, metrics.clone()).await.unwrap();
        Running { server, metrics }
    }

    fn url(&self) -> String {
        format!("http://{}", self.server.addr().unwrap())
    }

    fn engine(&self) -> &EngineHandle {
        self.server.handle()
    }

    /// The value of a metric, summed over its labels.
    fn count(&self, name: &str) -> u64 {
        let text = String::from_utf8(self.metrics.render()).unwrap();
        let lines = text.lines().filter(|line| line.starts_with(name));
        let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        values.sum::<f64>() as u64
    }

    /// Makes a step of one item, as a worker does: again as long as blocks are being loaded.
    async fn step(&self, item: StepItem) -> StepOutput {
        loop {
            let items = vec![item.clone()];
            let mut response = self.engine().step(StepRequest { items }).await.unwrap();
            match response.results.remove(0) {
                Ok(output) => return output,
                Err(error) => assert_eq!(error.code.as_deref(), Some(KV_LOADING)),
            }
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    }

    /// Decodes tokens after a text in a new session, one per step, and closes it.
    async fn decode(&self, text: &[TokenId], count: usize) -> (Vec<StepOutput>, Vec<TokenId>) {
        self.decode_of(TenantId(0), text, count).await
    }

    /// As [`Running::decode`], for a tenant.
    async fn decode_of(
        &self,
        tenant: TenantId,
        text: &[TokenId],
        count: usize,
    ) -> (Vec<StepOutput>, Vec<TokenId>) {
        let (session, sampling) = (EngineSessionId(text.len() as u128), sampling());
        let mut outputs = Vec::new();
        let mut emitted: Vec<TokenId> = Vec::new();
        while emitted.len() < count {
            let mut next = match emitted.as_slice() {
                [] => opening(session.0, &sampling, text),
                more => item(session.0, text.len() + more.len(), &[]),
            };
            if let Some(spec) = &mut next.open {
                spec.namespace = NamespaceId(1 + tenant.0);
                spec.tenant = tenant;
            }
            let output = self.step(next).await;
            emitted.extend(&output.emitted);
            outputs.push(output);
        }
        let close = CloseRequest {
            sessions: vec![session],
            keep_kv: true,
            parks: false,
        };
        self.engine().close(close).await.unwrap();
        (outputs, emitted)
    }
}

fn sampling() -> Sampling {
    Sampling {
        temperature: 0.8,
        seed: 3,
        ..greedy()
    }
}

fn text() -> Vec<TokenId> {
    (0..300).map(|token| 5 + token * 7 % 4_000).collect()
}

fn logprobs(outputs: &[StepOutput]) -> Vec<u32> {
    let all = outputs
        .iter()
        .flat_map(|output| output.logprobs.iter().flatten());
    all.map(|logprob| logprob.logprob.to_bits()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_goes_on_with_the_blocks_of_another_engine_and_has_the_same_bits() {
    let keys = MeshConfig::generate().unwrap();
    let alone = Running::start(&keys, &[], 1).await;
    let (expected, all) = alone.decode(&text(), 60).await;
    let first = Running::start(&keys, &[], 1).await;
    let (_, begun) = first.decode(&text(), 30).await;
    // One that is gone, one that has nothing, and the one that has the blocks.
    let nobody = "http://127.0.0.1:9".to_owned();
    let empty = Running::start(&keys, &[], 1).await;
    let peers = [nobody, empty.url(), first.url()];
    let second = Running::start(&keys, &peers, 30_000).await;
    let text = [text(), begun.clone()].concat();
    let (outputs, rest) = second.decode(&text, 30).await;
    assert_eq!([begun, rest].concat(), all);
    assert_eq!(logprobs(&outputs), logprobs(&expected[30..]));
    assert_eq!(outputs[0].cached_tokens as usize, in_blocks(text.len()));
    let blocks = in_blocks(text.len()) as u64 / 32;
    assert_eq!(second.count("refrain_engine_kv_pool_fetched_total"), blocks);
    assert_eq!(
        second.count("refrain_engine_kv_pool_hits_total{source=\"peer\"}"),
        blocks
    );
    assert_eq!(
        second.count("refrain_engine_kv_pool_failures_total{of=\"peer\"}"),
        1
    );
    // It asked an engine with others' text as well, but got none of that.
    let (other, _) = second.decode(&[9; 200], 1).await;
    assert_eq!(other[0].cached_tokens, 0);
    for running in [alone, first, empty, second] {
        running.server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_behind_a_name_are_found_by_their_addresses() {
    let keys = MeshConfig::generate().unwrap();
    let first = Running::start(&keys, &[], 1).await;
    let (_, begun) = first.decode(&text(), 30).await;
    // The name may have an address of IPv6 as well, where nobody listens.
    let port = first.server.addr().unwrap().port();
    let peers = [format!("dns+http://localhost:{port}")];
    let second = Running::start(&keys, &peers, 30_000).await;
    let text = [text(), begun].concat();
    let (outputs, _) = second.decode(&text, 1).await;
    assert_eq!(outputs[0].cached_tokens as usize, in_blocks(text.len()));
    let blocks = in_blocks(text.len()) as u64 / 32;
    assert_eq!(second.count("refrain_engine_kv_pool_fetched_total"), blocks);
    // A name that nobody has costs time only.
    let peers = ["dns+http://nobody.invalid:1".to_owned()];
    let third = Running::start(&keys, &peers, 30_000).await;
    let (outputs, _) = third.decode(&text, 1).await;
    assert_eq!(outputs[0].cached_tokens, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_that_refuse_or_fall_silent_cost_only_the_wait() {
    let keys = MeshConfig::generate().unwrap();
    let alone = Running::start(&keys, &[], 1).await;
    let (expected, all) = alone.decode(&text(), 4).await;
    let stranger = Running::start(&MeshConfig::generate().unwrap(), &[], 1).await;
    // It takes connections and never answers.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for peer in [
        stranger.url(),
        format!("http://{}", silent.local_addr().unwrap()),
    ] {
        let engine = Running::start(&keys, &[peer], 300).await;
        let started = Instant::now();
        let (outputs, emitted) = engine.decode(&text(), 4).await;
        assert_eq!(
            (emitted, logprobs(&outputs)),
            (all.clone(), logprobs(&expected))
        );
        assert_eq!(outputs[0].cached_tokens, 0);
        assert!(started.elapsed() < Duration::from_secs(120));
        engine.server.stop().await;
    }
    alone.server.stop().await;
    stranger.server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_engine_goes_on_with_its_file() {
    let keys = MeshConfig::generate().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let pool = KvPoolConfig {
        memory_bytes_max: 64 << 20,
        file: Some(folder.path().join("engine.kvpool")),
        wait_ms: 30_000,
        ..KvPoolConfig::default()
    };
    let before = Running::start_with(&keys, pool.clone()).await;
    let (expected, all) = before.decode(&text(), 20).await;
    before.server.stop().await;
    let after = Running::start_with(&keys, pool).await;
    let (outputs, emitted) = after.decode(&text(), 20).await;
    assert_eq!((emitted, logprobs(&outputs)), (all, logprobs(&expected)));
    assert_eq!(outputs[0].cached_tokens as usize, in_blocks(300));
    assert_eq!(
        after.count("refrain_engine_kv_pool_hits_total{source=\"file\"}"),
        9
    );
    after.server.stop().await;
}

#[tokio::test]
async fn blocks_are_for_engines_and_bad_questions_are_refused() {
    let keys = MeshConfig::generate().unwrap();
    let engine = Running::start(&keys, &[], 1).await;
    let timeout = Duration::from_secs(120);
    let path = "/engine/v1/kv/blocks";
    let ask = async |secret: &str, body: &str| {
        let client = MeshClient::new(&engine.url(), secret, timeout).unwrap();
        let body = body.as_bytes().to_vec();
        client
            .post_bytes(path, "application/json", body, timeout)
            .await
    };
    let right = r#"{"keys": ["00000000000000000000000000000001"], "blocks_max": 4}"#;
    assert_eq!(ask(&keys.secret, right).await.unwrap().as_ref(), [0; 4]);
    let kinds = [
        ask("wrong", right).await.unwrap_err().kind,
        ask(&keys.secret, r#"{"keys": ["xyz"], "blocks_max": 4}"#)
            .await
            .unwrap_err()
            .kind,
        ask(&keys.secret, "{}").await.unwrap_err().kind,
    ];
    let bad = ErrorKind::InvalidRequest;
    assert_eq!(kinds, [ErrorKind::Unauthorized, bad, bad]);
    engine.server.stop().await;
}

/// Whether a file has the tokens of this block.
fn has_block(path: &Path, tokens: &[TokenId]) -> bool {
    let tokens: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    let bytes = std::fs::read(path).unwrap();
    bytes.windows(tokens.len()).any(|part| part == tokens)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_of_a_forgotten_tenant_is_in_the_file_or_is_used_also_after_a_restart() {
    let keys = MeshConfig::generate().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("engine.kvpool");
    let pool = KvPoolConfig {
        memory_bytes_max: 64 << 20,
        file: Some(path.clone()),
        wait_ms: 30_000,
        ..KvPoolConfig::default()
    };
    let engine = Running::start_with(&keys, pool.clone()).await;
    let (acme, bolt) = (TenantId::of("acme"), TenantId::of("bolt"));
    let texts = [text(), text().into_iter().rev().collect::<Vec<_>>()];
    for (tenant, text) in [(acme, &texts[0]), (bolt, &texts[1])] {
        engine.decode_of(tenant, text, 4).await;
    }
    while engine.count("refrain_engine_kv_pool_blocks{tier=\"file\"}") < 18 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert!(texts.iter().all(|text| has_block(&path, &text[256..288])));
    let order = ForgetTenant { tenant: acme };
    let client = MeshClient::new(&engine.url(), &keys.secret, Duration::from_secs(120)).unwrap();
    let forgotten: TenantForgotten = client
        .post_json("/engine/v1/forget", &order, None)
        .await
        .unwrap();
    let expected = TenantForgotten {
        sessions: 1,
        memory_blocks: 9,
        file_blocks: 9,
        running: 0,
    };
    assert_eq!(forgotten, expected);
    for block in texts[0].chunks_exact(32) {
        assert!(!has_block(&path, block));
    }
    assert!(
        texts[1]
            .chunks_exact(32)
            .all(|block| has_block(&path, block))
    );
    engine.server.stop().await;
    let engine = Running::start_with(&keys, pool).await;
    for (tenant, text, cached) in [(acme, &texts[0], 0), (bolt, &texts[1], in_blocks(300))] {
        let (outputs, _) = engine.decode_of(tenant, text, 1).await;
        assert_eq!(outputs[0].cached_tokens as usize, cached);
    }
    // A repeat forgets what came since, and another secret forgets nothing.
    assert_eq!(
        engine
            .engine()
            .forget_tenant(order)
            .await
            .unwrap()
            .memory_blocks,
        9
    );
    let stranger = MeshClient::new(&engine.url(), "wrong", Duration::from_secs(120)).unwrap();
    let refused = stranger.post_json::<_, TenantForgotten>("/engine/v1/forget", &order, None);
    assert_eq!(refused.await.unwrap_err().kind, ErrorKind::Unauthorized);
    engine.server.stop().await;
}
