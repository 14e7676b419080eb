//! Orders of trainers to real processes: pauses under load, and weights that change under running requests.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use e2e::{Chat, HttpMesh, PATIENCE, Service, TINY_MODEL, long_task, repository, wait_until};
use futures_util::StreamExt as _;
use refrain_protocol::chunk::{
    ChunkBudget, ChunkEndReason, ChunkEvent, ChunkRequest, DraftRules, Speculation, Urgency,
};
use refrain_protocol::engine::{EngineCapabilities, Sampling};
use refrain_protocol::engine_order::{EngineOrder, EngineState, PauseMode};
use refrain_protocol::scheduling::WorkerReport;
use refrain_protocol::{ApiError, ErrorKind, LeaseId, Namespace, RequestId, TokenId};
use refrain_rpc::{ChunkStream, HttpWorkers, Workers as _};
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::NamespaceSigner;

/// Longer than parked requests and the silence of a worker may last in these meshes.
const LONG: Duration = Duration::from_millis(7_000);

const SETTINGS: &str = "[worker]\nparked_ms_max = 800\n\n[scheduler]\nworker_ttl_ms = 6000\n";

fn pause(mode: PauseMode) -> EngineOrder {
    EngineOrder::Pause {
        mode,
        clears_cache: false,
    }
}

fn load(directory: &Path) -> EngineOrder {
    EngineOrder::LoadWeights {
        directory: directory.display().to_string(),
        version: None,
    }
}

fn client(mesh: &HttpMesh, service: Service) -> anyhow::Result<MeshClient> {
    let (url, secret) = (mesh.url(service), &mesh.keys().secret);
    MeshClient::new(&url, secret, PATIENCE)
}

/// Gives an order to a worker.
async fn order(
    mesh: &HttpMesh,
    worker: usize,
    order: EngineOrder,
) -> anyhow::Result<Result<EngineState, ApiError>> {
    let workers = HttpWorkers::new(client(mesh, Service::Worker(worker))?);
    let worker = workers.at(&mesh.url(Service::Worker(worker)));
    Ok(worker.order(order).await.map(|reply| reply.state))
}

async fn order_all(mesh: &HttpMesh, workers: usize, given: EngineOrder) -> anyhow::Result<()> {
    let all = (0..workers).map(|worker| order(mesh, worker, given.clone()));
    for answer in futures_util::future::join_all(all).await {
        answer??;
    }
    Ok(())
}

