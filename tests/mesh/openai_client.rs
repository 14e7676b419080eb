//! The official Python clients of OpenAI and Anthropic work with a mesh.

use anyhow::{Context, ensure};
use e2e::{KEY, TINY_MODEL, UpMesh, repository};
use tokio::process::Command;

/// Runs a script of `tests/python` against a mesh.
async fn run(script: &str) -> anyhow::Result<()> {
    let python = repository().join(".venv/bin/python");
    ensure!(
        python.exists(),
        "{} is missing: tests/run makes it, with the clients in the versions that are tested",
        python.display()
    );
    let mesh = UpMesh::start().await?;
    let output = Command::new(&python)
        .arg(repository().join("tests/python").join(script))
        .args([mesh.client().url(), KEY, TINY_MODEL])
        .output()
        .await
        .context("python does not run")?;
    let said = [output.stdout, output.stderr]
        .map(|text| String::from_utf8_lossy(&text).into_owned())
        .join("\n");
    ensure!(output.status.success(), "{}:\n{said}", output.status);
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_client_understands_every_answer() -> anyhow::Result<()> {
    run("openai_client.py").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_client_runs_tools_over_responses() -> anyhow::Result<()> {
    run("responses_client.py").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_client_of_anthropic_runs_tools_over_messages() -> anyhow::Result<()> {
    run("anthropic_client.py").await
}
