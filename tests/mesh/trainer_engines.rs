//! Engines that register while a mesh runs, with real processes.

use anyhow::{Context as _, ensure};
use e2e::{Client, HttpMesh, PATIENCE, Service, free_addr, long_task, wait_until};
use refrain_protocol::adoption::AdopterReport;
use refrain_protocol::scheduling::WorkerReport;
use refrain_service_kit::http::MeshClient;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

/// Tokens of a rollout that takes a while.
const LONG: u32 = 400;

/// A trainer, and a mesh whose two workers adopt engines.
struct Lab {
    mesh: HttpMesh,
    trainer: Client,
}

/// A rollout in the words of slime.
fn rollout(number: usize, tokens: u32) -> Value {
    json!({
        "text": long_task(number),
        "sampling_params": {"temperature": 0.8, "max_new_tokens": tokens, "ignore_eos": true,
            "sampling_seed": number, "no_stop_trim": true, "skip_special_tokens": false},
        "return_logprob": true,
    })
}

fn json_of(reply: e2e::Reply, status: u16) -> anyhow::Result<Value> {
    ensure!(reply.status == status, "{}: {}", reply.status, reply.text);
    Ok(reply.json())
}

impl Lab {
    /// Starts a mesh without engines behind its workers, or with one behind each.
    async fn start(adopts: bool) -> anyhow::Result<Self> {
        let trainer = free_addr()?;
        let mut settings = format!("[gateway.trainer]\nlisten = \"{trainer}\"\ntenant = \"one\"\n");
        if adopts {
            for number in 0..2 {
                // No service of a mesh gets these ports. The file is in the folder of the mesh.
                let first_port = free_addr()?.port() - 10_000;
                settings += &format!(
                    "[worker-{number}.adoption]\nengines_max = 4\nfinds_kind = false\nfirst_port = {first_port}\n\
                     file = \"engines-{number}.json\"\n"
                );
            }
        }
        let mesh = HttpMesh::start_children(2, &settings, &[]).await?;
        let trainer = Client::new(&format!("http://{trainer}"), "").without_key();
        Ok(Lab { mesh, trainer })
    }

    fn engine(&self, number: usize) -> String {
        self.mesh.url(Service::Engine(number))
    }

    async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        json_of(self.trainer.post(path, body.to_string()).await?, 200)
    }

    /// Registers an engine.
    async fn register(&self, number: usize) -> anyhow::Result<Value> {
        let body = json!({"url": self.engine(number), "worker_type": "regular"});
        json_of(self.trainer.post("/workers", body.to_string()).await?, 202)
    }

    /// Removes an engine as slime does: by the id that the list has for its URL.
    async fn remove(&self, number: usize) -> anyhow::Result<()> {
        let url = self.engine(number);
        let rows = self.rows().await?;
        let row = rows.iter().find(|row| row["url"] == url);
        let id = row.context("not listed")?["id"].as_str().context("an id")?;
        let request = self
            .trainer
            .request(Method::DELETE, &format!("/workers/{id}"));
        json_of(self.trainer.send(request).await?, 202)?;
        Ok(())
    }

    async fn rows(&self) -> anyhow::Result<Vec<Value>> {
        let answer = json_of(self.trainer.get("/workers").await?, 200)?;
        Ok(answer["workers"].as_array().cloned().unwrap_or_default())
    }

    fn client(&self, service: Service) -> anyhow::Result<MeshClient> {
        let (url, secret) = (self.mesh.url(service), &self.mesh.keys().secret);
        MeshClient::new(&url, secret, PATIENCE)
    }

    async fn workers(&self) -> anyhow::Result<Vec<WorkerReport>> {
        let scheduler = self.client(Service::Scheduler)?;
        Ok(scheduler.get_json("/internal/v1/workers").await?)
    }

    /// Sends rollouts in the background.
    fn sent(&self, rollouts: &[Value]) -> Vec<JoinHandle<anyhow::Result<Value>>> {
        let sent = rollouts.iter().map(|rollout| {
            let (trainer, body) = (self.trainer.clone(), rollout.to_string());
            tokio::spawn(async move { json_of(trainer.post("/generate", body).await?, 200) })
        });
        sent.collect()
    }

    async fn outputs(&self, rollouts: &[Value]) -> anyhow::Result<Vec<Value>> {
        ends(self.sent(rollouts)).await
    }
}