fn chat(number: usize) -> Chat {
    Chat::new(&long_task(number))
        .sampled(0.9, number as u64)
        .max_tokens(150)
        .endless()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pauses_under_load_change_no_output() -> anyhow::Result<()> {
    let mesh = HttpMesh::start_children(2, SETTINGS, &[]).await?;
    mesh.workers_report(2).await;
    let mut undisturbed = Vec::new();
    for number in 0..4 {
        undisturbed.push(mesh.client().chat(&chat(number)).await?.text);
    }
    for mode in [PauseMode::Keep, PauseMode::Wait] {
        let mut streams = Vec::new();
        for number in 0..2 {
            // Drafts from the equal output above could end it before the pause.
            let slow = chat(number).speculation("off");
            let mut stream = mesh.client().stream(&slow).await?;
            let begun = stream.read_pieces(3).await?;
            streams.push((number, begun, stream));
        }
        order_all(&mesh, 2, pause(mode)).await?;
        // These begin in the pause.
        let held = [2, 3].map(|number| {
            let client = mesh.client();
            tokio::spawn(async move { client.chat(&chat(number)).await })
        });
        wait_until("the new requests are held", async || {
            let mut held = 0;
            for worker in 0..2 {
                held += order(&mesh, worker, EngineOrder::Report)
                    .await
                    .ok()?
                    .ok()?
                    .held;
            }
            (held == 2).then_some(())
        })
        .await;
        tokio::time::sleep(LONG).await;
        // The scheduler knows of the pause, and still has the workers.
        let scheduler = client(&mesh, Service::Scheduler)?;
        let reports: Vec<WorkerReport> = scheduler.get_json("/internal/v1/workers").await?;
        ensure!(reports.len() == 2, "{reports:?}");
        let modes = reports.iter().map(|report| report.state?.pause);
        ensure!(modes.eq([Some(mode); 2]), "{reports:?}");
        order_all(&mesh, 2, EngineOrder::Resume).await?;
        for (number, begun, mut stream) in streams {
            let text = begun + &stream.read_to_done().await?;
            ensure!(text == undisturbed[number], "{mode:?}, {number}: {text}");
        }
        for (number, held) in (2..).zip(held) {
            let text = held.await??.text;
            ensure!(text == undisturbed[number], "{mode:?}, {number}: {text}");
        }
    }
    // Nothing was lost or asked for again.
    let gateway = mesh.scrape(Service::Gateway).await?;
    let continued = gateway.sum("refrain_gateway_continuations_total", &[]);
    ensure!(continued == 0.0, "{continued} continuations");
    // Running requests are aborted, and those that come later wait.
    let long = chat(0).max_tokens(3_000).speculation("off");
    let mut running = mesh.client().stream(&long).await?;
    running.read_pieces(3).await?;
    order_all(&mesh, 2, pause(PauseMode::Abort)).await?;
    while let Some(event) = running.next().await? {
        drop(event);
    }
    let waiting = tokio::spawn({
        let client = mesh.client();
        async move { client.chat(&chat(3)).await }
    });
    wait_until("the new request is held", async || {
        let mut held = 0;
        for worker in 0..2 {
            let state = order(&mesh, worker, EngineOrder::Report).await.ok()?.ok()?;
            assert_eq!(state.running, 0);
            held += state.held;
        }
        (held == 1).then_some(())
    })
    .await;
    order_all(&mesh, 2, EngineOrder::Resume).await?;
    ensure!(waiting.await??.text == undisturbed[3]);
    mesh.stop().await
}

/// Calls a worker as a gateway would.
struct Caller<'a> {
    mesh: &'a HttpMesh,
    signer: NamespaceSigner,
    able: EngineCapabilities,
    workers: HttpWorkers,
}

impl<'a> Caller<'a> {
    async fn new(mesh: &'a HttpMesh) -> anyhow::Result<Self> {
        let engine = client(mesh, Service::Engine(0))?;
        Ok(Caller {
            signer: NamespaceSigner::new(mesh.keys())?,
            able: engine.get_json("/engine/v1/capabilities").await?,
            workers: HttpWorkers::new(client(mesh, Service::Worker(0))?),
            mesh,
        })
    }

    /// Decodes on from a text, of which the first `prompt_len` tokens are the prompt.
    async fn chunk(
        &self,
        number: u128,
        tokens: &[TokenId],
        max_new_tokens: u32,
    ) -> anyhow::Result<ChunkStream> {
        // Drafts from an equal output would end one of these before anything happens to it.
        let speculation = match number {
            SLOW => Speculation::Off,
            _ => Speculation::Auto,
        };
        let namespace = Namespace {
            tenant: "one".into(),
            model: TINY_MODEL.into(),
            tokenizer: self.able.tokenizer.clone(),
        };
        let request = ChunkRequest {
            lease: LeaseId(number),
            epoch: 1,
            request: RequestId(number),
            namespace: self.signer.sign(namespace),
            session: None,
            group: None,
            resumes: None,
            tokens: tokens.to_vec(),
            prompt_len: PROMPT.len() as u32,
            sampling: Sampling {
                temperature: 0.8,
                seed: 11,
                ..Sampling::default()
            },
            max_new_tokens,
            chunk_tokens: None,
            speculation,
            drafts: DraftRules::default(),
            urgency: Urgency::default(),
            budget: ChunkBudget {
                attempts: 1,
                time_left_ms: None,
            },
            expected_tokens: None,
            prediction: Vec::new(),
            transferred: false,
            alive_within_ms: Some(2_000),
        };
        let url = self.mesh.url(Service::Worker(0));
        Ok(self.workers.at(&url).chunk(request).await?)
    }
}

