//! HTTP calls to a third-party engine. It receives its own key, and never the secret of the mesh.
//!
//! Calls with a whole response are reqwest's; those that stream events have connections of their own
//! (`event_calls.rs`).

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::http::failed_call_kind;
use refrain_service_kit::trace::trace_headers;
use reqwest::header::CONTENT_TYPE;
use reqwest::{Method, RequestBuilder, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::call_error::failed_call;
use super::event_calls::{EventCalls, EventResponse};
use super::per_runtime::PerRuntime;
use crate::config::ApiKey;

/// Timeout of opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an unused connection is kept. Shorter than engines keep theirs (uvicorn: 5 s), so that a call never
/// meets a connection that its engine is just closing.
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// Timeout of a call that carries out an order: weights may come over a network, and requests may be waited for.
const ORDER_TIMEOUT: Duration = Duration::from_secs(1_500);
/// Largest response that is read whole, bytes.
const RESPONSE_BYTES_MAX: usize = 16 << 20;
/// How much of an engine's own error message is passed on, characters.
const MESSAGE_CHARS_MAX: usize = 500;

/// An engine's base URL and its connections. Cheap to clone.
#[derive(Clone)]
pub(super) struct EngineClient {
    pools: Arc<PerRuntime<reqwest::Client>>,
    events: EventCalls,
    base_url: String,
    api_key: Option<ApiKey>,
    call_timeout: Duration,
}

impl EngineClient {
    pub(super) fn new(
        base_url: &str,
        api_key: Option<ApiKey>,
        call_timeout: Duration,
    ) -> anyhow::Result<Self> {
        refrain_service_kit::telemetry::install_crypto_provider();
        let base_url = without_version(base_url);
        // Unusable settings are an error here, and not in the first call.
        let mut request = new_pool()?.request(Method::POST, base_url);
        if let Some(key) = &api_key {
            request = request.bearer_auth(key.as_str());
        }
        let events = EventCalls::new(&request.build()?, CONNECT_TIMEOUT, POOL_IDLE_TIMEOUT)?;
        Ok(EngineClient {
            pools: Arc::default(),
            events,
            base_url: base_url.to_owned(),
            api_key,
            call_timeout,
        })
    }

    pub(super) fn base_url(&self) -> &str {
        &self.base_url
    }

    /// Gets a whole response.
    pub(super) async fn get(&self, path: &str) -> Result<Bytes, ApiError> {
        let request = self.request(Method::GET, path)?;
        let response = self.send(request.timeout(self.call_timeout)).await?;
        read_whole(response).await
    }

    /// Posts JSON and reads the whole response.
    pub(super) async fn post<B: Serialize + Sync + ?Sized>(
        &self,
        path: &str,
        body: &B,
    ) -> Result<Bytes, ApiError> {
        let json = serde_json::to_vec(body).map_err(ApiError::internal)?;
        self.post_json(path, json).await
    }

    /// As [`EngineClient::post`], for a body that is written already.
    pub(super) async fn post_json(&self, path: &str, json: Vec<u8>) -> Result<Bytes, ApiError> {
        let request = self.request(Method::POST, path)?.body(json);
        let request = request.header(CONTENT_TYPE, "application/json");
        let response = self.send(request.timeout(self.call_timeout)).await?;
        read_whole(response).await
    }

    /// Makes a call of a trainer's, which may take minutes. Returns whatever the engine answers, with its status.
    pub(super) async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
    ) -> Result<(u16, Bytes), ApiError> {
        let mut request = self.request(method, path)?.timeout(ORDER_TIMEOUT);
        if let Some(body) = body {
            request = request.header(CONTENT_TYPE, "application/json").body(body);
        }
        let response = request.send().await;
        let response = response.map_err(|error| connection_error(&error))?;
        Ok((response.status().as_u16(), read_whole(response).await?))
    }

    /// Posts JSON and expects a stream of events.
    pub(super) async fn post_events(
        &self,
        path: &str,
        json: Vec<u8>,
    ) -> Result<EventResponse, ApiError> {
        let mut response = self.events.post(path, json).await?;
        let status = response.status();
        if status >= 400 {
            let retry_after_ms = retry_after_ms(response.header("retry-after"));
            let body = read_events_whole(&mut response).await;
            let mut error = status_error(status, &body);
            error.retry_after_ms = retry_after_ms;
            return Err(error);
        }
        let kind = response.header("content-type").unwrap_or("none");
        if kind.starts_with("text/event-stream") {
            return Ok(response);
        }
        let what = format!("content type {kind} instead of a stream of events");
        Err(unexpected_response(what))
    }

    fn request(&self, method: Method, path: &str) -> Result<RequestBuilder, ApiError> {
        let pool = self.pools.current(new_pool).map_err(ApiError::internal)?;
        let request = pool.request(method, format!("{}{path}", self.base_url));
        let request = request.headers(trace_headers());
        Ok(match &self.api_key {
            Some(key) => request.bearer_auth(key.as_str()),
            None => request,
        })
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, ApiError> {
        let response = request
            .send()
            .await
            .map_err(|error| connection_error(&error))?;
        let status = response.status().as_u16();
        if status < 300 {
            return Ok(response);
        }
        let header = response.headers().get("retry-after");
        let retry_after_ms = retry_after_ms(header.and_then(|value| value.to_str().ok()));
        let body = read_whole(response).await.unwrap_or_default();
        let mut error = status_error(status, &body);
        error.retry_after_ms = retry_after_ms;
        Err(error)
    }
}

/// The base URL without `/v1` at its end, which clients of OpenAI have there. The routes of all kinds begin above it.
pub(crate) fn without_version(base_url: &str) -> &str {
    let url = base_url.trim_end_matches('/');
    url.strip_suffix("/v1").unwrap_or(url).trim_end_matches('/')
}

/// The pause that an engine asks for.
fn retry_after_ms(header: Option<&str>) -> Option<u64> {
    let seconds: u64 = header?.parse().ok()?;
    Some(seconds.saturating_mul(1_000))
}

/// Reads the body of an error. One that is longer than [`RESPONSE_BYTES_MAX`], or that breaks off, counts as empty.
async fn read_events_whole(response: &mut EventResponse) -> Vec<u8> {
    let mut body = Vec::new();
    loop {
        match poll_fn(|context| response.poll_bytes(context)).await {
            None => return body,
            Some(Ok(bytes)) if body.len() + bytes.len() <= RESPONSE_BYTES_MAX => {
                body.extend_from_slice(&bytes);
            }
            Some(Ok(_) | Err(_)) => return Vec::new(),
        }
    }
}

/// Reads a response of at most [`RESPONSE_BYTES_MAX`].
async fn read_whole(response: Response) -> Result<Bytes, ApiError> {
    let body = Limited::new(reqwest::Body::from(response), RESPONSE_BYTES_MAX);
    match body.collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(unexpected_response(format!(
            "a response of more than {RESPONSE_BYTES_MAX} bytes"
        ))),
        Err(error) => Err(match error.downcast_ref::<reqwest::Error>() {
            Some(error) => connection_error(error),
            None => ApiError::internal(error),
        }),
    }
}

