//! The connections of a listener: each holds a place (`places.rs`), and can be told to end while nothing is asked of
//! it.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use actix_web::body::{BodySize, BoxBody, MessageBody};
use bytes::Bytes;
use futures_util::task::AtomicWaker;
use prometheus::{IntCounter, IntGauge};
use refrain_protocol::openai::ErrorBody;
use refrain_protocol::{ApiError, ErrorKind};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;

use super::places::{AddressLimit, Id, Places, Refusal};
use crate::telemetry::Metrics;

/// When a refused caller may try again.
const RETRY_AFTER_S: u64 = 1;
/// How long a refused caller has to read why: closed at once, what it has sent unread would destroy the answer on its
/// way.
const REFUSED_LINGER: Duration = Duration::from_millis(500);
/// How long a caller whose body was not read to its end has to read the answer.
const UNREAD_LINGER: Duration = Duration::from_secs(2);

/// All connections of one listener. Cheap to clone.
#[derive(Clone)]
pub(super) struct Connections {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    ids: AtomicU64,
    open: IntGauge,
    gave_way: IntCounter,
    rejections: [(Refusal, IntCounter); 2],
}

struct State {
    places: Places,
    /// Those that hold a place.
    open: HashMap<Id, Arc<Signal>>,
}

/// Tells a connection that it is over.
#[derive(Default)]
struct Signal {
    is_over: AtomicBool,
    /// A request is carried out.
    is_busy: AtomicBool,
    reader: AtomicWaker,
}

impl Signal {
    fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.reader.wake();
    }
}

/// A connection's place; gone with the connection.
pub(super) struct Place {
    shared: Arc<Shared>,
    signal: Arc<Signal>,
    id: Id,
}

/// What requests know of their connection.
#[derive(Clone)]
pub(super) struct Connection(Arc<Place>);

/// A stream that ends when its place is wanted.
pub(super) struct Placed {
    stream: TcpStream,
    place: Arc<Place>,
}

impl Connections {
    pub(super) fn new(
        service: &str,
        all_max: usize,
        address: AddressLimit,
        metrics: &Metrics,
    ) -> Self {
        let rejections = [Refusal::All, Refusal::Address].map(|limit| {
            let counter = metrics.http_rejections();
            (limit, counter.with_label_values(&[service, limit.as_str()]))
        });
        let state = State {
            places: Places::new(all_max, address),
            open: HashMap::new(),
        };
        Connections {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                ids: AtomicU64::new(0),
                open: metrics.http_connections().with_label_values(&[service]),
                gave_way: metrics.http_gave_way().with_label_values(&[service]),
                rejections,
            }),
        }
    }

    /// Takes a connection in, or refuses it with a word.
    pub(super) async fn admit(
        &self,
        stream: TcpStream,
    ) -> io::Result<(Placed, Option<SocketAddr>)> {
        let peer = stream.peer_addr().ok();
        match self.enter(peer) {
            Ok(place) => {
                let place = Arc::new(place);
                Ok((Placed { stream, place }, peer))
            }
            Err(refusal) => {
                refuse(stream, refusal).await;
                Err(io::ErrorKind::ConnectionRefused.into())
            }
        }
    }

    fn enter(&self, peer: Option<SocketAddr>) -> Result<Place, Refusal> {
        let shared = &self.shared;
        let id = shared.ids.fetch_add(1, Ordering::Relaxed);
        let address = peer.map(|peer| peer.ip());
        let signal = Arc::new(Signal::default());
        let mut state = shared.state();
        let gives_way = state
            .places
            .enter(id, address, Instant::now())
            .inspect_err(|refusal| {
                for (limit, counter) in &shared.rejections {
                    counter.inc_by(u64::from(limit == refusal));
                }
            })?;
        let gives_way = gives_way.and_then(|id| state.open.remove(&id));
        state.open.insert(id, signal.clone());
        shared.open.set(state.places.len() as i64);
        drop(state);
        if let Some(gives_way) = gives_way {
            shared.gave_way.inc();
            gives_way.end();
        }
        Ok(Place {
            shared: self.shared.clone(),
            signal,
            id,
        })
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.places.leave(self.id);
        state.open.remove(&self.id);
        self.shared.open.set(state.places.len() as i64);
    }
}

