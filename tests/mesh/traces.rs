//! One request is one trace from the gateway to the engine, in one process and across processes. The spans that the
//! documentation names are exported with the default configuration.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Context, ensure};
use e2e::{
    Chat, Client, HttpMesh, Program, Span, TINY_MODEL, exported_spans, serve_http, wait_until,
};
use parking_lot::Mutex;
use reqwest::Method;
use serde_json::json;

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

/// The stages of a request, each with the one after it.
const STAGES: [&str; 5] = [
    "gateway POST /v1/chat/completions",
    "chat refrain-tiny",
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
        let above = if *stage == "chunk" {
            STAGES[1]
        } else {
            STAGES[place - 1]
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

/// The section of the documentation on traces.
fn documented() -> anyhow::Result<(BTreeSet<String>, BTreeSet<String>)> {
    let text = include_str!("../../docs/operations.md");
    let (_, section) = text.split_once("\n### Traces\n").context("no section")?;
    let section = section.split("\n## ").next().unwrap_or_default();
    let (spans, attributes) = section.split_once("\n| attribute ").context("no table")?;
    let names = |table: &str| -> BTreeSet<String> {
        let rows = table.lines().filter_map(|line| line.strip_prefix("| `"));
        let cells = rows.filter_map(|row| row.split(" | ").next());
        let names = cells.flat_map(|cell| cell.split("`, `"));
        names
            .map(|name| name.trim_matches('`').replace("MODEL", TINY_MODEL))
            .collect()
    };
    Ok((names(spans), names(attributes)))
}

/// Chats that are sent at once.
const BURST: usize = 24;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_span_of_the_documentation_is_exported() -> anyhow::Result<()> {
    let (spans, attributes) = documented()?;
    ensure!(
        spans.len() > 8 && attributes.len() > 6,
        "{spans:?} {attributes:?}"
    );
    let collector = Collector::start().await?;
    let variables = [
        (
            "REFRAIN_TELEMETRY__OTLP_ENDPOINT",
            collector.endpoint.as_str(),
        ),
        ("OTEL_BSP_SCHEDULE_DELAY", "100"),
    ];
    let mesh = HttpMesh::start_children(1, "", &variables).await?;
    let client = mesh.client();
    let mut number = 0;
    wait_until("all spans are exported", async || {
        number += 1;
        let many: Vec<Chat> = (0..BURST)
            .map(|at| Chat::random(number * BURST + at))
            .collect();
        client.chat_all(&many, "auto", BURST).await.ok()?;
        client
            .chat(&chat().set("group", format!("group {number}")))
            .await
            .ok()?;
        let body = json!({"model": TINY_MODEL, "prompt": "Once", "max_tokens": 4});
        let request = client.request(Method::POST, "/v1/completions").json(&body);
        client.send(request).await.ok()?;
        let found: BTreeSet<String> = collector
            .spans()
            .into_iter()
            .map(|span| span.name)
            .collect();
        let missing: Vec<_> = spans.difference(&found).collect();
        if number % 20 == 0 {
            println!("after {number} rounds: no {missing:?}");
        }
        missing.is_empty().then_some(())
    })
    .await;
    mesh.stop().await?;
    let exported = collector.spans();
    let requests: BTreeSet<&str> = exported
        .iter()
        .filter(|span| span.name.starts_with("gateway POST /v1/"))
        .map(|span| span.trace.as_str())
        .collect();
    for name in &spans {
        let mut of_name = exported.iter().filter(|span| span.name == *name);
        let is_in_a_request = of_name.any(|span| requests.contains(span.trace.as_str()));
        ensure!(is_in_a_request, "no {name} is part of a request's trace");
    }
    let chat = exported
        .iter()
        .find(|span| span.name == STAGES[1])
        .context("no span of the chat")?;
    for attribute in attributes.iter().filter(|name| *name != "error.type") {
        ensure!(
            chat.attributes.contains(attribute),
            "no {attribute} in {chat:?}"
        );
    }
    Ok(())
}

/// Another mesh plays the engine of somebody else: its gateway is an OpenAI-compatible server like any other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_of_others_join_the_trace() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let variables = [(
        "REFRAIN_TELEMETRY__OTLP_ENDPOINT",
        collector.endpoint.as_str(),
    )];
    let dirs = [tempfile::tempdir()?, tempfile::tempdir()?];
    let (mut engine, engine_url) = Program::up(dirs[0].path(), &[], &variables).await?;
    let config = dirs[1].path().join("mesh.toml");
    let settings = format!(
        "urls.engine = \"{engine_url}\"\n\
         [worker.engine]\nkind = \"openai\"\nmodel = \"by-text\"\nserved_model = \"{TINY_MODEL}\"\n\
         files = \"builtin:refrain-tiny\"\napi_key = \"refrain-dev\"\n\
         [[gateway.models]]\nid = \"by-text\"\nfiles = \"builtin:refrain-tiny\"\ntext_only = true\n"
    );
    std::fs::write(&config, settings)?;
    let arguments = ["--config", &*config.to_string_lossy()];
    let (mut front, url) = Program::up(dirs[1].path(), &arguments, &variables).await?;
    let body = json!({"model": "by-text", "prompt": "Once", "max_tokens": 4});
    let client = Client::new(&url, "refrain-dev");
    let request = client.request(Method::POST, "/v1/completions").json(&body);
    let reply = client.send(request).await?;
    ensure!(reply.status == 200, "{}", reply.text);
    for program in [&mut front, &mut engine] {
        program.terminate().await?;
        ensure!(program.ended().await?.success(), "{}", program.output());
    }
    let spans = collector.spans();
    let asked = spans
        .iter()
        .find(|span| span.name == "text_completion by-text");
    let trace = &asked.context("no span of the request")?.trace;
    let answered = format!("text_completion {TINY_MODEL}");
    let joined = |span: &Span| span.name == answered && span.trace == *trace;
    ensure!(
        spans.iter().any(joined),
        "the engine began a trace of its own"
    );
    Ok(())
}
