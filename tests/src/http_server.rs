//! A small HTTP server in the place of a program that a mesh calls.

use std::sync::Arc;

use anyhow::Context;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// Receives a request's first line and its body, and returns a status and a body.
type Answer = dyn Fn(&str, &[u8]) -> (&'static str, String) + Send + Sync;

/// Starts a server that answers every request by `answer`, until the test ends. Returns its URL.
///
/// # Errors
/// No port is free.
pub async fn serve_http(
    answer: impl Fn(&str, &[u8]) -> (&'static str, String) + Send + Sync + 'static,
) -> anyhow::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let answer: Arc<Answer> = Arc::new(answer);
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            tokio::spawn(serve(connection, answer.clone()));
        }
    });
    Ok(url)
}

/// Serves one connection until the client closes it.
async fn serve(connection: TcpStream, answer: Arc<Answer>) -> anyhow::Result<()> {
    let mut connection = BufReader::new(connection);
    loop {
        let mut first_line = String::new();
        if connection.read_line(&mut first_line).await? == 0 {
            return Ok(());
        }
        let mut length = 0;
        loop {
            let mut line = String::new();
            connection.read_line(&mut line).await?;
            if line.trim().is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').context("a header without a value")?;
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse()?;
            }
        }
        let mut request = vec![0; length];
        connection.read_exact(&mut request).await?;
        let (status, body) = answer(&first_line, &request);
        let length = body.len();
        let reply = format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        connection.get_mut().write_all(reply.as_bytes()).await?;
    }
}
