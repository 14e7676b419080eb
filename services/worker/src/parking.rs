//! Requests between two chunks: their text, own index and engine session stay here, so that the next chunk costs only
//! what is new.
//!
//! A parked request holds no slot and runs no step. It goes when its time is up or when the budget is needed for a
//! newer one, and then the gateway sends its whole context. So losing one costs time, never output.

mod table;

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use refrain_draft_replica::Uploader;
use refrain_protocol::chunk::{ChunkRequest, ParkedContext};
use refrain_protocol::engine::CloseRequest;
use refrain_protocol::error::code;
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind, LeaseId, NamespaceId, RequestId};

use self::table::{Limits, ParkedTable};
use crate::config::WorkerConfig;
use crate::engine::{VerifyingEngine, WorkerEngine};
use crate::metrics::{ParkingOutcome, WorkerMetrics};
use crate::orders::Orders;
use crate::running::ActiveRequest;

/// A request between two chunks.
struct ParkedRequest {
    running: ActiveRequest,
    /// The lease of its last chunk.
    lease: LeaseId,
}

/// The parked requests of a worker.
pub(crate) struct Parking {
    state: Mutex<ParkingState>,
    /// The engine whose sessions are parked with their requests; `None` for one that generates by itself.
    engine: Option<Arc<dyn VerifyingEngine>>,
    uploader: Uploader,
    metrics: Arc<WorkerMetrics>,
    /// While a trainer's order holds everything, no time passes for parked requests.
    orders: Arc<Orders>,
}

struct ParkingState {
    table: ParkedTable<ParkedRequest>,
    /// Nothing is parked any more, because the worker stops.
    is_closed: bool,
}

/// A parked request that a chunk is about to go on with. Dropping it parks it again, for the time that it has left.
pub(crate) struct TakenRequest {
    parking: Arc<Parking>,
    taken: Option<(ParkedRequest, Instant)>,
}

impl TakenRequest {
    /// Goes on with the request, whose next chunk begins now.
    pub(crate) fn resume(mut self, request: ChunkRequest, now: Instant) -> Option<ActiveRequest> {
        let (parked, _) = self.taken.take()?;
        self.parking.metrics.parked(ParkingOutcome::Resumed);
        Some(parked.running.resume(request, now))
    }
}

impl Drop for TakenRequest {
    fn drop(&mut self) {
        if let Some((parked, since)) = self.taken.take() {
            self.parking.insert(parked, since);
        }
    }
}

impl Parking {
    pub(crate) fn new(
        config: &WorkerConfig,
        engine: &WorkerEngine,
        uploader: Uploader,
        metrics: Arc<WorkerMetrics>,
        orders: Arc<Orders>,
    ) -> Self {
        let limits = Limits {
            entries: config.parked_requests_max as usize,
            tokens: config.parked_tokens_max,
            time: Duration::from_millis(config.parked_ms_max),
        };
        Parking {
            state: Mutex::new(ParkingState {
                table: ParkedTable::new(limits),
                is_closed: false,
            }),
            engine: match engine {
                WorkerEngine::Verifying(engine) => Some(engine.clone()),
                WorkerEngine::Streaming(_) => None,
            },
            uploader,
            metrics,
            orders,
        }
    }

