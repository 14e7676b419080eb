//! Heartbeats to the scheduler.

use std::sync::Arc;
use std::time::Duration;

use refrain_protocol::scheduling::Heartbeat;
use refrain_protocol::{ApiError, ErrorKind, WorkerId};
use refrain_rpc::{HEARTBEAT_RETRY_PAUSE, HEARTBEAT_TIMEOUT, Scheduler};
use refrain_service_kit::actors::{self, Actor};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::engine_checks::{EngineChecks, EngineNews};
use super::handle::WorkerHandle;
use crate::chunk::{Command, EndOrder};
use crate::routing::fallback_worker;

/// How long before a heartbeat the engine is asked for what the heartbeat reports.
const CHECK_LEAD_MAX: Duration = Duration::from_millis(100);
/// Shortest interval between heartbeats, whatever the scheduler asks for.
pub(super) const INTERVAL_MIN: Duration = Duration::from_millis(20);

/// Sends the heartbeats of a worker.
#[derive(Clone)]
pub(crate) struct Heartbeats {
    worker: WorkerHandle,
    scheduler: Arc<dyn Scheduler>,
    incarnation: u64,
    /// The news of the engine.
    engine: Arc<EngineNews>,
    /// Whether the last heartbeat failed. Only changes are logged, since heartbeats are repeated several times a
    /// second.
    scheduler_fails: bool,
    /// Whether the next heartbeat is the last one.
    leaves: bool,
}

impl Heartbeats {
    pub(crate) fn new(
        worker: WorkerHandle,
        scheduler: Arc<dyn Scheduler>,
        incarnation: u64,
    ) -> Self {
        Heartbeats {
            worker,
            scheduler,
            incarnation,
            engine: Arc::default(),
            scheduler_fails: false,
            leaves: false,
        }
    }

    /// Sends a heartbeat with what is known of the engine. Returns the pause before the next one.
    async fn send(&mut self) -> Duration {
        let parts = self.worker.parts.clone();
        if let Some(replica) = &parts.replica {
            replica.observe();
        }
        parts.shared.parking.expire();
        let served = parts.engine.served();
        let trouble = self.worker.readiness().err();
        let config = &parts.shared.config;
        let heartbeat = Heartbeat {
            eagle3: parts.reports.own(),
            fallback: fallback_worker(&config.speculation),
            kv: self.engine.kv.lock().clone(),
            state: Some(parts.shared.orders.engine_state()),
            worker: WorkerId(config.id.clone()),
            incarnation: self.incarnation,
            url: config.advertise_url.clone(),
            model: served.model.to_owned(),
            tokenizer: served.tokenizer.to_owned(),
            max_context: served.limits.max_context,
            max_running: config.running_max,
            running: parts.admission.leases(),
            epoch_seen: parts.admission.epoch_seen(),
            // A worker whose engine is away takes no new chunks, but keeps its leases.
            draining: trouble.is_some(),
            trouble: trouble.map(|why| sent_trouble(&why)),
            leaves: self.leaves,
            compiles_forms: parts.engine.compiles_forms(),
        };
        let reply = self.scheduler.heartbeat(heartbeat);
        let reply = tokio::time::timeout(HEARTBEAT_TIMEOUT, reply).await;
        let timeout = |_| {
            let message = format!("the scheduler does not answer within {HEARTBEAT_TIMEOUT:?}");
            Err(ApiError::new(ErrorKind::Timeout, message))
        };
        match reply.unwrap_or_else(timeout) {
            Ok(reply) => {
                if std::mem::take(&mut self.scheduler_fails) {
                    tracing::info!("the scheduler takes heartbeats again");
                }
                parts.reports.set_fallback(reply.fallback);
                if !reply.give_way.is_empty() {
                    // A driver that has stopped has no chunks to end.
                    let order = EndOrder::GiveWay(reply.give_way);
                    let _ = parts.commands.try_send(Command::EndChunks(order));
                }
                Duration::from_millis(reply.next_in_ms).max(INTERVAL_MIN)
            }
            Err(error) => {
                // Without a fresh report, no request is transferred to the other worker.
                parts.reports.set_fallback(None);
                if !std::mem::replace(&mut self.scheduler_fails, true) {
                    tracing::warn!(%error, "heartbeats fail; trying again");
                }
                HEARTBEAT_RETRY_PAUSE
            }
        }
    }

    /// Asks the engine whether it is ready, and sends the first heartbeat. Returns the actor that sends the others
    /// until `leaving` is notified. It then sends a last one.
    pub(crate) async fn start(mut self, leaving: Arc<Notify>) -> Actor {
        let checks = EngineChecks::new(self.worker.clone(), self.engine.clone());
        checks.clone().check().await;
        let pause = self.send().await;
        actors::start("heartbeats", move || {
            let (checks, heartbeats) = (checks.clone(), self.clone());
            let leaving = leaving.clone();
            async move {
                tokio::select! {
                    () = checks.run() => {}
                    () = heartbeats.run(pause, leaving) => {}
                }
            }
        })
    }

    async fn run(mut self, mut pause: Duration, leaving: Arc<Notify>) {
        let drain = self.worker.parts.drain.clone();
        let mut orders = self.worker.parts.ordered_drain.orders();
        let trainer_orders = self.worker.parts.shared.orders.clone();
        let engine = self.engine.clone();
        loop {
            let changes = trainer_orders.gate().changes();
            let due = Instant::now() + pause;
            tokio::select! {
                () = until(due, pause, &engine) => {}
                // The scheduler should know of a drain at once, and of an engine that fails or answers again.
                () = drain.begun(), if !drain.is_draining() => {}
                () = engine.turned.notified() => {}
                Ok(()) = orders.changed() => {}
                () = trainer_orders.changed_since(changes) => {}
                () = leaving.notified() => {
                    self.leaves = true;
                    self.send().await;
                    return;
                }
            }
            pause = self.send().await;
        }
    }
}

/// Waits for the next heartbeat, and asks for news of the engine shortly before.
async fn until(due: Instant, pause: Duration, engine: &EngineNews) {
    tokio::time::sleep_until(due - CHECK_LEAD_MAX.min(pause / 2)).await;
    engine.wanted.notify_one();
    tokio::time::sleep_until(due).await;
}

/// Longest reason that a heartbeat carries, characters.
const TROUBLE_CHARS_MAX: usize = 500;

/// A reason as heartbeats carry it.
pub(super) fn sent_trouble(why: &str) -> String {
    why.chars().take(TROUBLE_CHARS_MAX).collect()
}
