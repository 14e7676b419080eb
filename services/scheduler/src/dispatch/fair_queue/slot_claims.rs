//! The choice of the leases to preempt, see `dispatch/preemption.rs`.

use std::collections::BTreeMap;

use refrain_protocol::LeaseId;
use refrain_protocol::scheduling::LeaseRequest;

use super::pool_queue::PoolQueue;
use super::waiting_request::LeaseCallId;

/// The conditions under which waiting requests may claim a slot of a full worker.
pub(crate) struct SlotDemand<'a> {
    /// Slots of the pool.
    pub(crate) slots: u64,
    /// Requests that were submitted later have to wait.
    pub(crate) submitted_ms_max: u64,
    /// Whether the worker could take the request.
    pub(crate) fits: &'a dyn Fn(&LeaseRequest) -> bool,
}

/// The leases of a tenant that can be preempted.
#[derive(Debug, Default)]
pub(crate) struct PreemptibleLeases {
    /// Number of leases that are being preempted already, on any worker.
    pub(crate) preempted: u32,
    /// Grant times and ids of those that could be preempted. The last one is preempted first.
    pub(crate) leases: Vec<(u64, LeaseId)>,
}

impl PoolQueue {
    /// Claims slots of tenants above their share for requests of tenants below theirs. Returns the leases to end.
    /// Each is for one request, which is first in the queue from now on.
    pub(in crate::dispatch) fn claim_slots(
        &mut self,
        demand: SlotDemand<'_>,
        mut preemptible: BTreeMap<String, PreemptibleLeases>,
    ) -> Vec<LeaseId> {
        let active = self
            .tenants
            .values()
            .filter(|queue| queue.is_active())
            .count();
        let share = demand.slots / active.max(1) as u64;
        let share = u32::try_from(share.max(1)).unwrap_or(u32::MAX);
        let mut preempted = Vec::new();
        for (_, calls) in self.claimants(&demand, share) {
            for call in calls {
                let most_over = preemptible
                    .iter_mut()
                    .filter(|(_, of_tenant)| !of_tenant.leases.is_empty())
                    .filter_map(|(tenant, of_tenant)| {
                        let queue = self.tenants.get(tenant)?;
                        let keeps = queue.running.saturating_sub(of_tenant.preempted);
                        (keeps > share).then_some((keeps, of_tenant))
                    })
                    .max_by_key(|(keeps, _)| *keeps);
                let Some((_, of_tenant)) = most_over else {
                    break;
                };
                if let Some((_, lease)) = of_tenant.leases.pop() {
                    of_tenant.preempted += 1;
                    self.claimed.insert(call);
                    preempted.push(lease);
                }
            }
        }
        preempted
    }

    /// The requests that may claim a slot, by tenant: tokens served and calls. The least served tenant comes first.
    fn claimants(&self, demand: &SlotDemand<'_>, share: u32) -> Vec<(u64, Vec<LeaseCallId>)> {
        let mut claimants: Vec<(u64, Vec<LeaseCallId>)> = Vec::new();
        for queue in self.tenants.values() {
            let waiting = queue.waiting.iter();
            let claimed = waiting
                .clone()
                .filter(|(call, _)| self.claimed.contains(call));
            let has = queue.running + u32::try_from(claimed.count()).unwrap_or(u32::MAX);
            let calls = waiting
                .filter(|(call, waiting)| {
                    !self.claimed.contains(call)
                        && waiting.submitted_ms <= demand.submitted_ms_max
                        && (demand.fits)(&waiting.request)
                })
                .map(|(call, _)| *call);
            let calls: Vec<LeaseCallId> = calls.take(share.saturating_sub(has) as usize).collect();
            if !calls.is_empty() {
                claimants.push((queue.served, calls));
            }
        }
        claimants.sort_by_key(|(served, calls)| (*served, calls[0]));
        claimants
    }
}
