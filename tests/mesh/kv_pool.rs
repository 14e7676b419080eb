//! Streams that go on with KV blocks of another engine, or of the file of an engine that was killed.

use anyhow::{Context, ensure};
use e2e::{Chat, HttpMesh, Service, long_task};

const TOKENS: u32 = 1_000;

/// Tokens that are read before something happens, so that more blocks are full than `fetch_tokens_min` asks for.
const BEGUN_PIECES: usize = 250;

/// Fewest blocks that a stream goes on with: its prompt has more tokens than two of them.
const BLOCKS_MIN: f64 = 3.0;

fn chat() -> Chat {
    Chat::new(&long_task(9))
        .sampled(0.9, 42)
        .max_tokens(TOKENS)
        .endless()
        .speculation("off")
}

/// The output of a mesh without pools.
async fn undisturbed() -> anyhow::Result<String> {
    let mesh = HttpMesh::start_here(1, "").await?;
    let text = mesh.client().chat(&chat()).await?.text;
    mesh.stop().await?;
    Ok(text)
}

async fn hits(mesh: &HttpMesh, engine: usize, source: &str) -> anyhow::Result<f64> {
    let scrape = mesh.scrape(Service::Engine(engine)).await?;
    Ok(scrape.sum("refrain_engine_kv_pool_hits_total", &[("source", source)]))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_whose_worker_is_lost_goes_on_with_the_blocks_of_the_first_engine()
-> anyhow::Result<()> {
    let expected = undisturbed().await?;
    let settings = "[engine.kv_pool]\nmemory_bytes_max = 67_108_864\nwait_ms = 20_000\n";
    let mut mesh = HttpMesh::start_children(2, settings, &[]).await?;
    mesh.workers_report(2).await;
    let mut stream = mesh.client().stream(&chat()).await?;
    let begun = stream.read_pieces(BEGUN_PIECES).await?;
    let mut busy = None;
    for number in 0..2 {
        let scrape = mesh.scrape(Service::Worker(number)).await?;
        if scrape.sum("refrain_worker_chunks_running", &[]) > 0.0 {
            busy = Some(number);
        }
    }
    let busy = busy.context("no worker decodes: the output ended too soon to be disturbed")?;
    // The engine has not been told that the session is over: blocks are there as soon as they are full.
    mesh.kill(Service::Worker(busy)).await?;
    let text = format!("{begun}{}", stream.read_to_done().await?);
    ensure!(text == expected, "{text}\ninstead of\n{expected}");
    let fetched = hits(&mesh, 1 - busy, "peer").await?;
    ensure!(
        fetched >= BLOCKS_MIN,
        "{fetched} blocks of the other engine"
    );
    let scrape = mesh.scrape(Service::Engine(1 - busy)).await?;
    let cached = scrape.sum("refrain_engine_cached_tokens_total", &[]);
    ensure!(cached >= 32.0 * fetched, "{cached} cached tokens");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_goes_on_with_the_file_of_its_engine_that_was_killed() -> anyhow::Result<()> {
    let expected = undisturbed().await?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("engine.kvpool");
    let settings = format!(
        "[engine.kv_pool]\nmemory_bytes_max = 67_108_864\nwait_ms = 20_000\nfile = {:?}\n",
        file.display().to_string()
    );
    let mut mesh = HttpMesh::start_children(1, &settings, &[]).await?;
    let mut stream = mesh.client().stream(&chat()).await?;
    let begun = stream.read_pieces(BEGUN_PIECES).await?;
    e2e::wait_until("blocks are in the file", async || {
        let scrape = mesh.scrape(Service::Engine(0)).await.ok()?;
        let blocks = scrape.sum("refrain_engine_kv_pool_blocks", &[("tier", "file")]);
        (blocks >= BLOCKS_MIN).then_some(())
    })
    .await;
    mesh.kill(Service::Engine(0)).await?;
    mesh.start_child(Service::Engine(0)).await?;
    let text = format!("{begun}{}", stream.read_to_done().await?);
    ensure!(text == expected, "{text}\ninstead of\n{expected}");
    let loaded = hits(&mesh, 0, "file").await?;
    ensure!(loaded >= BLOCKS_MIN, "{loaded} blocks of the file");
    mesh.stop().await
}
