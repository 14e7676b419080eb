//! Every query of the dashboards returns data from a real Prometheus, which scrapes live meshes and an engine with
//! the plugin inside.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use e2e::{
    Chat, Client, HttpMesh, KEY, PATIENCE, Scrape, Service, UpMesh, long_task, repository,
    varied_prompts,
};
use refrain::config::MeshFile;
use refrain_engine_plugin::{EngineRules, PluginConfig, Proposer, RequestStart};
use refrain_service_kit::mesh::MeshConfig;
use serde_json::Value;

use crate::alerts::rules;
use crate::prometheus::{Prometheus, list, metrics_of};
use crate::troubled_mesh::TroubledMesh;

/// Small limits, so that evictions and rejections happen.
const SETTINGS: &str = "
    [gateway]
    tenant_requests_in_flight_max = 6
    body_bytes_max = 65536
    [scheduler]
    queue_max = 2
    [worker]
    running_max = 2
    [draft_store]
    document_tokens_max = 128
    tenant_tokens_max = 256
    [engine.kv_pool]
    memory_bytes_max = 16777216
";

/// The store seals at once, and a worker holds little of it, so that it asks the store for drafts.
const SPREAD: &str = "
    [worker.replica]
    namespace_tokens_max = 150
    [draft_store]
    seal_after_s = 0
    seal_tokens = 200
";

/// Metrics of the score router only.
const OF_SCORE: &[&str] = &["refrain_spec_threshold"];

/// Metrics that have values only where two workers share groups, and seal and merge.
const OF_SPREAD: &[&str] = &[
    "refrain_replica_group_lag_seconds",
    "refrain_replica_lock_seconds",
];

/// Metrics that a mesh has only with keys that end, certificates, Redis or a third-party engine.
const OF_TROUBLES: &[&str] = &[
    "refrain_gateway_key_expiry_seconds",
    "refrain_gateway_limits_redis",
    "refrain_tls_",
    "refrain_mesh_credential_expiry_seconds",
    "refrain_reloads_total",
    "refrain_engine_requests",
    "refrain_worker_engine_breaker_open",
];

/// Metrics that only a process has which adopts engines.
const OF_ADOPTION: &[&str] = &[
    "refrain_worker_adopted_engines",
    "refrain_worker_adoptions",
    "refrain_worker_discovered_engines",
    "refrain_worker_discovery_faults",
];

/// The width of a dashboard in columns of Grafana's grid.
const GRID_WIDTH: i64 = 24;

/// Most panels of a dashboard.
const PANELS_MAX: usize = 39;

#[derive(Clone)]
struct Query {
    place: String,
    expression: String,
}

impl Query {
    fn is_of(&self, metrics: &[&str]) -> bool {
        metrics
            .iter()
            .any(|metric| self.expression.contains(metric))
    }
}

/// All dashboards of the repository.
fn dashboards() -> anyhow::Result<Vec<Value>> {
    let mut dashboards = Vec::new();
    for entry in std::fs::read_dir(repository().join("dashboards"))? {
        let path = entry?.path();
        let text = std::fs::read_to_string(&path)?;
        let dashboard = serde_json::from_str(&text);
        dashboards.push(dashboard.with_context(|| path.display().to_string())?);
    }
    ensure!(dashboards.len() == 10, "{} dashboards", dashboards.len());
    Ok(dashboards)
}

/// The rows and panels of a dashboard, those inside of collapsed rows included.
fn panels(dashboard: &Value) -> impl Iterator<Item = &Value> {
    list(&dashboard["panels"])
        .flat_map(|panel| std::iter::once(panel).chain(list(&panel["panels"])))
}

fn is_row(panel: &Value) -> bool {
    panel["type"] == "row"
}

/// The queries of all panels, with values for Grafana's variables.
fn queries() -> anyhow::Result<Vec<Query>> {
    let mut queries = Vec::new();
    for dashboard in dashboards()? {
        let variables = list(&dashboard["templating"]["list"]);
        let variables: Vec<&Value> = variables
            .filter(|variable| variable["type"] == "query")
            .collect();
        for panel in panels(&dashboard) {
            for target in list(&panel["targets"]) {
                let place = format!(
                    "{} / {} / {}",
                    dashboard["title"], panel["title"], target["refId"]
                );
                let expression = target["expr"].as_str();
                let expression = expression.with_context(|| format!("{place}: no query"))?;
                let mut expression = expression.replace("$__rate_interval", "15s");
                for variable in &variables {
                    let name = variable["name"].as_str().unwrap_or_default();
                    expression = expression.replace(&format!("\"${name}"), "\".*");
                }
                ensure!(
                    !expression.contains('$'),
                    "{place}: a variable is left in {expression}"
                );
                queries.push(Query { place, expression });
            }
        }
        for variable in variables {
            let query = variable["query"]["query"].as_str();
            let inner = query
                .and_then(|query| query.strip_prefix("label_values("))
                .and_then(|rest| rest.strip_suffix(')'));
            let (metric, label) = inner
                .and_then(|inner| inner.split_once(", "))
                .context("no label_values(..)")?;
            let expression = format!("count by ({label}) ({metric})");
            queries.push(Query {
                place: format!("variable {}", variable["name"]),
                expression,
            });
        }
    }
    ensure!(
        queries.len() > 300,
        "only {} queries: the test is blind",
        queries.len()
    );
    Ok(queries)
}

