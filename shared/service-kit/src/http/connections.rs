//! The connections of a listener. Each has an entry in the table (`connection_table.rs`), and can be closed for a new
//! one while it is idle.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use actix_web::body::{BodySize, BoxBody, MessageBody};
use bytes::Bytes;
use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use prometheus::{IntCounter, IntGauge};
use refrain_protocol::openai::ErrorBody;
use refrain_protocol::{ApiError, ErrorKind};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

use super::access::AccessLine;
use super::connection_table::{AddressLimit, ConnectionId, ConnectionTable, Refusal};
use crate::telemetry::Metrics;

/// Seconds after which a refused caller may try again.
const RETRY_AFTER_S: u64 = 1;
/// How long a refused caller has to read the reason. If the connection were closed at once, its unread request would
/// make the system discard the answer.
const REFUSED_LINGER: Duration = Duration::from_millis(500);
/// How long a caller has to read the answer if its body was not read to the end.
const UNREAD_LINGER: Duration = Duration::from_secs(2);

/// Resolution of the clock of the HTTP stack.
const CLOCK_STEP: Duration = Duration::from_millis(500);

/// Idle time of a connection before the system probes the caller, and time between two probes. It is shorter than the
/// idle time after which firewalls and load balancers forget a connection, most of which wait for minutes.
const PROBE_EVERY: Duration = Duration::from_secs(30);

/// Lets the system probe the caller while there is nothing to send. A caller may wait for hours for a whole answer,
/// and HTTP has no message for that time which all clients understand.
fn keep_alive(stream: &TcpStream) -> rustix::io::Result<()> {
    rustix::net::sockopt::set_tcp_keepidle(stream, PROBE_EVERY)?;
    rustix::net::sockopt::set_tcp_keepintvl(stream, PROBE_EVERY)?;
    rustix::net::sockopt::set_socket_keepalive(stream, true)
}

/// Limits on the connections of a listener.
pub(super) struct ConnectionLimits {
    /// Maximum number of connections at once.
    pub(super) all_max: usize,
    /// The limit on those of one address.
    pub(super) address: AddressLimit,
    /// How long the head of a request may take to arrive.
    pub(super) head_time_max: Duration,
    /// Whether callers speak TLS, so that they cannot read a refusal in clear.
    pub(super) is_tls: bool,
}

/// All connections of one listener.
pub(super) struct Connections {
    open: Mutex<OpenConnections>,
    ids: AtomicU64,
    open_gauge: IntGauge,
    gave_way: IntCounter,
    rejections: [(Refusal, IntCounter); 2],
    late_heads: IntCounter,
    head_time_max: Duration,
    is_tls: bool,
}

struct OpenConnections {
    table: ConnectionTable,
    /// The signals of the connections in the table.
    signals: HashMap<ConnectionId, Arc<CloseSignal>>,
}

/// Closes a connection from outside.
#[derive(Default)]
struct CloseSignal {
    is_over: AtomicBool,
    /// Whether a request is in flight.
    is_busy: AtomicBool,
    /// Requests whose head has arrived.
    requests: AtomicU64,
    reader: AtomicWaker,
}

impl CloseSignal {
    fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.reader.wake();
    }
}

/// The entry of a connection in the table, which is removed when this is dropped.
pub(super) struct ConnectionGuard {
    connections: Arc<Connections>,
    signal: Arc<CloseSignal>,
    id: ConnectionId,
    since: Instant,
}

/// The stream of an admitted connection, which ends when the connection has to give way.
pub(super) struct AdmittedStream {
    stream: TcpStream,
    guard: Arc<ConnectionGuard>,
    /// The deadline of a head that has begun to arrive, after the connection's first request.
    head_deadline: Option<HeadDeadline>,
}

/// The time at which the head of a further request has to have arrived. The HTTP stack has a deadline for the first
/// head only.
struct HeadDeadline {
    late_at: Pin<Box<Sleep>>,
    /// Requests of the connection when the head began.
    requests: u64,
}

impl Connections {
    pub(super) fn new(service: &str, limits: ConnectionLimits, metrics: &Metrics) -> Arc<Self> {
        let rejections = [Refusal::All, Refusal::Address].map(|limit| {
            let counter = &metrics.http().rejections;
            (limit, counter.with_label_values(&[service, limit.as_str()]))
        });
        let open = OpenConnections {
            table: ConnectionTable::new(limits.all_max, limits.address),
            signals: HashMap::new(),
        };
        Arc::new(Connections {
            open: Mutex::new(open),
            ids: AtomicU64::new(0),
            open_gauge: metrics.http().connections.with_label_values(&[service]),
            gave_way: metrics.http().gave_way.with_label_values(&[service]),
            rejections,
            late_heads: metrics
                .http()
                .rejections
                .with_label_values(&[service, "head_ms_max"]),
            head_time_max: limits.head_time_max,
            is_tls: limits.is_tls,
        })
    }