impl Placed {
    pub(super) fn connection(&self) -> Connection {
        Connection(self.place.clone())
    }

    fn is_over(&self) -> bool {
        self.place.signal.is_over.load(Ordering::Acquire)
    }

    fn over() -> io::Error {
        io::Error::new(io::ErrorKind::BrokenPipe, "the connection gave way")
    }

    /// What is written while no request is carried out is the rest of an answer: whoever goes on taking it is not
    /// idle.
    fn wrote(&self) {
        let place = &self.place;
        if !place.signal.is_busy.load(Ordering::Relaxed) {
            place.shared.state().places.idle(place.id, Instant::now());
        }
    }
}

impl AsyncRead for Placed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.place.signal.reader.register(context.waker());
        if self.is_over() {
            // As if its caller had closed it, which is what the listener knows how to go about.
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Placed {
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

impl Connection {
    /// A request is carried out for as long as this lives.
    pub(super) fn busy(&self) -> Busy {
        self.0.signal.is_busy.store(true, Ordering::Relaxed);
        self.0.shared.state().places.busy(self.0.id);
        Busy {
            connection: self.clone(),
            closes: false,
        }
    }
}

/// A request under way, until its answer's body is complete.
pub(super) struct Busy {
    connection: Connection,
    closes: bool,
}

impl Busy {
    /// Whether the connection is closed behind the answer, though the request's body may not have come to its end.
    pub(super) fn closing(mut self, closes: bool) -> Self {
        self.closes = closes;
        self
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let place = &self.connection.0;
        let now = Instant::now();
        place.signal.is_busy.store(false, Ordering::Relaxed);
        place.shared.state().places.idle(place.id, now);
        // Where the runtime is ending, the connection ends with it.
        if self.closes
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let signal = Arc::downgrade(&place.signal);
            runtime.spawn(async move {
                tokio::time::sleep(UNREAD_LINGER).await;
                if let Some(signal) = signal.upgrade() {
                    signal.end();
                }
            });
        }
    }
}

/// An answer's body, and the request that is under way until all of it has been given to the stream. What the caller
/// then leaves unread keeps no place.
pub(super) struct BusyBody {
    body: BoxBody,
    busy: Option<Busy>,
    /// Bytes to come, where that is known.
    left: Option<u64>,
}

impl BusyBody {
    pub(super) fn new(body: BoxBody, busy: Option<Busy>) -> Self {
        let left = match body.size() {
            BodySize::None => Some(0),
            BodySize::Sized(bytes) => Some(bytes),
            BodySize::Stream => None,
        };
        BusyBody { body, busy, left }
    }
}

impl MessageBody for BusyBody {
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
            self.busy = None;
        }
        Poll::Ready(piece)
    }
}

/// Says why, and closes.
async fn refuse(mut stream: TcpStream, refusal: Refusal) {
    let answer = refusal_answer(refusal);
    let lingers = async {
        // An answer that comes before the request is taken for garbage by some clients.
        let mut unread = [0; 1024];
        if stream.read(&mut unread).await? == 0 {
            return Ok(());
        }
        stream.write_all(&answer).await?;
        stream.shutdown().await?;
        // Until it closes, too.
        while stream.read(&mut unread).await? > 0 {}
        io::Result::Ok(())
    };
    // It hears of it, or it does not.
    let _ = tokio::time::timeout(REFUSED_LINGER, lingers).await;
}

fn refusal_answer(refusal: Refusal) -> Vec<u8> {
    let (status, error) = match refusal {
        Refusal::All => (
            "503 Service Unavailable",
            ApiError::new(
                ErrorKind::Unavailable,
                "all connections of this listener are in use; try again",
            ),
        ),
        Refusal::Address => (
            "429 Too Many Requests",
            ApiError::new(
                ErrorKind::Overloaded,
                "too many connections of your address; close some, or use them for more requests",
            ),
        ),
    };
    let error = error.with_code("too_many_connections");
    let body = serde_json::to_string(&ErrorBody::from(&error)).unwrap_or_default();
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nretry-after: {RETRY_AFTER_S}\r\nconnection: close\r\n\r\n{body}"
    )
    .into_bytes()
}
