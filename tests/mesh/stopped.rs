//! Services that are gone for a while, or that hang: which requests wait for them, and for how long.

use std::time::Duration;

use anyhow::{Context, ensure};
use e2e::{Chat, HttpMesh, Service, long_task, wait_until};
use futures_util::future::join_all;

/// Waits until no lease is held and no request waits.
async fn settled(mesh: &HttpMesh) {
    wait_until("every lease is given back", async || {
        let scrape = mesh.scrape(Service::Scheduler).await.ok()?;
        let running = scrape.sum("refrain_scheduler_leases_running", &[]);
        let waiting = scrape.sum("refrain_scheduler_queue_length", &[]);
        (running + waiting == 0.0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_the_scheduler_loses_no_request() -> anyhow::Result<()> {
    let mut mesh = HttpMesh::start_children(1, "", &[]).await?;
    let chats: Vec<Chat> = (0..6)
        .map(|number| Chat::new(&long_task(number)).max_tokens(20))
        .collect();
    let mut expected = Vec::new();
    for chat in &chats {
        expected.push(mesh.client().chat(chat).await?.text);
    }
    // This stream runs all the time, and needs no scheduler.
    let mut stream = mesh
        .client()
        .stream(&Chat::new(&long_task(7)).max_tokens(300).endless())
        .await?;
    stream.read_pieces(1).await?;
    mesh.kill(Service::Scheduler).await?;
    let client = mesh.client();
    let asked = tokio::spawn(async move {
        let answers = chats.iter().map(|chat| client.chat(chat));
        join_all(answers).await
    });
    // The scheduler is gone for this time.
    tokio::time::sleep(Duration::from_secs(2)).await;
    ensure!(
        !asked.is_finished(),
        "requests did not wait for the scheduler"
    );
    mesh.start_child(Service::Scheduler).await?;
    for (answer, expected) in asked.await?.into_iter().zip(expected) {
        ensure!(answer?.text == expected, "the answer differs");
    }
    stream.read_to_done().await?;
    settled(&mesh).await;
    mesh.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hanging_scheduler_is_an_error_and_holds_no_lease_when_it_goes_on() -> anyhow::Result<()>
{
    let settings = "[gateway]\nscheduler_wait_ms = 1000";
    let mesh = HttpMesh::start_children(1, settings, &[]).await?;
    let chat = Chat::new(&long_task(2)).max_tokens(20);
    let expected = mesh.client().chat(&chat).await?.text;
    // The lease of this stream is given back while the scheduler hangs.
    let mut stream = mesh
        .client()
        .stream(&Chat::new(&long_task(7)).max_tokens(200).endless())
        .await?;
    stream.read_pieces(1).await?;
    mesh.signal(Service::Scheduler, "STOP").await?;
    let reply = mesh
        .client()
        .post("/v1/chat/completions", chat.body().to_string())
        .await?;
    ensure!(reply.status == 503, "{}: {}", reply.status, reply.text);
    ensure!(
        reply.json()["error"]["code"] == "scheduler_unavailable",
        "{}",
        reply.text
    );
    ensure!(reply.header("retry-after").is_some(), "no Retry-After");
    stream.read_to_done().await?;
    mesh.signal(Service::Scheduler, "CONT").await?;
    let answer = wait_until("requests are served again", async || {
        mesh.client().chat(&chat).await.ok()
    })
    .await;
    ensure!(answer.text == expected, "the answer differs");
    settled(&mesh).await;
    mesh.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hanging_worker_is_left_after_the_lease_ttl() -> anyhow::Result<()> {
    let settings = "[scheduler]\nlease_ttl_ms = 5000";
    let mesh = HttpMesh::start_children(2, settings, &[]).await?;
    mesh.workers_report(2).await;
    let chat = Chat::new(&long_task(9))
        .sampled(0.9, 42)
        .max_tokens(400)
        .endless()
        .speculation("off");
    let undisturbed = mesh.client().chat(&chat).await?.text;
    let mut stream = mesh.client().stream(&chat).await?;
    let mut text = stream.read_pieces(10).await?;
    let mut busy = None;
    for number in 0..2 {
        let scrape = mesh.scrape(Service::Worker(number)).await?;
        if scrape.sum("refrain_worker_chunks_running", &[]) > 0.0 {
            busy = Some(Service::Worker(number));
        }
    }
    let busy = busy.context("no worker decodes: the output ended too soon")?;
    mesh.signal(busy, "STOP").await?;
    text += &stream.read_to_done().await?;
    ensure!(
        text == undisturbed,
        "the continued output differs:\n{text}\ninstead of\n{undisturbed}"
    );
    let gateway = mesh.scrape(Service::Gateway).await?;
    let continuations = gateway.sum("refrain_gateway_continuations_total", &[]);
    ensure!(continuations >= 1.0, "no output was continued elsewhere");
    // The old worker does no harm when it goes on with a chunk that another one took over.
    mesh.signal(busy, "CONT").await?;
    settled(&mesh).await;
    ensure!(mesh.client().chat(&chat).await?.text == undisturbed);
    mesh.stop().await
}
