//! The interface of workers.

use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt, TryStreamExt};
use lru::LruCache;
use parking_lot::Mutex;
use refrain_protocol::chunk::{ChunkCut, ChunkEvent, ChunkRequest};
use refrain_protocol::engine_order::{EngineOrder, EngineOrderReply};
use refrain_protocol::forgetting::{ForgetTenant, TenantForgotten};
use refrain_protocol::scheduling::WorkerDrain;
use refrain_protocol::token_body::{TokenBody, encode_token_body};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::causes;
use refrain_service_kit::deadline::Deadline;
use refrain_service_kit::http::MeshClient;
use tokio::time::Instant;
use tokio_util::codec::{AnyDelimiterCodec, AnyDelimiterCodecError, FramedRead};
use tokio_util::io::StreamReader;

/// The events of a chunk. The stream ends after `End` or after an error. If it ends without either, the worker was
/// lost. Dropping it aborts the chunk.
pub type ChunkStream = BoxStream<'static, Result<ChunkEvent, ApiError>>;

/// Decodes chunks on one engine.
#[async_trait]
pub trait Worker: Send + Sync {
    /// Starts a chunk.
    ///
    /// # Errors
    /// `Conflict` for an old fencing epoch, `Overloaded` if all slots are taken, `Unavailable` while the worker
    /// drains, `InvalidRequest` for a request that the engine can never carry out.
    async fn chunk(&self, request: ChunkRequest) -> Result<ChunkStream, ApiError>;

    /// Tells where the output ends, before a stream is dropped on purpose.
    async fn cut(&self, cut: ChunkCut) -> Result<(), ApiError>;

    /// Takes the order of an operator to drain, or to work again. Repeats are harmless.
    ///
    /// # Errors
    /// `NotFound` from a worker that does not offer it.
    async fn drain(&self, order: WorkerDrain) -> Result<(), ApiError> {
        let _ = order;
        let message = "this worker takes no orders to drain";
        Err(ApiError::new(ErrorKind::NotFound, message))
    }

    /// Has the engine forget everything that it computed for a tenant. Repeats are harmless.
    ///
    /// # Errors
    /// `NotFound` from a worker that does not offer it, and `InvalidRequest` with the code `unsupported_by_engine` if
    /// its engine cannot.
    async fn forget_tenant(&self, order: ForgetTenant) -> Result<TenantForgotten, ApiError> {
        let _ = order;
        let message = "this worker does not have its engine forget a tenant";
        Err(ApiError::new(ErrorKind::NotFound, message))
    }

    /// Carries out an order of a trainer, which may take minutes. Repeats are harmless.
    ///
    /// # Errors
    /// `NotFound` from a worker that does not offer it, `InvalidRequest` for what its engine cannot do, and
    /// `Upstream` if the engine failed. The worker then stays as it was.
    async fn order(&self, order: EngineOrder) -> Result<EngineOrderReply, ApiError> {
        let _ = order;
        let message = "this worker takes no orders of trainers";
        Err(ApiError::new(ErrorKind::NotFound, message))
    }
}

/// Finds the worker that a lease names.
pub trait Workers: Send + Sync {
    /// The worker at the URL of a lease.
    fn at(&self, url: &str) -> Arc<dyn Worker>;
}

/// [`Worker`] over HTTP: `POST /internal/v1/chunk` with the body of [`encode_token_body`], and `POST` to `cut`,
/// `drain`, `forget` and `order` beside it.
///
/// The response to a chunk has one [`ChunkEvent`] or `{"error": ApiError}` per line in JSON. An empty line shows that
/// the worker is alive but has no event yet, which tells a slow engine from a worker that has stopped.
pub struct HttpWorker {
    client: MeshClient,
}

/// Longest time of an order: weights may come over a network, and running requests may be waited for.
const ORDER_TIMEOUT: Duration = Duration::from_secs(1800);

/// Longest time in which an engine forgets a tenant: it overwrites what its file has of it.
const FORGET_TIMEOUT: Duration = Duration::from_secs(120);

/// Longest event line in bytes. A step emits at most some dozens of tokens with their log-probabilities.
const LINE_BYTES_MAX: usize = 4 << 20;

