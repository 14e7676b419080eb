//! Many open streams at one gateway: each costs little memory, further ones are refused, and those inside are served.

use std::net::SocketAddr;

use anyhow::{Context, ensure};
use e2e::{Chat, HttpMesh, KEY, PATIENCE, Service, number_of, wait_until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// The number of streams, unless this variable says otherwise. Many need a high limit on open files, also for the
/// test.
const STREAMS_VARIABLE: &str = "REFRAIN_TEST_STREAMS";
const STREAMS: usize = 300;
/// Streams before memory is measured, so that caches and pools have their sizes.
const WARM_UP: usize = 64;
/// Streams that are opened at once. Each waits for its first event, so few at once would take long.
const GROUP: usize = 512;
/// Streams that are opened at once to come past the limit.
const FURTHER: usize = 64;
/// Most memory of an open stream in one service, bytes. That of an optimised build is in docs/benchmarks.md; a debug
/// build keeps more on its stacks and in its futures.
const STREAM_BYTES_MAX: f64 = 80.0 * 1024.0;
fn request(number: usize) -> String {
    let chat = Chat::new(&format!("Tell a long story about number {number}."));
    let chat = chat.max_tokens(1_500).endless().speculation("off");
    let body = chat.set("stream", true);
    let body = body.body().to_string();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: mesh\r\nauthorization: Bearer {KEY}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// Opens a stream, and reads the head of its answer.
async fn open(addr: SocketAddr, number: usize) -> anyhow::Result<(TcpStream, String)> {
    let mut stream = TcpStream::connect(addr).await?;
    stream.write_all(request(number).as_bytes()).await?;
    let mut head = Vec::new();
    let read = async {
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(PATIENCE, read).await??;
    Ok((stream, String::from_utf8(head)?))
}

/// Streams that were opened at once.
#[derive(Default)]
struct Opened {
    streams: Vec<TcpStream>,
    /// The head of the last answer that is not a stream.
    refused: Option<String>,
}

async fn open_all(addr: SocketAddr, numbers: std::ops::Range<usize>) -> anyhow::Result<Opened> {
    let mut opening = tokio::task::JoinSet::new();
    for number in numbers {
        opening.spawn(open(addr, number));
    }
    let mut opened = Opened::default();
    while let Some(ended) = opening.join_next().await {
        let (stream, head) = ended??;
        match head.starts_with("HTTP/1.1 200") {
            true => opened.streams.push(stream),
            false => opened.refused = Some(head),
        }
    }
    Ok(opened)
}

/// Opens streams below the limit.
async fn open_inside(
    addr: SocketAddr,
    numbers: std::ops::Range<usize>,
) -> anyhow::Result<Vec<TcpStream>> {
    let opened = open_all(addr, numbers).await?;
    ensure!(opened.refused.is_none(), "{:?}", opened.refused);
    Ok(opened.streams)
}

async fn resident_bytes(mesh: &HttpMesh, service: Service) -> anyhow::Result<f64> {
    let scrape = mesh.scrape(service).await?;
    scrape.resident_bytes()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn open_streams_cost_little_and_those_past_the_limit_are_refused() -> anyhow::Result<()> {
    let streams_max = number_of(STREAMS_VARIABLE, STREAMS)?;
    ensure!(streams_max > WARM_UP, "{STREAMS_VARIABLE} is too small");
    // A busy machine may let a head wait.
    let settings = format!(
        "[gateway]\nrequests_in_flight_max = {streams_max}\n\
         tenant_requests_in_flight_max = {streams_max}\naddress_connections_max = 16384\n\
         request_ms_max = 3600000\nhttp.head_ms_max = 60000\n\
         [scheduler]\nqueue_max = 12000\ntenant_queue_max = 12000\n\
         queue_wait_ms_max = 3600000\n"
    );
    let mesh = HttpMesh::start_children(1, &settings, &[]).await?;
    let url = mesh.url(Service::Gateway);
    let addr: SocketAddr = url.trim_start_matches("http://").parse()?;
    let in_flight = async || {
        let scrape = mesh.scrape(Service::Gateway).await?;
        anyhow::Ok(scrape.sum("refrain_gateway_requests_in_flight", &[]))
    };

    let mut streams = open_inside(addr, 0..WARM_UP).await?;
    let services = [Service::Gateway, Service::Scheduler];
    let mut before = Vec::new();
    for service in services {
        before.push(resident_bytes(&mesh, service).await?);
    }
    for first in (WARM_UP..streams_max).step_by(GROUP) {
        let group = first..(first + GROUP).min(streams_max);
        streams.extend(open_inside(addr, group).await?);
    }
    let open_now = in_flight().await?;
    ensure!(
        open_now > 0.9 * streams_max as f64,
        "only {open_now} of {streams_max} streams are open"
    );
    for (service, before) in services.into_iter().zip(before) {
        let bytes = (resident_bytes(&mesh, service).await? - before) / (open_now - WARM_UP as f64);
        println!(
            "{open_now} requests in flight, {bytes:.0} bytes of {service:?} for each further one"
        );
        ensure!(
            bytes <= STREAM_BYTES_MAX,
            "{bytes} bytes of {service:?} for each stream"
        );
    }
    // Some may have ended already, so a few more are needed to come to the limit. They open at once: one by one, a
    // quick engine would end as many.
    let refused = wait_until("a stream past the limit is refused", async || {
        let further = streams_max..streams_max + FURTHER;
        let opened = open_all(addr, further).await.ok()?;
        streams.extend(opened.streams);
        opened.refused
    })
    .await;
    ensure!(
        refused.starts_with("HTTP/1.1 429") && refused.contains("retry-after:"),
        "{refused}"
    );
    // Those inside are served meanwhile.
    let emitted = async || {
        let scrape = mesh.scrape(Service::Worker(0)).await.ok()?;
        Some(scrape.sum("refrain_spec_emitted_tokens_total", &[]))
    };
    let at_limit = emitted().await.context("the worker does not answer")?;
    let mut buffer = vec![0; 1 << 16];
    wait_until("streams inside get tokens", async || {
        for stream in &mut streams {
            let _ = stream.try_read(&mut buffer);
        }
        (emitted().await? > at_limit).then_some(())
    })
    .await;
    drop(streams);
    wait_until("nothing is in flight any more", async || {
        (in_flight().await.ok()? == 0.0).then_some(())
    })
    .await;
    mesh.stop().await
}
