//! The thread that owns the model, and the queue of commands for it.
//!
//! A forward pass keeps a core busy for milliseconds. On an async worker it would stall all other tasks. So the model
//! has an OS thread of its own with a bounded queue.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use refrain_protocol::engine::{CloseRequest, EngineLoad, StepRequest, StepResponse};
use refrain_protocol::scheduling::KvReport;
use refrain_protocol::{ApiError, EngineSessionId, ErrorKind, TenantId};
use tokio::sync::{oneshot, watch};

use super::metrics::EngineMetrics;
use super::prefill_price::PrefillPrice;
use crate::engine::EngineCore;
use crate::model::Model;

/// Delay after which a caller that the full queue refused may try again. It is the time of a few steps.
const QUEUE_RETRY_AFTER_MS: u64 = 50;

/// The model thread's queue, and the load that the thread reports.
pub(super) struct ModelThread {
    queue: Mutex<CommandQueue>,
    wake: Condvar,
    load: watch::Sender<EngineLoad>,
    steps_max: usize,
    /// Only the thread changes it, between two steps.
    weight_version: AtomicU64,
    metrics: EngineMetrics,
}

#[derive(Default)]
struct CommandQueue {
    commands: VecDeque<EngineCommand>,
    /// Number of steps among the commands. Other commands are never refused: each has a waiting caller, and the
    /// number of callers is limited by the connections.
    steps: usize,
    closed: bool,
}

enum EngineCommand {
    Step(StepRequest, oneshot::Sender<Result<StepResponse, ApiError>>),
    Close(CloseRequest, oneshot::Sender<()>),
    Report(oneshot::Sender<KvReport>),
    Forget(Forgotten, oneshot::Sender<()>),
    /// The sessions of a tenant, except those that run. The reply has the number of both.
    ForgetTenant(TenantId, oneshot::Sender<(usize, usize)>),
    /// A new version begins, with another model or with the same one.
    Renew(Option<Arc<Model>>, Option<u64>, oneshot::Sender<()>),
}

/// The sessions that an order makes the engine forget.
pub(super) enum Forgotten {
    /// Those that are kept for reuse.
    Kept,
    /// All, open ones as well.
    All,
}

impl ModelThread {
    pub(super) fn new(steps_max: usize, weight_version: u64, metrics: EngineMetrics) -> Self {
        ModelThread {
            queue: Mutex::default(),
            wake: Condvar::new(),
            load: watch::Sender::default(),
            steps_max,
            weight_version: AtomicU64::new(weight_version),
            metrics,
        }
    }

    /// Runs a step after the waiting commands.
    ///
    /// # Errors
    /// `Overloaded` when too many steps wait, `Unavailable` after [`ModelThread::end`], and the faults of the step.
    pub(super) async fn step(&self, request: StepRequest) -> Result<StepResponse, ApiError> {
        let (sender, receiver) = oneshot::channel();
        {
            let mut queue = self.open_queue()?;
            if queue.steps >= self.steps_max {
                let error = ApiError::new(
                    ErrorKind::Overloaded,
                    format!("{} steps are already waiting; try again later", queue.steps),
                )
                .with_code("engine_queue_full")
                .with_retry_after_ms(QUEUE_RETRY_AFTER_MS);
                self.metrics.rejected(&error);
                return Err(error);
            }
            queue.steps += 1;
            let step = EngineCommand::Step(request, sender);
            queue.commands.push_back(step);
        }
        self.wake.notify_one();
        receiver.await.unwrap_or_else(|_| Err(thread_ended()))
    }

    /// Closes sessions after the waiting commands.
    ///
    /// # Errors
    /// `Unavailable` after [`ModelThread::end`].
    pub(super) async fn close(&self, request: CloseRequest) -> Result<(), ApiError> {
        let (sender, receiver) = oneshot::channel();
        self.push(EngineCommand::Close(request, sender))?;
        receiver.await.map_err(|_| thread_ended())
    }

    /// Reports the KV cache after the waiting commands.
    ///
    /// # Errors
    /// `Unavailable` after [`ModelThread::end`].
    pub(super) async fn kv_report(&self) -> Result<KvReport, ApiError> {
        let (sender, receiver) = oneshot::channel();
        self.push(EngineCommand::Report(sender))?;
        receiver.await.map_err(|_| thread_ended())
    }

    /// Forgets sessions after the waiting commands.
    ///
    /// # Errors
    /// `Unavailable` after [`ModelThread::end`].
    pub(super) async fn forget(&self, forgotten: Forgotten) -> Result<(), ApiError> {
        let (sender, receiver) = oneshot::channel();
        self.push(EngineCommand::Forget(forgotten, sender))?;
        receiver.await.map_err(|_| thread_ended())
    }

