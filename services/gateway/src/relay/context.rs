//! The objects that all requests share on their way through the mesh.

use std::sync::Arc;
use std::time::Duration;

use refrain_rpc::{Scheduler, Workers};

use crate::config::GatewayTuning;
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
