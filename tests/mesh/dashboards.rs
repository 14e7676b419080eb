//! Every query of the dashboards returns data from a real Prometheus, which scrapes a live mesh and an engine with
//! the plugin inside.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use e2e::{
    Chat, Client, KEY, PATIENCE, Scrape, UpMesh, free_addr, long_task, repository, varied_prompts,
};
use refrain_engine_plugin::{PluginConfig, Proposer, RequestStart};
use refrain_service_kit::mesh::MeshConfig;
use serde_json::Value;
use tokio::process::{Child, Command};

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
";

/// The width of a dashboard in columns of Grafana's grid.
const GRID_WIDTH: i64 = 24;

struct Query {
    place: String,
    expression: String,
}

/// All dashboards of the repository.
fn dashboards() -> anyhow::Result<Vec<Value>> {
    let mut dashboards = Vec::new();
    for entry in std::fs::read_dir(repository().join("dashboards"))? {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "json")
        {
            let text = std::fs::read_to_string(&path)?;
            let dashboard = serde_json::from_str(&text);
            dashboards.push(dashboard.with_context(|| path.display().to_string())?);
        }
    }
    Ok(dashboards)
}

/// The queries of all panels, with values for Grafana's variables.
fn queries() -> anyhow::Result<Vec<Query>> {
    let mut queries = Vec::new();
    for dashboard in dashboards()? {
        for panel in list(&dashboard["panels"]) {
            for target in list(&panel["targets"]) {
                let place = format!(
                    "{} / {} / {}",
                    dashboard["title"], panel["title"], target["refId"]
                );
                let expression = target["expr"]
                    .as_str()
                    .with_context(|| format!("{place}: no query"))?;
                let expression = expression
                    .replace("$__rate_interval", "15s")
                    .replace("$model", ".*");
                ensure!(
                    !expression.contains('$'),
                    "{place}: a variable is left in {expression}"
                );
                queries.push(Query { place, expression });
            }
        }
        for variable in list(&dashboard["templating"]["list"]) {
            let Some(query) = variable["definition"].as_str() else {
                continue;
            };
            let inner = query
                .strip_prefix("label_values(")
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
        queries.len() > 10,
        "only {} queries: the test is blind",
        queries.len()
    );
    Ok(queries)
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// The names of the metrics in a query. Those of histograms have no suffix.
fn metrics_of(expression: &str, scrape: &Scrape) -> BTreeSet<String> {
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let names = words.filter(|word| word.starts_with("refrain_") || word.starts_with("gen_ai_"));
    names
        .map(|name| {
            let base = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|ending| name.strip_suffix(ending));
            base.filter(|base| scrape.kind(base) == Some("histogram"))
                .unwrap_or(name)
                .to_owned()
        })
        .collect()
}

/// A program of Prometheus, which `tests/run` unpacks or which is installed.
fn tool(name: &str) -> PathBuf {
    let unpacked = repository().join("target/tools/usr/bin").join(name);
    match unpacked.exists() {
        true => unpacked,
        false => PathBuf::from(name),
    }
}

struct Prometheus {
    _child: Child,
    client: Client,
}

impl Prometheus {
    /// Starts a Prometheus that scrapes these addresses every second.
    async fn start(dir: &Path, targets: &[&str]) -> anyhow::Result<Self> {
        let binary = tool("prometheus");
        let targets: Vec<&str> = targets
            .iter()
            .map(|target| target.trim_start_matches("http://"))
            .collect();
        let config = dir.join("prometheus.yml");
        std::fs::write(
            &config,
            format!(
                "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\n\
                 scrape_configs: [{{job_name: refrain, static_configs: [{{targets: {targets:?}}}]}}]\n"
            ),
        )?;
        let addr = free_addr()?;
        let child = Command::new(&binary)
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                dir.join("tsdb").display()
            ))
            .arg(format!("--web.listen-address={addr}"))
            .arg("--log.level=error")
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("{} cannot be run: tests/run fetches it", binary.display()))?;
        let client = Client::new(&format!("http://{addr}"), "").without_key();
        e2e::wait_until("Prometheus is ready", async || {
            client
                .get("/-/ready")
                .await
                .ok()
                .filter(|reply| reply.status == 200)
        })
        .await;
        Ok(Prometheus {
            _child: child,
            client,
        })
    }

    /// The number of series that a query returns with a numeric value.
    async fn ask(&self, query: &Query) -> anyhow::Result<usize> {
        let encoded: String = query
            .expression
            .bytes()
            .map(|byte| format!("%{byte:02X}"))
            .collect();
        let reply = self
            .client
            .get(&format!("/api/v1/query?query={encoded}"))
            .await?;
        ensure!(
            reply.status == 200,
            "{}: {}\n{}",
            query.place,
            reply.text,
            query.expression
        );
        let body = reply.json();
        let is_number = |series: &&Value| {
            series["value"][1]
                .as_str()
                .is_some_and(|value| value != "NaN")
        };
        Ok(list(&body["data"]["result"]).filter(is_number).count())
    }
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
        self.proposer.propose(vec![("a".into(), 3)], 1.0, 1.0, 0.1);
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

