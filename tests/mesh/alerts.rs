//! Alerts fire when they should: by the unit tests of their rules, and some of them in a live mesh.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use e2e::{PATIENCE, repository};
use tokio::process::Command;

use crate::prometheus::{Prometheus, rules_dir, tool};
use crate::troubled_mesh::TroubledMesh;

/// The files with alerts.
const FILES: [&str; 2] = ["alerts.yml", "slo.yml"];

/// The files with the tests of alerts.
const TESTS: [&str; 2] = ["alerts_test.yml", "alerts_days_test.yml"];

fn read(name: &str) -> anyhow::Result<String> {
    std::fs::read_to_string(rules_dir().join(name)).with_context(|| name.to_owned())
}

/// The texts of all files with alerts.
pub(crate) fn rules() -> anyhow::Result<Vec<String>> {
    FILES.iter().map(|name| read(name)).collect()
}

fn values<'a>(text: &'a str, key: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines()
        .filter_map(move |line| line.trim().strip_prefix(key))
}

async fn promtool(arguments: &[&str]) -> anyhow::Result<()> {
    let promtool = Command::new(tool("promtool"))
        .args(arguments)
        .current_dir(rules_dir())
        .output();
    let outcome = promtool
        .await
        .context("promtool cannot be run: tests/run fetches it")?;
    let said = [outcome.stdout, outcome.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    ensure!(outcome.status.success(), "{said}");
    Ok(())
}

#[tokio::test]
async fn every_alert_fires_when_it_should_and_only_then() -> anyhow::Result<()> {
    let tests = TESTS.iter().map(|name| read(name));
    let tests = tests.collect::<anyhow::Result<Vec<_>>>()?.concat();
    let rules = rules()?.concat();
    let names: BTreeSet<&str> = values(&rules, "- alert: ").collect();
    ensure!(names.len() > 30, "only {names:?}: the test is blind");
    for name in names {
        // An alert that is only expected to be silent would be silent with any rule.
        let fires = format!("alertname: {name}\n        exp_alerts:\n          - exp_labels");
        ensure!(tests.contains(&fires), "no test expects {name} to fire");
    }
    promtool(&["test", "rules", TESTS[0], TESTS[1]]).await?;
    promtool(&["check", "config", "prometheus.yml"]).await
}

#[test]
fn every_alert_names_its_section_of_the_runbook() -> anyhow::Result<()> {
    let page = std::fs::read_to_string(repository().join("docs/alerts.md"))?;
    let sections: BTreeSet<&str> = values(&page, "### ").collect();
    let rules = rules()?.concat();
    let names: BTreeSet<&str> = values(&rules, "- alert: ").collect();
    ensure!(
        sections == names,
        "alerts without a section, or sections without an alert: {:?}",
        sections.symmetric_difference(&names)
    );
    let runbooks: Vec<&str> = values(&rules, "runbook: ").collect();
    let expected: Vec<String> = values(&rules, "- alert: ")
        .map(|name| format!("docs/alerts.md#{}", name.to_lowercase()))
        .collect();
    ensure!(runbooks == expected, "{runbooks:?}");
    Ok(())
}

/// The rules with waits of a second, since a test does not wait for minutes.
fn hasty(rules: &str) -> String {
    let mut text = String::new();
    for line in rules.lines() {
        let indent = line.len() - line.trim_start().len();
        match line.trim_start().starts_with("for: ") {
            true => text.push_str(&format!("{}for: 1s", " ".repeat(indent))),
            false => text.push_str(line),
        }
        text.push('\n');
    }
    text
}

/// Waits until all of these alerts fire. `stir` is done meanwhile, again and again.
async fn until_firing(
    prometheus: &Prometheus,
    wanted: &[&str],
    stir: impl AsyncFn() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let firing = prometheus.firing().await?;
        if wanted.iter().all(|name| firing.contains(*name)) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "only these fire: {firing:?}");
        stir().await?;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alerts_of_a_mesh_with_troubles_fire_in_a_real_prometheus() -> anyhow::Result<()> {
    let mesh = Box::pin(TroubledMesh::start()).await?;
    let rules: Vec<String> = rules()?.iter().map(|rules| hasty(rules)).collect();
    let prometheus = Prometheus::start(&[mesh.target()], &rules).await?;
    let at_once = ["RefrainLimitsWithoutRedis", "RefrainKeyEnds"];
    until_firing(&prometheus, &at_once, async || Ok(())).await?;
    let later = ["RefrainBreakerOpen", "RefrainErrorsBurnFast"];
    let firing = prometheus.firing().await?;
    let early: Vec<_> = later
        .iter()
        .filter(|name| firing.contains(**name))
        .collect();
    ensure!(early.is_empty(), "{early:?} fire before there is a reason");
    until_firing(&prometheus, &later, async || mesh.stir().await).await?;
    ensure!(!prometheus.firing().await?.contains("RefrainDown"));
    mesh.stop().await;
    until_firing(&prometheus, &["RefrainDown"], async || Ok(())).await
}
