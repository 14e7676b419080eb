//! `refrain up --adopt`: one process, in front of engines that a trainer registers.

use anyhow::ensure;
use e2e::{Client, KEY, Program, free_addr, wait_until};
use refrain_service_kit::mesh::MeshConfig;
use reqwest::Method;
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_process_serves_rollouts_by_an_engine_that_registers() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let keys = MeshConfig::generate()?;
    let (engine, trainer) = (free_addr()?.to_string(), free_addr()?.to_string());
    let first_port = free_addr()?.port() - 10_000;
    let mesh = format!(
        "[telemetry]\nlog = \"warn\"\n[mesh]\nsecret = {:?}\nnamespace_public_key = {:?}\n",
        keys.secret, keys.namespace_public_key
    );
    let of_engine = format!("{mesh}[engine]\nlisten = {engine:?}\n");
    let of_mesh = format!(
        "{mesh}namespace_signing_key = {:?}\n\
         [gateway]\nkeys = [{{ key = {KEY:?}, tenant = \"one\" }}]\n\
         [worker.adoption]\nfinds_kind = false\nfirst_port = {first_port}\n",
        keys.namespace_signing_key
    );
    let config = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text)?;
        anyhow::Ok(path.display().to_string())
    };
    let of_engine = config("engine.toml", &of_engine)?;
    let arguments = ["reference-engine", "--config", &of_engine];
    let _engine = Program::start(dir.path(), &arguments, &[])?;
    let of_mesh = config("mesh.toml", &of_mesh)?;
    let arguments = ["--config", &of_mesh, "--trainer", &trainer, "--adopt", "1"];
    let (mut program, url) = Program::up(dir.path(), &arguments, &[]).await?;

    let trainer = Client::new(&format!("http://{trainer}"), "").without_key();
    let register = async |host: &str| {
        let url = engine.replace("127.0.0.1", host);
        let body = json!({"url": format!("http://{url}"), "worker_type": "regular"});
        trainer.post("/workers", body.to_string()).await
    };
    let id = wait_until("the engine has started and registers", async || {
        let reply = register("127.0.0.1").await.ok()?;
        let id = reply.json()["worker_id"].as_str().map(str::to_owned);
        id.filter(|_| reply.status == 202)
    })
    .await;
    let full = register("localhost").await?;
    ensure!(full.status == 429, "{} {}", full.status, full.text);
    let workers = async || {
        let answer = trainer.get("/workers").await?.json();
        let rows = answer["workers"].as_array().cloned().unwrap_or_default();
        anyhow::Ok(rows)
    };
    let rows = workers().await?;
    ensure!(rows.len() == 2 && rows[1]["is_healthy"] == true, "{rows:?}");

    let rollout = json!({"text": "How many lamps are in stock?", "return_logprob": true,
        "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": true}});
    let reply = trainer.post("/generate", rollout.to_string()).await?;
    let tokens = reply.json()["output_ids"].as_array().map(Vec::len);
    ensure!(reply.status == 200 && tokens == Some(12), "{}", reply.text);
    // Users of the same process have the same engine.
    let chat = e2e::Chat::new("How many lamps are in stock?")
        .max_tokens(8)
        .endless();
    let answer = Client::new(&url, KEY).chat(&chat).await?;
    ensure!(answer.completion_tokens() == 8, "{answer:?}");

    let request = trainer.request(Method::DELETE, &format!("/workers/{id}"));
    let removed = trainer.send(request).await?;
    ensure!(removed.status == 202, "{} {}", removed.status, removed.text);
    let rows: Vec<Value> = workers().await?;
    ensure!(rows.len() == 1, "{rows:?}");
    program.terminate().await?;
    let status = program.ended().await?;
    ensure!(status.success(), "{}", program.output());
    Ok(())
}