/// The number of a request that decodes without drafts.
const SLOW: u128 = 3;

const PROMPT: [TokenId; 12] = [300, 301, 302, 303, 304, 305, 306, 307, 308, 309, 310, 311];

/// The tokens of a stream with the versions that sampled them, up to `most`.
async fn read(stream: &mut ChunkStream, most: usize) -> anyhow::Result<Vec<(TokenId, u64)>> {
    let mut read = Vec::new();
    while read.len() < most
        && let Some(event) = stream.next().await
    {
        match event? {
            ChunkEvent::Step(step) => {
                let version = step.weight_version;
                read.extend(step.tokens.iter().map(|token| (*token, version)));
            }
            ChunkEvent::End(end) => {
                ensure!(end.reason == ChunkEndReason::Length, "{:?}", end.reason);
            }
            ChunkEvent::Retry | ChunkEvent::Held { .. } => {}
        }
    }
    Ok(read)
}

fn tokens(read: &[(TokenId, u64)]) -> Vec<TokenId> {
    read.iter().map(|(token, _)| *token).collect()
}

/// Copies the shipped model to a folder, with the signs of one tensor turned.
fn write_turned_model(folder: &Path) -> anyhow::Result<()> {
    let shipped = repository().join("services/reference-engine/model");
    for file in ["config.json", "generation_config.json", "tokenizer.json"] {
        std::fs::copy(shipped.join(file), folder.join(file))?;
    }
    let mut bytes = std::fs::read(shipped.join("model.safetensors"))?;
    let header_len = u64::from_le_bytes(bytes[..8].try_into()?) as usize;
    let header: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(&bytes[8..8 + header_len])?;
    let tensor = &header["model.layers.1.mlp.down_proj.weight"];
    let width = match tensor["dtype"].as_str() {
        Some("F32") => 4,
        Some("BF16" | "F16") => 2,
        other => anyhow::bail!("{other:?}"),
    };
    let offset = |nth: usize| tensor["data_offsets"][nth].as_u64().context("an offset");
    let data = 8 + header_len;
    let (from, to) = (data + offset(0)? as usize, data + offset(1)? as usize);
    for number in bytes[from..to].chunks_exact_mut(width) {
        number[width - 1] ^= 0x80;
    }
    std::fs::write(folder.join("model.safetensors"), bytes)?;
    Ok(())
}

