//! The memory that large bodies take, in a process of its own. At every surface the limit on bytes that are parsed
//! and tokenized at once bounds it.
#![cfg(target_os = "linux")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test that panics has failed"
)]

#[path = "gateway/adopters.rs"]
#[allow(dead_code, reason = "this process has no engines that register")]
mod adopters;
#[path = "gateway/chunks.rs"]
#[allow(dead_code, reason = "the tests of the API use more of it")]
mod chunks;
#[path = "gateway/fleet.rs"]
#[allow(dead_code, reason = "the tests of the API use more of it")]
mod fleet;
#[path = "gateway/mesh.rs"]
#[allow(
    dead_code,
    reason = "this process needs only a part of the scripted mesh"
)]
mod mesh;
#[path = "gateway/series.rs"]
mod series;
#[allow(dead_code, reason = "this process has no tenants in its store")]
#[path = "gateway/store.rs"]
mod store;
#[path = "gateway/usage_store.rs"]
#[allow(dead_code, reason = "this process reads no usage")]
mod usage_store;

use mesh::{Bench, tuned};
use serde_json::{Value, json};

const BODIES: usize = 24;
/// Bytes of bodies that may be parsed and tokenized at once.
const TOKENIZING_BYTES_MAX: usize = 1 << 20;
/// A body of very many small values takes at most this many times its bytes while it is parsed and translated.
const BYTES_PER_BODY_BYTE: usize = 40;
/// Memory of connections and threads.
const OTHER_BYTES_MAX: usize = 16 << 20;

/// A body of some thousand messages. Small JSON values take far more memory than their text.
fn body(path: &str) -> Value {
    let said = |text: &str| json!({"role": "user", "content": [{"text": text, "type": "text"}]});
    let messages: Vec<Value> = vec![said("a"); 5_000];
    match path {
        "/v1/responses" => json!({"model": "tiny", "input": messages}),
        _ => json!({"model": "tiny", "max_tokens": 9, "messages": messages}),
    }
}

/// A field of `/proc/self/status`, in bytes.
fn status_bytes(field: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    let kib: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib << 10
}

#[tokio::test]
async fn bodies_of_every_surface_take_bounded_memory_at_once() {
    for path in ["/v1/chat/completions", "/v1/responses", "/v1/messages"] {
        let bench = Bench::with(refrain_gateway::GatewayConfig {
            body_bytes_max: 4 << 20,
            ..tuned(|tuning| tuning.tokenizing_bytes_max = TOKENIZING_BYTES_MAX)
        })
        .await;
        let body = bytes::Bytes::from(body(path).to_string());
        let before = status_bytes("VmRSS:");
        // From here on, the peak counts anew.
        std::fs::write("/proc/self/clear_refs", "5").unwrap();
        let url = format!("{}{path}", bench.url);
        let sent = (0..BODIES).map(|_| {
            let request = bench.client.post(&url).bearer_auth("sk-acme");
            request.body(body.clone()).send()
        });
        for answer in futures_util::future::join_all(sent).await {
            let answer = answer.unwrap();
            // They are parsed and translated, and then too long for the model.
            let status = answer.status();
            let text = answer.text().await.unwrap();
            assert!(
                status == 400 && (text.contains("context") || text.contains("too long")),
                "{path}: {status} {text}"
            );
        }
        let grown = status_bytes("VmHWM:").saturating_sub(before);
        // All bodies may have arrived, and those that are parsed take more.
        let most =
            BODIES * body.len() + TOKENIZING_BYTES_MAX * BYTES_PER_BODY_BYTE + OTHER_BYTES_MAX;
        assert!(grown < most, "{path}: {grown} bytes more, {most} allowed");
    }
}
