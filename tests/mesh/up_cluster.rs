//! `refrain up --cluster`: a mesh of processes that loses some of them, as somebody who tries it out sees it.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context as _, ensure};
use e2e::{Chat, Client, Program, repository, wait_until};

/// Names, addresses and process ids, as they are printed.
fn members(output: &str) -> BTreeMap<String, (String, u32)> {
    let row = |line: &str| {
        let mut words = line.split_whitespace();
        let (name, addr) = (words.next()?, words.next()?);
        let pid = words
            .next()
            .filter(|word| *word == "pid")
            .and(words.next())?;
        Some((name.to_owned(), (addr.to_owned(), pid.parse().ok()?)))
    };
    output.lines().filter_map(row).collect()
}

async fn kill(pid: u32) -> anyhow::Result<()> {
    let command = format!("kill -9 {pid}");
    let status = tokio::process::Command::new("sh")
        .args(["-c", &command])
        .status();
    ensure!(status.await?.success(), "{command} failed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_store_and_a_lost_gateway_cost_nothing_and_come_back() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    // `tests/run` unpacks the broker there. Elsewhere it has to be installed.
    let tools = repository().join("target/tools/usr/sbin");
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", tools.display());
    let data_dir = dir.path().to_string_lossy().into_owned();
    let arguments = [
        "up",
        "--cluster",
        "3",
        "--listen",
        "127.0.0.1:0",
        "--data-dir",
        &data_dir,
    ];
    let mut program = Program::start(dir.path(), &arguments, &[("PATH", &path)])?;
    program.line_with("Logs and data:").await?;
    let members = members(&program.output());
    ensure!(members.len() == 11, "{members:?}");
    let member = |name: &str| {
        members
            .get(name)
            .with_context(|| format!("no {name}: {members:?}"))
    };
    let client = |name: &str| {
        anyhow::Ok(Client::new(
            &format!("http://{}", member(name)?.0),
            "refrain-dev",
        ))
    };
    let (first, second) = (client("gateway-0")?, client("gateway-1")?);

    let chat = Chat::random(1).max_tokens(64);
    let plain = first.chat(&chat.clone().speculation("off")).await?;
    let said = first.chat(&chat).await?;
    ensure!(said.text == plain.text, "drafts changed the answer");

    kill(member("store-0")?.1).await?;
    kill(member("gateway-0")?.1).await?;
    wait_until(
        "the other gateway's answer is drafted from the first one",
        async || {
            let again = second.chat(&chat).await.ok()?;
            assert_eq!(again.text, plain.text, "a loss changed the answer");
            (again.accepted_from("suffix") > 32).then_some(())
        },
    )
    .await;

    program.line_with("store-0 runs again").await?;
    program.line_with("gateway-0 runs again").await?;
    first.ready("the first gateway").await;
    ensure!(
        first.chat(&chat).await?.text == plain.text,
        "the answer changed after a restart"
    );
    wait_until("all three stores hold the same", async || {
        stores_are_equal(dir.path()).await.ok()
    })
    .await;

    program.terminate().await?;
    ensure!(program.ended().await?.success(), "{}", program.output());
    for (name, (_, pid)) in &members {
        ensure!(
            !Path::new(&format!("/proc/{pid}")).exists(),
            "{name} still runs"
        );
    }
    Ok(())
}

/// Asks the operator's commands, which find the stores in the configuration that was written.
async fn stores_are_equal(dir: &Path) -> anyhow::Result<()> {
    let config = dir.join("cluster/cluster.toml");
    let config = config.to_string_lossy();
    let stats = ["store", "stats", "--json", "--config", &*config];
    let mut stats = Program::start(dir, &stats, &[])?;
    ensure!(stats.ended().await?.success(), "{}", stats.output());
    let stats: serde_json::Value = serde_json::from_str(&stats.output())?;
    let documents = stats["all"]["documents"].as_u64().unwrap_or(0);
    let replicas = stats["replicas"].as_array().map_or(0, Vec::len);
    ensure!(replicas == 3 && documents >= 3, "{stats}");
    let mut verify = Program::start(dir, &["store", "verify", "--config", &*config], &[])?;
    ensure!(verify.ended().await?.success(), "{}", verify.output());
    Ok(())
}
