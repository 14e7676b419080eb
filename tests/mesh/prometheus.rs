//! A real Prometheus that scrapes a mesh of a test.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, ensure};
use e2e::{Client, Scrape, free_addr, repository};
use serde_json::Value;
use tempfile::TempDir;
use tokio::process::{Child, Command};

/// A program of Prometheus, which `tests/run` unpacks or which is installed.
pub(crate) fn tool(name: &str) -> PathBuf {
    let unpacked = repository().join("target/tools/usr/bin").join(name);
    match unpacked.exists() {
        true => unpacked,
        false => PathBuf::from(name),
    }
}

/// The folder with the rules and the configuration of Prometheus.
pub(crate) fn rules_dir() -> PathBuf {
    repository().join("deploy/observability")
}

/// The elements of a JSON array, or nothing.
pub(crate) fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// The names of the metrics in an expression. Those of histograms have no suffix.
pub(crate) fn metrics_of(expression: &str, scrapes: &[Scrape]) -> BTreeSet<String> {
    let is_histogram = |name: &str| {
        let mut kinds = scrapes.iter().filter_map(|scrape| scrape.kind(name));
        kinds.any(|kind| kind == "histogram")
    };
    let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':');
    let names = words.filter(|word| word.starts_with("refrain_") || word.starts_with("gen_ai_"));
    names
        .map(|name| {
            let base = ["_bucket", "_sum", "_count"]
                .iter()
                .find_map(|ending| name.strip_suffix(ending));
            let base = base.filter(|base| is_histogram(base));
            base.unwrap_or(name).to_owned()
        })
        .collect()
}

/// A process of Prometheus. It ends with this.
pub(crate) struct Prometheus {
    _child: Child,
    _dir: TempDir,
    client: Client,
}

impl Prometheus {
    /// Starts a Prometheus that scrapes these URLs and evaluates these rules every second. The rules of the
    /// repository are given as texts, so that a test may change their times.
    ///
    /// # Errors
    /// The program is missing, or no port is free.
    pub(crate) async fn start(targets: &[String], rules: &[String]) -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let mut files = Vec::new();
        for (number, rules) in rules.iter().enumerate() {
            let path = dir.path().join(format!("rules{number}.yml"));
            std::fs::write(&path, rules)?;
            files.push(path.display().to_string());
        }
        let jobs: Vec<String> = ["http", "https"]
            .iter()
            .map(|scheme| {
                let prefix = format!("{scheme}://");
                let targets: Vec<&str> = targets
                    .iter()
                    .filter_map(|target| target.strip_prefix(&prefix))
                    .collect();
                // The authority of a test's certificate is not worth a file.
                format!(
                    "{{job_name: refrain-{scheme}, scheme: {scheme}, tls_config: {{insecure_skip_verify: true}}, \
                     static_configs: [{{targets: {targets:?}}}]}}"
                )
            })
            .collect();
        let config = dir.path().join("prometheus.yml");
        std::fs::write(
            &config,
            format!(
                "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\n\
                 rule_files: {files:?}\nscrape_configs: [{}]\n",
                jobs.join(", ")
            ),
        )?;
        let (addr, child) = spawn(dir.path(), &config)?;
        let client = Client::new(&format!("http://{addr}"), "").without_key();
        e2e::wait_until("Prometheus is ready", async || {
            let reply = client.get("/-/ready").await.ok();
            reply.filter(|reply| reply.status == 200)
        })
        .await;
        Ok(Prometheus {
            _child: child,
            _dir: dir,
            client,
        })
    }

    /// The number of series that an expression returns with a numeric value.
    ///
    /// # Errors
    /// Prometheus refuses the expression.
    pub(crate) async fn count(&self, expression: &str) -> anyhow::Result<usize> {
        let encoded: String = expression
            .bytes()
            .map(|byte| format!("%{byte:02X}"))
            .collect();
        let path = format!("/api/v1/query?query={encoded}");
        let reply = self.client.get(&path).await?;
        ensure!(reply.status == 200, "{}\n{expression}", reply.text);
        let body = reply.json();
        let is_number = |series: &&Value| {
            let value = series["value"][1].as_str();
            value.is_some_and(|value| value != "NaN")
        };
        Ok(list(&body["data"]["result"]).filter(is_number).count())
    }

    /// The names of the alerts that fire.
    ///
    /// # Errors
    /// Prometheus does not answer.
    pub(crate) async fn firing(&self) -> anyhow::Result<BTreeSet<String>> {
        let body = self.client.get("/api/v1/alerts").await?.json();
        let fires = |alert: &&Value| alert["state"] == "firing";
        let names = list(&body["data"]["alerts"]).filter(fires);
        let name = |alert: &Value| alert["labels"]["alertname"].as_str().map(str::to_owned);
        Ok(names.filter_map(name).collect())
    }
}

fn spawn(dir: &Path, config: &Path) -> anyhow::Result<(std::net::SocketAddr, Child)> {
    let (binary, addr) = (tool("prometheus"), free_addr()?);
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
    Ok((addr, child))
}
