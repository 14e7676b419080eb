//! Heartbeats to the scheduler.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use refrain_clients::Scheduler;
use refrain_protocol::WorkerId;
use refrain_protocol::scheduling::Heartbeat;

use crate::WorkerHandle;

/// Pause after a heartbeat that did not arrive.
const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// Never more often than this, whatever the scheduler says.
const PAUSE_MIN: Duration = Duration::from_millis(20);

/// Reports for duty until aborted.
pub(crate) async fn report(worker: WorkerHandle, scheduler: Arc<dyn Scheduler>) {
    let incarnation = crate::random_u128() as u64;
    loop {
        let inner = &worker.inner;
        inner.memory.observe();
        if !inner.engine_ready.load(Ordering::Relaxed) && inner.engine.load().await.is_ok() {
            inner.engine_ready.store(true, Ordering::Relaxed);
        }
        let capabilities = inner.engine.capabilities();
        let heartbeat = Heartbeat {
            worker: WorkerId(inner.config.id.clone()),
            incarnation,
            url: inner.config.advertise_url.clone(),
            model: capabilities.model.clone(),
            tokenizer: capabilities.tokenizer.clone(),
            max_context: capabilities.max_context,
            max_running: inner.config.running_max,
            running: inner.slots.leases(),
            // A worker whose engine is away takes nothing new, but keeps its leases.
            draining: worker.readiness().is_err(),
        };
        let pause = match scheduler.heartbeat(heartbeat).await {
            Ok(reply) => Duration::from_millis(reply.next_in_ms).max(PAUSE_MIN),
            Err(error) => {
                tracing::warn!(%error, "the scheduler did not take a heartbeat");
                RETRY_PAUSE
            }
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // A drain is news.
            () = inner.drain.begun(), if !inner.drain.is_draining() => {}
        }
    }
}
