//! Heartbeats to the scheduler.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_protocol::engine_order::EngineOrder;
use refrain_protocol::scheduling::{Heartbeat, KvReport};
use refrain_protocol::{ApiError, ErrorKind, WorkerId};
use refrain_rpc::Scheduler;
use tokio::sync::Notify;

use super::handle::WorkerHandle;
use crate::chunk::Command;
use crate::engine::WorkerEngine;
use crate::routing::fallback_worker;

/// Pause after a failed heartbeat.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// Timeout of a call: one that hangs must not let all leases expire.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a confirmation of the engine stays valid. A full worker sends many heartbeats per second, to learn early
/// about waiting tenants, and need not ask the engine each time.
const CONFIRMED_FOR: Duration = Duration::from_millis(500);
/// Shortest interval between heartbeats, whatever the scheduler asks for.
pub(super) const INTERVAL_MIN: Duration = Duration::from_millis(20);

/// Sends the heartbeats of a worker.
pub(crate) struct Heartbeats {
    worker: WorkerHandle,
    scheduler: Arc<dyn Scheduler>,
    incarnation: u64,
    /// Time of the engine's last confirmation.
    confirmed: Option<Instant>,
    /// The last report of the engine's KV cache.
    kv: Option<KvReport>,
    /// Whether the last heartbeat failed. Only changes are logged, since heartbeats are repeated several times a
    /// second.
    scheduler_fails: bool,
    /// The same of the last confirmation of the engine.
    engine_fails: bool,
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
            confirmed: None,
            kv: None,
            scheduler_fails: false,
            engine_fails: false,
            leaves: false,
        }
    }

    /// Sends a heartbeat. Returns the pause before the next one.
    pub(crate) async fn send(&mut self) -> Duration {
        let parts = self.worker.parts.clone();
        if let Some(replica) = &parts.replica {
            replica.observe();
        }
        parts.shared.parking.expire();
        if !self.leaves {
            self.confirm_engine().await;
        }
        let served = parts.engine.served();
        let trouble = self.worker.readiness().err();
        let config = &parts.shared.config;
        let heartbeat = Heartbeat {
            eagle3: parts.reports.own(),
            fallback: fallback_worker(&config.speculation),
            kv: self.kv.clone(),
            state: Some(parts.shared.orders.engine_state()),
            worker: WorkerId(config.id.clone()),
            incarnation: self.incarnation,
            url: config.advertise_url.clone(),
            model: served.model.to_owned(),
            tokenizer: served.tokenizer.to_owned(),
            max_context: served.limits.max_context,
            max_running: config.running_max,
            running: parts.admission.leases(),
            // A worker whose engine is away takes no new chunks, but keeps its leases.
            draining: trouble.is_some(),
            trouble: trouble.map(|why| sent_trouble(&why)),
            leaves: self.leaves,
            compiles_forms: parts.engine.compiles_forms(),
        };
        let reply = tokio::time::timeout(CALL_TIMEOUT, self.scheduler.heartbeat(heartbeat)).await;
        match reply.unwrap_or_else(|_| Err(timeout_error("the scheduler"))) {
            Ok(reply) => {
                if std::mem::take(&mut self.scheduler_fails) {
                    tracing::info!("the scheduler takes heartbeats again");
                }
                parts.reports.set_fallback(reply.fallback);
                if !reply.give_way.is_empty() {
                    // A driver that has stopped has no chunks to end.
                    let _ = parts.commands.try_send(Command::GiveWay(reply.give_way));
                }
                Duration::from_millis(reply.next_in_ms).max(INTERVAL_MIN)
            }
            Err(error) => {
                // Without a fresh report, no request is transferred to the other worker.
                parts.reports.set_fallback(None);
                if !std::mem::replace(&mut self.scheduler_fails, true) {
                    tracing::warn!(%error, "heartbeats fail; trying again");
                }
                RETRY_PAUSE
            }
        }
    }

    /// Asks the engine whether it is ready, unless it has just confirmed that, and reads its load.
    async fn confirm_engine(&mut self) {
        let parts = &self.worker.parts;
        let last = self.confirmed;
        if last.is_some_and(|last| last.elapsed() < CONFIRMED_FOR) {
            return;
        }
        let confirmed = tokio::time::timeout(CALL_TIMEOUT, parts.engine.confirm()).await;
        let mut confirmed = confirmed.unwrap_or_else(|_| Err(timeout_error("the engine")));
        // An engine that carries out an order may be silent for as long as that takes. Its calls tell if it is lost.
        if parts.shared.orders.gate().is_ordered() {
            confirmed = Ok(());
        }
        let failed_before = std::mem::replace(&mut self.engine_fails, confirmed.is_err());
        match &confirmed {
            Err(error) if !failed_before => {
                tracing::warn!(%error, "engine not ready; trying again");
            }
            Ok(()) if failed_before => tracing::info!("engine ready again"),
            _ => {}
        }
        self.confirmed = confirmed.is_ok().then(Instant::now);
        parts.shared.set_engine_ready(confirmed.is_ok());
        // An engine that does not answer in time has no report, rather than an old one.
        self.kv = match &parts.engine {
            WorkerEngine::Verifying(engine) => {
                // An engine of an earlier version has no such state.
                let state = tokio::time::timeout(CALL_TIMEOUT, engine.order(EngineOrder::Report));
                if let Ok(Ok(reply)) = state.await {
                    let version = reply.state.weight_version;
                    parts.shared.orders.set_weight_version(version);
                }
                let report = tokio::time::timeout(CALL_TIMEOUT, engine.kv_report()).await;
                let report = report.unwrap_or_default();
                if let Some(report) = &report {
                    let capacity = report.capacity_tokens.max(1) as f64;
                    let share = report.running_tokens as f64 / capacity;
                    parts.shared.metrics.kv_usage(share);
                }
                report
            }
            WorkerEngine::Streaming(engine) => {
                let metrics = &parts.shared.metrics;
                metrics.introduced(engine.take_introduction_counts());
                let load = tokio::time::timeout(CALL_TIMEOUT, engine.load()).await;
                load.ok().and_then(Result::ok).and_then(|load| {
                    metrics.engine_load(load);
                    load.kv_report()
                })
            }
        };
    }

    /// Sends heartbeats until aborted, the first one after `pause`. Once the worker is to leave, it sends a last one.
    pub(crate) async fn run(mut self, mut pause: Duration, leaving: Arc<Notify>) {
        let drain = self.worker.parts.drain.clone();
        let mut orders = self.worker.parts.ordered_drain.orders();
        let trainer_orders = self.worker.parts.shared.orders.clone();
        loop {
            let changes = trainer_orders.gate().changes();
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                // The scheduler should know of a drain at once.
                () = drain.begun(), if !drain.is_draining() => {}
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

fn timeout_error(who: &str) -> ApiError {
    ApiError::new(
        ErrorKind::Timeout,
        format!("{who} does not answer within {CALL_TIMEOUT:?}"),
    )
}

/// Longest reason that a heartbeat carries, characters.
const TROUBLE_CHARS_MAX: usize = 500;

/// A reason as heartbeats carry it.
pub(super) fn sent_trouble(why: &str) -> String {
    why.chars().take(TROUBLE_CHARS_MAX).collect()
}
