//! Tests of a listener and a client together.

mod connections;
mod slow_callers;
mod tls;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use actix_web::web;
use futures_util::StreamExt as _;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};

use super::server::KEEP_ALIVE;
use super::{
    HttpResult, ListenerConfig, MeshClient, RawBody, ServeOptions, Server, get, mesh_only, post,
    serve,
};
use crate::clocks::Clocks;
use crate::mesh::{MeshAuth, MeshConfig};
use crate::telemetry::Metrics;

const BODY_BYTES_MAX: usize = 1_000;
const TIMEOUT: Duration = Duration::from_secs(120);
const NOW_MS: u64 = 1_700_000_000_000;

struct Listening {
    server: Server,
    client: MeshClient,
    stranger: MeshClient,
    metrics: Metrics,
    /// Number of bodies that handlers have read.
    read: Arc<AtomicUsize>,
}

/// `/size` reads bytes and `/length` reads JSON; both return the length. `/never` reads bytes and does not answer.
/// `/huge` returns slightly more than a client reads.
fn listen() -> Listening {
    let keys = MeshConfig::generate().unwrap();
    let clocks = Clocks::with_clock("judge", true, 3_600, || NOW_MS);
    let auth = MeshAuth::new(&keys).unwrap().with_clocks(clocks);
    let metrics = Metrics::new().unwrap();
    let read = Arc::new(AtomicUsize::new(0));
    let options = ServeOptions {
        service: "test",
        listen: "127.0.0.1:0".parse().unwrap(),
        threads: 1,
        body_bytes_max: BODY_BYTES_MAX,
        connections_max: 16,
        http: ListenerConfig::default(),
    };
    let (counted, counted_never) = (read.clone(), read.clone());
    let server = serve(options, &metrics, Arc::new(|| Ok(())), move |app| {
        let counted = counted.clone();
        let size = move |RawBody(body): RawBody| {
            counted.fetch_add(1, Ordering::Relaxed);
            async move { HttpResult::Ok(web::Json(body.len())) }
        };
        let counted = counted_never.clone();
        let never = move |RawBody(_): RawBody| {
            counted.fetch_add(1, Ordering::Relaxed);
            std::future::pending::<HttpResult<String>>()
        };
        let huge = async || {
            let part = bytes::Bytes::from(vec![b' '; 1 << 20]);
            let parts = futures_util::stream::iter(vec![part; 65]).map(Ok::<_, std::io::Error>);
            actix_web::HttpResponse::Ok().streaming(parts)
        };
        let length = async |text: web::Json<String>| web::Json(text.len());
        app.service(
            web::scope("/in")
                .wrap(mesh_only(auth.clone(), &[]))
                .service(post("/size", size))
                .service(post("/length", length))
                .service(get("/huge", huge))
                .service(post("/never", never)),
        );
    })
    .unwrap();
    let url = format!("http://{}", server.addr());
    Listening {
        client: MeshClient::new(&url, &keys.secret, TIMEOUT).unwrap(),
        stranger: MeshClient::new(&url, &"0".repeat(64), TIMEOUT).unwrap(),
        server,
        metrics,
        read,
    }
}

async fn size(client: &MeshClient, bytes: usize) -> Result<String, ApiError> {
    let body = client
        .post_bytes(
            "/in/size",
            "application/octet-stream",
            vec![0; bytes],
            TIMEOUT,
        )
        .await?;
    Ok(String::from_utf8(body.to_vec()).unwrap())
}

#[tokio::test]
async fn a_body_past_the_limit_is_refused_in_the_usual_shape() {
    let listening = listen();
    let client = &listening.client;
    assert_eq!(size(client, BODY_BYTES_MAX).await.unwrap(), "1000");
    let by_bytes = size(client, BODY_BYTES_MAX + 1).await.unwrap_err();
    let by_json = client
        .post_json::<_, usize>("/in/length", &"x".repeat(BODY_BYTES_MAX), None)
        .await
        .unwrap_err();
    assert_eq!(by_bytes, by_json);
    assert_eq!(by_bytes.kind, ErrorKind::TooLarge);
    assert_eq!(by_bytes.code.as_deref(), Some("request_too_large"));
    listening.server.stop(true).await;
}

#[tokio::test]
async fn a_response_that_is_too_large_is_an_error_and_not_cut_off() {
    let listening = listen();
    let answer = listening.client.get_json::<String>("/in/huge").await;
    let error = answer.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Upstream);
    assert!(
        error.message.contains("more than 67108864 bytes"),
        "{error:?}"
    );
    listening.server.stop(false).await;
}

