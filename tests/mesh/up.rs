//! The main command, as a new user meets it.

use std::path::Path;

use anyhow::{Context, ensure};
use e2e::{Client, Program};
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_starts_and_prints_how_to_use_it() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let (program, url) = Program::up(dir.path(), &[], &[]).await?;
    let client = Client::new(&url, "");
    ensure!(
        client.get("/readyz").await?.status == 200,
        "it says that it is up, but is not ready"
    );

    let output = program.output();
    for (what, path) in [("Metrics:", "/metrics"), ("Console:", "/console")] {
        let page = between(&output, what, path)?.trim();
        let reply = Client::new(page, "").get(path).await?;
        ensure!(reply.status == 200, "{what} {page}: {}", reply.status);
    }
    // The command that it prints works. Not every machine has curl, so the test sends the same request itself.
    let key = between(&output, "authorization: Bearer ", "'")?;
    let body = between(&output, "-d '", "'")?;
    let path = between(&output, &format!("curl -s {url}"), " ")?;
    let reply = Client::new(&url, key).post(path, body.to_owned()).await?;
    ensure!(
        reply.status == 200,
        "the command it shows fails: {} {}",
        reply.status,
        reply.text
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_is_served_under_its_name() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let folder = dir.path().join("My-Model");
    std::fs::create_dir(&folder)?;
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../services/reference-engine/model");
    for file in [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
    ] {
        std::fs::copy(shipped.join(file), folder.join(file))?;
    }
    let data = dir.path().join("data");
    std::fs::create_dir(&data)?;
    let model = folder.to_string_lossy();
    let (program, url) = Program::up(&data, &["--model", &*model, "--context", "256"], &[]).await?;
    let output = program.output();
    ensure!(
        output.contains("Loading My-Model: ") && output.contains("texts of up to 256 tokens"),
        "{output}"
    );
    let client = Client::new(&url, "refrain-dev");
    let listed = client.get("/v1/models").await?;
    ensure!(listed.text.contains("My-Model"), "{}", listed.text);
    let mut steps = Vec::new();
    for _ in 0..2 {
        let body = json!({
            "model": "My-Model", "temperature": 0, "max_tokens": 24,
            "messages": [{"role": "user", "content": "Repeat: one two three four five six"}],
        });
        let reply = client
            .post("/v1/chat/completions", body.to_string())
            .await?;
        ensure!(reply.status == 200, "{}", reply.text);
        let answer: Value = serde_json::from_str(&reply.text)?;
        steps.push(answer["metrics"]["speculative_decoding"]["steps"].as_u64());
    }
    ensure!(
        steps[0] > steps[1] && steps[1].is_some(),
        "steps: {steps:?}"
    );
    let long = json!({"model": "My-Model", "prompt": "a b ".repeat(300)});
    let reply = client.post("/v1/completions", long.to_string()).await?;
    ensure!(reply.status == 400, "{} {}", reply.status, reply.text);
    Ok(())
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> anyhow::Result<&'a str> {
    let rest = text
        .split_once(before)
        .with_context(|| format!("no {before:?} in:\n{text}"))?
        .1;
    Ok(rest
        .split_once(after)
        .with_context(|| format!("no {after:?} after {before:?} in:\n{text}"))?
        .0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_fault_of_a_configuration_is_reported_at_once() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("faulty.toml");
    std::fs::write(
        &path,
        r#"
        colour = "red"
        [gateway]
        listen = "nowhere"
        threads = 0
        keyz = []
        [scheduler]
        queue_max = 0
        [worker]
        running_max = "many"
        [worker.replica]
        namespaces_max = 0
        [draft_store]
        retention_days = 0
        [engine]
        max_batch = 0
        [telemetry]
        log_json = 7
        "#,
    )?;
    let path = path.to_string_lossy();
    let variables = [
        ("REFRAIN_WORKER__ENGINE__IDLE_MS_MAX", "0"),
        ("REFRAIN_ENGINE__THREADZ", "1"),
    ];
    let mut program = Program::start(dir.path(), &["up", "--config", &*path], &variables)?;
    let status = program.ended().await?;
    ensure!(status.code().is_some_and(|code| code != 0), "{status}");
    let output = program.output();
    let keys = [
        "colour",
        "gateway.listen",
        "gateway.threads",
        "keyz",
        "scheduler.queue_max",
        "worker.running_max",
        "worker.replica.namespaces_max",
        "draft_store.retention_days",
        "engine.max_batch",
        "telemetry.log_json",
        "worker.engine.idle_ms_max",
        "threadz",
    ];
    let silent: Vec<_> = keys.iter().filter(|key| !output.contains(**key)).collect();
    ensure!(
        silent.is_empty(),
        "nothing is said about {silent:?}:\n{output}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_names_what_it_lacks() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("empty.toml");
    std::fs::write(&path, "")?;
    let path = path.to_string_lossy();
    let worker = [
        "mesh.secret",
        "worker.listen",
        "urls.scheduler",
        "urls.draft_store",
        "urls.engine",
    ];
    let cases: [(&str, &[&str]); 5] = [
        (
            "gateway",
            &[
                "mesh.namespace_signing_key",
                "gateway.keys",
                "gateway.models",
                "urls.scheduler",
            ],
        ),
        (
            "scheduler",
            &[
                "mesh.secret",
                "mesh.namespace_public_key",
                "scheduler.listen",
            ],
        ),
        ("worker", &worker),
        ("draft-store", &["mesh.secret", "draft_store.listen"]),
        ("reference-engine", &["mesh.secret", "engine.listen"]),
    ];
    for (role, keys) in cases {
        let mut program = Program::start(dir.path(), &[role, "--config", &*path], &[])?;
        let status = program.ended().await?;
        ensure!(!status.success(), "{role} starts without a configuration");
        let output = program.output();
        for key in keys {
            ensure!(
                output.contains(key),
                "{role} says nothing about {key}:\n{output}"
            );
        }
    }
    Ok(())
}