    /// Admits a connection, or answers with the reason for the refusal.
    pub(super) async fn admit(
        self: &Arc<Self>,
        stream: TcpStream,
    ) -> io::Result<(AdmittedStream, Option<SocketAddr>)> {
        let peer = stream.peer_addr().ok();
        if let Err(error) = keep_alive(&stream) {
            tracing::debug!(%error, "a connection is not kept alive");
        }
        match self.enter(peer) {
            Ok(guard) => {
                let guard = Arc::new(guard);
                let stream = AdmittedStream {
                    stream,
                    guard,
                    head_deadline: None,
                };
                Ok((stream, peer))
            }
            Err(refusal) => {
                if !self.is_tls {
                    refuse(stream, refusal).await;
                }
                Err(io::ErrorKind::ConnectionRefused.into())
            }
        }
    }

    fn enter(self: &Arc<Self>, peer: Option<SocketAddr>) -> Result<ConnectionGuard, Refusal> {
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let address = peer.map(|peer| peer.ip());
        let signal = Arc::new(CloseSignal::default());
        let mut open = self.open.lock();
        let gives_way = open
            .table
            .enter(id, address, Instant::now())
            .inspect_err(|refusal| {
                for (limit, counter) in &self.rejections {
                    counter.inc_by(u64::from(limit == refusal));
                }
            })?;
        let gives_way = gives_way.and_then(|id| open.signals.remove(&id));
        open.signals.insert(id, signal.clone());
        self.open_gauge.set(open.table.len() as i64);
        drop(open);
        if let Some(gives_way) = gives_way {
            self.gave_way.inc();
            gives_way.end();
        }
        Ok(ConnectionGuard {
            connections: self.clone(),
            signal,
            id,
            since: Instant::now(),
        })
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        let mut open = self.connections.open.lock();
        open.table.leave(self.id);
        open.signals.remove(&self.id);
        let requests = self.signal.requests.load(Ordering::Relaxed);
        // The HTTP stack closed the connection. Its clock has a resolution of half a second.
        let patience = self.connections.head_time_max.saturating_sub(CLOCK_STEP);
        if requests == 0 && self.since.elapsed() >= patience {
            self.connections.late_heads.inc();
        }
        self.connections.open_gauge.set(open.table.len() as i64);
    }
}

impl AdmittedStream {
    pub(super) fn connection(&self) -> Arc<ConnectionGuard> {
        self.guard.clone()
    }

    fn is_over(&self) -> bool {
        self.guard.signal.is_over.load(Ordering::Acquire)
    }

    fn over() -> io::Error {
        io::Error::new(
            io::ErrorKind::BrokenPipe,
            "the connection was closed to make room for another one",
        )
    }

    /// Whether a head that began to arrive is late.
    fn is_head_late(&mut self, context: &mut Context<'_>) -> bool {
        let requests = self.guard.signal.requests.load(Ordering::Relaxed);
        // The head has arrived if there is one request more.
        let begun = self.head_deadline.take();
        self.head_deadline = begun.filter(|head| head.requests == requests);
        let deadline = self.head_deadline.as_mut();
        deadline.is_some_and(|head| head.late_at.as_mut().poll(context).is_ready())
    }

    /// Notes that bytes have arrived. While no request is in flight, they begin the head of the next one.
    fn expect_head(&mut self, context: &mut Context<'_>) {
        let signal = &self.guard.signal;
        let requests = signal.requests.load(Ordering::Relaxed);
        let is_head = requests > 0 && !signal.is_busy.load(Ordering::Relaxed);
        if is_head && self.head_deadline.is_none() {
            let time_max = self.guard.connections.head_time_max;
            let mut late_at = Box::pin(tokio::time::sleep(time_max));
            // The task has to wake up at that time.
            let _ = late_at.as_mut().poll(context);
            self.head_deadline = Some(HeadDeadline { late_at, requests });
        }
    }

    /// Notes that the caller goes on reading an answer. Bytes that are written while no request is in flight are the
    /// rest of an answer, so the connection is not idle.
    fn wrote(&self) {
        let guard = &self.guard;
        if !guard.signal.is_busy.load(Ordering::Relaxed) {
            guard
                .connections
                .open
                .lock()
                .table
                .idle(guard.id, Instant::now());
        }
    }
}

