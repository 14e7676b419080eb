//! Asks the scheduler now and then which models are served.

use std::sync::Arc;
use std::time::Duration;

use refrain_rpc::Scheduler;
use refrain_service_kit::actors::{self, Actor};
use refrain_service_kit::backoff::jittered;

use super::Models;

/// How long the start waits for a first answer of the scheduler. Without one the gateway starts, but is not ready.
const FIRST_POLL_TIMEOUT: Duration = Duration::from_millis(500);

/// Asks once, and then keeps asking until it is aborted.
pub(crate) async fn poll_served(
    scheduler: Arc<dyn Scheduler>,
    models: Arc<Models>,
    period: Duration,
) -> Actor {
    let first = poll(&*scheduler, &models, FIRST_POLL_TIMEOUT).await;
    let follow = move || follow(scheduler.clone(), models.clone(), period, first);
    actors::start("models", follow)
}

/// Asks once. Returns whether the scheduler answered.
async fn poll(scheduler: &dyn Scheduler, models: &Models, timeout: Duration) -> bool {
    match tokio::time::timeout(timeout, scheduler.models()).await {
        Ok(Ok(served)) => {
            models.update(served);
            true
        }
        _ => false,
    }
}

/// Keeps asking. A scheduler that cannot be reached grants no leases, so no model is ready meanwhile.
async fn follow(
    scheduler: Arc<dyn Scheduler>,
    models: Arc<Models>,
    period: Duration,
    mut is_reachable: bool,
) {
    loop {
        tokio::time::sleep(jittered(period)).await;
        let answered = poll(&*scheduler, &models, period.max(FIRST_POLL_TIMEOUT)).await;
        if !answered {
            models.update(Vec::new());
        }
        if answered != is_reachable {
            is_reachable = answered;
            match answered {
                true => tracing::info!("the scheduler answers"),
                false => {
                    tracing::warn!("the scheduler does not answer; no model is ready meanwhile");
                }
            }
        }
    }
}