#[async_trait]
impl Worker for HttpWorker {
    async fn chunk(&self, request: ChunkRequest) -> Result<ChunkStream, ApiError> {
        let within = request.alive_within_ms.map(Duration::from_millis);
        let head_timeout = within.unwrap_or(self.client.timeout());
        let response = self
            .client
            .post_bytes_stream(
                "/internal/v1/chunk",
                ChunkRequest::CONTENT_TYPE,
                encode_token_body(request)?,
                head_timeout,
            )
            .await?;
        let lines = EventLines::new(response.bytes_stream(), within);
        Ok(futures_util::stream::unfold(lines, |mut lines| async move {
            lines.next().await.map(|event| (event, lines))
        })
        .boxed())
    }

    async fn cut(&self, cut: ChunkCut) -> Result<(), ApiError> {
        let path = "/internal/v1/cut";
        self.client.post_json(path, &cut, None).await
    }

    async fn drain(&self, order: WorkerDrain) -> Result<(), ApiError> {
        let path = "/internal/v1/drain";
        self.client.post_json(path, &order, None).await
    }

    async fn forget_tenant(&self, order: ForgetTenant) -> Result<TenantForgotten, ApiError> {
        let (path, timeout) = ("/internal/v1/forget", Some(FORGET_TIMEOUT));
        self.client.post_json(path, &order, timeout).await
    }

    async fn order(&self, order: EngineOrder) -> Result<EngineOrderReply, ApiError> {
        let path = "/internal/v1/order";
        let timeout = Some(ORDER_TIMEOUT);
        self.client.post_json(path, &order, timeout).await
    }
}

/// One line of the stream of a chunk.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum EventLine {
    Event(ChunkEvent),
    Error { error: ApiError },
}

/// The lines of a chunk's response.
struct EventLines {
    lines:
        FramedRead<StreamReader<BoxStream<'static, io::Result<Bytes>>, Bytes>, AnyDelimiterCodec>,
    /// The longest silence of the worker, and the deadline that it gives at present.
    silence: Option<(Duration, Deadline)>,
}

impl EventLines {
    /// Reads lines from `body`. With `silence_max`, a worker that sends no line for that long counts as lost.
    fn new<E>(
        body: impl Stream<Item = Result<Bytes, E>> + Send + 'static,
        silence_max: Option<Duration>,
    ) -> Self
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        // This codec copies no line, unlike `LinesCodec`, which makes a string of each.
        let codec = AnyDelimiterCodec::new_with_max_length(vec![b'\n'], Vec::new(), LINE_BYTES_MAX);
        EventLines {
            lines: FramedRead::new(
                StreamReader::new(body.map_err(io::Error::other).boxed()),
                codec,
            ),
            silence: silence_max.map(|max| (max, Deadline::after(max))),
        }
    }

    /// Reads the next event; `None` at the end of the stream.
    async fn next(&mut self) -> Option<Result<ChunkEvent, ApiError>> {
        loop {
            let line = match self.next_line().await? {
                Ok(line) if line.is_empty() => continue,
                Ok(line) => line,
                Err(error) => return Some(Err(error)),
            };
            return Some(match serde_json::from_slice(&line) {
                Ok(EventLine::Event(event)) => Ok(event),
                Ok(EventLine::Error { error }) => Err(error),
                Err(error) => Err(lost(
                    "a worker sent a line that is not a chunk event",
                    error,
                )),
            });
        }
    }

    async fn next_line(&mut self) -> Option<Result<Bytes, ApiError>> {
        let line = match &mut self.silence {
            None => self.lines.next().await?,
            Some((max, deadline)) => {
                let Some(line) = deadline.bound(self.lines.next()).await else {
                    let message = format!("a worker was silent for {} ms", max.as_millis());
                    return Some(Err(ApiError::new(ErrorKind::Timeout, message)));
                };
                deadline.set(Instant::now() + *max);
                line?
            }
        };
        Some(line.map_err(|error| match error {
            AnyDelimiterCodecError::MaxChunkLengthExceeded => lost(
                "a worker sent a line that is too long",
                format!("more than {LINE_BYTES_MAX} bytes"),
            ),
            AnyDelimiterCodecError::Io(error) => lost(
                "the connection to a worker broke off",
                causes::plain(&error),
            ),
        }))
    }
}

fn lost(message: &str, detail: impl std::fmt::Display) -> ApiError {
    ApiError::new(ErrorKind::Upstream, message).with_detail(detail)
}

/// One [`HttpWorker`] per URL, so that connections are reused.
pub struct HttpWorkers {
    template: MeshClient,
    by_url: Mutex<LruCache<String, Arc<HttpWorker>>>,
}

