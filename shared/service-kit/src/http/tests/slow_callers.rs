//! Callers that send a request byte by byte, or stop in the middle of it.

use std::sync::Arc;
use std::time::Duration;

use actix_web::{HttpResponse, web};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::http::{ListenerConfig, RawBody, ServeOptions, Server, post, serve};
use crate::telemetry::Metrics;

/// Longer than any step of these tests takes.
const PATIENCE: Duration = Duration::from_secs(120);
/// The clock of the HTTP stack has a resolution of half a second, and a busy machine sends a head in this time.
const HEAD_MS_MAX: u64 = 4_000;

struct Listening {
    server: Server,
    metrics: Metrics,
}

/// `/raw` and `/json` read a body. `/ignored` does not.
fn listen(body_ms_max: u64) -> Listening {
    let metrics = Metrics::new().unwrap();
    let options = ServeOptions {
        service: "test",
        listen: "127.0.0.1:0".parse().unwrap(),
        threads: 1,
        body_bytes_max: 1_000,
        connections_max: 16,
        http: ListenerConfig {
            head_ms_max: HEAD_MS_MAX,
            body_ms_max,
            ..ListenerConfig::default()
        },
    };
    let server = serve(options, &metrics, Arc::new(|| Ok(())), |app| {
        let raw = async |RawBody(body): RawBody| web::Json(body.len());
        let json = async |text: web::Json<String>| web::Json(text.len());
        let ignored = async || HttpResponse::Ok().body("ignored");
        app.service(post("/raw", raw))
            .service(post("/json", json))
            .service(post("/ignored", ignored));
    });
    Listening {
        server: server.unwrap(),
        metrics,
    }
}

impl Listening {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.server.addr()).await.unwrap()
    }

    fn late(&self, limit: &str) -> String {
        let text = String::from_utf8(self.metrics.render()).unwrap();
        let name = format!("refrain_http_rejections_total{{limit=\"{limit}\",");
        let line = text.lines().find(|line| line.starts_with(&name));
        let value = line.and_then(|line| line.rsplit(' ').next());
        value.unwrap_or("none").to_owned()
    }

    async fn until_late(&self, limit: &str, value: &str) {
        let comes = async {
            while self.late(limit) != value {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let came = tokio::time::timeout(PATIENCE, comes).await;
        assert!(came.is_ok(), "{limit} is {}", self.late(limit));
    }
}

/// Reads until the answer has `part`.
async fn answer(stream: &mut TcpStream, part: &str) -> String {
    let mut read = Vec::new();
    let reads = async {
        while !String::from_utf8_lossy(&read).contains(part) {
            assert!(stream.read_buf(&mut read).await.unwrap() > 0);
        }
    };
    tokio::time::timeout(PATIENCE, reads).await.unwrap();
    String::from_utf8(read).unwrap()
}

/// Sends `bytes` again and again, slowly, until the listener closes the connection. Returns all that it answered.
async fn dribble(mut stream: TcpStream, bytes: &[u8]) -> String {
    let (mut reading, mut writing) = stream.split();
    let mut answer = Vec::new();
    let sends = async {
        while writing.write_all(bytes).await.is_ok() {
            // Fewer lines than a head may have come before it is late.
            tokio::time::sleep(Duration::from_millis(HEAD_MS_MAX / 50)).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        // The connection may be reset, because bytes arrive after it was closed.
        _ = reading.read_to_end(&mut answer) => {}
        () = sends => {}
        () = tokio::time::sleep(PATIENCE) => panic!("the connection is not closed"),
    }
    String::from_utf8(answer).unwrap()
}

#[tokio::test]
async fn a_head_that_comes_byte_by_byte_is_408() {
    let listening = listen(60_000);
    let mut stream = listening.connect().await;
    stream
        .write_all(b"GET /healthz HTTP/1.1\r\n")
        .await
        .unwrap();
    let answer = dribble(stream, b"x: y\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    listening.until_late("head_ms_max", "1").await;
    listening.server.stop(true).await;
}

#[tokio::test]
async fn a_later_head_that_comes_byte_by_byte_loses_the_connection_and_an_idle_one_stays() {
    let listening = listen(60_000);
    let whole = b"GET /healthz HTTP/1.1\r\nhost: test\r\n\r\n";
    let (mut idle, mut slow) = (listening.connect().await, listening.connect().await);
    for stream in [&mut idle, &mut slow] {
        stream.write_all(whole).await.unwrap();
        answer(stream, "ok\n").await;
    }
    slow.write_all(b"GET /healthz HTTP/1.1\r\n").await.unwrap();
    assert_eq!(dribble(slow, b"x: y\r\n").await, "");
    assert_eq!(listening.late("head_ms_max"), "1");
    // It was idle for as long, and even a head in two parts is in time.
    idle.write_all(&whole[..9]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(HEAD_MS_MAX / 10)).await;
    idle.write_all(&whole[9..]).await.unwrap();
    answer(&mut idle, "ok\n").await;
    tokio::time::sleep(Duration::from_millis(HEAD_MS_MAX * 3 / 2)).await;
    idle.write_all(whole).await.unwrap();
    answer(&mut idle, "ok\n").await;
    assert_eq!(listening.late("head_ms_max"), "1");
    listening.server.stop(true).await;
}

#[tokio::test]
async fn a_body_that_comes_byte_by_byte_is_408_on_every_route() {
    let listening = listen(100);
    for (path, late) in [("/raw", "1"), ("/json", "2")] {
        let mut stream = listening.connect().await;
        let head =
            format!("POST {path} HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        let answer = dribble(stream, b"1\r\n\"\r\n").await;
        assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
        assert!(answer.contains(r#""code":"body_timeout""#), "{answer}");
        assert_eq!(listening.late("body_ms_max"), late);
    }
    // A body that nobody reads delays nobody.
    let mut stream = listening.connect().await;
    let head = b"POST /ignored HTTP/1.1\r\nhost: test\r\ncontent-length: 9\r\n\r\n";
    stream.write_all(head).await.unwrap();
    assert!(
        answer(&mut stream, "ignored")
            .await
            .starts_with("HTTP/1.1 200")
    );
    assert_eq!(listening.late("body_ms_max"), "2");
    listening.server.stop(true).await;
}
