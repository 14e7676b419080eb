//! A mesh in front of a third-party engine that only returns text. Another mesh plays that engine, since its gateway
//! is an OpenAI-compatible server like any other.

use anyhow::ensure;
use e2e::{Client, KEY, TINY_MODEL, UpMesh, wait_until};
use reqwest::Method;
use serde_json::{Value, json};

const PUBLIC: &str = "tiny-by-text";
const PROMPT: &str = "CREATE TABLE orders (\n  id INTEGER PRIMARY KEY,\n";

async fn in_front_of(engine: &Client) -> anyhow::Result<UpMesh> {
    let settings = format!(
        "urls.engine = \"{}\"\n\
         [scheduler]\nworker_wait_ms = 10000\n\
         [worker.engine]\nkind = \"openai\"\nmodel = \"{PUBLIC}\"\nserved_model = \"{TINY_MODEL}\"\n\
         files = \"builtin:refrain-tiny\"\napi_key = \"{KEY}\"\n\
         [[gateway.models]]\nid = \"{PUBLIC}\"\nfiles = \"builtin:refrain-tiny\"\ntext_only = true\n",
        engine.url()
    );
    UpMesh::start_with(&settings).await
}

async fn complete(client: &Client, model: &str, fields: Value) -> anyhow::Result<(u16, Value)> {
    let mut body = json!({"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 40});
    if let (Some(body), Some(fields)) = (body.as_object_mut(), fields.as_object()) {
        body.extend(fields.clone());
    }
    let request = client.request(Method::POST, "/v1/completions").json(&body);
    let reply = client.send(request).await?;
    Ok((reply.status, serde_json::from_str(&reply.text)?))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_engines_output_is_returned_and_remembered() -> anyhow::Result<()> {
    let engine = UpMesh::start().await?;
    let mesh = in_front_of(&engine.client()).await?;
    let (_, expected) = complete(&engine.client(), TINY_MODEL, json!({})).await?;
    let (status, said) = complete(&mesh.client(), PUBLIC, json!({})).await?;
    ensure!(status == 200, "{said}");
    ensure!(
        said["choices"][0]["text"] == expected["choices"][0]["text"],
        "{said}"
    );
    ensure!(said["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]);
    let client = mesh.client();
    wait_until("the draft store has it", async || {
        let scrape = client.scrape().await.ok()?;
        (scrape.sum("refrain_draft_store_documents", &[]) >= 1.0).then_some(())
    })
    .await;

    // The gateway refuses the features that such an engine lacks, and names them.
    let (status, refused) = complete(&mesh.client(), PUBLIC, json!({"top_k": 5})).await?;
    ensure!(
        status == 400 && refused["error"]["param"] == "top_k",
        "{refused}"
    );

    let form = json!({"guided_regex": "[a-z]+"});
    let (status, refused) = complete(&mesh.client(), PUBLIC, form).await?;
    ensure!(
        status == 400 && refused["error"]["code"] == "unsupported_by_engine",
        "{refused}"
    );

    // Without its engine, the mesh reports an error and goes on.
    engine.stop().await;
    let (status, error) = complete(&mesh.client(), PUBLIC, json!({})).await?;
    ensure!([502, 503].contains(&status), "{status}: {error}");
    ensure!(
        error["error"]["message"]
            .as_str()
            .is_some_and(|said| !said.is_empty())
    );
    mesh.stop().await;
    Ok(())
}
