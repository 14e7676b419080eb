//! `refrain up` with several engines: each model has a worker of its own, and the drafts of one are not the other's.

use anyhow::ensure;
use e2e::{Chat, TINY_MODEL, UpMesh};

/// Two engines in this process, and a third that is away.
const ENGINES: &str = r#"
[[engines]]
files = "builtin:refrain-tiny"
[[engines]]
files = "builtin:refrain-tiny"
model = "second"
[[engines]]
kind = "vllm"
url = "http://127.0.0.1:9"
model = "away"
files = "builtin:refrain-tiny"
"#;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_model_is_served_by_its_own_engine() -> anyhow::Result<()> {
    let mesh = UpMesh::start_with(&format!("{ENGINES}\n[scheduler]\nworker_wait_ms = 200")).await?;
    let client = mesh.client();
    let listed = client.get("/v1/models").await?.text;
    for model in [TINY_MODEL, "second", "away"] {
        ensure!(listed.contains(&format!("{model:?}")), "{model}: {listed}");
    }
    let ask = |model: &str| {
        Chat::new("Count to ten.")
            .set("model", model)
            .max_tokens(24)
    };
    let first = client.chat(&ask(TINY_MODEL)).await?;
    let second = client.chat(&ask("second")).await?;
    ensure!(first.text == second.text, "{} {}", first.text, second.text);
    // Before, there was nothing to draft from but the request itself, for either.
    for model in [TINY_MODEL, "second"] {
        let again = client.chat(&ask(model)).await?;
        ensure!(
            again.text == first.text && again.accepted() > second.accepted(),
            "{model}: {}",
            again.text
        );
    }
    let metrics = client.scrape().await?;
    for worker in ["worker-0", "worker-0-1"] {
        let emitted = metrics.sum("refrain_engine_emitted_tokens_total", &[("worker", worker)]);
        let answered = 2.0 * first.completion_tokens() as f64;
        ensure!(emitted == answered, "{worker}: {emitted} of {answered}");
    }
    let reply = client
        .post("/v1/chat/completions", ask("away").body().to_string())
        .await?;
    ensure!(reply.status == 503, "{} {}", reply.status, reply.text);
    mesh.stop().await;
    Ok(())
}
