//! Limits on connections: which one gives way, and which one is refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use actix_web::{HttpResponse, web};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::http::{
    AddressLimit, ListenerConfig, PublicOptions, ServeOptions, Server, serve_public,
};
use crate::telemetry::Metrics;

/// Longer than any step of these tests takes.
const PATIENCE: Duration = Duration::from_secs(120);
/// Longer than the idle time after which a connection gives way.
const IDLE: Duration = Duration::from_millis(300);
/// More bytes than the buffers of sockets hold.
const LARGE_BYTES: usize = 64 << 20;

struct Listening {
    server: Server,
    metrics: Metrics,
}

/// `/never` does not answer, `/large` sends more than callers read, and `/refuse` answers without reading the body
/// and closes.
fn listen(connections_max: usize, address_max: Option<usize>) -> Listening {
    let metrics = Metrics::new().unwrap();
    let options = ServeOptions {
        service: "test",
        listen: "127.0.0.1:0".parse().unwrap(),
        threads: 2,
        body_bytes_max: 1_000,
        connections_max,
        http: ListenerConfig::default(),
    };
    let public = PublicOptions {
        address: AddressLimit {
            connections_max: address_max,
            exempt: Vec::new(),
        },
        ..PublicOptions::default()
    };
    let ready = Arc::new(|| Ok(()));
    let server = serve_public(options, public, &metrics, ready, |app| {
        let never = async || std::future::pending::<HttpResponse>().await;
        let large = async || HttpResponse::Ok().body("x".repeat(LARGE_BYTES));
        let refuse = async |_: web::Payload| HttpResponse::BadRequest().force_close().body("no");
        app.route("/never", web::get().to(never))
            .route("/large", web::get().to(large))
            .route("/refuse", web::post().to(refuse));
    })
    .unwrap();
    Listening { server, metrics }
}

impl Listening {
    async fn send(&self, request: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.server.addr()).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    fn figure(&self, name: &str) -> String {
        let text = String::from_utf8(self.metrics.render()).unwrap();
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.rsplit(' ').next())
            .unwrap_or("none")
            .to_owned()
    }

    async fn until(&self, name: &str, value: &str) {
        let comes = async {
            while self.figure(name) != value {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let came = tokio::time::timeout(PATIENCE, comes).await;
        assert!(came.is_ok(), "{name} is {}", self.figure(name));
    }
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: test\r\n\r\n")
}

/// The answer up to `part`, or to its end.
async fn answer(stream: &mut TcpStream, part: &str) -> String {
    let mut read = Vec::new();
    let reads = async {
        while !String::from_utf8_lossy(&read).contains(part) {
            if stream.read_buf(&mut read).await.unwrap_or(0) == 0 {
                break;
            }
        }
    };
    tokio::time::timeout(PATIENCE, reads)
        .await
        .expect("there is no answer");
    String::from_utf8(read).unwrap()
}

async fn is_closed(stream: &mut TcpStream) -> bool {
    answer(stream, "\0").await;
    true
}

#[tokio::test]
async fn idle_connections_give_way_to_new_ones() {
    let listening = listen(8, None);
    let mut idle = Vec::new();
    for _ in 0..8 {
        let mut stream = listening.send(&get("/healthz")).await;
        assert!(
            answer(&mut stream, "ok\n")
                .await
                .starts_with("HTTP/1.1 200")
        );
        idle.push(stream);
    }
    assert_eq!(listening.figure("refrain_http_connections{"), "8");
    tokio::time::sleep(IDLE).await;
    // One of them has sent a part of its next head, which does not make it busy.
    idle[0].write_all(b"GET /hea").await.unwrap();
    let closed = Arc::new(AtomicUsize::new(0));
    for mut stream in idle {
        let closed = closed.clone();
        tokio::spawn(async move {
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
            closed.fetch_add(1, Ordering::Relaxed);
        });
    }
    let mut newcomers = Vec::new();
    for _ in 0..5 {
        let mut newcomer = listening.send(&get("/healthz")).await;
        let reply = answer(&mut newcomer, "ok\n").await;
        assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
        newcomers.push(newcomer);
    }
    let closes = async {
        while closed.load(Ordering::Relaxed) < 5 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, closes).await.is_ok());
    // The older connections gave way.
    for newcomer in &mut newcomers {
        newcomer
            .write_all(get("/healthz").as_bytes())
            .await
            .unwrap();
        assert!(answer(newcomer, "ok\n").await.starts_with("HTTP/1.1 200"));
    }
    assert_eq!(closed.load(Ordering::Relaxed), 5);
    let gave_way = listening.figure("refrain_http_connections_gave_way_total{");
    assert_eq!(gave_way, "5");
    listening.server.stop(true).await;
}