/// The tokens of rollouts, in order.
async fn ends(sent: Vec<JoinHandle<anyhow::Result<Value>>>) -> anyhow::Result<Vec<Value>> {
    let mut outputs = Vec::new();
    for sent in sent {
        let answer = sent.await??;
        let reason = &answer["meta_info"]["finish_reason"]["type"];
        ensure!(reason == "length", "{answer}");
        outputs.push(answer["output_ids"].clone());
    }
    Ok(outputs)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_join_and_leave_a_running_mesh_and_no_rollout_is_lost() -> anyhow::Result<()> {
    let long: Vec<Value> = (0..6).map(|number| rollout(number, LONG)).collect();
    let configured = Lab::start(false).await?;
    configured.mesh.workers_report(2).await;
    let expected = configured.outputs(&long).await?;
    configured.mesh.stop().await?;

    let mut lab = Lab::start(true).await?;
    ensure!(lab.workers().await?.is_empty());
    let first = lab.register(0).await?;
    ensure!(lab.register(0).await?["worker_id"] == first["worker_id"]);
    lab.register(1).await?;
    // Each process has one.
    for number in 0..2 {
        let adopter = lab.client(Service::Worker(number))?;
        let report: AdopterReport = adopter.get_json("/internal/v1/engines").await?;
        ensure!(report.engines.len() == 1, "{report:?}");
        let page = lab.mesh.scrape(Service::Worker(number)).await?;
        ensure!(page.sum("refrain_worker_adopted_engines", &[]) == 1.0);
    }
    ensure!(lab.outputs(&long).await? == expected, "other outputs");
    // The page of a process has the metrics of its worker.
    let page = lab.mesh.scrape(Service::Worker(0)).await?;
    let address = lab.engine(0).replace("http://", "");
    let name = format!("worker-0@{address}");
    let tokens = page.sum("refrain_goodput_tokens_total", &[("worker", &name)]);
    ensure!(tokens > 0.0, "no tokens of {name}");

    // One leaves under running rollouts.
    let running = lab.sent(&long);
    wait_until("both engines decode", async || {
        let rows = lab.rows().await.ok()?;
        let busy = |row: &&Value| row["load"].as_u64() > Some(0);
        (rows[1..].iter().filter(busy).count() == 2).then_some(())
    })
    .await;
    lab.remove(0).await?;
    let left = lab.workers().await?;
    ensure!(left.len() == 1, "{left:?}");
    ensure!(ends(running).await? == expected, "other outputs");
    ensure!(lab.rows().await?.len() == 2);

    // One comes back in a pause, with weights that the other one has no more.
    let model = e2e::repository().join("services/reference-engine/model");
    let load = json!({"model_path": model, "weight_version": "5"});
    lab.post("/update_weights_from_disk", &load).await?;
    let pause = json!({"mode": "in_place"});
    lab.post("/pause_generation", &pause).await?;
    let back = lab.register(0).await?;
    ensure!(back["has_newest_weights"] == false, "{back}");
    let paused = json_of(lab.trainer.get("/is_paused").await?, 200)?;
    ensure!(paused["is_paused"] == true, "{paused}");
    let held = lab.sent(&long[..2]);
    lab.post("/update_weights_from_disk", &load).await?;
    let versions = json_of(lab.trainer.get("/weight_info").await?, 200)?;
    ensure!(versions["is_everywhere"] == true, "{versions}");
    ensure!(held.iter().all(|held| !held.is_finished()));
    lab.post("/continue_generation", &json!({})).await?;
    ensure!(ends(held).await? == expected[..2], "other outputs");

    // The processes start anew, and know their engines.
    for number in 0..2 {
        lab.mesh.replace(Service::Worker(number), None).await?;
    }
    wait_until("the engines are back", async || {
        let rows = lab.rows().await.ok()?;
        let healthy = rows[1..].iter().filter(|row| row["is_healthy"] == true);
        (healthy.count() == 2).then_some(())
    })
    .await;
    ensure!(lab.outputs(&long[..2]).await? == expected[..2]);
    lab.mesh.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_must_not_or_cannot_serve_is_not_adopted() -> anyhow::Result<()> {
    let lab = Lab::start(true).await?;
    let refused = async |url: &str, status: u16| {
        let body = json!({"url": url}).to_string();
        let answer = json_of(lab.trainer.post("/workers", body).await?, status)?;
        let code = answer["error"]["code"].as_str();
        anyhow::Ok(code.unwrap_or_default().to_owned())
    };
    // A service of this machine that is no engine, an address where nothing is, and one that nobody allowed.
    let gateway = lab.mesh.url(Service::Gateway);
    let status = lab
        .trainer
        .post("/workers", json!({"url": gateway}).to_string())
        .await?
        .status;
    ensure!(status >= 400, "a gateway was adopted as an engine");
    let nothing = format!("http://{}", free_addr()?);
    refused(&nothing, 503).await?;
    ensure!(refused("http://169.254.169.254:80", 403).await? == "host_not_allowed");
    ensure!(lab.rows().await?.len() == 1);
    // An engine that dies takes no chunks, and is listed until it is removed.
    let mut lab = lab;
    lab.register(0).await?;
    lab.register(1).await?;
    lab.mesh.kill(Service::Engine(0)).await?;
    wait_until("the engine is told to be away", async || {
        let rows = lab.rows().await.ok()?;
        let away = rows[1..].iter().filter(|row| row["is_healthy"] == false);
        (away.count() == 1).then_some(())
    })
    .await;
    let some = [rollout(1, 20)];
    ensure!(lab.outputs(&some).await?.len() == 1);
    // It is started anew, and registers again.
    lab.mesh.start_child(Service::Engine(0)).await?;
    lab.register(0).await?;
    let rows = lab.rows().await?;
    let healthy = rows.iter().filter(|row| row["is_healthy"] == true);
    ensure!(healthy.count() == 3, "{rows:?}");
    lab.mesh.kill(Service::Engine(0)).await?;
    lab.remove(0).await?;
    ensure!(lab.rows().await?.len() == 2);
    ensure!(lab.workers().await?.len() == 1);
    lab.mesh.stop().await
}