/// The queries that a mesh answers: those about none of these metrics, or about some of them.
fn queries_about(metrics: &[&str]) -> anyhow::Result<Vec<Query>> {
    let about: Vec<Query> = queries()?
        .into_iter()
        .filter(|query| query.is_of(metrics))
        .collect();
    for metric in metrics {
        let is_asked = about.iter().any(|query| query.is_of(&[metric]));
        ensure!(is_asked, "no query asks for {metric}");
    }
    Ok(about)
}

/// An engine with the plugin inside, and its metrics.
struct Inside {
    proposer: Proposer,
    client: Client,
}

impl Inside {
    fn start() -> anyhow::Result<Self> {
        let config = PluginConfig {
            // No draft store listens there, so outputs stay here.
            store_url: "http://127.0.0.1:1".into(),
            mesh: MeshConfig::generate()?.into(),
            tokenizer: Some(repository().join("services/reference-engine/model")),
            metrics_listen: Some(([127, 0, 0, 1], 0).into()),
            ..PluginConfig::default()
        };
        let proposer = Proposer::connect(config, None)?;
        let addr = proposer.metrics_addr().context("it does not listen")?;
        Ok(Inside {
            proposer,
            client: Client::new(&format!("http://{addr}"), "").without_key(),
        })
    }

    /// Runs a repetitive request, so that it gets drafts.
    fn says_something(&self) -> anyhow::Result<()> {
        let begin = RequestStart {
            request: "a".into(),
            prompt: [1, 2, 3, 4, 5, 1, 2].to_vec(),
            ..RequestStart::default()
        };
        self.proposer.begin(begin)?;
        let wanted = vec![("a".into(), 3)];
        self.proposer.propose(wanted, &EngineRules::default());
        self.proposer.extend("a", &[3, 4, 5, 6]);
        self.proposer.finish("a".into(), Some("stop"));
        Ok(())
    }
}

/// Sends requests of all kinds until it is aborted, with more at once than the limits allow.
async fn traffic(client: Client) {
    let prompts = varied_prompts(12);
    for round in 0.. {
        let calls = (0..8).map(|number| {
            // Most requests leave the choice to the router. The others make sure that every way of drafting occurs.
            let mode = ["auto", "auto", "eagle3", "off"][number % 4];
            let chat = Chat::new(&prompts[(round + number) % prompts.len()])
                .max_tokens(40)
                .endless()
                .speculation(mode);
            let client = client.clone();
            // Some requests are refused, on purpose.
            async move { client.chat(&chat).await.map(drop) }
        });
        futures_util::future::join_all(calls).await;
        // The first sample of a group tells how long the second may become.
        for _ in 0..2 {
            let sample = Chat::new(&prompts[0]).max_tokens(20).endless();
            let _ = client.chat(&sample.set("group", "samples")).await;
        }
        let long = Chat::new(&"one two three ".repeat(4_000));
        let large = Chat::new(&"x".repeat(100_000));
        let short = Chat::new("a");
        let stranger = Client::new(client.url(), "nobody");
        let _ = tokio::join!(
            client.chat(&long),
            client.chat(&large),
            stranger.chat(&short)
        );
        if let Ok(mut stream) = client
            .stream(&Chat::new(&long_task(1)).max_tokens(500).endless())
            .await
        {
            let _ = stream.read_pieces(2).await;
        }
    }
}

/// Left edge, top edge, width and height of a panel.
fn place(panel: &Value) -> Option<[i64; 4]> {
    let grid = &panel["gridPos"];
    let [x, y, w, h] = ["x", "y", "w", "h"].map(|name| grid[name].as_i64());
    Some([x?, y?, w?, h?])
}

