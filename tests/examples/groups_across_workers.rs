//! Measures what a group of samples loses by running on several workers, and how late a token of one worker can be
//! drafted on another.
//!
//! The first part runs the same groups of 8 samples on one, two and four workers, four samples at once in each
//! layout, and compares tokens per step. The seeds are the same, and so are the outputs. Workers with `groups_max =
//! 0` show what the namespace's feed brings without the logs of groups.
//!
//! The second part writes samples at a steady rate through an uploader, and watches the group's tree of a replica
//! that follows the same store, token by token.
//!
//! A limit on the namespace's tokens stands for a namespace that is too large for a replica: what a worker has of it
//! are the newest outputs.
//!
//! Usage: `cargo run -p e2e --example groups_across_workers -- [groups] [tokens] [temperature] [namespace tokens]`

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use e2e::{Chat, HttpMesh, Service};
use refrain_draft_replica::{
    DocumentUpdateRef, DraftReplica, ReplicaConfig, ReplicaMetrics, Uploader, UploaderConfig,
    UploaderMetrics,
};
use refrain_protocol::document::{DocumentHead, FinishReason};
use refrain_protocol::{DocumentId, Namespace};
use refrain_rpc::HttpDraftStore;
use refrain_service_kit::http::MeshClient;
use refrain_service_kit::mesh::NamespaceSigner;
use refrain_service_kit::telemetry::Metrics;

/// Samples of a group.
const SAMPLES: usize = 8;

/// Samples that run at once, on all workers together. The others follow, as in a rollout with few slots.
const AT_ONCE: usize = 4;

/// Tokens of each sample of the second part, and the time between two of them: that of a large model.
const LAG_TOKENS: u32 = 1_000;
const LAG_STEP: Duration = Duration::from_millis(20);

/// The groups that each layout runs.
#[derive(Clone, Copy)]
struct Work {
    groups: usize,
    tokens: u32,
    temperature: f64,
    /// Tokens of the namespace that a replica has room for. `None`: all.
    namespace_tokens: Option<u64>,
}

/// The result of a layout.
struct Yield {
    tokens_per_step: f64,
    accepted_from_group: f64,
    accepted_from_tenant: f64,
    received: f64,
    texts: Vec<String>,
}

async fn run_layout(workers: usize, work: Work, logs: bool) -> anyhow::Result<Yield> {
    let settings = format!(
        "[worker]\nrunning_max = {}\n[worker.replica]\ngroups_max = {}\n",
        AT_ONCE / workers,
        if logs { 256 } else { 0 }
    );
    let mesh = HttpMesh::start_here_tuned(workers, &settings, |_, file| {
        // The step times of a busy machine do not decide which drafts are used.
        file.worker.profile_ms_max = 0;
        if let Some(tokens) = work.namespace_tokens {
            file.worker.replica.namespace_tokens_max = tokens;
            file.worker.replica.upkeep_ms = 5;
        }
    })
    .await?;
    let (mut steps, mut emitted, mut texts) = (0, 0, Vec::new());
    for group in 0..work.groups {
        let samples = (0..SAMPLES).map(|sample| {
            let seed = (group * SAMPLES + sample) as u64;
            let chat = Chat::random(group)
                .sampled(work.temperature, seed)
                .max_tokens(work.tokens)
                .speculation("suffix")
                .set("group", format!("group {group}"))
                .set("chunk_tokens", 4_000);
            let client = mesh.client();
            async move { client.chat(&chat).await }
        });
        for answer in futures_util::future::try_join_all(samples).await? {
            steps += answer.number("/metrics/speculative_decoding/steps");
            emitted += answer.completion_tokens();
            texts.push(answer.text);
        }
    }
    let (mut accepted_from_group, mut accepted_from_tenant) = (0.0, 0.0);
    let mut received = 0.0;
    for worker in 0..workers {
        let scrape = mesh.scrape(Service::Worker(worker)).await?;
        accepted_from_group += scrape.accepted_from("group");
        accepted_from_tenant += scrape.accepted_from("tenant");
        received += scrape.sum("refrain_replica_group_tokens_received_total", &[]);
    }
    mesh.stop().await?;
    Ok(Yield {
        tokens_per_step: emitted as f64 / steps as f64,
        accepted_from_group,
        accepted_from_tenant,
        received,
        texts,
    })
}