#[test]
fn every_panel_has_its_own_id_and_place() -> anyhow::Result<()> {
    for dashboard in dashboards()? {
        let panels: Vec<&Value> = list(&dashboard["panels"]).collect();
        let mut ids = BTreeSet::new();
        for (at, panel) in panels.iter().enumerate() {
            let title = &panel["title"];
            let id = panel["id"].as_i64();
            let id = id.with_context(|| format!("{title}: no id"))?;
            ensure!(ids.insert(id), "{title}: another panel has its id, {id}");
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
    }
    Ok(())
}

fn alerts() -> anyhow::Result<String> {
    let path = repository().join("deploy/observability/alerts.yml");
    Ok(std::fs::read_to_string(path)?)
}

#[tokio::test]
async fn every_alert_fires_when_it_should_and_only_then() -> anyhow::Result<()> {
    let dir = repository().join("deploy/observability");
    let tests = std::fs::read_to_string(dir.join("alerts_test.yml"))?;
    let alerts = alerts()?;
    let names: Vec<&str> = alerts
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
        .collect();
    ensure!(names.len() > 5, "only {names:?}: the test is blind");
    for name in names {
        ensure!(
            tests.contains(&format!("alertname: {name}")),
            "{name} has no test"
        );
    }
    let promtool = Command::new(tool("promtool"))
        .args(["test", "rules", "alerts_test.yml"])
        .current_dir(dir)
        .output();
    let outcome = promtool
        .await
        .context("promtool cannot be run: tests/run fetches it")?;
    let said = [outcome.stdout, outcome.stderr].concat();
    ensure!(
        outcome.status.success(),
        "{}",
        String::from_utf8_lossy(&said)
    );
    Ok(())
}

/// Metrics of the score router only.
const OF_SCORE: &str = "refrain_spec_threshold";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_query_of_the_dashboards_returns_data() -> anyhow::Result<()> {
    let (_, usual) = split()?;
    Box::pin(all_return_data(SETTINGS, &usual)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queries_about_the_score_router_return_data_with_it() -> anyhow::Result<()> {
    let (of_score, _) = split()?;
    ensure!(!of_score.is_empty(), "no query asks for {OF_SCORE}");
    Box::pin(all_return_data(
        "[worker.speculation]\nrouter = \"score\"",
        &of_score,
    ))
    .await
}

/// All queries, divided into those that need the score router and the others.
fn split() -> anyhow::Result<(Vec<Query>, Vec<Query>)> {
    let is_of_score = |query: &Query| query.expression.contains(OF_SCORE);
    Ok(queries()?.into_iter().partition(is_of_score))
}

async fn all_return_data(settings: &str, queries: &[Query]) -> anyhow::Result<()> {
    let mesh = UpMesh::start_with(settings).await?;
    let dir = tempfile::tempdir()?;
    let inside = Inside::start()?;
    let targets = [mesh.client().url(), inside.client.url()].map(str::to_owned);
    let targets = targets.each_ref().map(String::as_str);
    let prometheus = Prometheus::start(dir.path(), &targets).await?;
    let traffic = tokio::spawn(traffic(Client::new(mesh.client().url(), KEY)));

    let deadline = Instant::now() + PATIENCE;
    let silent = loop {
        let mut silent = Vec::new();
        inside.says_something()?;
        for query in queries {
            if prometheus.ask(query).await? == 0 {
                silent.push(format!("{}: {}", query.place, query.expression));
            }
        }
        if silent.is_empty() || Instant::now() > deadline {
            break silent;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    traffic.abort();
    let scrape = mesh.client().scrape().await?;
    let scrape_inside = inside.client.scrape().await?;
    for query in queries {
        for metric in metrics_of(&query.expression, &scrape) {
            ensure!(
                scrape.kind(&metric).is_some() || scrape_inside.kind(&metric).is_some(),
                "{}: /metrics has no {metric}",
                query.place
            );
        }
    }
    for metric in metrics_of(&alerts()?, &scrape) {
        ensure!(
            scrape.kind(&metric).is_some(),
            "an alert asks for {metric}, which /metrics does not have"
        );
    }
    ensure!(silent.is_empty(), "no data for:\n{}", silent.join("\n"));
    mesh.stop().await;
    Ok(())
}
