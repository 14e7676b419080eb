//! The trainers' listener in front of the real engine: drafts, aborts, pauses and new weights.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use e2e::{Client, UpMesh, free_addr, long_task, repository, wait_until};
use serde_json::{Value, json};

/// A trainer and the mesh behind it.
struct Lab {
    mesh: UpMesh,
    addr: SocketAddr,
}

impl Lab {
    async fn start() -> anyhow::Result<Self> {
        let addr = free_addr()?;
        let settings = format!("[gateway.trainer]\nlisten = \"{addr}\"\ntenant = \"one\"\n");
        let mesh = Box::pin(UpMesh::start_with(&settings)).await?;
        Ok(Lab { mesh, addr })
    }

    fn client(&self) -> Client {
        Client::new(&format!("http://{}", self.addr), "").without_key()
    }

    async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        let reply = self.client().post(path, body.to_string()).await?;
        ensure!(
            reply.status == 200,
            "{path}: {} {}",
            reply.status,
            reply.text
        );
        Ok(reply.json())
    }

    async fn get(&self, path: &str) -> anyhow::Result<Value> {
        let reply = self.client().get(path).await?;
        ensure!(
            reply.status == 200,
            "{path}: {} {}",
            reply.status,
            reply.text
        );
        Ok(reply.json())
    }

    /// Posts in the background.
    fn sent(
        &self,
        path: &'static str,
        body: &Value,
    ) -> tokio::task::JoinHandle<anyhow::Result<Value>> {
        let (client, body) = (self.client(), body.to_string());
        tokio::spawn(async move {
            let reply = client.post(path, body).await?;
            ensure!(
                reply.status == 200,
                "{path}: {} {}",
                reply.status,
                reply.text
            );
            Ok(reply.json())
        })
    }

    /// Waits until the engine decodes something.
    async fn decodes(&self) {
        wait_until("the engine decodes", async || {
            let version = self.get("/get_weight_version").await.ok()?;
            (version["workers"][0]["running"].as_u64()? > 0).then_some(())
        })
        .await;
    }
}

/// A rollout in the words of slime.
fn rollout(number: usize, tokens: u32) -> Value {
    json!({
        "text": long_task(number),
        "sampling_params": {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "max_new_tokens": tokens,
            "ignore_eos": true, "sampling_seed": number, "no_stop_trim": true, "skip_special_tokens": false},
        "return_logprob": true,
    })
}

fn tokens(answer: &Value) -> usize {
    answer["output_ids"].as_array().map_or(0, Vec::len)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollouts_are_drafted_from_earlier_ones_and_both_interfaces_give_the_same_tokens()
-> anyhow::Result<()> {
    let lab = Lab::start().await?;
    let first = lab.post("/generate", &rollout(1, 100)).await?;
    let second = lab.post("/generate", &rollout(1, 100)).await?;
    ensure!(first["output_ids"] == second["output_ids"]);
    let logprobs = |answer: &Value| answer["meta_info"]["output_token_logprobs"].clone();
    ensure!(
        logprobs(&first).as_array().map(Vec::len) == Some(100),
        "{first}"
    );
    let accepted = second["meta_info"]["spec_accept_token_num"].as_u64();
    ensure!(accepted > Some(50), "{second}");
    // vLLM's interface takes the same prompt as tokens.
    let ids = json!({"model": "refrain-tiny", "prompt": long_task(1)});
    let ids = lab
        .mesh
        .client()
        .post("/tokenize", ids.to_string())
        .await?
        .json();
    let body = json!({
        "token_ids": ids["tokens"], "request_id": "x",
        "sampling_params": {"temperature": 0.8, "top_p": 1.0, "max_tokens": 100, "ignore_eos": true, "seed": 1, "logprobs": 0},
    });
    let third = lab.post("/inference/v1/generate", &body).await?;
    ensure!(
        third["choices"][0]["token_ids"] == first["output_ids"],
        "{third}"
    );
    ensure!(third["choices"][0]["finish_reason"] == "length");
    lab.mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_output_that_was_aborted_or_paused_goes_on_as_if_nothing_had_been() -> anyhow::Result<()>
{
    let lab = Lab::start().await?;
    let whole = lab.post("/generate", &rollout(2, 300)).await?;
    let mut body = rollout(2, 300);
    body["rid"] = json!("one");
    let sent = lab.sent("/generate", &body);
    lab.decodes().await;
    lab.post("/abort_request", &json!({"rid": "one"})).await?;
    let part = sent.await??;
    let reason = &part["meta_info"]["finish_reason"]["type"];
    // A fast machine may have ended it before.
    ensure!(reason == "abort" || tokens(&part) == 300, "{part}");
    let begun = tokens(&part);
    ensure!(
        whole["output_ids"].as_array().map(|all| &all[..begun])
            == part["output_ids"].as_array().map(|all| &all[..])
    );
    wait_until("nothing is in flight", async || {
        (lab.get("/v1/loads").await.ok()?["num_reqs"] == 0).then_some(())
    })
    .await;

    lab.post("/pause?mode=keep&clear_cache=true", &json!({}))
        .await?;
    ensure!(lab.get("/is_paused").await?["is_paused"] == true);
    let held = lab.sent("/generate", &rollout(2, 300));
    tokio::time::sleep(Duration::from_millis(500)).await;
    ensure!(!held.is_finished());
    lab.post("/resume", &json!({})).await?;
    ensure!(held.await??["output_ids"] == whole["output_ids"]);
    lab.mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_weights_have_their_version_in_every_answer_after_them() -> anyhow::Result<()> {
    let lab = Lab::start().await?;
    ensure!(lab.get("/get_weight_version").await?["weight_version"] == "default");
    let model = repository().join("services/reference-engine/model");
    let model = model.canonicalize().context("the shipped model")?;
    let sent = lab.sent("/generate", &rollout(3, 1_000));
    lab.decodes().await;
    lab.post("/pause_generation", &json!({"mode": "in_place"}))
        .await?;
    let load = json!({"model_path": model, "weight_version": "5"});
    let loaded = lab.post("/update_weights_from_disk", &load).await?;
    ensure!(loaded["success"] == true, "{loaded}");
    ensure!(lab.get("/weight_info").await?["weight_version"] == "5");
    lab.post("/continue_generation", &json!({})).await?;
    let answer = sent.await??;
    let spans = answer["meta_info"]["weight_versions"]
        .as_array()
        .context("spans")?;
    ensure!(
        spans.last().context("a span")?["end"] == tokens(&answer),
        "{spans:?}"
    );
    let versions: Vec<_> = spans.iter().map(|span| span["version"].clone()).collect();
    ensure!(versions == [0, 5], "{versions:?}");
    let next = lab.post("/generate", &rollout(4, 5)).await?;
    ensure!(next["meta_info"]["weight_version"] == "5", "{next}");
    // Weights that are not there change nothing, and the answer says where.
    let missing = json!({"model_path": "/nowhere"}).to_string();
    let refused = lab
        .client()
        .post("/update_weights_from_disk", missing)
        .await?;
    ensure!(
        refused.status >= 400 && refused.json()["workers"][0]["done"] == false,
        "{}",
        refused.text
    );
    ensure!(lab.get("/weight_info").await?["weight_version"] == "5");
    ensure!(lab.post("/flush_cache", &json!({})).await?["success"] == true);
    lab.mesh.stop().await;
    Ok(())
}