    /// Forgets the sessions of a tenant after the waiting commands, except running ones. Returns the number of the
    /// former and of the latter.
    ///
    /// # Errors
    /// `Unavailable` after [`ModelThread::end`].
    pub(super) async fn forget_tenant(&self, tenant: TenantId) -> Result<(usize, usize), ApiError> {
        let (sender, receiver) = oneshot::channel();
        self.push(EngineCommand::ForgetTenant(tenant, sender))?;
        receiver.await.map_err(|_| thread_ended())
    }

    /// Begins a new version of the weights after the waiting commands, with `model` if there is one. `None` as its
    /// number is one more than the present one. All sessions end.
    ///
    /// # Errors
    /// `Unavailable` after [`ModelThread::end`].
    pub(super) async fn renew(
        &self,
        model: Option<Arc<Model>>,
        version: Option<u64>,
    ) -> Result<(), ApiError> {
        let (sender, receiver) = oneshot::channel();
        self.push(EngineCommand::Renew(model, version, sender))?;
        receiver.await.map_err(|_| thread_ended())
    }

    /// The version of the weights of the next step.
    pub(super) fn weight_version(&self) -> u64 {
        self.weight_version.load(Ordering::Acquire)
    }

    /// Publishes the version of the weights for the metrics.
    pub(super) fn publish_version(&self) {
        let gauge = &self.metrics.families.weight_version;
        gauge.set(self.weight_version().cast_signed());
    }

    fn push(&self, command: EngineCommand) -> Result<(), ApiError> {
        self.open_queue()?.commands.push_back(command);
        self.wake.notify_one();
        Ok(())
    }

    /// Closes sessions before all waiting commands, and prevents waiting steps from opening them.
    ///
    /// # Errors
    /// `Unavailable` after [`ModelThread::end`].
    pub(super) async fn abort(&self, sessions: Vec<EngineSessionId>) -> Result<(), ApiError> {
        let (sender, receiver) = oneshot::channel();
        {
            let mut queue = self.open_queue()?;
            for command in &mut queue.commands {
                if let EngineCommand::Step(request, _) = command {
                    let items = request.items.iter_mut();
                    items
                        .filter(|item| sessions.contains(&item.session))
                        .for_each(|item| item.open = None);
                }
            }
            let request = CloseRequest {
                sessions,
                keep_kv: false,
                parks: false,
            };
            let close = EngineCommand::Close(request, sender);
            queue.commands.push_front(close);
        }
        self.wake.notify_one();
        receiver.await.map_err(|_| thread_ended())
    }

