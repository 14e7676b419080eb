//! One answer of an engine, read while it streams, and given up by who does not read on.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{BoxStream, Stream};
use refrain_protocol::{ApiError, ErrorKind};
use reqwest::Response;
use serde_json::Value;
use tokio::runtime::Handle;

use super::client::{EngineClient, lost, no_engine};
use super::dialect::{Decoder, Dialect};
use super::sse::SseParser;
use super::streaming::{GenerateRequest, Generated};

/// Tells the engine to stop when it goes out of scope.
pub(super) struct Abort {
    client: EngineClient,
    tasks: Handle,
    path: &'static str,
    body: Value,
    /// Until the engine has ended by itself.
    pub(super) needed: bool,
}

impl Abort {
    /// None where closing the connection is enough.
    pub(super) fn of(
        client: &EngineClient,
        tasks: &Handle,
        dialect: &dyn Dialect,
        request: &GenerateRequest,
    ) -> Option<Self> {
        let (path, body) = dialect.abort(request)?;
        Some(Abort {
            client: client.clone(),
            tasks: tasks.clone(),
            path,
            body,
            needed: true,
        })
    }
}

impl Drop for Abort {
    fn drop(&mut self) {
        if !self.needed {
            return;
        }
        let (client, path, body) = (self.client.clone(), self.path, self.body.take());
        self.tasks.spawn(async move {
            if let Err(error) = client.post(path, &body).await {
                // Its words are not logged: they may repeat the request.
                tracing::debug!(kind = ?error.kind, "the engine did not take an abort");
            }
        });
    }
}

/// Pieces as they come. What came together is handed out before more is asked for.
pub(super) struct Answer {
    body: BoxStream<'static, reqwest::Result<Bytes>>,
    parser: SseParser,
    decoder: Box<dyn Decoder>,
    pieces: VecDeque<Generated>,
    /// Until the engine has ended by itself.
    abort: Option<Abort>,
    over: bool,
}

impl Answer {
    pub(super) fn new(response: Response, decoder: Box<dyn Decoder>, abort: Option<Abort>) -> Self {
        Answer {
            body: response.bytes_stream().boxed(),
            parser: SseParser::default(),
            decoder,
            pieces: VecDeque::new(),
            abort,
            over: false,
        }
    }

    /// Takes events.
    fn read(&mut self, bytes: &[u8]) -> Result<(), ApiError> {
        self.parser.push(bytes);
        loop {
            match self.parser.next() {
                Ok(Some(b"[DONE]")) => self.decoder.done(&mut self.pieces),
                Ok(Some(data)) => self.decoder.decode(data, &mut self.pieces)?,
                Ok(None) => return Ok(()),
                Err(_) => return Err(no_engine("an event without end")),
            }
        }
    }
}

impl Stream for Answer {
    type Item = Result<Generated, ApiError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(piece) = this.pieces.pop_front() {
                if matches!(piece, Generated::End(_)) {
                    this.over = true;
                    if let Some(abort) = &mut this.abort {
                        abort.needed = false;
                    }
                }
                return Poll::Ready(Some(Ok(piece)));
            }
            let bytes = ready!(this.body.poll_next_unpin(context));
            let read = match bytes {
                // Read to its end, so that the connection can be used again.
                Some(Ok(_)) if this.over => continue,
                Some(Err(_)) | None if this.over => return Poll::Ready(None),
                Some(Ok(bytes)) => this.read(&bytes),
                Some(Err(error)) => Err(lost(&error)),
                None => Err(ApiError::new(
                    ErrorKind::Upstream,
                    "the engine broke off in the middle of its answer",
                )),
            };
            if let Err(error) = read {
                this.over = true;
                return Poll::Ready(Some(Err(error)));
            }
        }
    }
}