const TOKENS: u32 = 400;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_change_under_running_requests_at_one_token() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    write_turned_model(folder.path())?;
    let mesh = HttpMesh::start_children(1, "", &[]).await?;
    let caller = Caller::new(&mesh).await?;
    let mut stream = caller.chunk(1, &PROMPT, TOKENS).await?;
    let undisturbed = tokens(&read(&mut stream, usize::MAX).await?);
    ensure!(undisturbed.len() == TOKENS as usize);
    // A folder without a model changes nothing for a running request.
    let mut stream = caller.chunk(2, &PROMPT, TOKENS).await?;
    let mut received = read(&mut stream, 5).await?;
    let empty = tempfile::tempdir()?;
    let refused = order(&mesh, 0, load(empty.path())).await?;
    let error = refused.err().context("an empty folder was loaded")?;
    ensure!(error.kind == ErrorKind::InvalidRequest, "{error}");
    ensure!(error.message.contains("config.json"), "{error}");
    received.extend(read(&mut stream, usize::MAX).await?);
    ensure!(tokens(&received) == undisturbed);
    ensure!(received.iter().all(|(_, version)| *version == 0));
    // Two requests run on when the weights change, each at a token of its own.
    let mut streams = [
        caller.chunk(SLOW, &PROMPT, TOKENS).await?,
        caller
            .chunk(4, &[&PROMPT[..], &[42]].concat(), TOKENS)
            .await?,
    ];
    let mut outputs = [
        read(&mut streams[0], 20).await?,
        read(&mut streams[1], 3).await?,
    ];
    // With a pause around it, as trainers do, so that the load is not over before the requests are.
    order(&mesh, 0, pause(PauseMode::Keep)).await??;
    let state = order(&mesh, 0, load(folder.path())).await??;
    ensure!(state.weight_version == 1 && state.running == 2, "{state:?}");
    order(&mesh, 0, EngineOrder::Resume).await??;
    for (output, stream) in outputs.iter_mut().zip(&mut streams) {
        output.extend(read(stream, usize::MAX).await?);
        ensure!(output.is_sorted_by_key(|(_, version)| *version));
    }
    let scrape = mesh.scrape(Service::Worker(0)).await?;
    ensure!(scrape.sum("refrain_worker_weight_version", &[]) == 1.0);
    mesh.stop().await?;
    // An engine that had the new weights from the start says the same from that token on.
    let settings = format!(
        "[engine]\nmodel = \"{}\"\nmodel_name = \"{TINY_MODEL}\"\neagle3 = \"off\"\n",
        folder.path().display()
    );
    let fresh = HttpMesh::start_children(1, &settings, &[]).await?;
    let caller = Caller::new(&fresh).await?;
    for (number, (output, prompt)) in outputs
        .iter()
        .zip([PROMPT.to_vec(), [&PROMPT[..], &[42]].concat()])
        .enumerate()
    {
        let old = output.iter().filter(|(_, version)| *version == 0).count();
        ensure!(old >= 3 && old < output.len(), "{old} of {}", output.len());
        let all = tokens(output);
        if number == 0 {
            ensure!(all[..old] == undisturbed[..old]);
            ensure!(all != undisturbed, "the new weights say the same");
        }
        let text = [&prompt[..], &all[..old]].concat();
        let left = TOKENS - old as u32;
        let mut stream = caller.chunk(10 + number as u128, &text, left).await?;
        let rest = tokens(&read(&mut stream, usize::MAX).await?);
        ensure!(rest == all[old..], "{rest:?} instead of {:?}", &all[old..]);
    }
    fresh.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_dies_while_it_loads_comes_back_with_its_first_weights() -> anyhow::Result<()>
{
    let folder = tempfile::tempdir()?;
    write_turned_model(folder.path())?;
    // A pipe that nobody writes to: the engine reads for as long as it lives.
    let weights = folder.path().join("model.safetensors");
    std::fs::remove_file(&weights)?;
    let made = std::process::Command::new("mkfifo")
        .arg(&weights)
        .status()?;
    ensure!(made.success(), "mkfifo: {made}");
    let mut mesh = HttpMesh::start_children(1, "", &[]).await?;
    let undisturbed = mesh.client().chat(&chat(1)).await?.text;
    let (url, secret) = (mesh.url(Service::Worker(0)), mesh.keys().secret.clone());
    let loading = load(folder.path());
    let ordered = tokio::spawn(async move {
        let client = MeshClient::new(&url, &secret, PATIENCE)?;
        let worker = HttpWorkers::new(client).at(&url);
        anyhow::Ok(worker.order(loading).await)
    });
    // While the weights are read, requests run.
    let meanwhile = mesh.client().chat(&chat(1)).await?.text;
    ensure!(meanwhile == undisturbed && !ordered.is_finished());
    mesh.kill(Service::Engine(0)).await?;
    let error = ordered.await??.err().context("the load succeeded")?;
    ensure!(error.kind != ErrorKind::InvalidRequest, "{error}");
    mesh.start_child(Service::Engine(0)).await?;
    mesh.ready().await;
    let after = mesh.client().chat(&chat(1)).await?.text;
    ensure!(after == undisturbed, "{after}");
    let state = order(&mesh, 0, EngineOrder::Report).await??;
    ensure!(state == EngineState::default(), "{state:?}");
    mesh.stop().await
}