/// Checks that these panels are inside of the grid, and that none lies over another one.
fn lie_apart(panels: &[&Value]) -> anyhow::Result<()> {
    for (at, panel) in panels.iter().enumerate() {
        let title = &panel["title"];
        let [x, y, w, h] = place(panel).with_context(|| format!("{title}: no place"))?;
        ensure!(
            x >= 0 && x + w <= GRID_WIDTH,
            "{title}: outside of the grid"
        );
        for other in &panels[..at] {
            let [left, top, width, height] = place(other).context("no place")?;
            let is_beside = x + w <= left || left + width <= x;
            let is_below = y + h <= top || top + height <= y;
            ensure!(
                is_beside || is_below,
                "{title} lies over {}",
                other["title"]
            );
        }
    }
    Ok(())
}

#[test]
fn every_panel_has_its_own_id_place_unit_and_description() -> anyhow::Result<()> {
    for dashboard in dashboards()? {
        let mut ids = BTreeSet::new();
        for panel in panels(&dashboard) {
            let title = &panel["title"];
            let id = panel["id"].as_i64();
            let id = id.with_context(|| format!("{title}: no id"))?;
            ensure!(ids.insert(id), "{title}: another panel has its id, {id}");
            if !is_row(panel) {
                let description = panel["description"].as_str().unwrap_or_default();
                ensure!(
                    description.len() > 10 && description.ends_with('.'),
                    "{title}: its description is no sentence"
                );
                let unit = &panel["fieldConfig"]["defaults"]["unit"];
                ensure!(
                    unit.is_string() || panel["type"] == "heatmap",
                    "{title}: no unit"
                );
            }
        }
        // A collapsed row pushes the rows after it down when it opens.
        let shown: Vec<&Value> = list(&dashboard["panels"]).collect();
        lie_apart(&shown)?;
        for row in shown {
            let opened: Vec<&Value> = std::iter::once(row).chain(list(&row["panels"])).collect();
            lie_apart(&opened)?;
        }
    }
    Ok(())
}

