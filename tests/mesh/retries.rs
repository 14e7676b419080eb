//! One budget of attempts for gateway and workers together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::ensure;
use e2e::{UpMesh, serve_http};
use refrain::config::MeshFile;
use reqwest::Method;
use serde_json::{Value, json};
use tempfile::TempDir;

const MODEL: &str = "model-of-a-failing-engine";

/// An engine that serves the model, and fails every request to generate.
struct FailingEngine {
    url: String,
    asked: Arc<AtomicU64>,
}

impl FailingEngine {
    async fn start() -> anyhow::Result<Self> {
        let asked = Arc::new(AtomicU64::new(0));
        let counter = asked.clone();
        let url = serve_http(move |first_line, _| {
            if !first_line.starts_with("POST /v1/completions ") {
                return ("200 OK", json!({"data": [{"id": MODEL}]}).to_string());
            }
            counter.fetch_add(1, Ordering::SeqCst);
            let planned = json!({"error": {"message": "planned", "code": 500}});
            ("500 Internal Server Error", planned.to_string())
        });
        Ok(FailingEngine {
            url: url.await?,
            asked,
        })
    }

    fn asked(&self) -> u64 {
        self.asked.load(Ordering::SeqCst)
    }
}

/// A mesh in front of the engine, and its data directory. Without `retries_per_s`, the budget of retries is the share
/// of the chunks alone.
async fn in_front_of(
    engine: &FailingEngine,
    gateway: &str,
    retries_per_s: f64,
) -> anyhow::Result<(UpMesh, TempDir)> {
    let settings = format!(
        "urls.engine = \"{}\"\n\
         [gateway]\n{gateway}\n\
         [worker.engine]\nkind = \"openai\"\nmodel = \"{MODEL}\"\nfiles = \"builtin:refrain-tiny\"\n\
         [[gateway.models]]\nid = \"{MODEL}\"\nfiles = \"builtin:refrain-tiny\"\ntext_only = true\n",
        engine.url
    );
    let data = tempfile::tempdir()?;
    let tune = |file: &mut MeshFile| {
        file.worker.engine.retry_backoff_ms = 1;
        file.worker.engine.breaker_failures_max = 1000;
        file.gateway.tuning.retry_backoff = Duration::from_millis(1);
        file.gateway.tuning.retries_per_s_min = retries_per_s;
    };
    let mesh = UpMesh::start_tuned(data.path(), &settings, tune).await?;
    Ok((mesh, data))
}

async fn ask(mesh: &UpMesh) -> anyhow::Result<(u16, Value)> {
    let client = mesh.client();
    let body = json!({"model": MODEL, "prompt": "CREATE", "max_tokens": 5});
    let request = client.request(Method::POST, "/v1/completions").json(&body);
    let reply = client.send(request).await?;
    Ok((reply.status, serde_json::from_str(&reply.text)?))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_of_gateway_and_worker_count_together() -> anyhow::Result<()> {
    let engine = FailingEngine::start().await?;
    let (mesh, _data) = in_front_of(&engine, "", 10.0).await?;
    let (status, error) = ask(&mesh).await?;
    ensure!(status == 502, "{status}: {error}");
    // The worker tries three times on the first lease, and twice on the second one.
    ensure!(engine.asked() == 5, "asked {} times", engine.asked());
    let scrape = mesh.client().scrape().await?;
    let retries = scrape.sum("refrain_worker_engine_retries_total", &[]);
    ensure!(retries == 3.0, "{retries} retries by the worker");
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_are_a_share_of_all_requests() -> anyhow::Result<()> {
    let engine = FailingEngine::start().await?;
    let (mesh, _data) = in_front_of(&engine, "retry_share = 0.5", 0.0).await?;
    for _ in 0..6 {
        let (status, error) = ask(&mesh).await?;
        ensure!(status == 502, "{status}: {error}");
    }
    // An unused budget expires, so a slow machine grants fewer retries.
    ensure!(
        (6..=9).contains(&engine.asked()),
        "asked {} times",
        engine.asked()
    );
    let scrape = mesh.client().scrape().await?;
    let refused = scrape.sum("refrain_gateway_rejections_total", &[("limit", "retries")]);
    ensure!(refused >= 3.0, "{refused} refused");
    ensure!(scrape.sum("refrain_gateway_retry_budget", &[]) < 1.0);
    mesh.stop().await;
    Ok(())
}