#[tokio::test]
async fn without_an_idle_connection_new_ones_are_refused_at_once() {
    let listening = listen(4, None);
    let mut busy = Vec::new();
    for _ in 0..4 {
        busy.push(listening.send(&get("/never")).await);
    }
    listening.until("refrain_http_connections{", "4").await;
    tokio::time::sleep(IDLE).await;
    // These are more than are refused at the same time.
    for _ in 0..100 {
        let mut refused = listening.send(&get("/healthz")).await;
        let reply = answer(&mut refused, "}}").await;
        assert!(reply.starts_with("HTTP/1.1 503"), "{reply}");
        assert!(reply.contains("retry-after: 1\r\n"), "{reply}");
        assert!(
            reply.contains(r#""code":"too_many_connections""#),
            "{reply}"
        );
    }
    let rejected = r#"refrain_http_rejections_total{limit="connections_max","#;
    assert_eq!(listening.figure(rejected), "100");
    drop(busy.pop());
    listening.until("refrain_http_connections{", "3").await;
    let mut welcome = listening.send(&get("/healthz")).await;
    assert!(
        answer(&mut welcome, "ok\n")
            .await
            .starts_with("HTTP/1.1 200")
    );
    listening.server.stop(false).await;
}

#[tokio::test]
async fn an_address_has_no_more_connections_than_its_limit() {
    let listening = listen(100, Some(2));
    let _busy = [
        listening.send(&get("/never")).await,
        listening.send(&get("/never")).await,
    ];
    listening.until("refrain_http_connections{", "2").await;
    tokio::time::sleep(IDLE).await;
    let mut refused = listening.send(&get("/healthz")).await;
    let reply = answer(&mut refused, "}}").await;
    assert!(reply.starts_with("HTTP/1.1 429"), "{reply}");
    let rejected = r#"refrain_http_rejections_total{limit="address_connections_max","#;
    assert_eq!(listening.figure(rejected), "1");
    listening.server.stop(false).await;
}

#[tokio::test]
async fn a_connection_whose_answer_nobody_reads_gives_way() {
    let listening = listen(1, None);
    let mut unread = listening.send(&get("/large")).await;
    let mut first = [0; 1];
    unread.read_exact(&mut first).await.unwrap();
    tokio::time::sleep(2 * IDLE).await;
    let mut newcomer = listening.send(&get("/healthz")).await;
    assert!(
        answer(&mut newcomer, "ok\n")
            .await
            .starts_with("HTTP/1.1 200")
    );
    listening.server.stop(false).await;
}

#[tokio::test]
async fn a_connection_that_is_closed_after_an_answer_does_not_wait_for_the_body() {
    let listening = listen(4, None);
    let head = "POST /refuse HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut stream = listening.send(head).await;
    assert!(answer(&mut stream, "no").await.starts_with("HTTP/1.1 400"));
    // The caller sends on and does not close.
    assert!(is_closed(&mut stream).await);
    listening.until("refrain_http_connections{", "0").await;
    listening.server.stop(true).await;
}

#[tokio::test]
async fn a_refused_method_is_told_the_allowed_ones_and_head_is_answered() {
    let listening = listen(4, None);
    for path in ["/healthz", "/readyz", "/metrics"] {
        let mut stream = listening
            .send(&format!("HEAD {path} HTTP/1.1\r\nhost: test\r\n\r\n"))
            .await;
        let reply = answer(&mut stream, "\r\n\r\n").await;
        assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
        assert!(reply.ends_with("\r\n\r\n"), "{reply}");
        let mut stream = listening
            .send(&format!("DELETE {path} HTTP/1.1\r\nhost: test\r\n\r\n"))
            .await;
        let reply = answer(&mut stream, "}}").await;
        assert!(reply.starts_with("HTTP/1.1 405"), "{reply}");
        assert!(reply.contains("allow: GET, HEAD\r\n"), "{reply}");
        assert!(reply.contains(r#""code":"method_not_allowed""#), "{reply}");
    }
    listening.server.stop(true).await;
}