    fn open_queue(&self) -> Result<MutexGuard<'_, CommandQueue>, ApiError> {
        let queue = self.queue.lock();
        if queue.closed {
            let message = "the engine is shutting down";
            return Err(ApiError::new(ErrorKind::Unavailable, message));
        }
        Ok(queue)
    }

    /// Refuses new commands. The thread ends after the waiting ones.
    pub(super) fn end(&self) {
        self.queue.lock().closed = true;
        self.wake.notify_all();
    }

    /// Returns the engine's load.
    pub(super) fn load(&self) -> EngineLoad {
        let steps = self.queue.lock().steps;
        EngineLoad {
            steps_waiting: steps as u32,
            ..*self.load.borrow()
        }
    }

    #[cfg(test)]
    pub(super) fn watch_load(&self) -> watch::Receiver<EngineLoad> {
        self.load.subscribe()
    }

    /// Executes commands until [`ModelThread::end`]. This is the body of the thread.
    pub(super) fn run(&self, core: &mut EngineCore, idle_check: Duration) {
        let mut checked = Instant::now();
        let mut price = PrefillPrice::default();
        while let Some(command) = self.next(idle_check) {
            match command {
                // The caller has gone, so nobody relies on the effect of this step.
                Some(EngineCommand::Step(_, reply)) if reply.is_closed() => {}
                Some(EngineCommand::Step(request, reply)) => {
                    let answer = self.execute(core, &mut price, request);
                    self.publish_load(core);
                    // If the caller has gone by now, its sessions expire.
                    let _ = reply.send(answer);
                }
                Some(EngineCommand::Close(request, reply)) => {
                    match request.parks {
                        true => core.park(&request.sessions, Instant::now()),
                        false => core.close(&request),
                    }
                    self.publish_load(core);
                    let _ = reply.send(());
                }
                Some(EngineCommand::Report(reply)) => {
                    let report = KvReport {
                        prefill_ms_per_1k: price.ms_per_1k(),
                        ..core.kv_report()
                    };
                    let _ = reply.send(report);
                }
                Some(EngineCommand::Forget(forgotten, reply)) => {
                    match forgotten {
                        Forgotten::Kept => core.forget_kept(),
                        Forgotten::All => core.forget_all(),
                    }
                    self.publish_load(core);
                    let _ = reply.send(());
                }
                Some(EngineCommand::ForgetTenant(tenant, reply)) => {
                    let counts = core.forget_tenant(tenant, Instant::now());
                    self.publish_load(core);
                    let _ = reply.send(counts);
                }
                Some(EngineCommand::Renew(model, version, reply)) => {
                    core.forget_all();
                    let version = version.unwrap_or_else(|| self.weight_version().wrapping_add(1));
                    core.renew(model, version);
                    self.weight_version.store(version, Ordering::Release);
                    self.publish_version();
                    self.publish_load(core);
                    let _ = reply.send(());
                }
                None => {}
            }
            if checked.elapsed() >= idle_check {
                checked = Instant::now();
                let expired = core.expire(checked) as u64;
                self.metrics.families.expired.inc_by(expired);
                self.publish_load(core);
            }
        }
    }

    /// Returns the next command, `Some(None)` if none came for `wait`, or `None` if the thread should end.
    #[allow(clippy::option_option, reason = "three outcomes, in one place")]
    fn next(&self, wait: Duration) -> Option<Option<EngineCommand>> {
        let mut queue = self.queue.lock();
        let is_idle = |queue: &mut CommandQueue| queue.commands.is_empty() && !queue.closed;
        let _ = self.wake.wait_while_for(&mut queue, is_idle, wait);
        let command = queue.commands.pop_front();
        if matches!(command, Some(EngineCommand::Step(..))) {
            queue.steps -= 1;
        }
        if command.is_none() && queue.closed {
            None
        } else {
            Some(command)
        }
    }

    fn execute(
        &self,
        core: &mut EngineCore,
        price: &mut PrefillPrice,
        request: StepRequest,
    ) -> Result<StepResponse, ApiError> {
        let started = Instant::now();
        let ids: Vec<EngineSessionId> = request.items.iter().map(|item| item.session).collect();
        // All state that a panic can leave half changed is discarded: the batch's sessions below, and the buffers by
        // the next pass, which resizes them.
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let mut batch = core.begin(request, started)?;
            let drafting = Instant::now();
            let draft_s = match core.draft(&mut batch) {
                true => drafting.elapsed().as_secs_f64(),
                false => 0.0,
            };
            Ok((core.verify(batch, started), draft_s))
        }));
        let seconds = started.elapsed().as_secs_f64();
        match outcome {
            Ok(Ok((stepped, draft_s))) => {
                self.metrics.stepped(&stepped, seconds);
                let evicted = core.take_parked_evicted();
                self.metrics.families.parked_evicted.inc_by(evicted);
                price.learn(&stepped, seconds - draft_s);
                Ok(StepResponse {
                    results: stepped.results,
                    step_s: seconds,
                    draft_s,
                    weight_version: self.weight_version(),
                })
            }
            Ok(Err(error)) => {
                self.metrics.rejected(&error);
                Err(error)
            }
            Err(_) => {
                self.metrics.families.panics.inc();
                tracing::error!(
                    sessions = ids.len(),
                    "an engine step panicked; its sessions are lost"
                );
                core.close(&CloseRequest {
                    sessions: ids,
                    keep_kv: false,
                    parks: false,
                });
                Err(ApiError::internal("the engine step panicked"))
            }
        }
    }

    /// Publishes the load for [`ModelThread::load`] and the metrics.
    pub(super) fn publish_load(&self, core: &EngineCore) {
        let (open, kept) = core.sessions().counts();
        let (kv_tokens, kv_tokens_max) = core.sessions().kv_tokens();
        let load = EngineLoad {
            sessions_open: open as u32,
            sessions_parked: core.sessions().parked() as u32,
            sessions_kept: kept as u32,
            kv_tokens,
            kv_tokens_max,
            steps_waiting: self.queue.lock().steps as u32,
        };
        self.metrics.load(&load, core.sessions().state_tokens());
        if let Some(grammars) = core.grammars() {
            self.metrics.forms(grammars);
        }
        self.load.send_replace(load);
    }
}

fn thread_ended() -> ApiError {
    ApiError::internal("the model thread ended")
}
