//! Calls between services.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use parking_lot::RwLock;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind, MESH_SECRET_HEADER};
use reqwest::header::CONTENT_TYPE;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::api_error_of;
use crate::causes;
use crate::clocks::{CLOCK_HEADER, Clocks, LastSent};
use crate::descriptors;
use crate::mesh::MeshCredentials;
use crate::trace::trace_headers;

/// Largest response that is read into memory.
const RESPONSE_BYTES_MAX: usize = 64 << 20;

/// How long an unused connection is kept: half as long as the listeners keep it. A call on a connection that the
/// listener is closing fails, and a POST that failed that way may not be sent again.
pub(super) const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// Message for a caller whose deadline passed.
const TIMED_OUT: &str = "a service of the mesh did not answer in time";

/// The kind of error of a call that failed. All clients of services and engines use this one mapping:
///
/// * `Unavailable`: no connection could be made, so nothing was asked. It was refused, or took too long.
/// * `Timeout`: the deadline passed, and the call may have been carried out.
/// * `Upstream`: the connection broke during the call, which may have been carried out.
pub fn failed_call_kind(error: &reqwest::Error) -> ErrorKind {
    if error.is_connect() {
        ErrorKind::Unavailable
    } else if error.is_timeout() {
        ErrorKind::Timeout
    } else {
        ErrorKind::Upstream
    }
}

/// The connections of a client, and what its calls carry.
struct Pool {
    credentials: MeshCredentials,
    /// The HTTP client, and the generation of the certificates that it was made with.
    http: RwLock<(u64, reqwest::Client)>,
}

impl Pool {
    fn new(credentials: MeshCredentials) -> anyhow::Result<Self> {
        let http = RwLock::new(http_client(&credentials)?);
        Ok(Pool { credentials, http })
    }

    /// The HTTP client, made anew if the certificates have changed. Calls in flight keep the connections of the
    /// earlier one.
    fn http(&self) -> reqwest::Client {
        let (made_with, http) = self.http.read().clone();
        if made_with == self.credentials.tls_generation() {
            return http;
        }
        match http_client(&self.credentials) {
            Ok(renewed) => {
                let http = renewed.1.clone();
                *self.http.write() = renewed;
                http
            }
            Err(error) => {
                tracing::error!(%error, "no client can be made with the changed certificates");
                http
            }
        }
    }
}

fn http_client(credentials: &MeshCredentials) -> anyhow::Result<(u64, reqwest::Client)> {
    let builder = reqwest::Client::builder()
        .connect_timeout(Duration::from_secs(2))
        .pool_idle_timeout(POOL_IDLE_TIMEOUT)
        .tcp_nodelay(true)
        .no_proxy()
        // Every call carries the caller's credentials, which are for that address alone.
        .redirect(reqwest::redirect::Policy::none());
    Ok(match credentials.tls() {
        None => (0, builder.build()?),
        Some((generation, tls)) => {
            let builder = builder.tls_backend_preconfigured((*tls).clone());
            (generation, builder.build()?)
        }
    })
}

/// A client of one service of the mesh: its base URL, the credentials of calls, and a pool of connections. Cheap to
/// clone.
///
/// It does not retry, because whether a second attempt is right depends on the call.
#[derive(Clone)]
pub struct MeshClient {
    pool: Arc<Pool>,
    base_url: Arc<str>,
    timeout: Duration,
    /// The token of an operator of a gateway, for its admin API.
    operator_token: Option<Arc<str>>,
    clocks: Option<Clocks>,
    /// When the clock was last sent to this service.
    clock_sent: LastSent,
}

impl MeshClient {
    /// Creates a client of the service at `base_url`, whose calls carry `secret`, and whose ordinary calls may take
    /// `timeout`.
    ///
    /// # Errors
    /// The HTTP client cannot be built.
    pub fn new(base_url: &str, secret: &str, timeout: Duration) -> anyhow::Result<Self> {
        MeshClient::with_credentials(base_url, MeshCredentials::of_secret(secret), timeout)
    }

    /// As [`MeshClient::new`], with credentials that may change.
    ///
    /// # Errors
    /// The HTTP client cannot be built.
    pub fn with_credentials(
        base_url: &str,
        credentials: MeshCredentials,
        timeout: Duration,
    ) -> anyhow::Result<Self> {
        crate::telemetry::install_crypto_provider();
        Ok(MeshClient {
            pool: Arc::new(Pool::new(credentials)?),
            base_url: trim(base_url),
            timeout,
            operator_token: None,
            clocks: None,
            clock_sent: LastSent::default(),
        })
    }

    /// Creates a client of a gateway's admin API, whose calls carry the token of an operator and no secret of a mesh.
    ///
    /// # Errors
    /// The HTTP client cannot be built.
    pub fn of_operator(base_url: &str, token: &str, timeout: Duration) -> anyhow::Result<Self> {
        Ok(MeshClient {
            operator_token: Some(token.into()),
            ..MeshClient::new(base_url, "", timeout)?
        })
    }

    /// Makes the calls of this client carry the time of this service's clock.
    pub fn with_clocks(mut self, clocks: Clocks) -> Self {
        self.clocks = Some(clocks);
        self
    }

    /// Creates a client with the same settings for another service of the mesh.
    pub fn at(&self, base_url: &str) -> Self {
        MeshClient {
            base_url: trim(base_url),
            clock_sent: LastSent::default(),
            ..self.clone()
        }
    }

