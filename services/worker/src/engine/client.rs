//! HTTP calls to an engine that is no service of the mesh: it gets its own key and never the mesh's secret.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::descriptors;
use refrain_service_kit::http::failed_call_kind;
use reqwest::{Method, RequestBuilder, Response};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::runtime;

use crate::config::ApiKey;

/// How long a connection may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an unused connection is kept. Short of what engines keep theirs (uvicorn: 5 s).
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// Largest answer that is read whole.
const ANSWER_BYTES_MAX: usize = 16 << 20;
/// What is passed on of an engine's own message, characters.
const MESSAGE_CHARS_MAX: usize = 500;

/// An engine's base URL and its connections. Cheap to clone.
#[derive(Clone)]
pub(super) struct EngineClient {
    pools: Arc<Pools>,
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
        // The settings can be used: found out here, and not by the first call.
        new_pool()?;
        Ok(EngineClient {
            pools: Arc::default(),
            base_url: base_url.trim_end_matches('/').to_owned(),
            api_key,
            call_timeout,
        })
    }

    pub(super) fn base_url(&self) -> &str {
        &self.base_url
    }

    /// Gets text.
    pub(super) async fn get(&self, path: &str) -> Result<String, ApiError> {
        let request = self.request(Method::GET, path)?.timeout(self.call_timeout);
        let answer = self.read(self.send(request).await?).await?;
        Ok(String::from_utf8_lossy(&answer).into_owned())
    }

    /// Gets JSON.
    pub(super) async fn get_json<A: DeserializeOwned>(&self, path: &str) -> Result<A, ApiError> {
        let request = self.request(Method::GET, path)?.timeout(self.call_timeout);
        parse(&self.read(self.send(request).await?).await?)
    }

    /// Posts JSON and reads JSON.
    pub(super) async fn post_json<Q: Serialize, A: DeserializeOwned>(
        &self,
        path: &str,
        body: &Q,
    ) -> Result<A, ApiError> {
        parse(&self.post_read(path, body).await?)
    }

    /// Posts JSON and reads the answer whole.
    pub(super) async fn post_read<Q: Serialize>(
        &self,
        path: &str,
        body: &Q,
    ) -> Result<Vec<u8>, ApiError> {
        let request = self.request(Method::POST, path)?.json(body);
        let response = self.send(request.timeout(self.call_timeout)).await?;
        self.read(response).await
    }

    /// Posts JSON and reads nothing but whether it was taken.
    pub(super) async fn post<Q: Serialize>(&self, path: &str, body: &Q) -> Result<(), ApiError> {
        let request = self.request(Method::POST, path)?.json(body);
        self.send(request.timeout(self.call_timeout)).await?;
        Ok(())
    }

    /// Posts JSON; the answer is to be a stream of events.
    pub(super) async fn post_events<Q: Serialize>(
        &self,
        path: &str,
        body: &Q,
    ) -> Result<Response, ApiError> {
        let response = self
            .send(self.request(Method::POST, path)?.json(body))
            .await?;
        let kind = response.headers().get(reqwest::header::CONTENT_TYPE);
        let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or("none");
        if kind.starts_with("text/event-stream") {
            return Ok(response);
        }
        let what = format!("content type {kind} where a stream of events was due");
        Err(no_engine(what))
    }

    fn request(&self, method: Method, path: &str) -> Result<RequestBuilder, ApiError> {
        let pool = self.pools.here()?;
        let request = pool.request(method, format!("{}{path}", self.base_url));
        Ok(match &self.api_key {
            Some(key) => request.bearer_auth(key.as_str()),
            None => request,
        })
    }

    async fn send(&self, request: RequestBuilder) -> Result<Response, ApiError> {
        let response = request.send().await.map_err(|error| lost(&error))?;
        let status = response.status().as_u16();
        if status < 400 {
            return Ok(response);
        }
        let retry_after_ms = response
            .headers()
            .get("retry-after")
            .and_then(|value| value.to_str().ok()?.parse::<u64>().ok())
            .map(|seconds| seconds.saturating_mul(1000));
        let body = self.read(response).await.unwrap_or_default();
        let mut error = refusal(status, &body);
        error.retry_after_ms = retry_after_ms;
        Err(error)
    }

    async fn read(&self, mut response: Response) -> Result<Vec<u8>, ApiError> {
        let mut body = Vec::new();
        while let Some(bytes) = response.chunk().await.map_err(|error| lost(&error))? {
            if body.len() + bytes.len() > ANSWER_BYTES_MAX {
                return Err(no_engine("an answer without end"));
            }
            body.extend_from_slice(&bytes);
        }
        Ok(body)
    }
}

/// A pool of connections for each runtime that calls. A connection is served where it was opened: out of one pool for all,
/// what an engine streams would often wake one thread to be handed to another, and connections would die with the listener
/// thread that happened to open them.
#[derive(Default)]
struct Pools {
    by_runtime: Mutex<HashMap<runtime::Id, reqwest::Client>>,
}

/// Runtimes remembered at most: a process has its own and one for each thread of a listener, so more means that some are gone.
const RUNTIMES_MAX: usize = 1024;

