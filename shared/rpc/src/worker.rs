//! The worker's interface.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use bytes::BytesMut;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use refrain_protocol::chunk::{ChunkCut, ChunkEvent, ChunkRequest};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::deadline::Deadline;
use refrain_service_kit::http::MeshClient;
use tokio::time::Instant;

/// The events of a chunk. It ends after `End` or after an error; ending without either means that the
/// worker was lost. Dropping it aborts the chunk.
pub type ChunkStream = BoxStream<'static, Result<ChunkEvent, ApiError>>;

/// Decodes chunks on one engine.
#[async_trait]
pub trait Worker: Send + Sync {
    /// Starts a chunk.
    ///
    /// # Errors
    /// `Conflict` for an old fencing epoch, `Overloaded` when all slots are taken, `Unavailable` while
    /// draining, `InvalidRequest` for what the engine can never do.
    async fn chunk(&self, request: ChunkRequest) -> Result<ChunkStream, ApiError>;

    /// Says how much of the output was kept, before a stream is dropped on purpose.
    async fn cut(&self, cut: ChunkCut) -> Result<(), ApiError>;
}

/// Finds the worker that a lease names.
pub trait Workers: Send + Sync {
    /// The worker at a lease's URL.
    fn at(&self, url: &str) -> Arc<dyn Worker>;
}

/// [`Worker`] over HTTP: `POST /internal/v1/chunk` answers JSON lines, one [`ChunkEvent`] or
/// `{"error": ApiError}` each; `POST /internal/v1/cut`. An empty line says that the worker lives and has nothing to say yet:
/// a worker that has stopped is told by that from one whose engine takes its time.
pub struct HttpWorker {
    client: MeshClient,
}

/// Longest event line. A step emits at most some dozens of tokens with their logprobs.
const LINE_BYTES_MAX: usize = 4 << 20;

#[async_trait]
impl Worker for HttpWorker {
    async fn chunk(&self, request: ChunkRequest) -> Result<ChunkStream, ApiError> {
        let within = request.alive_within_ms.map(Duration::from_millis);
        let head_timeout = within.unwrap_or(self.client.timeout());
        let response = self
            .client
            .post_stream("/internal/v1/chunk", &request, head_timeout)
            .await?;
        let lines = Lines {
            body: response.bytes_stream().boxed(),
            buffer: BytesMut::new(),
            scanned: 0,
            silence: within.map(|within| (within, Deadline::after(within))),
        };
        Ok(futures_util::stream::unfold(lines, |mut lines| async move {
            lines.next().await.map(|event| (event, lines))
        })
        .boxed())
    }

    async fn cut(&self, cut: ChunkCut) -> Result<(), ApiError> {
        self.client
            .post_json("/internal/v1/cut", &cut, Some(self.client.timeout()))
            .await
    }
}

/// One line of a chunk's stream.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Line {
    Event(ChunkEvent),
    Error { error: ApiError },
}

struct Lines {
    body: BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    buffer: BytesMut,
    /// Bytes at the front of the buffer that hold no end of a line: a long line is looked through once.
    scanned: usize,
    /// How long the worker may say nothing at all, and until when by now.
    silence: Option<(Duration, Deadline)>,
}

impl Lines {
    async fn next(&mut self) -> Option<Result<ChunkEvent, ApiError>> {
        loop {
            let unscanned = self.buffer[self.scanned..].iter();
            if let Some(end) = unscanned.clone().position(|byte| *byte == b'\n') {
                let line = self.buffer.split_to(self.scanned + end + 1);
                self.scanned = 0;
                if line.len() == 1 {
                    continue;
                }
                return Some(match serde_json::from_slice(&line) {
                    Ok(Line::Event(event)) => Ok(event),
                    Ok(Line::Error { error }) => Err(error),
                    Err(error) => Err(lost("the worker sent a line that is no chunk event", error)),
                });
            }
            self.scanned = self.buffer.len();
            if self.buffer.len() > LINE_BYTES_MAX {
                return Some(Err(lost("the worker sent an endless line", LINE_BYTES_MAX)));
            }
            match self.heard().await? {
                Ok(Ok(bytes)) => self.buffer.extend_from_slice(&bytes),
                Ok(Err(error)) => {
                    return Some(Err(lost("the connection to the worker broke", error)));
                }
                Err(silent) => return Some(Err(silent)),
            }
        }
    }