/// Milliseconds from the emission of each token until another replica can draft it, in order of size.
async fn lags_ms() -> anyhow::Result<Vec<f64>> {
    let mesh = HttpMesh::start_here(1, "").await?;
    let client = MeshClient::new(
        &mesh.url(Service::DraftStore),
        &mesh.keys().secret,
        Duration::from_secs(5),
    )?;
    let store = Arc::new(HttpDraftStore::new(client));
    let signed = NamespaceSigner::new(mesh.keys())?.sign(Namespace {
        tenant: "lag".into(),
        model: "model".into(),
        tokenizer: "tokenizer".into(),
    });
    let namespace = signed.namespace.id();
    let uploader = {
        let metrics = UploaderMetrics::register(Metrics::new()?.registry())?;
        Uploader::start(UploaderConfig::default(), store.clone(), metrics)
    };
    let metrics = ReplicaMetrics::register(Metrics::new()?.registry())?;
    let replica = DraftReplica::new(ReplicaConfig::default(), 64, store, metrics);
    replica.namespace(namespace, &signed);
    let reader = DocumentId(1_000);
    let membership = replica
        .join_group(namespace, "g", reader)
        .context("the replica takes no group")?;
    let documents: Vec<DocumentId> = (0..SAMPLES as u128).map(DocumentId).collect();
    let head = DocumentHead {
        group: Some("g".into()),
        ..DocumentHead::default()
    };
    let mut emitted_at: HashMap<DocumentId, Vec<Instant>> = HashMap::new();
    let mut seen: HashMap<DocumentId, usize> = HashMap::new();
    let mut lags_ms = Vec::new();
    let mut step = tokio::time::interval(LAG_STEP);
    let mut look = tokio::time::interval(Duration::from_millis(1));
    let mut position = 0;
    while lags_ms.len() < SAMPLES * LAG_TOKENS as usize {
        tokio::select! {
            _ = step.tick(), if position < LAG_TOKENS => {
                for document in &documents {
                    let token = [(u128::from(position) * 31 + document.0) as u32];
                    let update = DocumentUpdateRef {
                        document: *document,
                        epoch: 1,
                        prev_len: position,
                        tokens: &token,
                        head: &head,
                        finish: (position + 1 == LAG_TOKENS).then_some(FinishReason::Length),
                        trace: None,
                    };
                    emitted_at.entry(*document).or_default().push(Instant::now());
                    uploader.push(namespace, &signed, update);
                }
                position += 1;
            }
            _ = look.tick() => {
                let index = membership.group().read();
                for document in &documents {
                    let len = index.len_of(*document).unwrap_or(0) as usize;
                    let from = seen.entry(*document).or_default();
                    let emitted = emitted_at.get(document).map_or(&[][..], Vec::as_slice);
                    let new = emitted.get(*from..len).unwrap_or_default();
                    lags_ms.extend(new.iter().map(|at| at.elapsed().as_secs_f64() * 1e3));
                    *from = len;
                }
            }
        }
    }
    drop(membership);
    uploader.drain(Duration::from_secs(5)).await;
    replica.stop();
    mesh.stop().await?;
    lags_ms.sort_by(f64::total_cmp);
    Ok(lags_ms)
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let work = Work {
        groups: arguments.next().map_or(Ok(4), |text| text.parse())?,
        tokens: arguments.next().map_or(Ok(400), |text| text.parse())?,
        temperature: arguments.next().map_or(Ok(0.8), |text| text.parse())?,
        namespace_tokens: arguments.next().map(|text| text.parse()).transpose()?,
    };
    println!(
        "{} groups of {SAMPLES} samples, {AT_ONCE} at once, {} tokens each, temperature {}, {} tokens of the namespace",
        work.groups,
        work.tokens,
        work.temperature,
        work.namespace_tokens
            .map_or("all".into(), |tokens| tokens.to_string())
    );
    println!("workers  logs  tokens per step  of one worker  accepted: group  tenant  received");
    let mut one: Option<Yield> = None;
    for (workers, logs) in [
        (1, true),
        (2, true),
        (4, true),
        (1, false),
        (2, false),
        (4, false),
    ] {
        let found = run_layout(workers, work, logs).await?;
        let first = one.as_ref().unwrap_or(&found);
        anyhow::ensure!(
            first.texts == found.texts,
            "an output depends on the layout"
        );
        println!(
            "{workers:>7}  {:>4}  {:>15.3}  {:>13.3}  {:>15}  {:>6}  {:>8}",
            if logs { "yes" } else { "no" },
            found.tokens_per_step,
            found.tokens_per_step / first.tokens_per_step,
            found.accepted_from_group,
            found.accepted_from_tenant,
            found.received,
        );
        one.get_or_insert(found);
    }
    let lags_ms = lags_ms().await?;
    let at = |share: f64| lags_ms[((lags_ms.len() - 1) as f64 * share) as usize];
    println!(
        "lag of {} tokens: median {:.0} ms, p99 {:.0} ms, longest {:.0} ms",
        lags_ms.len(),
        at(0.5),
        at(0.99),
        at(1.0)
    );
    Ok(())
}
