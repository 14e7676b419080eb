//! One connection, which makes progress only while somebody polls it.

use std::future::{Future as _, poll_fn};
use std::pin::{Pin, pin};
use std::task::{Context, Waker};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use refrain_protocol::{ApiError, ErrorKind};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::engine::call_error::failed_call;

/// A request to an engine.
pub(super) type EngineRequest = Request<Full<Bytes>>;

/// The error of a connection that broke off.
pub(super) fn broken(error: &hyper::Error) -> ApiError {
    failed_call(ErrorKind::Upstream, error)
}

/// A stream of bytes to an engine and back, plain or with TLS.
pub(super) trait EngineStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> EngineStream for S {}

/// Bytes that are read at once: some hundred events of a token. hyper's own buffer grows with what arrives. Memory of
/// such a size comes as fresh pages from the system, which cost a tenth of the time of a streamed token. The head of
/// a response has to fit in as well; data may be longer.
const READ_BYTES: usize = 32 << 10;

type Driver = http1::Connection<TokioIo<Box<dyn EngineStream>>, Full<Bytes>>;

/// A failed call, with its request if nothing of it was sent.
pub(super) struct FailedCall(TrySendError<EngineRequest>);

impl FailedCall {
    pub(super) fn into_parts(mut self) -> (hyper::Error, Option<EngineRequest>) {
        let unsent = self.0.take_message();
        (self.0.into_error(), unsent)
    }
}

/// A connection over which one call is made at a time.
pub(super) struct Connection {
    sender: SendRequest<Full<Bytes>>,
    /// Reads and writes; `None` once the connection is closed.
    driver: Option<Pin<Box<Driver>>>,
}

impl Connection {
    pub(super) async fn new(stream: Box<dyn EngineStream>) -> hyper::Result<Self> {
        let mut builder = http1::Builder::new();
        builder.read_buf_exact_size(Some(READ_BYTES));
        let (sender, driver) = builder.handshake(TokioIo::new(stream)).await?;
        Ok(Connection {
            sender,
            driver: Some(Box::pin(driver)),
        })
    }

    /// Reads and writes what is possible now.
    pub(super) fn drive(&mut self, context: &mut Context<'_>) {
        if let Some(driver) = &mut self.driver
            && driver.as_mut().poll(context).is_ready()
        {
            // Its error, if there is one, reaches the call.
            self.driver = None;
        }
    }

    /// Whether another call can be made. A connection that the engine has closed meanwhile is not usable.
    pub(super) fn is_usable(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        self.driver.is_some() && self.sender.is_ready()
    }

    /// Sends a request, and waits for the head of its response.
    pub(super) async fn send(
        &mut self,
        request: EngineRequest,
    ) -> Result<Response<Incoming>, FailedCall> {
        let mut response = pin!(self.sender.try_send_request(request));
        let driver = &mut self.driver;
        let sent = poll_fn(|context| {
            if let Some(running) = driver
                && running.as_mut().poll(context).is_ready()
            {
                *driver = None;
            }
            response.as_mut().poll(context)
        });
        sent.await.map_err(FailedCall)
    }
}
