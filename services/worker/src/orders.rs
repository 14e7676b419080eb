//! The state that a trainer's orders leave in a worker: its pause, its requests, and the version of its weights.
//!
//! `service/trainer_orders.rs` carries the orders out. Both drivers ask the [`Gate`] here which requests go on.

mod gate;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use refrain_protocol::engine_order::{EngineState, PauseMode};
use tokio::sync::watch;

use crate::metrics::WorkerMetrics;

pub(crate) use self::gate::{Fate, Gate, Pause};

/// The gate, and those who stand at it.
#[derive(Clone, Copy, Debug, Default)]
struct OrdersState {
    gate: Gate,
    /// Chunks here.
    chunks: u32,
    /// Those of them whose requests began in the present pause.
    held: u32,
    /// The changes of the gate that the decode loop has followed.
    followed: u64,
}

/// The state that a trainer's orders leave.
pub(crate) struct Orders {
    state: watch::Sender<OrdersState>,
    /// Callers that wait for the number of chunks.
    count_waiters: AtomicUsize,
    weight_version: AtomicU64,
    /// The turn of orders that the engine carries out.
    pub(crate) engine_turn: tokio::sync::Mutex<()>,
    metrics: Arc<WorkerMetrics>,
}

impl Orders {
    /// `has_steps`: a decode loop follows the gate, step by step.
    pub(crate) fn new(has_steps: bool, metrics: Arc<WorkerMetrics>) -> Self {
        let state = OrdersState {
            followed: if has_steps { 0 } else { u64::MAX },
            ..OrdersState::default()
        };
        Orders {
            state: watch::Sender::new(state),
            count_waiters: AtomicUsize::new(0),
            weight_version: AtomicU64::new(0),
            engine_turn: tokio::sync::Mutex::default(),
            metrics,
        }
    }

    /// The gate as it is now.
    pub(crate) fn gate(&self) -> Gate {
        self.state.borrow().gate
    }

    /// An instant on the clock that stands still while the gate is shut.
    pub(crate) fn working_time(&self, now: Instant) -> Instant {
        self.gate().working_time(now)
    }

    /// The version of the weights, as far as it is known.
    pub(crate) fn weight_version(&self) -> u64 {
        self.weight_version.load(Ordering::Relaxed)
    }

    /// Notes the version of the weights.
    pub(crate) fn set_weight_version(&self, version: u64) {
        // Every step comes here, so the usual case is only a read.
        if self.weight_version() != version {
            self.weight_version.store(version, Ordering::Relaxed);
            self.metrics.weight_version(version);
        }
    }

    /// The state for trainers and operators.
    pub(crate) fn engine_state(&self) -> EngineState {
        let state = self.state.borrow();
        EngineState {
            weight_version: self.weight_version(),
            pause: state.gate.pause().map(|pause| pause.mode),
            running: state.chunks - state.held,
            held: state.held,
        }
    }

    /// Lets a chunk in. It stands at the gate until the ticket is dropped.
    pub(crate) fn enter(self: &Arc<Self>, has_output: bool) -> Ticket {
        let mut begun_in = 0;
        self.change_counts(|state| {
            begun_in = state.gate.begins_in(has_output);
            state.chunks += 1;
            state.held += u32::from(begun_in > 0);
        });
        self.show();
        Ticket {
            orders: self.clone(),
            begun_in,
        }
    }

    /// Begins a pause, or changes its mode. Returns it, and whether there was none before.
    pub(crate) fn begin_pause(&self, mode: PauseMode) -> (Pause, bool) {
        let now = Instant::now();
        let begin = |gate: &mut Gate| {
            let is_first = gate.pause().is_none();
            (gate.begin_pause(mode, now), is_first)
        };
        let mut begun = begin(&mut self.gate());
        self.state
            .send_modify(|state| begun = begin(&mut state.gate));
        self.show();
        begun
    }

    /// Notes that the requests have ended that a pause waited for.
    pub(crate) fn settle(&self, pause: Pause) {
        let settle = |state: &mut OrdersState| state.gate.settle(pause, Instant::now());
        self.state.send_modify(settle);
    }

    /// Ends the pause.
    pub(crate) fn end_pause(&self) {
        self.state.send_modify(|state| {
            state.gate.end_pause(Instant::now());
            state.held = 0;
        });
        self.show();
    }

