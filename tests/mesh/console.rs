//! The orders of an operator, and the figures of the console, in a mesh of separate processes.

use anyhow::{Context as _, ensure};
use e2e::{Chat, Client, HttpMesh, free_addr, wait_until};
use refrain_accounts::OperatorToken;
use reqwest::Method;
use serde_json::{Value, json};

/// Calls the admin API, and returns the answer.
async fn call(client: &Client, method: Method, path: &str, body: Value) -> anyhow::Result<Value> {
    let request = client.request(method, &format!("/admin/{path}"));
    let reply = client.send(request.json(&body)).await?;
    ensure!(
        reply.status == 200,
        "{path}: {} {}",
        reply.status,
        reply.text
    );
    Ok(reply.json())
}

/// The sum of a metric in the figures of all services of a role.
fn sum(figures: &Value, role: &str, name: &str) -> f64 {
    let parts = figures["parts"].as_array().into_iter().flatten();
    let pages = parts.filter(|part| part["role"] == role);
    let lines = pages.flat_map(|part| part["metrics"].as_str().unwrap_or_default().lines());
    let of_name = lines.filter(|line| line.starts_with(name));
    let values = of_name.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values.sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_sees_and_orders_every_service_of_a_mesh() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let made = OperatorToken::random()?;
    let operations = free_addr()?;
    let settings = format!(
        "[gateway]\n\
         operations_listen = \"{operations}\"\n\
         console = true\n\
         audit_file = \"{}/audit.jsonl\"\n\
         operators = [{{ name = \"ann\", token_sha256 = \"{}\" }}]\n",
        dir.path().display(),
        made.sha256,
    );
    let mesh = HttpMesh::start_children(2, &settings, &[]).await?;
    mesh.workers_report(2).await;
    let operator = Client::new(&format!("http://{operations}"), &made.token);
    let figures = async || call(&operator, Method::GET, "figures", json!({})).await;
    let page = operator.without_key().get("/console/").await?;
    ensure!(page.status == 200 && page.text.contains("Refrain console"));

    let client = mesh.client();
    let chat = Chat::new("What is the weather in Oslo?").max_tokens(24);
    client.chat(&chat).await?;
    client.chat(&chat).await?;
    wait_until(
        "the store has the output, and the page sees all of it",
        async || {
            let figures = figures().await.ok()?;
            let tokens = sum(&figures, "worker", "refrain_goodput_tokens_total");
            let documents = sum(&figures, "draft-store", "refrain_draft_store_documents");
            let chunks = sum(&figures, "gateway", "refrain_gateway_requests_total");
            (tokens > 0.0 && documents >= 2.0 && chunks >= 2.0).then_some(())
        },
    )
    .await;
    let seen = figures().await?;
    let parts = seen["parts"].as_array().context("no parts")?;
    ensure!(parts.len() == 5, "{parts:#?}");
    ensure!(
        parts.iter().all(|part| part["trouble"].is_null()),
        "{parts:#?}"
    );

    // A drained worker gets nothing, and another one answers.
    let first = &seen["workers"][0]["worker"];
    let first = first
        .as_str()
        .context("a worker without a name")?
        .to_owned();
    let drain = format!("workers/{first}/drain");
    call(&operator, Method::POST, &drain, json!({})).await?;
    let drains = async |wanted: bool| {
        wait_until("the scheduler knows of the order", async || {
            let figures = figures().await.ok()?;
            let workers = figures["workers"].as_array()?;
            let worker = workers.iter().find(|worker| worker["worker"] == *first)?;
            (worker["draining"] == wanted).then_some(())
        })
        .await;
    };
    drains(true).await;
    for number in 0..4 {
        client.chat(&Chat::random(number).max_tokens(4)).await?;
    }
    call(&operator, Method::DELETE, &drain, json!({})).await?;
    drains(false).await;

    let compacted = call(&operator, Method::POST, "compactions", json!({})).await?;
    ensure!(compacted["after_bytes"].is_u64(), "{compacted}");
    let tenant = json!({"tenant": "one"});
    let erased = call(&operator, Method::POST, "erasures", tenant.clone()).await?;
    ensure!(erased["documents"].as_u64() >= Some(2), "{erased}");
    let again = call(&operator, Method::POST, "erasures", tenant).await?;
    ensure!(again["documents"] == 0, "{again}");

    let audit = std::fs::read_to_string(dir.path().join("audit.jsonl"))?;
    let done = audit
        .lines()
        .filter(|line| line.contains("\"outcome\":\"done\""));
    ensure!(done.count() == 5, "{audit}");
    mesh.stop().await
}
