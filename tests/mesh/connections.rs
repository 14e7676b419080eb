//! The limit on open files limits connections, and no client can keep all of them.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, ensure};
use e2e::{Chat, Client, PATIENCE, Program, long_task, wait_until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const SOFT: u32 = 200;
const HARD: u32 = 260;
/// More connections than the process has descriptors.
const STRANGERS: usize = 400;
/// How long a client may wait for a connection. Idle connections are kept far longer.
const CONNECTION_WAIT_MAX: Duration = PATIENCE;

/// Opens a connection, sends one request, and keeps the connection.
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
async fn strangers_that_keep_connections_do_not_lock_clients_out() -> anyhow::Result<()> {
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
        "the program has not raised its limit on open files"
    );
    let mut strangers = Vec::new();
    for _ in 0..STRANGERS {
        // Some connections are refused, as they should be.
        strangers.extend(
            tokio::time::timeout(CONNECTION_WAIT_MAX, stranger(addr))
                .await?
                .ok(),
        );
    }
    ensure!(
        strangers.len() > 50,
        "only {} connections were accepted",
        strangers.len()
    );
    // The newcomers come one after the other, so that none of them has an open connection.
    for number in 0..3 {
        let newcomer = Client::new(&format!("http://{addr}"), "refrain-dev");
        let chat = Chat::new(&long_task(number)).max_tokens(4);
        let answers = async {
            loop {
                if newcomer.chat(&chat).await.is_ok() {
                    break;
                }
                // All connections were too new to be closed, so the client was told to try again.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        let answered = tokio::time::timeout(CONNECTION_WAIT_MAX, answers).await;
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
        "no idle connection was closed"
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
        "the log has an error:\n{}",
        program.output()
    );
    Ok(())
}
