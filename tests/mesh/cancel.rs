//! A client that disconnects frees its resources everywhere.

use anyhow::ensure;
use e2e::{Chat, Client, PATIENCE, Scrape, UpMesh, long_task, wait_until};

const TOKENS: u32 = 3000;

fn endless(number: usize) -> Chat {
    Chat::new(&long_task(number))
        .sampled(1.0, number as u64)
        .max_tokens(TOKENS)
        .endless()
        .speculation("off")
}

fn in_flight(scrape: &Scrape) -> [f64; 4] {
    [
        "refrain_gateway_requests_in_flight",
        "refrain_scheduler_leases_running",
        "refrain_worker_chunks_running",
        "refrain_engine_sessions_open",
    ]
    .map(|name| scrape.sum(name, &[]))
}

async fn wait_for(client: &Client, requests: f64) {
    wait_until(
        &format!("{requests} requests are under way everywhere"),
        async || {
            // The lease ends last, by a separate call to the scheduler.
            (in_flight(&client.scrape().await.ok()?) == [requests; 4]).then_some(())
        },
    )
    .await;
}

/// Checks that far fewer tokens were decoded than requested.
async fn ensure_cut_short(client: &Client) -> anyhow::Result<()> {
    let scrape = client.scrape().await?;
    let emitted = scrape.sum("refrain_spec_emitted_tokens_total", &[]);
    ensure!(
        emitted < f64::from(TOKENS) / 2.0,
        "{emitted} tokens were decoded for nobody"
    );
    let cancelled = scrape.sum("refrain_worker_chunks_total", &[("outcome", "cancelled")]);
    ensure!(cancelled > 0.0, "no chunk was cancelled");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_stream_ends_its_work() -> anyhow::Result<()> {
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    let mut stream = client.stream(&endless(1)).await?;
    stream.read_pieces(3).await?;
    wait_for(&client, 1.0).await;
    drop(stream);
    wait_for(&client, 0.0).await;
    ensure_cut_short(&client).await?;
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_request_ends_its_work() -> anyhow::Result<()> {
    let mesh = UpMesh::start().await?;
    let client = mesh.client();
    let asking = tokio::spawn({
        let client = client.clone();
        async move { client.chat(&endless(2)).await }
    });
    wait_for(&client, 1.0).await;
    asking.abort();
    wait_for(&client, 0.0).await;
    ensure_cut_short(&client).await?;
    mesh.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiting_request_leaves_the_queue() -> anyhow::Result<()> {
    let mesh = UpMesh::start_with("[worker]\nrunning_max = 1").await?;
    let client = mesh.client();
    let mut running = client.stream(&endless(3)).await?;
    running.read_pieces(1).await?;
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.chat(&endless(4)).await }
    });
    let queue_length = async |wanted: f64| {
        wait_until(&format!("{wanted} wait"), async || {
            let scrape = client.scrape().await.ok()?;
            (scrape.sum("refrain_scheduler_queue_length", &[]) == wanted).then_some(())
        })
        .await;
    };
    queue_length(1.0).await;
    waiting.abort();
    queue_length(0.0).await;
    // The running request is not disturbed.
    tokio::time::timeout(PATIENCE, running.read_pieces(3)).await??;
    drop(running);
    wait_for(&client, 0.0).await;
    mesh.stop().await;
    Ok(())
}