/// Most workers whose connections are kept. Leases name only live workers, so the least recently used are gone.
const WORKERS_KEPT_MAX: NonZeroUsize = NonZeroUsize::new(1024).unwrap();

impl HttpWorkers {
    /// Creates clients with the settings of `template` for the URLs that leases name.
    pub fn new(template: MeshClient) -> Self {
        HttpWorkers {
            template,
            by_url: Mutex::new(LruCache::new(WORKERS_KEPT_MAX)),
        }
    }
}

impl Workers for HttpWorkers {
    fn at(&self, url: &str) -> Arc<dyn Worker> {
        let mut by_url = self.by_url.lock();
        let client = || {
            Arc::new(HttpWorker {
                client: self.template.at(url),
            })
        };
        by_url.get_or_insert_ref(url, client).clone()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    /// The events of a stream that arrives in pieces of so many bytes.
    async fn read(text: &str, piece: usize) -> Vec<Result<ChunkEvent, ApiError>> {
        let pieces: Vec<io::Result<Bytes>> = text
            .as_bytes()
            .chunks(piece)
            .map(|bytes| Ok(Bytes::copy_from_slice(bytes)))
            .collect();
        let mut lines = EventLines::new(stream::iter(pieces), None);
        let mut events = Vec::new();
        while let Some(event) = lines.next().await {
            events.push(event);
        }
        events
    }

    fn messages(events: &[Result<ChunkEvent, ApiError>]) -> Vec<String> {
        let errors = events.iter().map(|event| event.as_ref().unwrap_err());
        errors.map(|error| error.message.clone()).collect()
    }

    #[tokio::test]
    async fn lines_are_the_same_however_they_are_cut() {
        let long = ApiError {
            message: "y".repeat(5_000),
            ..ApiError::internal("x")
        };
        let errors = [ApiError::internal("a"), long, ApiError::invalid("p", "b")];
        let text: String = errors
            .iter()
            .map(|error| format!("\n{}\n\n", serde_json::json!({ "error": error })))
            .collect();
        let expected: Vec<_> = errors.iter().map(|error| error.message.clone()).collect();
        for piece in [text.len(), 1, 2, 7, 100, 4_999] {
            assert_eq!(messages(&read(&text, piece).await), expected);
        }
    }

    #[tokio::test]
    async fn a_line_without_an_end_or_of_something_else_is_an_error() {
        let endless = "x".repeat(LINE_BYTES_MAX + 1);
        let found = messages(&read(&endless, 1 << 16).await);
        assert_eq!(found[0], "a worker sent a line that is too long");
        for text in ["{}\n", "{\"type\":\"ste", "\u{fffd}\n"] {
            let found = messages(&read(text, 3).await);
            assert_eq!(found, ["a worker sent a line that is not a chunk event"]);
        }
        assert!(read("\n\n", 1).await.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn empty_lines_keep_a_worker_alive_and_silence_does_not() {
        let silence_max = Duration::from_secs(2);
        let error = format!(
            "{}\n",
            serde_json::json!({ "error": ApiError::internal("a") })
        );
        let pieces = ["\n".to_owned(), "\n".into(), error, "\n".into()];
        let body = stream::iter(pieces)
            .then(async |piece| {
                tokio::time::sleep(Duration::from_millis(1_900)).await;
                io::Result::Ok(Bytes::from(piece))
            })
            .chain(stream::pending());
        let began = Instant::now();
        let mut lines = EventLines::new(body, Some(silence_max));
        let first = lines.next().await.unwrap().unwrap_err();
        assert_eq!(first.kind, ErrorKind::Internal);
        let silent = lines.next().await.unwrap().unwrap_err();
        assert_eq!(silent.kind, ErrorKind::Timeout);
        assert_eq!(
            began.elapsed(),
            Duration::from_millis(4 * 1_900) + silence_max
        );
    }

    #[tokio::test]
    async fn a_connection_that_breaks_is_told_from_one_that_ends() {
        let broken = || io::Error::from(io::ErrorKind::ConnectionReset);
        let body = stream::iter([Ok(Bytes::from("\n")), Err(broken())]);
        let mut lines = EventLines::new(body, None);
        let error = lines.next().await.unwrap().unwrap_err();
        assert_eq!(error.message, "the connection to a worker broke off");
        assert!(error.detail.unwrap().contains("connection reset"));
    }
}
