//! Calls to an engine whose answer is a stream of events, over HTTP/1.1.
//!
//! The task that reads the events drives the connection too. With a client that has a task for each connection, one
//! token would wake that task, which would wake the reader. And events that arrived together would go through both
//! one by one, so each would be written to the client of the mesh by itself.
//!
//! A connection belongs to the runtime that opened it, since it would end with that runtime.

mod connection;
mod endpoint;
mod idle_connections;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Body as _, Incoming};
use hyper::{HeaderMap, StatusCode};
use refrain_protocol::ApiError;

use self::connection::{Connection, broken};
use self::endpoint::Endpoint;
use self::idle_connections::IdleConnections;
use super::per_runtime::PerRuntime;

/// The calls to one engine. Cheap to clone.
#[derive(Clone)]
pub(super) struct EventCalls {
    shared: Arc<Shared>,
}

struct Shared {
    endpoint: Endpoint,
    idle_max: Duration,
    idle: PerRuntime<Arc<IdleConnections>>,
}

impl EventCalls {
    /// Creates calls to the engine that `request` is addressed to, with the headers of `request`. Opening a
    /// connection may take `connect_timeout`, and one that is not used for `idle_max` is closed.
    ///
    /// # Errors
    /// The address has no host, or the system has no certificates for a TLS address.
    pub(super) fn new(
        request: &reqwest::Request,
        connect_timeout: Duration,
        idle_max: Duration,
    ) -> anyhow::Result<Self> {
        Ok(EventCalls {
            shared: Arc::new(Shared {
                endpoint: Endpoint::new(request, connect_timeout)?,
                idle_max,
                idle: PerRuntime::default(),
            }),
        })
    }

    /// Posts JSON, and returns the answer once its head has arrived.
    ///
    /// # Errors
    /// The engine cannot be reached, or the connection broke off.
    pub(super) async fn post(&self, path: &str, json: Vec<u8>) -> Result<EventResponse, ApiError> {
        let shared = &self.shared;
        let idle = || Ok::<_, Infallible>(Arc::new(IdleConnections::new(shared.idle_max)));
        let Ok(idle) = shared.idle.current(idle);
        let mut request = shared.endpoint.post(path, json)?;
        // A connection that was used before may have been closed by the engine meanwhile. Then nothing of the request
        // was sent, and another connection takes it.
        while let Some(mut connection) = idle.take(Instant::now()) {
            match connection.send(request).await {
                Ok(response) => return Ok(EventResponse::new(response, connection, idle)),
                Err(failed) => match failed.into_parts() {
                    (_, Some(unsent)) => request = unsent,
                    (error, None) => return Err(broken(&error)),
                },
            }
        }
        let mut connection = shared.endpoint.connect().await?;
        match connection.send(request).await {
            Ok(response) => Ok(EventResponse::new(response, connection, idle)),
            Err(failed) => Err(broken(&failed.into_parts().0)),
        }
    }
}

/// The answer to a call, with the connection that it comes by. Dropping it before its end closes the connection,
/// which tells the engine to stop.
pub(super) struct EventResponse {
    status: StatusCode,
    headers: HeaderMap,
    body: Incoming,
    /// `None` once the body has ended.
    connection: Option<Connection>,
    idle: Arc<IdleConnections>,
}

impl EventResponse {
    fn new(
        response: hyper::Response<Incoming>,
        connection: Connection,
        idle: Arc<IdleConnections>,
    ) -> Self {
        let (head, body) = response.into_parts();
        EventResponse {
            status: head.status,
            headers: head.headers,
            body,
            connection: Some(connection),
            idle,
        }
    }

    pub(super) fn status(&self) -> u16 {
        self.status.as_u16()
    }

    /// A header, if it is text.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// Polls for the next bytes of the body; `None` at its end.
    pub(super) fn poll_bytes(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, ApiError>>> {
        loop {
            let mut frame = Pin::new(&mut self.body).poll_frame(context);
            if frame.is_pending()
                && let Some(connection) = &mut self.connection
            {
                connection.drive(context);
                frame = Pin::new(&mut self.body).poll_frame(context);
            }
            match ready!(frame) {
                Some(Ok(frame)) => {
                    if let Ok(bytes) = frame.into_data() {
                        return Poll::Ready(Some(Ok(bytes)));
                    }
                }
                Some(Err(error)) => {
                    self.connection = None;
                    return Poll::Ready(Some(Err(broken(&error))));
                }
                None => {
                    if let Some(connection) = self.connection.take() {
                        self.idle.put(connection, Instant::now());
                    }
                    return Poll::Ready(None);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