fn new_pool() -> reqwest::Result<reqwest::Client> {
    reqwest::Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(POOL_IDLE_TIMEOUT)
        .tcp_nodelay(true)
        .no_proxy()
        // An engine that registered must not lead the worker to an address that nobody allowed.
        .redirect(reqwest::redirect::Policy::none())
        .build()
}

fn connection_error(error: &reqwest::Error) -> ApiError {
    failed_call(failed_call_kind(error), error)
}

/// The error of a response that does not fit the kind of engine; `what` says how, for the log.
pub(super) fn unexpected_response(what: impl std::fmt::Display) -> ApiError {
    ApiError::new(
        ErrorKind::Upstream,
        "unexpected response from the engine; check worker.engine.kind and urls.engine",
    )
    .with_code("engine_garbage")
    .with_detail(what)
}

/// An engine's error response: its status says who can act on it, and its own message is quoted.
pub(super) fn status_error(status: u16, body: &[u8]) -> ApiError {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let error = match &body["error"] {
        Value::Null => &body,
        error => error,
    };
    let message = [&error["message"], &error["detail"], error]
        .iter()
        .find_map(|value| value.as_str())
        .map(|message| message.chars().take(MESSAGE_CHARS_MAX).collect::<String>());
    let quoted = message.unwrap_or_else(|| "no message".to_owned());
    let (kind, message) = match status {
        400 | 413 | 422 => (
            ErrorKind::InvalidRequest,
            format!("the engine refuses this request: {quoted}"),
        ),
        401 | 403 => (
            ErrorKind::Upstream,
            "the engine refuses this worker's key; set worker.engine.api_key".to_owned(),
        ),
        404 => (
            ErrorKind::Upstream,
            format!(
                "the engine does not know the model or the route: {quoted}; check worker.engine.kind and served_model"
            ),
        ),
        408 | 504 => (
            ErrorKind::Timeout,
            format!("the engine timed out (status {status}): {quoted}"),
        ),
        429 => (
            ErrorKind::Overloaded,
            format!("the engine is overloaded: {quoted}"),
        ),
        503 => (
            ErrorKind::Unavailable,
            format!("the engine is not ready: {quoted}"),
        ),
        _ => (
            ErrorKind::Upstream,
            format!("the engine failed (status {status}): {quoted}"),
        ),
    };
    let code = ["code", "type"]
        .iter()
        .find_map(|key| error[key].as_str())
        .filter(|_| kind == ErrorKind::InvalidRequest);
    let error = ApiError::new(kind, message);
    match (code, kind.status()) {
        (Some(code), _) => error.with_code(code),
        (None, 500..) => error.with_code(code::ENGINE_ERROR),
        (None, _) => error,
    }
}

