//! One answer of an engine, read while it streams, and given up by who does not read on.

use std::collections::VecDeque;

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use refrain_protocol::{ApiError, ErrorKind};
use serde_json::Value;
use tokio::runtime::Handle;

use super::client::{EngineClient, lost, no_engine};
use super::external::{Decoder, Dialect};
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

/// An answer while it streams.
pub(super) struct Answer {
    body: BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    parser: SseParser,
    decoder: Box<dyn Decoder>,
    pieces: VecDeque<Generated>,
    abort: Option<Abort>,
    over: bool,
}

impl Answer {
    pub(super) fn new(
        response: reqwest::Response,
        decoder: Box<dyn Decoder>,
        abort: Option<Abort>,
    ) -> Self {
        Answer {
            body: response.bytes_stream().boxed(),
            parser: SseParser::default(),
            decoder,
            pieces: VecDeque::new(),
            abort,
            over: false,
        }
    }

    /// The next piece; none behind the end, which is an error where the engine did not end by itself.
    pub(super) async fn next(&mut self) -> Option<Result<Generated, ApiError>> {
        loop {
            if let Some(piece) = self.pieces.pop_front() {
                if matches!(piece, Generated::End(_)) {
                    self.over = true;
                    if let Some(abort) = &mut self.abort {
                        abort.needed = false;
                    }
                }
                return Some(Ok(piece));
            }
            if self.over {
                // Read to its end, so that the connection can be used again.
                while let Some(Ok(_)) = self.body.next().await {}
                return None;
            }
            if let Err(error) = self.read().await {
                self.over = true;
                return Some(Err(error));
            }
        }
    }

    /// Takes the next events.
    async fn read(&mut self) -> Result<(), ApiError> {
        let bytes = match self.body.next().await {
            Some(Ok(bytes)) => bytes,
            Some(Err(error)) => return Err(lost(&error)),
            None => {
                return Err(ApiError::new(
                    ErrorKind::Upstream,
                    "the engine broke off in the middle of its answer",
                ));
            }
        };
        self.parser.push(&bytes);
        loop {
            let data = match self.parser.next() {
                Ok(Some(data)) => data,
                Ok(None) => return Ok(()),
                Err(_) => return Err(no_engine("an event without end")),
            };
            if data == b"[DONE]" {
                self.decoder.done(&mut self.pieces);
            } else {
                self.decoder.decode(&data, &mut self.pieces)?;
            }
        }
    }
}
