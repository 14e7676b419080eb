//! Requests that the mesh refuses, and the errors that they get.

use anyhow::ensure;
use e2e::{Chat, Client, Reply, TINY_MODEL, UpMesh, long_task, wait_until};
use serde_json::{Value, json};

/// Checks status, code and parameter of an error in OpenAI's shape, which always has four keys.
fn ensure_refused(
    reply: &Reply,
    status: u16,
    code: Option<&str>,
    param: Option<&str>,
) -> anyhow::Result<()> {
    ensure!(
        reply.status == status,
        "{} instead of {status}: {}",
        reply.status,
        reply.text
    );
    let body = reply.json();
    let error = body["error"]
        .as_object()
        .ok_or_else(|| anyhow::anyhow!("no error: {}", reply.text))?;
    let mut keys: Vec<&str> = error.keys().map(String::as_str).collect();
    keys.sort_unstable();
    ensure!(
        keys == ["code", "message", "param", "type"],
        "keys of the error: {keys:?}"
    );
    ensure!(
        error["message"]
            .as_str()
            .is_some_and(|text| !text.is_empty()),
        "no message: {}",
        reply.text
    );
    ensure!(error["type"].is_string(), "no type: {}", reply.text);
    for (key, wanted) in [("code", code), ("param", param)] {
        if let Some(wanted) = wanted {
            ensure!(
                error[key] == wanted,
                "{key}: {} instead of {wanted}",
                error[key]
            );
        }
    }
    ensure!(
        reply.header("x-request-id").is_some(),
        "an error without a request id"
    );
    Ok(())
}

