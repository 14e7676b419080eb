//! Asks the engine of a worker whether it is ready, and reads its load.
//!
//! This goes on beside the heartbeats, which send what is known: an engine that does not answer delays none of them.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use refrain_protocol::engine_order::EngineOrder;
use refrain_protocol::scheduling::KvReport;
use refrain_protocol::{ApiError, ErrorKind};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::handle::WorkerHandle;
use crate::engine::WorkerEngine;

/// Timeout of a call to the engine.
const CALL_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a confirmation of the engine stays valid. A full worker sends many heartbeats per second, to learn early
/// about waiting tenants, and need not ask the engine each time.
const CONFIRMED_FOR: Duration = Duration::from_millis(500);

/// The news of the engine beside its readiness, and the signals between its checks and the heartbeats.
#[derive(Default)]
pub(super) struct EngineNews {
    /// The last report of the engine's KV cache.
    pub(super) kv: Mutex<Option<KvReport>>,
    /// A heartbeat is due soon.
    pub(super) wanted: Notify,
    /// The engine has become ready, or is no longer.
    pub(super) turned: Notify,
}

/// Checks the engine of a worker.
#[derive(Clone)]
pub(super) struct EngineChecks {
    worker: WorkerHandle,
    news: Arc<EngineNews>,
    /// Time of the engine's last confirmation.
    confirmed: Option<Instant>,
    /// Whether the last confirmation failed. Only changes are logged, since the engine is asked often.
    fails: bool,
}

impl EngineChecks {
    pub(super) fn new(worker: WorkerHandle, news: Arc<EngineNews>) -> Self {
        EngineChecks {
            worker,
            news,
            confirmed: None,
            fails: false,
        }
    }

    /// Checks the engine whenever a heartbeat wants news, until it is dropped.
    pub(super) async fn run(mut self) {
        loop {
            self.news.wanted.notified().await;
            self.check().await;
        }
    }

    /// Asks the engine whether it is ready, unless it has just confirmed that, and reads its load.
    pub(super) async fn check(&mut self) {
        let parts = &self.worker.parts;
        let last = self.confirmed;
        if last.is_some_and(|last| last.elapsed() < CONFIRMED_FOR) {
            return;
        }
        let confirmed = tokio::time::timeout(CALL_TIMEOUT, parts.engine.confirm()).await;
        let mut confirmed = confirmed.unwrap_or_else(|_| {
            let message = format!("the engine does not answer within {CALL_TIMEOUT:?}");
            Err(ApiError::new(ErrorKind::Timeout, message))
        });
        // An engine that carries out an order may be silent for as long as that takes. Its calls tell if it is lost.
        if parts.shared.orders.gate().is_ordered() {
            confirmed = Ok(());
        }
        let failed_before = std::mem::replace(&mut self.fails, confirmed.is_err());
        match &confirmed {
            Err(error) if !failed_before => {
                tracing::warn!(%error, "engine not ready; trying again");
            }
            Ok(()) if failed_before => tracing::info!("engine ready again"),
            _ => {}
        }
        self.confirmed = confirmed.is_ok().then(Instant::now);
        parts.shared.set_engine_ready(confirmed.is_ok());
        if self.fails != failed_before {
            self.news.turned.notify_one();
        }
        // An engine that does not answer in time has no report, rather than an old one.
        let kv = self.load().await;
        *self.news.kv.lock() = kv;
    }

    /// Reads the load of the engine. Returns its report of its KV cache.
    async fn load(&self) -> Option<KvReport> {
        let parts = &self.worker.parts;
        match &parts.engine {
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
        }
    }
}
