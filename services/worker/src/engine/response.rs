//! The streamed response of a third-party engine, and the abort of a call that is given up.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use futures_util::stream::Stream;
use refrain_protocol::{ApiError, ErrorKind};
use serde_json::Value;
use tokio::runtime::Handle;

use super::client::{EngineClient, unexpected_response};
use super::dialect::{Decoder, Dialect};
use super::event_calls::EventResponse;
use super::generate::{GenerateRequest, Generated};
use super::sse::SseParser;

/// Aborts the engine's work on a call when it is dropped.
pub(super) struct AbortOnDrop {
    client: EngineClient,
    tasks: Handle,
    path: &'static str,
    body: Value,
    /// The engine has not ended the call by itself yet.
    is_armed: bool,
}

impl AbortOnDrop {
    /// The abort of a call; `None` for an engine that stops as soon as the connection closes.
    pub(super) fn new(
        client: &EngineClient,
        tasks: &Handle,
        dialect: &dyn Dialect,
        request: &GenerateRequest,
    ) -> Option<Self> {
        let (path, body) = dialect.abort(request)?;
        Some(AbortOnDrop {
            client: client.clone(),
            tasks: tasks.clone(),
            path,
            body,
            is_armed: true,
        })
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        if !self.is_armed {
            return;
        }
        let (client, path, body) = (self.client.clone(), self.path, self.body.take());
        self.tasks.spawn(async move {
            if let Err(error) = client.post(path, &body).await {
                // The engine's message is not logged: it may repeat the request.
                tracing::debug!(kind = ?error.kind, "the engine did not accept an abort");
            }
        });
    }
}

/// The pieces of a streamed response. Pieces that arrived together are handed out before more bytes are read.
pub(super) struct ResponseStream {
    response: EventResponse,
    parser: SseParser,
    decoder: Box<dyn Decoder>,
    pieces: VecDeque<Generated>,
    abort: Option<AbortOnDrop>,
    is_over: bool,
}

impl ResponseStream {
    pub(super) fn new(
        response: EventResponse,
        decoder: Box<dyn Decoder>,
        abort: Option<AbortOnDrop>,
    ) -> Self {
        ResponseStream {
            response,
            parser: SseParser::default(),
            decoder,
            pieces: VecDeque::new(),
            abort,
            is_over: false,
        }
    }

    /// Decodes the events that end in `bytes`.
    fn decode(&mut self, bytes: Bytes) -> Result<(), ApiError> {
        self.parser.push(bytes);
        loop {
            match self.parser.next_event() {
                Ok(Some(data)) if *data == *b"[DONE]" => self.decoder.done(&mut self.pieces),
                Ok(Some(data)) => self.decoder.decode(&data, &mut self.pieces)?,
                Ok(None) => return Ok(()),
                Err(_) => return Err(unexpected_response("an event without end")),
            }
        }
    }
}

impl Stream for ResponseStream {
    type Item = Result<Generated, ApiError>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(piece) = this.pieces.pop_front() {
                if matches!(piece, Generated::End(_)) {
                    this.is_over = true;
                    if let Some(abort) = &mut this.abort {
                        abort.is_armed = false;
                    }
                }
                return Poll::Ready(Some(Ok(piece)));
            }
            let bytes = ready!(this.response.poll_bytes(context));
            let decoded = match bytes {
                // Read to the end, so that the connection can be used again.
                Some(Ok(_)) if this.is_over => continue,
                Some(Err(_)) | None if this.is_over => return Poll::Ready(None),
                Some(Ok(bytes)) => this.decode(bytes),
                Some(Err(error)) => Err(error),
                None => Err(ApiError::new(
                    ErrorKind::Upstream,
                    "the engine ended its response without an end event",
                )),
            };
            if let Err(error) = decoded {
                this.is_over = true;
                return Poll::Ready(Some(Err(error)));
            }
        }
    }
}