impl Pools {
    /// The pool of the runtime that this is called on.
    fn here(&self) -> Result<reqwest::Client, ApiError> {
        let runtime = runtime::Handle::current().id();
        if let Some(pool) = self.lock().get(&runtime) {
            return Ok(pool.clone());
        }
        // Made without the lock: it takes a while, and others have calls to make. Of two made at once, one stays.
        let pool = new_pool().map_err(ApiError::internal)?;
        let mut pools = self.lock();
        if pools.len() >= RUNTIMES_MAX {
            pools.clear();
        }
        Ok(pools.entry(runtime).or_insert(pool).clone())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<runtime::Id, reqwest::Client>> {
        self.by_runtime
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn new_pool() -> reqwest::Result<reqwest::Client> {
    reqwest::Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(POOL_IDLE_TIMEOUT)
        .tcp_nodelay(true)
        .no_proxy()
        .build()
}

/// The connection was refused, timed out, or broke; or this process could not open one, which is no failure of the
/// engine's.
pub(super) fn lost(error: &reqwest::Error) -> ApiError {
    if let Some(error) = descriptors::exhausted(error) {
        return error;
    }
    let kind = failed_call_kind(error);
    let message = match kind {
        ErrorKind::Unavailable => "the engine cannot be reached",
        ErrorKind::Timeout => "the engine did not answer in time",
        _ => "the connection to the engine broke off",
    };
    let error = ApiError::new(kind, message).with_detail(format!("{error:?}"));
    match kind {
        ErrorKind::Unavailable => error.with_code("engine_unreachable"),
        _ => error,
    }
}

/// What came is nothing that such an engine says.
pub(super) fn no_engine(what: impl std::fmt::Display) -> ApiError {
    ApiError::new(
        ErrorKind::Upstream,
        "the engine answered something that no such engine says; check worker.engine.kind and urls.engine",
    )
    .with_code("engine_garbage")
    .with_detail(what)
}

/// An engine's error answer, in our words about whose matter it is and its own words about what it is.
pub(super) fn refusal(status: u16, body: &[u8]) -> ApiError {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let error = match &body["error"] {
        Value::Null => &body,
        error => error,
    };
    let said = [&error["message"], &error["detail"], error]
        .iter()
        .find_map(|value| value.as_str())
        .map(|said| said.chars().take(MESSAGE_CHARS_MAX).collect::<String>());
    let said = said.unwrap_or_else(|| "it does not say why".to_owned());
    let (kind, message) = match status {
        400 | 413 | 422 => (
            ErrorKind::InvalidRequest,
            format!("the engine refuses this request: {said}"),
        ),
        401 | 403 => (
            ErrorKind::Upstream,
            "the engine refuses this worker's key; set worker.engine.api_key".to_owned(),
        ),
        404 => (
            ErrorKind::Upstream,
            format!(
                "the engine does not know the model or the route: {said}; check worker.engine.kind and served_model"
            ),
        ),
        408 | 504 => (
            ErrorKind::Timeout,
            format!("the engine gave up (status {status}): {said}"),
        ),
        429 => (
            ErrorKind::Overloaded,
            format!("the engine is overloaded: {said}"),
        ),
        503 => (
            ErrorKind::Unavailable,
            format!("the engine is not ready: {said}"),
        ),
        _ => (
            ErrorKind::Upstream,
            format!("the engine failed (status {status}): {said}"),
        ),
    };
    let code = ["code", "type"]
        .iter()
        .find_map(|key| error[key].as_str())
        .filter(|_| kind == ErrorKind::InvalidRequest);
    let error = ApiError::new(kind, message);
    match code {
        Some(code) => error.with_code(code),
        None => error,
    }
}

pub(super) fn parse<'a, A: Deserialize<'a>>(body: &'a [u8]) -> Result<A, ApiError> {
    serde_json::from_slice(body).map_err(|error| {
        // Its message quotes what it stumbled over, which may be someone's text; details are logged.
        let place = (error.line(), error.column());
        no_engine(format!("{:?} error at {place:?}", error.classify()))
    })
}

#[cfg(test)]
mod tests {
    use refrain_protocol::error::code;

    use super::*;

    #[test]
    fn what_an_engine_said_is_not_quoted_in_details() {
        let error = parse::<u32>(br#""someone's text""#).unwrap_err();
        let detail = error.detail.unwrap();
        assert!(!detail.contains("someone"), "{detail}");
        assert!(detail.contains("Data error at (1, "), "{detail}");
    }

    /// Resolves nothing, since this process may not open another socket.
    struct OutOfSockets;

    impl reqwest::dns::Resolve for OutOfSockets {
        fn resolve(&self, _: reqwest::dns::Name) -> reqwest::dns::Resolving {
            // EMFILE.
            let error = std::io::Error::from_raw_os_error(24);
            Box::pin(std::future::ready(Err(error.into())))
        }
    }

    #[tokio::test]
    async fn want_of_sockets_is_no_failure_of_the_engine() {
        refrain_service_kit::telemetry::install_crypto_provider();
        let client = reqwest::Client::builder()
            .no_proxy()
            .dns_resolver(Arc::new(OutOfSockets))
            .build()
            .unwrap();
        let error = client.get("http://engine:1/").send().await.unwrap_err();
        assert!(error.is_connect());
        let error = lost(&error);
        assert_eq!(error.kind, ErrorKind::Unavailable);
        assert_eq!(error.code.as_deref(), Some(code::OUT_OF_DESCRIPTORS));
        assert!(error.retry_after_ms.is_some());
    }

    #[test]
    fn errors_keep_the_engines_words_and_say_whose_matter_it_is() {
        let openai =
            br#"{"error":{"code":400,"message":"too long","type":"exceed_context_size_error"}}"#;
        let error = refusal(400, openai);
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
            let error = refusal(status, body);
            assert_eq!(error.kind, kind, "{status}");
            assert!(error.message.contains(part), "{}", error.message);
        }
        let long = serde_json::json!({ "error": { "message": "x".repeat(10_000) } }).to_string();
        assert!(refusal(400, long.as_bytes()).message.len() < 1_000);
    }
}