#[test]
fn a_dashboard_is_short_and_only_its_first_row_is_open() -> anyhow::Result<()> {
    for dashboard in dashboards()? {
        let board = &dashboard["title"];
        let refresh = &dashboard["refresh"];
        ensure!(refresh == "30s", "{board}: it asks again after {refresh}");
        let count = panels(&dashboard).filter(|panel| !is_row(panel)).count();
        ensure!(count <= PANELS_MAX, "{board}: {count} panels");
        let mut shown = list(&dashboard["panels"]);
        let first = shown.next().with_context(|| format!("{board}: empty"))?;
        let is_open = first["collapsed"] == false && list(&first["panels"]).next().is_none();
        ensure!(
            is_row(first) && is_open,
            "{board}: its first row is not open"
        );
        for row in shown.skip_while(|panel| !is_row(panel)) {
            let title = &row["title"];
            ensure!(
                is_row(row) && row["collapsed"] == true,
                "{board}: {title} is no collapsed row"
            );
            let [_, top, ..] = place(row).context("no place")?;
            let mut inside = list(&row["panels"]).map(place).peekable();
            ensure!(inside.peek().is_some(), "{board}: {title} is empty");
            ensure!(
                inside.all(|place| place.is_some_and(|[_, y, ..]| y > top)),
                "{board}: a panel of {title} lies above its row"
            );
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_query_of_the_dashboards_returns_data() -> anyhow::Result<()> {
    let mut usual = queries()?;
    usual.retain(|query| !query.is_of(&[OF_SCORE, OF_SPREAD, OF_TROUBLES, OF_ADOPTION].concat()));
    let data = tempfile::tempdir()?;
    // A ratio is shown after some seconds, however uncertain it is.
    let hasty = |file: &mut MeshFile| {
        let gain = &mut file.worker.speculation.gain;
        gain.warm_up = Duration::ZERO;
        gain.window = Duration::from_secs(60);
        gain.error_max = f64::INFINITY;
    };
    let mesh = Box::pin(UpMesh::start_tuned(data.path(), SETTINGS, hasty)).await?;
    let inside = Inside::start()?;
    let urls = [mesh.client().url(), inside.client.url()].map(str::to_owned);
    let prometheus = Prometheus::start(&urls, &rules()?).await?;
    let running = tokio::spawn(traffic(Client::new(mesh.client().url(), KEY)));
    let answered = all_return_data(&prometheus, &usual, async || inside.says_something()).await;
    running.abort();
    answered?;
    let scrapes = [mesh.client().scrape().await?, inside.client.scrape().await?];
    every_metric_is_on_a_board(&scrapes)?;
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queries_about_the_score_router_return_data_with_it() -> anyhow::Result<()> {
    let mesh = UpMesh::start_with("[worker.speculation]\nrouter = \"score\"").await?;
    let prometheus = Prometheus::start(&[mesh.client().url().to_owned()], &[]).await?;
    let chat = Chat::new("Tell me a story about the sea.").max_tokens(24);
    let ask = async || mesh.client().chat(&chat).await.map(drop);
    all_return_data(&prometheus, &queries_about(OF_SCORE)?, ask).await?;
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queries_about_engines_that_come_and_go_return_data_with_a_process_that_adopts_them()
-> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("engines.txt");
    std::fs::write(&file, "")?;
    // The second source is never there, so its readings fail.
    let settings = format!(
        "[worker.adoption]\nengines_max = 2\nsources = [\"file://{0}\", \"file://{0}.missing\"]\n",
        file.display()
    );
    let mesh = UpMesh::start_with(&settings).await?;
    let prometheus = Prometheus::start(&[mesh.client().url().to_owned()], &[]).await?;
    all_return_data(&prometheus, &queries_about(OF_ADOPTION)?, async || Ok(())).await?;
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queries_about_several_workers_return_data_with_them() -> anyhow::Result<()> {
    let tune = |_: Service, file: &mut MeshFile| {
        file.draft_store.tuning.tick_ms = 20;
        file.worker.replica.upkeep_ms = 5;
        file.worker.running_max = 2;
    };
    let mesh = Box::pin(HttpMesh::start_here_tuned(2, SPREAD, tune)).await?;
    let urls = [Service::DraftStore, Service::Worker(0), Service::Worker(1)];
    let urls = urls.map(|service| mesh.url(service));
    let prometheus = Prometheus::start(&urls, &[]).await?;
    let client = mesh.client();
    let sample = async |number: usize| {
        let chat = Chat::random(number).max_tokens(150).set("group", "g");
        client.chat(&chat.speculation("suffix")).await
    };
    let say = async || {
        let said = futures_util::future::join_all((0..4).map(&sample));
        said.await.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        let alone = Chat::random(1).max_tokens(100).speculation("suffix");
        client.chat(&alone).await.map(drop)
    };
    all_return_data(&prometheus, &queries_about(OF_SPREAD)?, say).await?;
    mesh.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queries_about_keys_redis_and_other_engines_return_data_with_them() -> anyhow::Result<()> {
    let mesh = Box::pin(TroubledMesh::start()).await?;
    let prometheus = Prometheus::start(&[mesh.target()], &[]).await?;
    let stir = async || mesh.stir().await;
    all_return_data(&prometheus, &queries_about(OF_TROUBLES)?, stir).await?;
    mesh.stop().await;
    Ok(())
}

/// Asks all queries until each has returned data at some time. `stir` is done meanwhile, again and again.
async fn all_return_data(
    prometheus: &Prometheus,
    queries: &[Query],
    stir: impl AsyncFn() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let mut silent: Vec<&Query> = queries.iter().collect();
    loop {
        stir().await?;
        let mut still = Vec::new();
        for query in silent {
            let count = prometheus.count(&query.expression).await;
            if count.with_context(|| query.place.clone())? == 0 {
                still.push(query);
            }
        }
        silent = still;
        if silent.is_empty() {
            return Ok(());
        }
        let lines = silent
            .iter()
            .map(|query| format!("{}: {}", query.place, query.expression));
        ensure!(
            Instant::now() < deadline,
            "no data for:\n{}",
            lines.collect::<Vec<_>>().join("\n")
        );
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// Checks that boards and alerts ask for metrics that exist, and that each metric is on a board.
fn every_metric_is_on_a_board(scrapes: &[Scrape]) -> anyhow::Result<()> {
    let exists = |metric: &str| scrapes.iter().any(|scrape| scrape.kind(metric).is_some());
    // A family with labels is not shown before its first value.
    let may_be_absent = [OF_SCORE, OF_SPREAD, OF_TROUBLES, OF_ADOPTION].concat();
    let may_be_absent = |metric: &str| {
        may_be_absent
            .iter()
            .any(|absent| metric.starts_with(absent))
    };
    let mut asked = BTreeSet::new();
    for query in queries()? {
        asked.extend(metrics_of(&query.expression, scrapes));
    }
    let on_boards = asked.clone();
    for rules in rules()? {
        let expressions = rules
            .lines()
            .filter(|line| !line.contains("record:") && !line.contains("runbook:"));
        for line in expressions {
            asked.extend(metrics_of(line, scrapes));
        }
    }
    let absent: Vec<&String> = asked
        .iter()
        .filter(|metric| !exists(metric) && !may_be_absent(metric))
        .collect();
    ensure!(absent.is_empty(), "/metrics has no {absent:?}");
    let hidden: Vec<&str> = scrapes
        .iter()
        .flat_map(Scrape::names)
        .filter(|name| name.starts_with("refrain_") || name.starts_with("gen_ai_"))
        .filter(|name| !on_boards.contains(*name))
        .collect();
    ensure!(hidden.is_empty(), "no board shows {hidden:?}");
    Ok(())
}
