//! A mesh whose engine is away at the start, comes, goes and comes back: it says so, and needs nobody's help.

use std::path::Path;

use anyhow::ensure;
use e2e::{Client, KEY, Program, TINY_MODEL, UpMesh, free_addr, wait_until};
use reqwest::Method;
use serde_json::{Value, json};

const PUBLIC: &str = "tiny-by-text";
const OWN_KEY: &str = "key-of-this-mesh";

/// Asks the mesh for some tokens. Returns the status and the answer.
async fn complete(client: &Client) -> anyhow::Result<(u16, Value)> {
    let body =
        json!({"model": PUBLIC, "prompt": "CREATE TABLE", "temperature": 0, "max_tokens": 4});
    let request = client.request(Method::POST, "/v1/completions").json(&body);
    let reply = client.send(request).await?;
    Ok((reply.status, serde_json::from_str(&reply.text)?))
}

/// Waits until the mesh is not ready and says all of `words`.
async fn until_it_says(client: &Client, words: &[&str]) {
    wait_until(&format!("/readyz says {words:?}"), async || {
        let reply = client.get("/readyz").await.ok()?;
        let says = words.iter().all(|word| reply.text.contains(word));
        (reply.status == 503 && says).then_some(())
    })
    .await;
}

/// Gives the only worker an order, as an operator.
async fn order(dir: &Path, drains: bool) -> anyhow::Result<()> {
    let read = |name: &str| std::fs::read_to_string(dir.join(name));
    let (url, token) = (read("operations-url")?, read("operator-token")?);
    let client = Client::new(url.trim(), token.trim());
    let figures = client.get("/admin/figures").await?;
    let figures: Value = serde_json::from_str(&figures.text)?;
    let worker = figures["workers"][0]["worker"].as_str().unwrap_or_default();
    let method = if drains { Method::POST } else { Method::DELETE };
    let request = client.request(method, &format!("/admin/workers/{worker}/drain"));
    let reply = client.send(request).await?;
    ensure!(reply.status == 200, "{}", reply.text);
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_follows_the_engine_and_says_why() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let addr = free_addr()?;
    let config = dir.path().join("mesh.toml");
    std::fs::write(
        &config,
        format!(
            "[urls]\nengine = \"http://{addr}\"\n\
             [scheduler]\nworker_wait_ms = 200\n\
             [worker.engine]\nkind = \"openai\"\nmodel = \"{PUBLIC}\"\nserved_model = \"{TINY_MODEL}\"\n\
             files = \"builtin:refrain-tiny\"\napi_key = \"{KEY}\"\n\
             [[gateway.models]]\nid = \"{PUBLIC}\"\nfiles = \"builtin:refrain-tiny\"\ntext_only = true\n\
             [[gateway.keys]]\nkey = \"{OWN_KEY}\"\ntenant = \"one\"\n"
        ),
    )?;
    let config = config.to_string_lossy().into_owned();
    let (program, url) = Program::up(dir.path(), &["--config", &config], &[]).await?;
    let client = Client::new(&url, OWN_KEY);
    let named = format!("the engine at http://{addr} (urls.engine)");

    // Without its engine it listens, lives, and says what it waits for.
    ensure!(client.get("/healthz").await?.status == 200);
    until_it_says(&client, &[PUBLIC, "waiting for", &named]).await;
    let (status, error) = complete(&client).await?;
    let message = error["error"]["message"].as_str().unwrap_or_default();
    ensure!(status == 503 && message.contains(&named), "{error}");
    let output = program.output();
    let of_worker = |line: &&str| line.contains("waiting for") && line.contains("refrain_worker");
    let lines = output.lines().filter(of_worker);
    ensure!(
        lines.count() == 1,
        "it says more than once what it waits for:\n{output}"
    );
    ensure!(
        !output.contains("reqwest") && !output.contains(OWN_KEY),
        "{output}"
    );

    let start_engine = async || {
        let settings = format!("[gateway]\nlisten = \"{addr}\"");
        UpMesh::start_with(&settings).await
    };
    let engine = start_engine().await?;
    client.ready("the mesh whose engine came").await;
    let (status, said) = complete(&client).await?;
    ensure!(status == 200, "{said}");

    engine.stop().await;
    until_it_says(&client, &[PUBLIC, &named, "does not answer"]).await;
    let (status, error) = complete(&client).await?;
    let message = error["error"]["message"].as_str().unwrap_or_default();
    ensure!(status == 503 && message.contains(&named), "{error}");

    let engine = start_engine().await?;
    client.ready("the mesh whose engine is back").await;

    order(dir.path(), true).await?;
    until_it_says(&client, &[PUBLIC, "drained by an operator"]).await;
    order(dir.path(), false).await?;
    client.ready("the mesh whose worker is back").await;
    ensure!(complete(&client).await?.0 == 200);
    engine.stop().await;
    Ok(())
}