#[tokio::test]
async fn a_known_path_refuses_other_methods_and_an_unknown_path_is_not_found() {
    let listening = listen();
    let client = &listening.client;
    let error = client.get_json::<usize>("/in/size").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::MethodNotAllowed);
    assert!(error.message.contains("only POST"), "{}", error.message);
    let error = client.post_json::<_, usize>("/in/huge", &(), None).await;
    assert_eq!(error.unwrap_err().kind, ErrorKind::MethodNotAllowed);
    let error = client.get_json::<usize>("/in/nothing").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::NotFound);
    // A caller without the secret does not learn which paths there are.
    let error = listening.stranger.get_json::<usize>("/in/size").await;
    assert_eq!(error.unwrap_err().kind, ErrorKind::Unauthorized);
    listening.server.stop(true).await;
}

#[tokio::test]
async fn failed_calls_tell_whether_anything_was_asked() {
    let unused = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refused = format!("http://{}", unused.local_addr().unwrap());
    drop(unused);
    let listening = listen();
    let client = listening.client.at(&refused);
    let error = client.get_json::<usize>("/in/huge").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unavailable);
    assert!(error.has_code(code::SERVICE_UNREACHABLE));
    // The deadline passes while the service has the call.
    let timeout = Duration::from_millis(50);
    let kind = "application/octet-stream";
    let late = listening
        .client
        .post_bytes("/in/never", kind, vec![0], timeout);
    assert_eq!(late.await.unwrap_err().kind, ErrorKind::Timeout);
    // The connection breaks while the service has the call.
    let breaks = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = listening
        .client
        .at(&format!("http://{}", breaks.local_addr().unwrap()));
    let accept = tokio::spawn(async move { drop(breaks.accept().await.unwrap()) });
    let error = client.get_json::<usize>("/in/huge").await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Upstream);
    accept.await.unwrap();
    listening.server.stop(false).await;
}

#[tokio::test]
async fn bodies_of_callers_without_the_secret_are_not_read() {
    let listening = listen();
    // The second body is over the limit, so a service that read it would answer 413.
    for bytes in [10, 10 * BODY_BYTES_MAX] {
        let error = size(&listening.stranger, bytes).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unauthorized);
    }
    assert_eq!(listening.read.load(Ordering::Relaxed), 0);
    assert_eq!(size(&listening.client, 10).await.unwrap(), "10");
    let counted = r#"route="/in/size",service="test",status="401"} 2"#;
    let metrics = String::from_utf8(listening.metrics.render()).unwrap();
    assert!(metrics.contains(counted), "{metrics}");
    listening.server.stop(true).await;
}

#[tokio::test]
async fn a_client_closes_idle_connections_and_a_stop_does_not_wait_for_them() {
    assert!(super::client::POOL_IDLE_TIMEOUT < KEEP_ALIVE);
    let listening = listen();
    size(&listening.client, 1).await.unwrap();
    let stopping = Instant::now();
    listening.server.stop(true).await;
    assert!(stopping.elapsed() < KEEP_ALIVE);
}

#[tokio::test]
async fn a_stop_waits_no_longer_than_its_grace_for_a_handler_that_never_answers() {
    let listening = listen();
    let client = listening.client.clone();
    let asking = tokio::spawn(async move {
        let bytes = vec![0; 10];
        let kind = "application/octet-stream";
        client
            .post_bytes("/in/never", kind, bytes, 4 * TIMEOUT)
            .await
    });
    let waited = tokio::time::timeout(TIMEOUT, async {
        while listening.read.load(Ordering::Relaxed) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    });
    waited.await.unwrap();
    let stopping = listening.server.stop_within(Duration::from_millis(50));
    let stopped = tokio::time::timeout(2 * TIMEOUT, stopping).await;
    assert!(stopped.is_ok());
    // It takes no new calls either.
    assert!(size(&listening.client, 1).await.is_err());
    asking.abort();
}

#[tokio::test]
async fn a_call_carries_the_callers_clock_and_its_response_the_mesh_time() {
    let listening = listen();
    let ahead =
        |hours: u64| Clocks::with_clock("caller", false, 3_600, move || NOW_MS + hours * 3_600_000);
    let (right, wrong) = (ahead(0), ahead(2));
    for clocks in [&right, &wrong] {
        let client = listening
            .client
            .at(&format!("http://{}", listening.server.addr()));
        size(&client.with_clocks(clocks.clone()), 1).await.unwrap();
    }
    right.readiness().unwrap();
    let reason = wrong.readiness().unwrap_err();
    // The time of the call may be subtracted.
    assert!(
        reason.contains("7200 s ahead") || reason.contains("719"),
        "{reason}"
    );
    // A caller without the secret learns nothing.
    let stranger = ahead(2);
    let client = listening.stranger.clone().with_clocks(stranger.clone());
    assert!(size(&client, 1).await.is_err());
    stranger.readiness().unwrap();
    listening.server.stop(true).await;
}