    /// The next bytes, or that none came for too long.
    async fn heard(&mut self) -> Option<Result<reqwest::Result<bytes::Bytes>, ApiError>> {
        let Some((within, deadline)) = &mut self.silence else {
            return self.body.next().await.map(Ok);
        };
        match deadline.bound(self.body.next()).await {
            Some(heard) => {
                deadline.set(Instant::now() + *within);
                heard.map(Ok)
            }
            None => {
                let message = format!(
                    "a worker gave no sign of life for {} ms",
                    within.as_millis()
                );
                Some(Err(ApiError::new(ErrorKind::Timeout, message)))
            }
        }
    }
}

fn lost(message: &str, detail: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorKind::Upstream, message).with_detail(detail)
}

/// One [`HttpWorker`] per URL, so that connections are kept.
pub struct HttpWorkers {
    template: MeshClient,
    by_url: Mutex<HashMap<String, Arc<HttpWorker>>>,
}

/// Workers remembered at most; leases name live workers only, so more means churn: start over.
const WORKERS_REMEMBERED_MAX: usize = 1024;

impl HttpWorkers {
    /// Clients made like `template`, at the URLs that leases name.
    pub fn new(template: MeshClient) -> Self {
        HttpWorkers {
            template,
            by_url: Mutex::new(HashMap::new()),
        }
    }
}

impl Workers for HttpWorkers {
    fn at(&self, url: &str) -> Arc<dyn Worker> {
        let mut by_url = self
            .by_url
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        if by_url.len() >= WORKERS_REMEMBERED_MAX {
            by_url.clear();
        }
        let worker = by_url.entry(url.to_owned()).or_insert_with(|| {
            Arc::new(HttpWorker {
                client: self.template.at(url),
            })
        });
        worker.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Events of a stream that comes in pieces of so many bytes.
    async fn read(text: &str, piece: usize) -> Vec<Result<ChunkEvent, ApiError>> {
        let pieces: Vec<_> = text
            .as_bytes()
            .chunks(piece)
            .map(|bytes| Ok(bytes::Bytes::copy_from_slice(bytes)))
            .collect();
        let mut lines = Lines {
            body: futures_util::stream::iter(pieces).boxed(),
            buffer: BytesMut::new(),
            scanned: 0,
            silence: None,
        };
        let mut events = Vec::new();
        while let Some(event) = lines.next().await {
            events.push(event);
        }
        events
    }

    #[tokio::test]
    async fn lines_are_the_same_however_they_are_cut() {
        let long = ApiError::internal("x").with_detail("never sent");
        let long = ApiError {
            message: "y".repeat(5_000),
            ..long
        };
        let errors = [ApiError::internal("a"), long, ApiError::invalid("p", "b")];
        let text: String = errors
            .iter()
            .map(|error| format!("\n{}\n\n", serde_json::json!({ "error": error })))
            .collect();
        let whole = read(&text, text.len()).await;
        assert_eq!(whole.len(), 3);
        for (given, read) in errors.iter().zip(&whole) {
            assert_eq!(read.as_ref().unwrap_err().message, given.message);
        }
        for piece in [1, 2, 7, 100, 4_999] {
            let messages = |events: &[Result<ChunkEvent, ApiError>]| {
                let errors = events.iter().map(|event| event.as_ref().unwrap_err());
                errors
                    .map(|error| error.message.clone())
                    .collect::<Vec<_>>()
            };
            assert_eq!(messages(&read(&text, piece).await), messages(&whole));
        }
    }
}
