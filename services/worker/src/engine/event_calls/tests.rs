//! Calls against a server that writes its answers by hand.

use std::future::poll_fn;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use refrain_protocol::ErrorKind;
use refrain_protocol::error::code;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::*;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const NEVER: Duration = Duration::from_secs(3_600);

fn calls(url: &str, idle_max: Duration) -> EventCalls {
    refrain_service_kit::telemetry::install_crypto_provider();
    let request = reqwest::Client::new().post(url).bearer_auth("key");
    EventCalls::new(&request.build().unwrap(), CONNECT_TIMEOUT, idle_max).unwrap()
}

/// Connections that were opened, the requests that came, and connections that their callers have closed.
#[derive(Default)]
struct Seen {
    connections: AtomicUsize,
    closed: AtomicUsize,
    requests: Mutex<Vec<String>>,
}

/// A server that answers each request with a body of these pieces, and ends each connection after some requests.
async fn server(pieces: &'static [&'static str], requests_max: usize) -> (String, Arc<Seen>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/base/", listener.local_addr().unwrap());
    let seen = Arc::<Seen>::default();
    let counts = seen.clone();
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            counts.connections.fetch_add(1, Ordering::Relaxed);
            let counts = counts.clone();
            tokio::spawn(async move {
                serve(connection, pieces, requests_max, &counts).await;
                counts.closed.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    (url, seen)
}

async fn serve(mut connection: TcpStream, pieces: &[&str], requests_max: usize, seen: &Seen) {
    for _ in 0..requests_max {
        let mut request = Vec::new();
        while !request.ends_with(b"{}") {
            if connection.read_buf(&mut request).await.unwrap_or(0) == 0 {
                return;
            }
        }
        let request = String::from_utf8(request).unwrap();
        seen.requests.lock().push(request);
        let mut answer =
            "HTTP/1.1 200 OK\r\ncontent-type: x\r\ntransfer-encoding: chunked\r\n\r\n".to_owned();
        for piece in pieces {
            answer += &format!("{:x}\r\n{piece}\r\n", piece.len());
        }
        answer += "0\r\n\r\n";
        let _ = connection.write_all(answer.as_bytes()).await;
    }
}

async fn next(response: &mut EventResponse) -> Option<Result<Bytes, ApiError>> {
    poll_fn(|context| response.poll_bytes(context)).await
}

async fn whole(calls: &EventCalls) -> Result<Vec<Bytes>, ApiError> {
    let mut response = calls.post("/path", b"{}".to_vec()).await?;
    let mut pieces = Vec::new();
    while let Some(piece) = next(&mut response).await {
        pieces.push(piece?);
    }
    assert!(next(&mut response).await.is_none());
    Ok(pieces)
}

#[tokio::test]
async fn calls_one_after_the_other_share_a_connection_and_those_at_once_do_not() {
    let (url, seen) = server(&["a", "bc"], usize::MAX).await;
    let calls = calls(&url, NEVER);
    for _ in 0..5 {
        assert_eq!(whole(&calls).await.unwrap(), ["a", "bc"]);
    }
    assert_eq!(seen.connections.load(Ordering::Relaxed), 1);
    let (first, second) = tokio::join!(whole(&calls), whole(&calls));
    assert_eq!(first.unwrap(), second.unwrap());
    assert_eq!(seen.connections.load(Ordering::Relaxed), 2);
    let requests = seen.requests.lock();
    let host = url.trim_start_matches("http://").trim_end_matches("/base/");
    assert!(requests[0].starts_with("POST /base/path HTTP/1.1\r\n"));
    for header in [
        &format!("host: {host}\r\n"),
        "authorization: Bearer key\r\n",
        "content-type: application/json\r\n",
        "content-length: 2\r\n",
    ] {
        assert!(requests[0].contains(header), "{}", requests[0]);
    }
}

#[tokio::test]
async fn pieces_that_arrived_together_are_read_without_a_wake_up() {
    let (url, _) = server(&["a", "b", "c", "d", "e"], usize::MAX).await;
    let calls = calls(&url, NEVER);
    let mut response = calls.post("/path", b"{}".to_vec()).await.unwrap();
    assert!(next(&mut response).await.unwrap().is_ok());
    let mut context = Context::from_waker(std::task::Waker::noop());
    let mut rest = Vec::new();
    while let Poll::Ready(Some(piece)) = response.poll_bytes(&mut context) {
        rest.push(piece.unwrap());
    }
    assert_eq!(rest, ["b", "c", "d", "e"]);
}

#[tokio::test]
async fn a_connection_that_the_engine_closed_is_replaced() {
    let (url, seen) = server(&["a"], 2).await;
    let calls = calls(&url, NEVER);
    for number in 1..=6 {
        assert_eq!(whole(&calls).await.unwrap(), ["a"]);
        // The engine's end of the connection needs a moment to arrive, whichever end notices first.
        while seen.closed.load(Ordering::Relaxed) < number / 2 {
            tokio::task::yield_now().await;
        }
    }
    assert_eq!(seen.connections.load(Ordering::Relaxed), 3);
    assert_eq!(seen.requests.lock().len(), 6);
}

#[tokio::test]
async fn a_response_that_is_dropped_closes_its_connection() {
    // Larger than all buffers, so that its end cannot have arrived.
    let (url, seen) = server(&[LONG; 64], usize::MAX).await;
    let calls = calls(&url, NEVER);
    let mut response = calls.post("/path", b"{}".to_vec()).await.unwrap();
    assert!(next(&mut response).await.unwrap().is_ok());
    drop(response);
    while seen.closed.load(Ordering::Relaxed) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

const LONG: &str = match std::str::from_utf8(&[b'x'; 1 << 18]) {
    Ok(text) => text,
    Err(_) => "",
};

#[tokio::test]
async fn connections_that_nobody_uses_are_closed() {
    let (url, seen) = server(&["a"], usize::MAX).await;
    let calls = calls(&url, Duration::from_millis(20));
    let _ = tokio::join!(whole(&calls), whole(&calls));
    while seen.closed.load(Ordering::Relaxed) < 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(whole(&calls).await.unwrap(), ["a"]);
    while seen.closed.load(Ordering::Relaxed) < 3 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn failures_say_how_far_a_call_came() {
    let (ended, mut has_ended) = mpsc::channel(1);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut connection, _) = listener.accept().await.unwrap();
        let mut request = [0; 1_024];
        let _ = connection.read(&mut request).await;
        let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab";
        let _ = connection.write_all(head).await;
        drop((connection, listener));
        let _ = ended.send(()).await;
    });
    let calls = calls(&url, NEVER);
    let mut response = calls.post("/path", b"{}".to_vec()).await.unwrap();
    has_ended.recv().await.unwrap();
    let error = loop {
        match next(&mut response).await {
            Some(Ok(_)) => {}
            Some(Err(error)) => break error,
            None => panic!("the body is not whole"),
        }
    };
    assert_eq!(error.kind, ErrorKind::Upstream);
    assert!(next(&mut response).await.is_none_or(|end| end.is_err()));
    // Nobody listens any more.
    let error = calls.post("/path", b"{}".to_vec()).await.err().unwrap();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert!(error.has_code("engine_unreachable"));
    assert!(!error.has_code(code::OUT_OF_DESCRIPTORS));
}
