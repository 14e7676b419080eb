//! Connections are few where files are few, and nobody can keep all of them.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, ensure};
use e2e::{Chat, Client, Program, long_task, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const SOFT: u32 = 200;
const HARD: u32 = 260;
/// More than there are descriptors.
const STRANGERS: usize = 400;
/// What a client may have to wait for a connection: far less than connections are kept for.
const PATIENCE: Duration = Duration::from_secs(20);

/// A connection of somebody who asks once, and keeps it.
async fn stranger(addr: SocketAddr) -> anyhow::Result<TcpStream> {
    let mut stream = TcpStream::connect(addr).await?;
    stream
        .write_all(b"GET /healthz HTTP/1.1\r\nhost: mesh\r\n\r\n")
        .await?;
    let mut first = [0; 1];
    stream.read_exact(&mut first).await?;
    Ok(stream)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_who_keep_their_connections_keep_no_client_out() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let data = dir.path().to_string_lossy().into_owned();
    let arguments = ["up", "--listen", "127.0.0.1:0", "--data-dir", &*data];
    let mut program = Program::start_with_descriptors(dir.path(), (SOFT, HARD), &arguments)?;
    let line = program.line_with("Refrain is up: http://").await?;
    let addr = line.split("Refrain is up: http://").nth(1);
    let addr = addr
        .and_then(|rest| rest.strip_suffix("/v1"))
        .context("no address")?;
    let addr: SocketAddr = addr.trim().parse()?;
    let client = Client::new(&format!("http://{addr}"), "refrain-dev");
    let scrape = client.scrape().await?;
    ensure!(
        scrape.sum("process_max_fds", &[]) == f64::from(HARD),
        "it has not raised its limit"
    );
    let mut strangers = Vec::new();
    for _ in 0..STRANGERS {
        // Some are refused, which is as it should be.
        strangers.extend(tokio::time::timeout(PATIENCE, stranger(addr)).await?.ok());
    }
    ensure!(strangers.len() > 50, "only {} were let in", strangers.len());
    // One after the other, so that none of them has a connection to go on with.
    for number in 0..3 {
        let newcomer = Client::new(&format!("http://{addr}"), "refrain-dev");
        let chat = Chat::new(&long_task(number)).max_tokens(4);
        let answers = async {
            loop {
                if newcomer.chat(&chat).await.is_ok() {
                    break;
                }
                // All had only just come: it was told to try again.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let answered = tokio::time::timeout(PATIENCE, answers).await;
        ensure!(
            answered.is_ok(),
            "client {number} waits:\n{}",
            program.output()
        );
    }
    let scrape = client.scrape().await?;
    let open = scrape.sum("refrain_http_connections", &[("service", "gateway")]);
    ensure!(open < f64::from(HARD) / 2.0, "{open} connections are open");
    ensure!(
        scrape.sum("refrain_http_connections_gave_way_total", &[]) > 0.0,
        "nobody gave way"
    );
    let open_files = scrape.sum("process_open_fds", &[]);
    ensure!(
        open_files < f64::from(HARD) * 0.9,
        "{open_files} files are open"
    );
    drop(strangers);
    wait_until("the strangers' connections are closed", async || {
        let scrape = client.scrape().await.ok()?;
        (scrape.sum("refrain_http_connections", &[]) < 10.0).then_some(())
    })
    .await;
    ensure!(
        !program.output().contains("ERROR"),
        "it calls that an error:\n{}",
        program.output()
    );
    Ok(())
}
