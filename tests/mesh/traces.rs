//! One request is one trace from the gateway to the engine, in one process and across processes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Context, ensure};
use e2e::{Chat, Client, HttpMesh, Program, Span, exported_spans, serve_http};
use parking_lot::Mutex;

/// A collector that receives spans from OTLP exporters.
struct Collector {
    endpoint: String,
    spans: Arc<Mutex<Vec<Span>>>,
}

impl Collector {
    async fn start() -> anyhow::Result<Self> {
        let spans = Arc::new(Mutex::new(Vec::new()));
        let received = spans.clone();
        let url = serve_http(move |_, export| {
            let mut received = received.lock();
            received.extend(exported_spans(export));
            ("200 OK", String::new())
        });
        let endpoint = format!("{}/v1/traces", url.await?);
        Ok(Collector { endpoint, spans })
    }

    fn spans(&self) -> Vec<Span> {
        self.spans.lock().clone()
    }
}

/// The name of a span, without the parts that differ between requests.
const STAGES: [&str; 4] = [
    "gateway POST /v1/chat/completions",
    "lease",
    "chunk",
    "engine_step",
];

/// Checks that the trace has all stages, each as a child of the stage before.
fn ensure_one_trace(spans: &[Span]) -> anyhow::Result<()> {
    let mut traces: BTreeMap<&str, Vec<&Span>> = BTreeMap::new();
    for span in spans {
        traces.entry(&span.trace).or_default().push(span);
    }
    let root = spans
        .iter()
        .find(|span| span.name == STAGES[0])
        .context("no span of the request")?;
    let trace = &traces[root.trace.as_str()];
    let by_id: BTreeMap<&str, &Span> = trace.iter().map(|span| (span.id.as_str(), *span)).collect();
    let names: BTreeSet<&str> = trace.iter().map(|span| span.name.as_str()).collect();
    for (place, stage) in STAGES.iter().enumerate().skip(1) {
        let found: Vec<_> = trace.iter().filter(|span| span.name == *stage).collect();
        ensure!(
            !found.is_empty(),
            "no span {stage} in the request's trace, which has {names:?}"
        );
        // A lease is before a chunk, and not its parent.
        let above = if *stage == "engine_step" {
            STAGES[place - 1]
        } else {
            STAGES[0]
        };
        for span in found {
            let mut ancestors = Vec::new();
            let mut at = *span;
            while let Some(parent) = by_id.get(at.parent.as_str()) {
                ancestors.push(parent.name.as_str());
                at = parent;
            }
            ensure!(
                ancestors.contains(&above),
                "{stage} hangs below {ancestors:?} instead of {above}"
            );
        }
    }
    Ok(())
}

fn chat() -> Chat {
    Chat::new("Write a short note about a trip to Oslo.")
        .max_tokens(8)
        .endless()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_process_one_trace() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let dir = tempfile::tempdir()?;
    let variables = [(
        "REFRAIN_TELEMETRY__OTLP_ENDPOINT",
        collector.endpoint.as_str(),
    )];
    let (mut program, url) = Program::up(dir.path(), &[], &variables).await?;
    Client::new(&url, "refrain-dev").chat(&chat()).await?;
    // A stop exports the collected spans.
    program.terminate().await?;
    ensure!(program.ended().await?.success(), "{}", program.output());
    ensure_one_trace(&collector.spans())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_processes_one_trace() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let variables = [(
        "REFRAIN_TELEMETRY__OTLP_ENDPOINT",
        collector.endpoint.as_str(),
    )];
    let mesh = HttpMesh::start_children(1, "", &variables).await?;
    mesh.client().chat(&chat()).await?;
    mesh.stop().await?;
    let spans = collector.spans();
    ensure_one_trace(&spans)?;
    let root = spans
        .iter()
        .find(|span| span.name == STAGES[0])
        .context("no span of the request")?;
    for hop in [
        "scheduler POST /internal/v1/lease",
        "worker POST /internal/v1/chunk",
    ] {
        let joined = spans
            .iter()
            .any(|span| span.name == hop && span.trace == root.trace);
        ensure!(joined, "{hop} is not part of the request's trace");
    }
    let steps = spans
        .iter()
        .filter(|span| span.trace == root.trace && span.name.ends_with("/engine/v1/step"));
    ensure!(
        steps.count() > 0,
        "the engine's own spans are not part of the request's trace"
    );
    Ok(())
}
