//! The official Python client of OpenAI works with a mesh.

use anyhow::{Context, ensure};
use e2e::{KEY, TINY_MODEL, UpMesh, repository};
use tokio::process::Command;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_client_understands_every_answer() -> anyhow::Result<()> {
    let python = repository().join(".venv/bin/python");
    ensure!(
        python.exists(),
        "{} is missing: tests/run makes it, with the client in the version that is tested",
        python.display()
    );
    let mesh = UpMesh::start().await?;
    let output = Command::new(&python)
        .arg(repository().join("tests/python/openai_client.py"))
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