impl AsyncRead for AdmittedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.guard.signal.reader.register(context.waker());
        if self.is_over() {
            // The listener closes the connection, as if the caller had closed its side.
            return Poll::Ready(Ok(()));
        }
        if self.is_head_late(context) {
            self.guard.connections.late_heads.inc();
            self.guard.signal.end();
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        if buffer.filled().len() > before {
            self.expect_head(context);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for AdmittedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.is_over() {
            return Poll::Ready(Err(Self::over()));
        }
        let written = ready!(Pin::new(&mut self.stream).poll_write(context, bytes))?;
        self.wrote();
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl ConnectionGuard {
    /// Marks the connection as busy until the returned guard is dropped.
    pub(super) fn busy(self: &Arc<Self>) -> RequestGuard {
        self.signal.is_busy.store(true, Ordering::Relaxed);
        self.signal.requests.fetch_add(1, Ordering::Relaxed);
        self.connections.open.lock().table.busy(self.id);
        RequestGuard {
            connection: self.clone(),
            closes: false,
        }
    }
}

/// A request in flight, until the body of its answer is complete.
pub(super) struct RequestGuard {
    connection: Arc<ConnectionGuard>,
    closes: bool,
}

impl RequestGuard {
    /// Sets whether the connection is closed after the answer, although the request's body may not have been read.
    pub(super) fn closing(mut self, closes: bool) -> Self {
        self.closes = closes;
        self
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        let guard = &self.connection;
        let now = Instant::now();
        guard.signal.is_busy.store(false, Ordering::Relaxed);
        guard.connections.open.lock().table.idle(guard.id, now);
        // Without a runtime the process is ending, and the connection with it.
        if self.closes
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let signal = Arc::downgrade(&guard.signal);
            runtime.spawn(async move {
                tokio::time::sleep(UNREAD_LINGER).await;
                if let Some(signal) = signal.upgrade() {
                    signal.end();
                }
            });
        }
    }
}

/// The body of an answer, whose request is in flight until the whole body has been given to the stream. After that
/// the connection counts as idle, even if the caller has not read all of it.
pub(super) struct TrackedBody {
    body: BoxBody,
    request: Option<RequestGuard>,
    /// The line of the access log, which is written at the end of the body.
    access: Option<AccessLine>,
    /// Bytes that are left, if that is known.
    left: Option<u64>,
}

impl TrackedBody {
    pub(super) fn new(
        body: BoxBody,
        request: Option<RequestGuard>,
        access: Option<AccessLine>,
    ) -> Self {
        let left = match body.size() {
            BodySize::None => Some(0),
            BodySize::Sized(bytes) => Some(bytes),
            BodySize::Stream => None,
        };
        TrackedBody {
            body,
            request,
            access,
            left,
        }
    }
}

impl MessageBody for TrackedBody {
    type Error = <BoxBody as MessageBody>::Error;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        let piece = ready!(Pin::new(&mut self.body).poll_next(context));
        if let Some(Ok(piece)) = &piece {
            self.left = self
                .left
                .map(|left| left.saturating_sub(piece.len() as u64));
        }
        if self.left == Some(0) || piece.is_none() {
            self.request = None;
            self.access = None;
        }
        Poll::Ready(piece)
    }
}

/// Sends the reason of a refusal and closes the connection.
async fn refuse(mut stream: TcpStream, refusal: Refusal) {
    let answer = refusal_answer(refusal);
    let answer_and_linger = async {
        // Some clients take an answer that arrives before their request for garbage.
        let mut unread = [0; 1024];
        if stream.read(&mut unread).await? == 0 {
            return Ok(());
        }
        stream.write_all(&answer).await?;
        stream.shutdown().await?;
        // Read until the caller closes its side.
        while stream.read(&mut unread).await? > 0 {}
        io::Result::Ok(())
    };
    // The answer is a courtesy: it does not matter if it is not delivered in time.
    let _ = tokio::time::timeout(REFUSED_LINGER, answer_and_linger).await;
}

fn refusal_answer(refusal: Refusal) -> Vec<u8> {
    let (status, kind, message) = match refusal {
        Refusal::All => (
            "503 Service Unavailable",
            ErrorKind::Unavailable,
            "this listener has reached its limit on connections; try again",
        ),
        Refusal::Address => (
            "429 Too Many Requests",
            ErrorKind::Overloaded,
            "your address has too many connections; close some, or use them for more requests",
        ),
    };
    let error = ApiError::new(kind, message).with_code("too_many_connections");
    let body = serde_json::to_string(&ErrorBody::from(&error)).unwrap_or_default();
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nretry-after: {RETRY_AFTER_S}\r\nconnection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::{socket_keepalive, tcp_keepidle, tcp_keepintvl};

    #[tokio::test]
    async fn the_system_probes_the_caller_of_an_idle_connection() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let _caller = TcpStream::connect(addr).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let limits = ConnectionLimits {
            all_max: 1,
            address: AddressLimit::default(),
            head_time_max: PROBE_EVERY,
            is_tls: false,
        };
        let connections = Connections::new("test", limits, &Metrics::new().unwrap());
        let (admitted, _) = connections.admit(stream).await.unwrap();
        let stream = &admitted.stream;
        assert!(socket_keepalive(stream).unwrap());
        assert_eq!(tcp_keepidle(stream).unwrap(), PROBE_EVERY);
        assert_eq!(tcp_keepintvl(stream).unwrap(), PROBE_EVERY);
    }
}