/// Parses a response as JSON. One look at all of its bytes costs less than `serde_json`'s look at each string, which
/// is a fifth of its time for an event of one token. Bytes that are no UTF-8 may be in a field that nobody reads.
pub(super) fn parse<'a, A: Deserialize<'a>>(body: &'a [u8]) -> Result<A, ApiError> {
    let parsed = match std::str::from_utf8(body) {
        Ok(text) => serde_json::from_str(text),
        Err(_) => serde_json::from_slice(body),
    };
    parsed.map_err(|error| {
        // serde's message quotes the input, which may be a user's text, and details are logged.
        let position = (error.line(), error.column());
        unexpected_response(format!("{:?} error at {position:?}", error.classify()))
    })
}

#[cfg(test)]
mod tests {
    use refrain_protocol::error::code;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[derive(Deserialize)]
    struct OneField {
        a: u32,
    }

    #[test]
    fn a_response_that_cannot_be_parsed_is_named_by_its_place_and_never_quoted() {
        let detail = |body: &[u8]| parse::<Vec<String>>(body).unwrap_err().detail.unwrap();
        assert_eq!(
            parse::<Vec<String>>("[\"é\"]".as_bytes()),
            Ok(vec!["é".to_owned()])
        );
        assert_eq!(detail(b"[\"secret\", 1]"), "Data error at (1, 12)");
        assert_eq!(detail(b"[\"secret\""), "Eof error at (1, 9)");
        assert_eq!(detail(b"[\"secret\xff\"]"), "Syntax error at (1, 9)");
        let read: OneField = parse(b"{\"b\": \"\xff\", \"a\": 1}").unwrap();
        assert_eq!(read.a, 1, "nobody reads the other field");
    }

