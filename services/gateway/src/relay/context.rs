//! The objects that all requests share on their way through the mesh.

use std::sync::Arc;
use std::time::Duration;

use refrain_accounts::NONE;
use refrain_rpc::{Scheduler, Workers};

use crate::config::{GatewayConfig, GatewayTuning};
use crate::deps::GatewayDeps;
use crate::metrics::GatewayMetrics;
use crate::models::Models;
use crate::relay::draft_memory::DraftMemory;
use crate::relay::implicit_groups::ImplicitGroups;
use crate::relay::request_time::RequestTime;
use crate::relay::retry_budget::RetryBudget;

/// The services, budgets and limits that every request uses.
pub(crate) struct RelayContext {
    pub(crate) scheduler: Arc<dyn Scheduler>,
    pub(crate) workers: Arc<dyn Workers>,
    pub(crate) memory: DraftMemory,
    pub(crate) models: Arc<Models>,
    pub(crate) metrics: Arc<GatewayMetrics>,
    /// The runtime on which leases are given back.
    pub(crate) tasks: tokio::runtime::Handle,
    pub(crate) retries: RetryBudget,
    /// How long an interactive request waits for a scheduler.
    pub(crate) scheduler_wait: Duration,
    /// How long a rollout waits for a scheduler, or for a worker.
    pub(crate) rollout_scheduler_wait: Duration,
    pub(crate) groups: ImplicitGroups,
    pub(crate) time: Arc<RequestTime>,
    pub(crate) tuning: GatewayTuning,
}

impl RelayContext {
    /// Creates the objects.
    ///
    /// # Errors
    /// The registry has one of the metrics already.
    pub(crate) fn new(
        config: &GatewayConfig,
        deps: &GatewayDeps,
        models: Arc<Models>,
        metrics: Arc<GatewayMetrics>,
    ) -> anyhow::Result<Self> {
        let tasks = tokio::runtime::Handle::current();
        let rejections = metrics.accounts.rejections();
        let rollout_max = match config.rollout_ms_max {
            0 => Duration::MAX,
            most => Duration::from_millis(most),
        };
        Ok(RelayContext {
            scheduler: deps.scheduler.clone(),
            workers: deps.workers.clone(),
            memory: DraftMemory::new(deps.store.clone(), metrics.clone(), tasks.clone()),
            models,
            retries: RetryBudget::new(
                config.retry_share,
                config.tuning.retries_per_s_min,
                &deps.metrics,
                rejections.with_label_values(&[NONE, "retries"]),
            )?,
            scheduler_wait: Duration::from_millis(config.scheduler_wait_ms),
            rollout_scheduler_wait: Duration::from_millis(config.rollout_scheduler_wait_ms),
            groups: ImplicitGroups::new(
                Duration::from_millis(config.implicit_group_window_ms),
                config.implicit_groups_max,
                metrics.families.implicit_groups.clone(),
            ),
            metrics,
            tasks,
            time: Arc::new(RequestTime::new(
                Duration::from_millis(config.request_ms_max),
                rollout_max,
            )),
            tuning: config.tuning.clone(),
        })
    }
}
