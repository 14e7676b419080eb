//! The routes beside chats, on a real mesh: health, tokens, and the line that each request leaves in the log.

use anyhow::{Context, ensure};
use e2e::{Chat, Client, Program, TINY_MODEL, UpMesh, wait_until};
use reqwest::Method;
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_routes_need_no_key_and_tokens_are_those_of_an_answer() -> anyhow::Result<()> {
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    for path in ["/health", "/ping", "/version"] {
        let reply = client.without_key().get(path).await?;
        ensure!(
            reply.status == 200,
            "{path}: {} {}",
            reply.status,
            reply.text
        );
    }
    let version = client.get("/version").await?.json();
    ensure!(version["version"] == env!("CARGO_PKG_VERSION"), "{version}");

    let chat = Chat::new("What is the weather in Oslo?").max_tokens(4);
    let answer = client.chat(&chat).await?;
    let prompt = answer.number("/usage/prompt_tokens");
    let body = chat.body();
    let asked = json!({"messages": body["messages"], "return_token_strs": true});
    let tokens = client.post("/tokenize", asked.to_string()).await?.json();
    ensure!(tokens["count"] == prompt, "{prompt} tokens, but {tokens}");
    let count = client
        .post("/v1/messages/count_tokens", body.to_string())
        .await?;
    ensure!(count.json()["input_tokens"] == prompt, "{}", count.text);
    let back = json!({"model": TINY_MODEL, "tokens": tokens["tokens"]});
    let text = client.post("/detokenize", back.to_string()).await?.json();
    let text = text["prompt"].as_str().context("no text")?;
    ensure!(text.contains("What is the weather in Oslo?"), "{text}");
    let card = client
        .get(&format!("/v1/models/{TINY_MODEL}"))
        .await?
        .json();
    ensure!(card["max_model_len"] == tokens["max_model_len"], "{card}");
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_leaves_one_line_without_content() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    // Its standard error is no terminal, so these lines come without any setting.
    let (program, url) = Program::up(dir.path(), &[], &[]).await?;
    let client = Client::new(&url, "refrain-dev");
    let secret = "What is the weather in Reykjavik?";
    let answer = client.chat(&Chat::new(secret).max_tokens(3)).await?;
    client.get("/v1/models?secret=Reykjavik").await?;
    let refused = json!({"model": "Reykjavik", "messages": []}).to_string();
    let refused = client
        .request(Method::POST, "/v1/chat/completions")
        .header("user-agent", "OpenAI/Python 1.99.1")
        .body(refused);
    client.send(refused).await?;
    client.get("/healthz").await?;
    let lines = wait_until("three requests are in the log", async || {
        let output = program.output();
        let lines = output
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        let requests = lines.filter(|line: &Value| {
            line["target"] == "access" && line["fields"]["message"] == "request"
        });
        let lines: Vec<Value> = requests.map(|line| line["fields"].clone()).collect();
        (lines.len() >= 3).then_some(lines)
    })
    .await;
    ensure!(lines.len() == 3, "{lines:#?}");
    for (field, value) in [
        ("method", json!("POST")),
        ("route", json!("/v1/chat/completions")),
        ("status", json!(200)),
        ("model", json!(TINY_MODEL)),
        (
            "prompt_tokens",
            json!(answer.number("/usage/prompt_tokens")),
        ),
        ("completion_tokens", json!(answer.completion_tokens())),
    ] {
        ensure!(lines[0][field] == value, "{field} in {}", lines[0]);
    }
    for field in ["tenant", "duration_ms", "request_id"] {
        ensure!(!lines[0][field].is_null(), "{field} in {}", lines[0]);
    }
    ensure!(lines[1]["route"] == "/v1/models", "{}", lines[1]);
    ensure!(lines[1]["error_code"].is_null(), "{}", lines[1]);
    for (field, value) in [
        ("status", json!(404)),
        ("error_code", json!("model_not_found")),
        ("error_param", json!("model")),
        ("client", json!("OpenAI/Python")),
    ] {
        ensure!(lines[2][field] == value, "{field} in {}", lines[2]);
    }
    let output = program.output();
    ensure!(!output.contains("Reykjavik"), "the log has content");
    Ok(())
}
