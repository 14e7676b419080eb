//! The doors of `refrain up`: who gets in, what is printed, and how its operator's commands find it.

use std::path::Path;

use anyhow::{Context as _, ensure};
use e2e::{Chat, Client, Program, wait_until};
use serde_json::Value;

/// Runs a command to its end. Returns whether it succeeded, and what it printed.
async fn run(dir: &Path, words: &[&str]) -> anyhow::Result<(bool, String)> {
    let mut program = Program::start(dir, words, &[])?;
    let status = program.ended().await?;
    Ok((status.success(), program.output()))
}

/// As [`run`], of a command that has to succeed.
async fn done(dir: &Path, words: &[&str]) -> anyhow::Result<String> {
    let (is_done, output) = run(dir, words).await?;
    ensure!(is_done, "{words:?}: {output}");
    Ok(output)
}

/// Starts `refrain up` in a folder, with its data where it keeps them by default.
async fn start(dir: &Path, words: &[&str]) -> anyhow::Result<(Program, String)> {
    let mut program = Program::start(dir, &[&["up"], words].concat(), &[])?;
    let line = program.line_with("Refrain is up: ").await?;
    let url = line.split("Refrain is up: ").nth(1).unwrap_or_default();
    let url = url.trim_end_matches("/v1").to_owned();
    Ok((program, url))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_machines_do_not_get_in_with_the_key_that_everybody_knows() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let dir = dir.path();
    std::fs::write(dir.join("empty.toml"), "")?;
    let listen = ["up", "--listen", "0.0.0.0:0"];
    for more in [&[][..], &["--config", "empty.toml"]] {
        let (is_done, output) = run(dir, &[&listen, more].concat()).await?;
        ensure!(!is_done, "it started: {output}");
        for part in ["refrain-dev", "--make-key", "gateway.keys", "127.0.0.1"] {
            ensure!(output.contains(part), "{part} in {output}");
        }
    }

    // With a key of its own it lets that in, prints it nowhere, and keeps the metrics for operators.
    let words = ["--listen", "0.0.0.0:0", "--make-key"];
    let (program, url) = start(dir, &words).await?;
    let url = url.replace("0.0.0.0", "127.0.0.1");
    let key = std::fs::read_to_string(dir.join("refrain-data/api-key"))?;
    let client = Client::new(&url, key.trim());
    ensure!(client.get("/v1/models").await?.status == 200);
    ensure!(
        Client::new(&url, "refrain-dev")
            .get("/v1/models")
            .await?
            .status
            == 401
    );
    ensure!(client.get("/metrics").await?.status == 404);
    let output = program.output();
    ensure!(
        !output.contains(key.trim()) && output.contains("$API_KEY"),
        "{output}"
    );
    ensure!(output.contains("refrain-data/api-key"), "{output}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_find_the_mesh_that_runs_beside_them() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let dir = dir.path();
    // Nobody would read what they wrote, so they write nothing.
    for words in [
        &["tenants", "add", "acme"][..],
        &["store", "stats"],
        &["usage"],
    ] {
        let (is_done, output) = run(dir, words).await?;
        ensure!(
            !is_done && output.contains("no `refrain up`"),
            "{words:?}: {output}"
        );
        ensure!(output.contains("refrain-data"), "{words:?}: {output}");
    }
    ensure!(
        std::fs::read_dir(dir)?.next().is_none(),
        "something was written"
    );

    let (program, url) = start(dir, &["--listen", "127.0.0.1:0"]).await?;
    done(dir, &["tenants", "add", "acme"]).await?;
    let key = done(dir, &["keys", "add", "acme", "--name", "ci"]).await?;
    let client = Client::new(&url, key.trim());
    wait_until("the new key is let in", async || {
        let reply = client.get("/v1/models").await.ok()?;
        (reply.status == 200).then_some(())
    })
    .await;

    client.chat(&Chat::new("SELECT").max_tokens(8)).await?;
    let stats = async || -> anyhow::Result<Value> {
        let stats = done(dir, &["store", "stats", "--json"]).await?;
        Ok(serde_json::from_str(&stats)?)
    };
    wait_until("the output is stored", async || {
        (stats().await.ok()?["documents"] == 1).then_some(())
    })
    .await;
    let export = [
        "store",
        "export",
        "--tenant",
        "acme",
        "--output",
        "acme.jsonl",
    ];
    done(dir, &export).await?;
    ensure!(
        std::fs::read_to_string(dir.join("acme.jsonl"))?
            .lines()
            .count()
            == 1
    );
    let verified = done(dir, &["store", "verify"]).await?;
    ensure!(verified.contains("1 documents"), "{verified}");
    done(dir, &["store", "compact"]).await?;
    wait_until("the usage is stored", async || {
        let usage = done(dir, &["usage", "--by", "tenant"]).await.ok()?;
        usage.contains("acme").then_some(())
    })
    .await;

    let erase = [
        "store",
        "erase",
        "--tenant",
        "acme",
        "--everything",
        "--json",
    ];
    let erased: Value = serde_json::from_str(&done(dir, &erase).await?)?;
    ensure!(
        erased["documents"] == 1 && erased["documents_left"] == 0,
        "{erased}"
    );
    ensure!(
        erased["engines"]["workers"][0]["worker"].is_string(),
        "{erased}"
    );
    ensure!(stats().await?["documents"] == 0);
    done(dir, &["store", "import", "acme.jsonl"]).await?;
    // The same by the name of the directory, from elsewhere.
    let elsewhere = tempfile::tempdir()?;
    let data = dir.join("refrain-data");
    let data = data.to_str().context("a path that is no text")?;
    let words = ["store", "erase", "--tenant", "acme", "--data-dir", data];
    let erased = done(elsewhere.path(), &words).await?;
    ensure!(erased.contains("1 documents erased"), "{erased}");
    done(
        elsewhere.path(),
        &["usage", "erase", "acme", "--data-dir", data],
    )
    .await?;
    done(
        elsewhere.path(),
        &["tenants", "remove", "acme", "--data-dir", data],
    )
    .await?;

    let audit = std::fs::read_to_string(dir.join("refrain-data/audit.jsonl"))?;
    for act in [
        "exported",
        "compacted",
        "everything of tenant acme",
        "imported",
        "usage of",
    ] {
        ensure!(
            audit.contains(act),
            "the audit log says nothing of {act}: {audit}"
        );
    }

    // A mesh that was killed is not there, though its files are.
    program.kill().await?;
    let (is_done, output) = run(dir, &["tenants", "list"]).await?;
    ensure!(!is_done && output.contains("no `refrain up`"), "{output}");
    done(dir, &["store", "stats", "--data-dir", "refrain-data"]).await?;
    Ok(())
}
