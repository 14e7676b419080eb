//! Calls between services.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use opentelemetry::propagation::{Injector, TextMapPropagator};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use refrain_protocol::{ApiError, ErrorKind, MESH_SECRET_HEADER};
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use super::error::api_error_of;
use crate::clocks::{CLOCK_HEADER, Clocks, Told};
use crate::descriptors;

/// Largest answer that is read into memory.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// How long an unused connection is kept. Half of what the listeners keep it: a call on a connection that the
/// other side is just closing fails, and a POST that failed so may not be sent again.
pub(super) const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// What a caller is told whose deadline passed.
const LATE: &str = "a service of the mesh did not answer in time";

/// A service of the same mesh: its base URL, the secret, and a connection pool. Cheap to clone.
///
/// It does not retry: whether a second attempt is right depends on the call.
#[derive(Clone)]
pub struct MeshClient {
    http: reqwest::Client,
    base_url: Arc<str>,
    secret: Arc<str>,
    timeout: Duration,
    clocks: Option<Clocks>,
    /// When this service was last told what the clock shows.
    told: Told,
}

impl MeshClient {
    /// A client of the service at `base_url`.
    ///
    /// # Errors
    /// The HTTP client cannot be built.
    pub fn new(base_url: &str, secret: &str, timeout: Duration) -> anyhow::Result<Self> {
        crate::telemetry::install_crypto_provider();
        let http = reqwest::Client::builder()
            .connect_timeout(Duration::from_secs(2))
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            .tcp_nodelay(true)
            .no_proxy()
            .build()?;
        Ok(MeshClient {
            http,
            base_url: trim(base_url),
            secret: secret.into(),
            timeout,
            clocks: None,
            told: Told::default(),
        })
    }

    /// The same client, and its calls tell what this service's clock shows.
    pub fn with_clocks(mut self, clocks: Clocks) -> Self {
        self.clocks = Some(clocks);
        self
    }

    /// The same client for another service of the mesh.
    pub fn at(&self, base_url: &str) -> Self {
        MeshClient {
            base_url: trim(base_url),
            told: Told::default(),
            ..self.clone()
        }
    }

    /// How long ordinary calls may take.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Posts JSON and reads JSON. `timeout: None` waits as long as ordinary calls may take: no call is without a deadline.
    ///
    /// # Errors
    /// The service's own error, or `Upstream`/`Timeout` when it cannot be reached.
    pub async fn post_json<Q: Serialize, A: DeserializeOwned>(
        &self,
        path: &str,
        body: &Q,
        timeout: Option<Duration>,
    ) -> Result<A, ApiError> {
        let request = self.request(reqwest::Method::POST, path).json(body);
        self.read_json(request.timeout(timeout.unwrap_or(self.timeout)))
            .await
    }

    /// Gets JSON.
    ///
    /// # Errors
    /// As [`MeshClient::post_json`].
    pub async fn get_json<A: DeserializeOwned>(&self, path: &str) -> Result<A, ApiError> {
        self.read_json(
            self.request(reqwest::Method::GET, path)
                .timeout(self.timeout),
        )
        .await
    }

    /// Posts bytes and reads bytes.
    ///
    /// # Errors
    /// As [`MeshClient::post_json`].
    pub async fn post_bytes(
        &self,
        path: &str,
        content_type: &'static str,
        body: Vec<u8>,
        timeout: Duration,
    ) -> Result<Bytes, ApiError> {
        let request = self
            .request(reqwest::Method::POST, path)
            .header(CONTENT_TYPE, content_type)
            .body(body)
            .timeout(timeout);
        self.read(request).await
    }