    #[test]
    fn details_never_quote_the_response() {
        let error = parse::<u32>(br#""someone's text""#).unwrap_err();
        let detail = error.detail.unwrap();
        assert!(!detail.contains("someone"), "{detail}");
        assert!(detail.contains("Data error at (1, "), "{detail}");
    }

    /// A resolver for a process that may not open another socket.
    struct OutOfSockets;

    impl reqwest::dns::Resolve for OutOfSockets {
        fn resolve(&self, _: reqwest::dns::Name) -> reqwest::dns::Resolving {
            // EMFILE.
            let error = std::io::Error::from_raw_os_error(24);
            Box::pin(std::future::ready(Err(error.into())))
        }
    }

    #[tokio::test]
    async fn a_lack_of_sockets_is_not_a_failure_of_the_engine() {
        refrain_service_kit::telemetry::install_crypto_provider();
        let client = reqwest::Client::builder()
            .no_proxy()
            .dns_resolver(Arc::new(OutOfSockets))
            .build()
            .unwrap();
        let error = client.get("http://engine:1/").send().await.unwrap_err();
        assert!(error.is_connect());
        let error = connection_error(&error);
        assert_eq!(error.kind, ErrorKind::Unavailable);
        assert_eq!(error.code.as_deref(), Some(code::OUT_OF_DESCRIPTORS));
        assert!(error.retry_after_ms.is_some());
    }

    #[test]
    fn status_errors_quote_the_engine_and_say_who_can_act() {
        let openai =
            br#"{"error":{"code":400,"message":"too long","type":"exceed_context_size_error"}}"#;
        let error = status_error(400, openai);
        assert_eq!(error.kind, ErrorKind::InvalidRequest);
        assert!(error.message.ends_with("too long"), "{}", error.message);
        assert_eq!(error.code.as_deref(), Some("exceed_context_size_error"));
        for (status, body, kind, part) in [
            (
                404,
                &br#"{"object":"error","message":"no such model"}"#[..],
                ErrorKind::Upstream,
                "no such model",
            ),
            (401, b"", ErrorKind::Upstream, "api_key"),
            (
                422,
                br#"{"detail":"bad field"}"#,
                ErrorKind::InvalidRequest,
                "bad field",
            ),
            (
                503,
                br#"{"error":{"message":"Loading model"}}"#,
                ErrorKind::Unavailable,
                "Loading model",
            ),
            (429, b"{}", ErrorKind::Overloaded, "overloaded"),
            (500, b"<html>", ErrorKind::Upstream, "status 500"),
        ] {
            let error = status_error(status, body);
            assert_eq!(error.kind, kind, "{status}");
            assert!(error.message.contains(part), "{}", error.message);
        }
        let long = serde_json::json!({ "error": { "message": "x".repeat(10_000) } }).to_string();
        assert!(status_error(400, long.as_bytes()).message.len() < 1_000);
    }

    #[test]
    fn the_version_at_the_end_of_a_url_is_left_out() {
        for (given, used) in [
            ("http://h:8000", "http://h:8000"),
            ("http://h:8000/", "http://h:8000"),
            ("http://h:8000/v1", "http://h:8000"),
            ("http://h:8000/v1/", "http://h:8000"),
            ("https://h/models/a/v1", "https://h/models/a"),
            ("http://h/av1", "http://h/av1"),
        ] {
            let client = EngineClient::new(given, None, Duration::from_secs(1)).unwrap();
            assert_eq!(client.base_url(), used);
        }
    }

    /// A server that answers every request with a body of `len` bytes and without a length.
    async fn server_of(len: usize) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            while let Ok((mut connection, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut request = [0u8; 1024];
                    let _ = connection.read(&mut request).await;
                    let head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";
                    let _ = connection.write_all(head).await;
                    // The client hangs up at its limit.
                    let _ = connection.write_all(&vec![b'1'; len]).await;
                });
            }
        });
        url
    }

    #[tokio::test]
    async fn an_oversized_response_is_an_error() {
        for (len, fits) in [(RESPONSE_BYTES_MAX, true), (RESPONSE_BYTES_MAX + 1, false)] {
            let url = server_of(len).await;
            let client = EngineClient::new(&url, None, Duration::from_secs(60)).unwrap();
            match client.get("/metrics").await {
                Ok(body) => assert!(fits && body.len() == len),
                Err(error) => {
                    assert!(!fits);
                    assert_eq!(error.code.as_deref(), Some("engine_garbage"));
                    let detail = error.detail.unwrap();
                    assert!(detail.contains("16777216 bytes"), "{detail}");
                }
            }
        }
    }
}