async fn chat(client: &Client, body: &Value) -> anyhow::Result<Reply> {
    client.post("/v1/chat/completions", body.to_string()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_name_the_fault_of_a_request() -> anyhow::Result<()> {
    let mesh = UpMesh::start_with("[gateway]\nbody_bytes_max = 65536").await?;
    let client = mesh.client();
    let fine = Chat::new("a").body().clone();
    ensure_refused(&chat(&client.without_key(), &fine).await?, 401, None, None)?;
    ensure_refused(
        &client.without_key().get("/v1/models").await?,
        401,
        None,
        None,
    )?;
    let stranger = Client::new(client.url(), "key-of-nobody");
    ensure_refused(
        &chat(&stranger, &fine).await?,
        401,
        Some("invalid_api_key"),
        None,
    )?;
    ensure_refused(
        &client.get("/v1/nothing").await?,
        404,
        Some("unknown_url"),
        None,
    )?;
    ensure_refused(
        &client.get("/v1/models/nobody").await?,
        404,
        Some("model_not_found"),
        None,
    )?;
    let other = Chat::new("a").set("model", "nobody").body().clone();
    ensure_refused(
        &chat(&client, &other).await?,
        404,
        Some("model_not_found"),
        Some("model"),
    )?;
    for broken in ["", "{", "[]", "{\"model\": 1}", "\u{0}", "null"] {
        ensure_refused(
            &client.post("/v1/chat/completions", broken).await?,
            400,
            None,
            None,
        )?;
    }
    let large = Chat::new(&"x".repeat(70_000)).body().clone();
    ensure_refused(&chat(&client, &large).await?, 413, None, None)?;
    let long = Chat::new(&"one two three ".repeat(4_000)).body().clone();
    ensure_refused(
        &chat(&client, &long).await?,
        400,
        Some("context_length_exceeded"),
        None,
    )?;
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsupported_fields_are_refused_and_not_ignored() -> anyhow::Result<()> {
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    let unsupported = Some("unsupported_parameter");
    let cases: &[(&str, Value, Option<&str>)] = &[
        ("guided_regex", json!(["a"]), None),
        ("prompt_logprobs", json!(6), None),
        ("allowed_token_ids", json!([1]), unsupported),
        ("presence_penalty", json!(2.5), None),
        ("frequency_penalty", json!(-3), None),
        ("repetition_penalty", json!(0), None),
        ("ignore_eos", json!("yes"), None),
        (
            "response_format",
            json!({"type": "structural_tag"}),
            unsupported,
        ),
        ("tool_choice", json!("required"), None),
        ("temperature", json!(3), None),
        ("top_p", json!(-0.1), None),
        ("n", json!(0), None),
        ("n", json!(129), None),
        ("max_tokens", json!(0), None),
        ("stop", json!(vec!["a"; 65]), None),
        ("top_logprobs", json!(3), None),
        ("logit_bias", json!({"0": 101}), None),
        ("stream_options", json!({"include_usage": true}), None),
        ("speculation", json!("magic"), None),
        ("priority", json!("urgent"), None),
        ("tpot_ms", json!(0), None),
        ("messages", json!([]), None),
        ("messages", json!("hello"), None),
    ];
    for (field, value, code) in cases {
        let body = Chat::new("a").set(field, value.clone()).body().clone();
        ensure_refused(&chat(&client, &body).await?, 400, *code, Some(field))?;
    }
    let prompt = |prompt: Value| json!({"model": TINY_MODEL, "prompt": prompt}).to_string();
    for faulty in [
        json!([4_000_000_000u64]),
        json!([]),
        json!([[1], []]),
        json!({}),
    ] {
        let reply = client.post("/v1/completions", prompt(faulty)).await?;
        ensure_refused(&reply, 400, None, Some("prompt"))?;
    }
    mesh.stop().await;
    Ok(())
}

/// Occupies the only slot of the mesh until the stream is dropped.
async fn occupy(client: &Client) -> anyhow::Result<e2e::EventStream> {
    let endless = Chat::new(&long_task(1))
        .max_tokens(3_500)
        .endless()
        .speculation("off");
    let mut stream = client.stream(&endless).await?;
    stream.read_pieces(1).await?;
    Ok(stream)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_queue_gives_a_retry_hint() -> anyhow::Result<()> {
    let settings = "[worker]\nrunning_max = 1\n[scheduler]\nqueue_max = 1";
    let mesh = UpMesh::start_with(settings).await?;
    let client = mesh.client();
    let _running = occupy(&client).await?;
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.chat(&Chat::new("b").max_tokens(1)).await }
    });
    wait_until("a request waits", async || {
        let scrape = client.scrape().await.ok()?;
        (scrape.sum("refrain_scheduler_queue_length", &[]) == 1.0).then_some(())
    })
    .await;
    let reply = chat(&client, Chat::new("c").body()).await?;
    ensure_refused(&reply, 429, None, None)?;
    let seconds: f64 = reply.header("retry-after").unwrap_or_default().parse()?;
    ensure!(seconds > 0.0 && seconds <= 120.0, "retry-after: {seconds}");
    ensure!(
        !waiting.is_finished(),
        "the request that waited was thrown out"
    );
    let rejections = client
        .scrape()
        .await?
        .sum("refrain_scheduler_rejections_total", &[]);
    ensure!(rejections == 1.0, "{rejections} rejections counted");
    drop(_running);
    waiting.await??;
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_limit_of_one_tenant_does_not_affect_another() -> anyhow::Result<()> {
    let mesh = UpMesh::start_with("[gateway]\ntenant_requests_in_flight_max = 1").await?;
    let client = mesh.client();
    let _running = occupy(&client).await?;
    let reply = chat(&client, Chat::new("c").body()).await?;
    ensure_refused(&reply, 429, None, None)?;
    ensure!(reply.header("retry-after").is_some(), "no retry-after");
    mesh.client_of_another()
        .chat(&Chat::new("c").max_tokens(1))
        .await?;
    let rejections = client.scrape().await?.sum(
        "refrain_gateway_rejections_total",
        &[("limit", "tenant_requests")],
    );
    ensure!(rejections == 1.0, "{rejections} rejections counted");
    drop(_running);
    mesh.stop().await;
    Ok(())
}
