//! The address of an engine, and what all requests to it have in common.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST, HeaderMap, HeaderValue};
use hyper::{Method, Request};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::trace::trace_headers;
use rustls_platform_verifier::ConfigVerifierExt as _;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use super::connection::{Connection, EngineRequest, EngineStream, broken};
use crate::engine::call_error::failed_call;

/// The address of an engine.
pub(super) struct Endpoint {
    host: String,
    port: u16,
    /// The part of each path that the address has.
    path: String,
    headers: HeaderMap,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    connect_timeout: Duration,
}

impl Endpoint {
    /// The address and the headers of `request`.
    ///
    /// # Errors
    /// The address has no host, or the system has no certificates for a TLS address.
    pub(super) fn new(
        request: &reqwest::Request,
        connect_timeout: Duration,
    ) -> anyhow::Result<Self> {
        let url = request.url();
        let host = url.host_str().context("the address has no host")?;
        let port = url
            .port_or_known_default()
            .context("the address has no port")?;
        let named = url
            .port()
            .map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"));
        let mut headers = request.headers().clone();
        headers.insert(HOST, HeaderValue::from_str(&named)?);
        headers.insert(ACCEPT, HeaderValue::from_static("*/*"));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        // An IPv6 address has brackets in a URL, and nowhere else.
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let tls = match url.scheme() {
            "https" => {
                let config = ClientConfig::with_platform_verifier()?;
                let name = ServerName::try_from(host.to_owned())?;
                Some((TlsConnector::from(Arc::new(config)), name))
            }
            _ => None,
        };
        Ok(Endpoint {
            host: host.to_owned(),
            port,
            path: url.path().trim_end_matches('/').to_owned(),
            headers,
            tls,
            connect_timeout,
        })
    }

    /// A request that posts JSON.
    pub(super) fn post(&self, path: &str, json: Vec<u8>) -> Result<EngineRequest, ApiError> {
        let mut request = Request::new(Full::new(Bytes::from(json)));
        *request.method_mut() = Method::POST;
        let path = format!("{}{path}", self.path);
        *request.uri_mut() = path.parse().map_err(ApiError::internal)?;
        *request.headers_mut() = self.headers.clone();
        request.headers_mut().extend(trace_headers());
        Ok(request)
    }

    /// Opens a connection.
    ///
    /// # Errors
    /// `Unavailable` if the engine cannot be reached.
    pub(super) async fn connect(&self) -> Result<Connection, ApiError> {
        let opened = tokio::time::timeout(self.connect_timeout, self.open()).await;
        let stream = opened
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(|error| failed_call(ErrorKind::Unavailable, &error))?;
        Connection::new(stream)
            .await
            .map_err(|error| broken(&error))
    }

    async fn open(&self) -> io::Result<Box<dyn EngineStream>> {
        let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
        stream.set_nodelay(true)?;
        Ok(match &self.tls {
            Some((connector, name)) => Box::new(connector.connect(name.clone(), stream).await?),
            None => Box::new(stream),
        })
    }
}