    /// Posts JSON and returns the response as soon as its head is there, within `head_timeout`; the body streams, and whoever
    /// reads it sees to it that it does not fall silent.
    ///
    /// # Errors
    /// As [`MeshClient::post_json`].
    pub async fn post_stream<Q: Serialize>(
        &self,
        path: &str,
        body: &Q,
        head_timeout: Duration,
    ) -> Result<reqwest::Response, ApiError> {
        let sent = self.send(self.request(reqwest::Method::POST, path).json(body));
        // The client's own timeout would count the body, too.
        tokio::time::timeout(head_timeout, sent)
            .await
            .unwrap_or_else(|_| {
                Err(ApiError::new(ErrorKind::Timeout, LATE).with_detail(&self.base_url))
            })
    }

    fn request(&self, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
        let request = self
            .http
            .request(method, format!("{}{path}", self.base_url))
            .header(MESH_SECRET_HEADER, &*self.secret)
            .headers(trace_headers());
        let clocks = self.clocks.as_ref();
        match clocks.and_then(|clocks| clocks.call(&self.told)) {
            Some(said) => request.header(CLOCK_HEADER, said),
            None => request,
        }
    }

    async fn read_json<A: DeserializeOwned>(
        &self,
        request: reqwest::RequestBuilder,
    ) -> Result<A, ApiError> {
        let answer = self.read(request).await?;
        serde_json::from_slice(&answer).map_err(|error| {
            ApiError::new(
                ErrorKind::Upstream,
                "a service of the mesh answered something else",
            )
            .with_detail(format!("{}: {error}", self.base_url))
        })
    }

    async fn read(&self, request: reqwest::RequestBuilder) -> Result<Bytes, ApiError> {
        let mut response = self.send(request).await?;
        self.read_limited(&mut response).await
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<reqwest::Response, ApiError> {
        let sent = Instant::now();
        let mut response = request
            .send()
            .await
            .map_err(|error| self.unreachable(error))?;
        if let Some(clocks) = &self.clocks
            && let Some(said) = response.headers().get(CLOCK_HEADER)
        {
            clocks.answered(said.to_str().unwrap_or_default(), sent);
        }
        let status = response.status().as_u16();
        if status < 400 {
            return Ok(response);
        }
        let retry_after_ms = response
            .headers()
            .get("retry-after-ms")
            .and_then(|value| value.to_str().ok())
            .and_then(|text| text.parse().ok());
        let body = self.read_limited(&mut response).await.unwrap_or_default();
        Err(api_error_of(status, retry_after_ms, &body))
    }

    async fn read_limited(&self, response: &mut reqwest::Response) -> Result<Bytes, ApiError> {
        let mut body = BytesMut::new();
        loop {
            let chunk = response.chunk().await;
            match chunk.map_err(|error| self.unreachable(error))? {
                None => return Ok(body.freeze()),
                Some(chunk) if body.len() + chunk.len() > ANSWER_BYTES_MAX => {
                    let message = format!(
                        "a service of the mesh answered more than {ANSWER_BYTES_MAX} bytes"
                    );
                    return Err(ApiError::new(ErrorKind::Upstream, message)
                        .with_detail(self.base_url.to_string()));
                }
                Some(chunk) => body.extend_from_slice(&chunk),
            }
        }
    }

    fn unreachable(&self, error: reqwest::Error) -> ApiError {
        if let Some(error) = descriptors::exhausted(&error) {
            return error;
        }
        let (kind, message) = if error.is_timeout() {
            (ErrorKind::Timeout, LATE)
        } else {
            (
                ErrorKind::Upstream,
                "a service of the mesh cannot be reached",
            )
        };
        ApiError::new(kind, message).with_detail(format!("{}: {error:?}", self.base_url))
    }
}

fn trim(base_url: &str) -> Arc<str> {
    base_url.trim_end_matches('/').into()
}

struct Headers(HeaderMap);

impl Injector for Headers {
    fn set(&mut self, key: &str, value: String) {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(key), HeaderValue::try_from(value)) {
            self.0.insert(name, value);
        }
    }
}

/// W3C trace context of the current span.
fn trace_headers() -> HeaderMap {
    let mut headers = Headers(HeaderMap::new());
    TraceContextPropagator::new().inject_context(&tracing::Span::current().context(), &mut headers);
    headers.0
}
