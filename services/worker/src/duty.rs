//! Heartbeats to the scheduler.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use refrain_protocol::scheduling::Heartbeat;
use refrain_protocol::{ApiError, ErrorKind, WorkerId};
use refrain_rpc::Scheduler;

use crate::WorkerHandle;
use crate::decode::Command;
use crate::engine::WorkerEngine;
use crate::fallback::other_worker;

/// Pause after a heartbeat that did not arrive.
const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// One call that hangs must not let all leases lapse.
const CALL_TIMEOUT: Duration = Duration::from_secs(1);
/// How long an engine's word that it is well holds: a full worker reports many times a second, so as to hear who
/// waits.
const CONFIRMED_FOR: Duration = Duration::from_millis(500);
/// Never more often than this, whatever the scheduler says.
const PAUSE_MIN: Duration = Duration::from_millis(20);

/// What a worker says of itself.
pub(crate) struct Duty {
    worker: WorkerHandle,
    scheduler: Arc<dyn Scheduler>,
    incarnation: u64,
    /// When the engine last said that it is well.
    confirmed: Mutex<Option<Instant>>,
}

impl Duty {
    pub(crate) fn new(
        worker: WorkerHandle,
        scheduler: Arc<dyn Scheduler>,
    ) -> Result<Self, ApiError> {
        let incarnation = refrain_service_kit::random::u128()? as u64;
        Ok(Duty {
            worker,
            scheduler,
            incarnation,
            confirmed: Mutex::default(),
        })
    }

    /// Reports once. Returns when to report again.
    pub(crate) async fn report(&self) -> Duration {
        let inner = &self.worker.inner;
        if let Some(memory) = &inner.memory {
            memory.observe();
        }
        self.ask_engine().await;
        let served = inner.engine.served();
        let heartbeat = Heartbeat {
            eagle3: inner.reports.own(),
            fallback: other_worker(&inner.config.speculation),
            worker: WorkerId(inner.config.id.clone()),
            incarnation: self.incarnation,
            url: inner.config.advertise_url.clone(),
            model: served.model.to_owned(),
            tokenizer: served.tokenizer.to_owned(),
            max_context: served.max_context,
            max_running: inner.config.running_max,
            running: inner.slots.leases(),
            // A worker whose engine is away takes nothing new, but keeps its leases.
            draining: self.worker.readiness().is_err(),
        };
        let reply = tokio::time::timeout(CALL_TIMEOUT, self.scheduler.heartbeat(heartbeat)).await;
        match reply.unwrap_or_else(|_| Err(late("the scheduler"))) {
            Ok(reply) => {
                inner.reports.hear(reply.fallback);
                if !reply.give_way.is_empty() {
                    // A loop that is gone has nothing to end.
                    let _ = inner.commands.try_send(Command::GiveWay(reply.give_way));
                }
                Duration::from_millis(reply.next_in_ms).max(PAUSE_MIN)
            }
            Err(error) => {
                // What is not heard of is not handed over to.
                inner.reports.hear(None);
                tracing::warn!(%error, "the scheduler did not take a heartbeat");
                RETRY_PAUSE
            }
        }
    }

    /// Asks how the engine is, unless it has only just said that it is well.
    async fn ask_engine(&self) {
        let inner = &self.worker.inner;
        let last = *self.confirmed();
        if last.is_some_and(|last| last.elapsed() < CONFIRMED_FOR) {
            return;
        }
        let confirmed = tokio::time::timeout(CALL_TIMEOUT, inner.engine.confirm()).await;
        let confirmed = confirmed.unwrap_or_else(|_| Err(late("the engine")));
        if let Err(error) = &confirmed {
            tracing::warn!(%error, "engine not ready");
        }
        *self.confirmed() = confirmed.is_ok().then(Instant::now);
        inner
            .engine_ready
            .store(confirmed.is_ok(), Ordering::Relaxed);
        if let WorkerEngine::Streaming(engine) = &inner.engine {
            inner.metrics.streaming.introduced(engine.take_introduced());
            if let Ok(Ok(load)) = tokio::time::timeout(CALL_TIMEOUT, engine.load()).await {
                inner.metrics.streaming.load(load);
            }
        }
    }

    fn confirmed(&self) -> MutexGuard<'_, Option<Instant>> {
        self.confirmed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports again and again, first after `pause`, until aborted.
    pub(crate) async fn go_on(self, mut pause: Duration) {
        let drain = self.worker.inner.drain.clone();
        loop {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                // A drain is news.
                () = drain.begun(), if !drain.is_draining() => {}
            }
            pause = self.report().await;
        }
    }
}

fn late(who: &str) -> ApiError {
    ApiError::new(
        ErrorKind::Timeout,
        format!("{who} does not answer within {CALL_TIMEOUT:?}"),
    )
}
