//! The loss of a worker or an engine only delays a stream.

use anyhow::{Context, ensure};
use e2e::{Chat, EventStream, HttpMesh, Service, long_task};

const TOKENS: u32 = 400;

fn chat() -> Chat {
    Chat::new(&long_task(9))
        .sampled(0.9, 42)
        .max_tokens(TOKENS)
        .endless()
        .speculation("off")
}

/// Starts a stream, and finds the worker that decodes it.
async fn begin(mesh: &HttpMesh, workers: usize) -> anyhow::Result<(EventStream, String, usize)> {
    let mut stream = mesh.client().stream(&chat()).await?;
    let text = stream.read_pieces(10).await?;
    let mut busy = None;
    for number in 0..workers {
        let scrape = mesh.scrape(Service::Worker(number)).await?;
        if scrape.sum("refrain_worker_chunks_running", &[]) > 0.0 {
            busy = Some(number);
        }
    }
    Ok((
        stream,
        text,
        busy.context("no worker decodes: the output ended too soon to be disturbed")?,
    ))
}

async fn ensure_continued(
    mesh: &HttpMesh,
    mut stream: EventStream,
    begun: &str,
    undisturbed: &str,
) -> anyhow::Result<()> {
    let text = format!("{begun}{}", stream.read_to_done().await?);
    ensure!(
        text == undisturbed,
        "the continued output differs:\n{text}\ninstead of\n{undisturbed}"
    );
    let continuations = mesh
        .scrape(Service::Gateway)
        .await?
        .sum("refrain_gateway_continuations_total", &[]);
    ensure!(continuations >= 1.0, "nothing was disturbed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_goes_on_elsewhere_when_its_worker_is_lost() -> anyhow::Result<()> {
    let mut mesh = HttpMesh::start_children(2, "", &[]).await?;
    mesh.workers_report(2).await;
    let undisturbed = mesh.client().chat(&chat()).await?.text;
    let (stream, begun, busy) = begin(&mesh, 2).await?;
    mesh.kill(Service::Worker(busy)).await?;
    ensure_continued(&mesh, stream, &begun, &undisturbed).await?;
    // The rest of the mesh goes on serving.
    ensure!(
        mesh.client().chat(&chat()).await?.text == undisturbed,
        "the worker that is left says something else"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_goes_on_when_its_engine_comes_back() -> anyhow::Result<()> {
    let mut mesh = HttpMesh::start_children(1, "", &[]).await?;
    let undisturbed = mesh.client().chat(&chat()).await?.text;
    let (stream, begun, _) = begin(&mesh, 1).await?;
    mesh.kill(Service::Engine(0)).await?;
    mesh.start_child(Service::Engine(0)).await?;
    ensure_continued(&mesh, stream, &begun, &undisturbed).await?;
    mesh.stop().await
}
