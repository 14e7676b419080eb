//! Snapshots of the queue, for `/debug/state`.

use std::cmp::Reverse;

use serde::Serialize;

use super::cost::PARTS_PER_TOKEN;
use super::pool_queue::PoolQueue;
use crate::dispatch::pool_key::PoolKey;

/// Maximum number of tenants that a snapshot shows per pool.
const TENANTS_SHOWN_MAX: usize = 100;

/// The queue of one pool.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PoolState {
    model: String,
    tokenizer: String,
    /// Requests that wait, and those of them that are rollouts.
    waiting: usize,
    rollouts_waiting: usize,
    /// Leases of rollouts that are held.
    rollouts_running: u64,
    /// How long recent chunks held their slots.
    service_ms: u64,
    /// Tokens that recent chunks wrote.
    output_tokens: u64,
    /// The correlation of the lengths of recent rollouts with those of earlier outputs to the same prompt, and with
    /// those of other members of the group, in hundredths.
    history_correlation_percent: i64,
    sibling_correlation_percent: i64,
    /// How many more tokens per step chunks had that could draft from a finished member of their group, in
    /// hundredths.
    reference_gain_percent: i64,
    /// Whether these say that an order by lengths pays, and one that lets other members finish first.
    order_by_lengths_pays: bool,
    order_by_references_pays: bool,
    /// Tenants whose served tokens are remembered.
    tenants_tracked: usize,
    /// The busiest of them.
    tenants: Vec<TenantState>,
}

/// One tenant in the queue of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct TenantState {
    tenant: String,
    /// Requests that wait.
    waiting: usize,
    /// Leases that are held.
    running: u32,
    /// Tokens that it was charged for, by their cost and its weight.
    served: u64,
}

impl PoolState {
    pub(super) fn of(key: &PoolKey, pool: &PoolQueue) -> Self {
        let mut tenants: Vec<TenantState> = pool
            .tenants
            .iter()
            .map(|(tenant, queue)| TenantState {
                tenant: tenant.to_string(),
                waiting: queue.waiting(),
                running: queue.running,
                served: queue.served / PARTS_PER_TOKEN,
            })
            .collect();
        let tenants_tracked = tenants.len();
        tenants.sort_by_key(|tenant| Reverse((tenant.waiting, tenant.running)));
        tenants.truncate(TENANTS_SHOWN_MAX);
        let [history, siblings] = pool.evidence.correlations();
        let pays = pool.evidence.pays();
        let percent = |value: f64| (value * 100.0).round() as i64;
        PoolState {
            model: key.model.to_string(),
            tokenizer: key.tokenizer.to_string(),
            waiting: pool.waiting(),
            rollouts_waiting: pool.waiting[1],
            rollouts_running: pool.running[1],
            service_ms: pool.service_ms.round() as u64,
            output_tokens: pool.output_tokens.round() as u64,
            history_correlation_percent: percent(history),
            sibling_correlation_percent: percent(siblings),
            reference_gain_percent: percent(pool.evidence.reference_gain()),
            order_by_lengths_pays: pays.lengths,
            order_by_references_pays: pays.references,
            tenants_tracked,
            tenants,
        }
    }
}