    /// The base URL of the service.
    pub fn base_url(&self) -> &str {
        &self.base_url
    }

    /// Timeout of ordinary calls.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Posts JSON and reads JSON. Without a `timeout` the one of ordinary calls holds: no call is without a deadline.
    ///
    /// # Errors
    /// The service's own error, or that of a call that failed (see [`failed_call_kind`]).
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

    /// Gets bytes.
    ///
    /// # Errors
    /// As [`MeshClient::post_json`].
    pub async fn get_bytes(&self, path: &str, timeout: Duration) -> Result<Bytes, ApiError> {
        let request = self.request(reqwest::Method::GET, path);
        self.read(request.timeout(timeout)).await
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

    /// Posts bytes and reads JSON, as an ordinary call.
    ///
    /// # Errors
    /// As [`MeshClient::post_json`].
    pub async fn post_bytes_for_json<A: DeserializeOwned>(
        &self,
        path: &str,
        content_type: &'static str,
        body: Vec<u8>,
    ) -> Result<A, ApiError> {
        let request = self
            .request(reqwest::Method::POST, path)
            .header(CONTENT_TYPE, content_type)
            .body(body);
        self.read_json(request.timeout(self.timeout)).await
    }

    /// Posts JSON and returns the response once its head has arrived, within `head_timeout`. The body is a stream
    /// without a deadline, so its reader has to notice when it falls silent.
    ///
    /// # Errors
    /// As [`MeshClient::post_json`].
    pub async fn post_stream<Q: Serialize>(
        &self,
        path: &str,
        body: &Q,
        head_timeout: Duration,
    ) -> Result<reqwest::Response, ApiError> {
        let request = self.request(reqwest::Method::POST, path).json(body);
        self.stream(request, head_timeout).await
    }

    /// As [`MeshClient::post_stream`], with a body of bytes.
    ///
    /// # Errors
    /// As [`MeshClient::post_json`].
    pub async fn post_bytes_stream(
        &self,
        path: &str,
        content_type: &'static str,
        body: Vec<u8>,
        head_timeout: Duration,
    ) -> Result<reqwest::Response, ApiError> {
        let request = self
            .request(reqwest::Method::POST, path)
            .header(CONTENT_TYPE, content_type)
            .body(body);
        self.stream(request, head_timeout).await
    }

    async fn stream(
        &self,
        request: reqwest::RequestBuilder,
        head_timeout: Duration,
    ) -> Result<reqwest::Response, ApiError> {
        let sent = self.send(request);
        // A timeout of the HTTP client would include the body.
        tokio::time::timeout(head_timeout, sent)
            .await
            .unwrap_or_else(|_| {
                Err(ApiError::new(ErrorKind::Timeout, TIMED_OUT).with_detail(&self.base_url))
            })
    }

    fn request(&self, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
        let pool = &self.pool;
        let request = pool
            .http()
            .request(method, format!("{}{path}", self.base_url))
            .headers(trace_headers());
        let request = match &self.operator_token {
            Some(token) => request.bearer_auth(token),
            None => request.header(MESH_SECRET_HEADER, &*pool.credentials.carried()),
        };
        let clocks = self.clocks.as_ref();
        match clocks.and_then(|clocks| clocks.request_header(&self.clock_sent)) {
            Some(value) => request.header(CLOCK_HEADER, value),
            None => request,
        }
    }

    async fn read_json<A: DeserializeOwned>(
        &self,
        request: reqwest::RequestBuilder,
    ) -> Result<A, ApiError> {
        let response = self.read(request).await?;
        serde_json::from_slice(&response).map_err(|error| {
            ApiError::new(
                ErrorKind::Upstream,
                "a service of the mesh sent an unexpected response; check that all services run the same version",
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
        let mut response = request.send().await.map_err(|error| self.failed(&error))?;
        if let Some(clocks) = &self.clocks
            && let Some(value) = response.headers().get(CLOCK_HEADER)
        {
            clocks.read_response_header(value.to_str().unwrap_or_default(), sent);
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
            match chunk.map_err(|error| self.failed(&error))? {
                None => return Ok(body.freeze()),
                Some(chunk) if body.len() + chunk.len() > RESPONSE_BYTES_MAX => {
                    let message = format!(
                        "a service of the mesh sent a response of more than {RESPONSE_BYTES_MAX} bytes"
                    );
                    return Err(ApiError::new(ErrorKind::Upstream, message)
                        .with_detail(self.base_url.to_string()));
                }
                Some(chunk) => body.extend_from_slice(&chunk),
            }
        }
    }

    /// The error of a call that has no response, by [`failed_call_kind`].
    fn failed(&self, error: &reqwest::Error) -> ApiError {
        if let Some(error) = descriptors::exhausted(error) {
            return error;
        }
        let failed = match failed_call_kind(error) {
            kind @ ErrorKind::Unavailable => {
                ApiError::new(kind, "a service of the mesh cannot be reached")
                    .with_code(code::SERVICE_UNREACHABLE)
            }
            kind @ ErrorKind::Timeout => ApiError::new(kind, TIMED_OUT),
            kind => ApiError::new(kind, "the connection to a service of the mesh broke off"),
        };
        failed.with_detail(format!("{}: {}", self.base_url, causes::plain(error)))
    }
}

fn trim(base_url: &str) -> Arc<str> {
    base_url.trim_end_matches('/').into()
}