    /// Parks a request whose chunk has ended, with its session in the engine.
    ///
    /// # Errors
    /// Returns the request if it cannot be parked.
    #[allow(
        clippy::result_large_err,
        reason = "the request comes back as it went in"
    )]
    pub(crate) fn park(&self, running: ActiveRequest, lease: LeaseId) -> Result<(), ActiveRequest> {
        {
            let state = self.state.lock();
            if state.is_closed || !state.table.takes(u64::from(running.text.len())) {
                return Err(running);
            }
        }
        let session = running.session.id;
        self.insert(ParkedRequest { running, lease }, self.now());
        self.tell_engine(CloseRequest {
            sessions: vec![session],
            keep_kv: true,
            parks: true,
        });
        Ok(())
    }

    /// Takes out the request that a chunk goes on with.
    ///
    /// # Errors
    /// The code [`code::CONTEXT_GONE`]: it is not here, or not with this context.
    pub(crate) fn take(
        self: &Arc<Self>,
        request: RequestId,
        namespace: NamespaceId,
        wanted: &ParkedContext,
    ) -> Result<TakenRequest, ApiError> {
        self.expire();
        let taken = self.state.lock().table.take(&request);
        self.show();
        if let Some((mut parked, since)) = taken {
            if parked.running.namespace == namespace && parked.running.parked_context() == *wanted {
                return Ok(TakenRequest {
                    parking: self.clone(),
                    taken: Some((parked, since)),
                });
            }
            self.let_go(parked, ParkingOutcome::Dropped);
        }
        self.metrics.parked(ParkingOutcome::Gone);
        let message = "this worker no longer has the context of the request; send all of it";
        Err(ApiError::new(ErrorKind::NotFound, message).with_code(code::CONTEXT_GONE))
    }

    /// Drops a request that begins anew with its whole context.
    pub(crate) fn forget(&self, request: RequestId) {
        let taken = self.state.lock().table.take(&request);
        if let Some((parked, _)) = taken {
            self.let_go(parked, ParkingOutcome::Dropped);
            self.show();
        }
    }

    /// Drops the request whose last chunk had this lease, since its output has ended.
    pub(crate) fn forget_lease(&self, lease: LeaseId) {
        let taken = self
            .state
            .lock()
            .table
            .take_where(|parked| parked.lease == lease);
        if let Some(parked) = taken {
            self.let_go(parked, ParkingOutcome::Dropped);
            self.show();
        }
    }

    /// Drops the requests whose time is up.
    pub(crate) fn expire(&self) {
        let now = self.now();
        let expired = self.state.lock().table.expire(now);
        if expired.is_empty() {
            return;
        }
        for parked in expired {
            self.let_go(parked, ParkingOutcome::Expired);
        }
        self.show();
    }

    /// Number of parked requests.
    pub(crate) fn len(&self) -> usize {
        self.state.lock().table.len()
    }

    fn now(&self) -> Instant {
        self.orders.working_time(Instant::now())
    }

    /// Drops all requests, and parks none from now on.
    pub(crate) fn close(&self) {
        let all = {
            let mut state = self.state.lock();
            state.is_closed = true;
            state.table.clear()
        };
        for parked in all {
            self.let_go(parked, ParkingOutcome::Dropped);
        }
        self.show();
    }

    fn insert(&self, parked: ParkedRequest, since: Instant) {
        let request = parked.running.request.request;
        let tokens = u64::from(parked.running.text.len());
        let gone = {
            let mut state = self.state.lock();
            match state.is_closed {
                true => vec![parked],
                false => state.table.insert(request, parked, tokens, since),
            }
        };
        for parked in gone {
            self.let_go(parked, ParkingOutcome::Evicted);
        }
        self.show();
    }

    /// Gives up what a request has here. The engine may keep its KV while there is room.
    fn let_go(&self, parked: ParkedRequest, outcome: ParkingOutcome) {
        self.metrics.parked(outcome);
        let running = parked.running;
        self.uploader
            .release(running.namespace, running.document.id);
        self.close_session(running.session.id, true);
    }

    /// Closes the engine's session of a request that is not parked.
    pub(crate) fn close_session(&self, session: EngineSessionId, keep_kv: bool) {
        self.tell_engine(CloseRequest {
            sessions: vec![session],
            keep_kv,
            parks: false,
        });
    }

    /// Tells the engine in the background, so that nobody waits for it. A session that the engine is not told of
    /// expires by itself.
    fn tell_engine(&self, request: CloseRequest) {
        let Some(engine) = self.engine.clone() else {
            return;
        };
        tokio::spawn(async move {
            if let Err(error) = engine.close(request).await {
                tracing::debug!(%error, "engine session was neither parked nor closed");
            }
        });
    }

    fn show(&self) {
        let state = self.state.lock();
        let families = &self.metrics.families;
        families.parked_requests.set(state.table.len() as i64);
        let tokens = state.table.tokens();
        families.parked_tokens.set(tokens.cast_signed());
    }
}