    /// Notes an order that the engine carries out, until the guard is dropped. While it is `loading`, the engine
    /// generates nothing.
    pub(crate) fn engine_call(&self, is_loading: bool) -> EngineCallGuard<'_> {
        let begin = |state: &mut OrdersState| state.gate.set_call(true, is_loading, Instant::now());
        self.state.send_modify(begin);
        EngineCallGuard {
            orders: self,
            is_loading,
        }
    }

    /// Notes that the decode loop has followed these changes of the gate: no step is under way that they forbid.
    pub(crate) fn follow(&self, changes: u64) {
        self.state.send_if_modified(|state| {
            let is_news = state.followed < changes;
            state.followed = state.followed.max(changes);
            is_news
        });
    }

    /// Waits until the gate has changed since then.
    pub(crate) async fn changed_since(&self, changes: u64) {
        self.wait(|state| state.gate.changes() != changes).await;
    }

    /// Waits until the decode loop has followed the gate as it is now.
    pub(crate) async fn followed(&self) {
        let changes = self.gate().changes();
        self.wait(|state| state.followed >= changes).await;
    }

    /// Waits until no request runs that a pause waits for. Returns whether the pause still stands.
    pub(crate) async fn none_runs(&self, pause: Pause) -> bool {
        let is_over = |state: &OrdersState| {
            let now = state.gate.pause();
            now.is_none_or(|now| !now.is_same(&pause))
        };
        self.wait_for_counts(|state| is_over(state) || state.chunks == state.held)
            .await;
        !is_over(&self.state.borrow())
    }

    /// Waits until a request runs.
    pub(crate) async fn some_run(&self) {
        self.wait_for_counts(|state| state.chunks > state.held)
            .await;
    }

    /// Changes the number of chunks. Every chunk watches the gate, so that each beginning and each end would wake all
    /// of them: only callers that wait for the number are told.
    fn change_counts(&self, change: impl FnOnce(&mut OrdersState)) {
        self.state.send_if_modified(|state| {
            change(state);
            self.count_waiters.load(Ordering::SeqCst) > 0
        });
    }

    async fn wait_for_counts(&self, holds: impl FnMut(&OrdersState) -> bool) {
        // Whoever changes the number after the first look at the state also sees this.
        let _waiter = CountWaiter::new(&self.count_waiters);
        self.wait(holds).await;
    }

    async fn wait(&self, holds: impl FnMut(&OrdersState) -> bool) {
        let mut state = self.state.subscribe();
        // The sender is here, so it cannot be gone.
        let _ = state.wait_for(holds).await;
    }

    fn show(&self) {
        let state = self.engine_state();
        self.metrics.pause(state.pause, state.held);
    }
}

/// Counts a caller that waits for the number of chunks.
struct CountWaiter<'a>(&'a AtomicUsize);

impl<'a> CountWaiter<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        CountWaiter(count)
    }
}

impl Drop for CountWaiter<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A chunk's place at the gate.
pub(crate) struct Ticket {
    orders: Arc<Orders>,
    begun_in: u64,
}

impl Ticket {
    /// The number of the pause in which its request began; 0: in none.
    pub(crate) fn begun_in(&self) -> u64 {
        self.begun_in
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let begun_in = self.begun_in;
        self.orders.change_counts(|state| {
            state.chunks -= 1;
            state.held -= u32::from(state.gate.is_new(begun_in));
        });
        self.orders.show();
    }
}

/// An order that the engine carries out.
pub(crate) struct EngineCallGuard<'a> {
    orders: &'a Orders,
    is_loading: bool,
}

impl Drop for EngineCallGuard<'_> {
    fn drop(&mut self) {
        let is_loading = self.is_loading;
        self.orders
            .state
            .send_modify(|state| state.gate.set_call(false, is_loading, Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::atomic::AtomicBool;
    use std::task::{Context, Poll, Wake, Waker};

    use futures_util::FutureExt as _;
    use refrain_service_kit::telemetry::Metrics;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    impl Woken {
        fn is_set(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn chunks_that_come_and_go_wake_only_those_who_wait_for_their_number() {
        let metrics = Metrics::new().unwrap();
        let metrics = WorkerMetrics::new(&metrics, "model", Default::default()).unwrap();
        let orders = Arc::new(Orders::new(false, Arc::new(metrics)));
        let (by_gate, by_number) = (Arc::new(Woken::default()), Arc::new(Woken::default()));
        let (of_gate, of_number) = (Waker::from(by_gate.clone()), Waker::from(by_number.clone()));
        let mut gate = pin!(orders.changed_since(orders.gate().changes()));
        let mut context = Context::from_waker(&of_gate);
        assert!(gate.as_mut().poll(&mut context).is_pending());
        let ticket = orders.enter(false);
        assert!(!by_gate.is_set());
        let (pause, _) = orders.begin_pause(PauseMode::Wait);
        assert!(by_gate.is_set());
        assert!(gate.as_mut().poll(&mut context).is_ready());
        {
            let mut ended = pin!(orders.none_runs(pause));
            let mut context = Context::from_waker(&of_number);
            assert!(ended.as_mut().poll(&mut context).is_pending());
            drop(ticket);
            assert!(by_number.is_set());
            assert_eq!(ended.as_mut().poll(&mut context), Poll::Ready(true));
        }
        assert_eq!(orders.count_waiters.load(Ordering::SeqCst), 0);
        // A chunk that ended before the call is known as well.
        assert_eq!(orders.none_runs(pause).now_or_never(), Some(true));
    }
}
