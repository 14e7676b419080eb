//! The choice of the leases to preempt, see `dispatch/preemption.rs`.

use std::collections::{BTreeMap, HashMap};

use refrain_protocol::LeaseId;
use refrain_protocol::scheduling::{LeaseRequest, RequestClass};

use super::classes::{CLASSES, ClassRules, index, kept_slots};
use super::pool_queue::{PoolQueue, TenantQueue};
use super::waiting_request::{LeaseCallId, WaitingRequest};

const ROLLOUTS: usize = 1;
/// Maximum number of requests of one line that are looked at for a claim.
const LINE_LOOKED_AT_MAX: usize = 32;

/// The conditions under which waiting requests may claim a slot of a full worker.
pub(in crate::dispatch) struct SlotDemand<'a> {
    /// Slots of the pool.
    pub(in crate::dispatch) slots: u64,
    /// Requests that were submitted later have to wait.
    pub(in crate::dispatch) submitted_ms_max: u64,
    /// Whether the worker could take the request.
    pub(in crate::dispatch) fits: &'a dyn Fn(&LeaseRequest) -> bool,
}

/// A lease that may be preempted.
#[derive(Clone, Debug)]
pub(in crate::dispatch) struct PreemptibleLease {
    pub(in crate::dispatch) lease: LeaseId,
    pub(in crate::dispatch) tenant: String,
    pub(in crate::dispatch) class: RequestClass,
    pub(in crate::dispatch) granted_ms: u64,
    /// Its chunk ends by itself soon, because its length is limited.
    pub(in crate::dispatch) bounded: bool,
}

/// Whether a lease gives way to interactive requests.
fn yields(one: &PreemptibleLease) -> bool {
    one.class == RequestClass::Rollout && !one.bounded
}

/// How many slots may be claimed.
struct Quotas {
    /// All that could be preempted.
    slots: usize,
    /// All slots of the pool, of which tenants have shares.
    of_all: u64,
    /// Rollouts give way to interactive requests, whatever their tenants.
    rollouts_yield: bool,
}

/// A waiting request that may claim a slot.
#[derive(Clone, Copy, Debug)]
struct Claimant<'a> {
    tenant: &'a str,
    class: RequestClass,
    call: LeaseCallId,
}

impl PoolQueue {
    /// Claims slots for waiting requests. Returns the leases to end. Each is for one request, which is first in the
    /// queue from now on.
    ///
    /// A tenant below its share claims from tenants above theirs. Interactive requests also claim from rollouts
    /// whose chunks have no limit, while rollouts have more than they keep. A tenant past its lead claims so from its
    /// own rollouts only.
    pub(super) fn claim_slots(
        &mut self,
        waiting: &HashMap<LeaseCallId, WaitingRequest>,
        demand: &SlotDemand<'_>,
        rules: ClassRules,
        mut preemptible: Vec<PreemptibleLease>,
    ) -> Vec<LeaseId> {
        let kept = kept_slots(rules.rollout_share, demand.slots);
        let first_max = self.interactive_first_max(rules);
        let rollouts_yield = preemptible.iter().any(yields) && self.rollouts_that_stay() > kept;
        let slots = match rollouts_yield {
            true => preemptible.len(),
            false => self.leases_over(demand.slots, &preemptible),
        };
        if slots == 0 {
            return Vec::new();
        }
        let quotas = Quotas {
            slots,
            of_all: demand.slots,
            rollouts_yield,
        };
        let claimants: Vec<(String, RequestClass, LeaseCallId)> = self
            .claimants(waiting, demand, &quotas)
            .into_iter()
            .map(|claimant| (claimant.tenant.to_owned(), claimant.class, claimant.call))
            .collect();
        // The last one goes first: rollouts before interactive ones, and the longest-running before the others.
        preemptible.sort_by_key(|one| {
            let interactive = one.class == RequestClass::Interactive;
            std::cmp::Reverse((interactive, one.granted_ms, one.lease))
        });
        let mut preempted = Vec::new();
        for (tenant, class, call) in claimants {
            let Some(queue) = self.tenants.get(tenant.as_str()) else {
                continue;
            };
            let share = self.share_of(queue.weight, demand.slots);
            let below_share = queue.running + queue.claimed < share;
            let leads = first_max.is_none_or(|most| queue.served <= most);
            let by_share =
                below_share.then(|| self.most_over(demand.slots, kept, class, &preemptible));
            let victim = by_share.flatten().or_else(|| {
                let may = class == RequestClass::Interactive && self.rollouts_that_stay() > kept;
                let gives =
                    |one: &PreemptibleLease| may && yields(one) && (leads || one.tenant == tenant);
                preemptible.iter().rposition(gives)
            });
            let Some(victim) = victim else {
                continue;
            };
            let victim = preemptible.remove(victim);
            self.preempted[index(victim.class)] += 1;
            self.change(&victim.tenant, |queue| queue.preempted += 1);
            self.change(&tenant, |queue| queue.claimed += 1);
            self.claimed.insert(call);
            self.claimed_rollouts += u64::from(class == RequestClass::Rollout);
            preempted.push(victim.lease);
        }
        preempted
    }

    /// The leases that tenants above their share could give up.
    fn leases_over(&self, slots: u64, preemptible: &[PreemptibleLease]) -> usize {
        let mut by_tenant: BTreeMap<&str, u32> = BTreeMap::new();
        for one in preemptible {
            *by_tenant.entry(&one.tenant).or_default() += 1;
        }
        let over = by_tenant.into_iter().map(|(tenant, leases)| {
            let queue = self.tenants.get(tenant);
            leases.min(queue.map_or(0, |queue| self.slots_over(queue, slots))) as usize
        });
        over.sum()
    }

    /// The slots that a tenant has beyond its share, without those that it is giving up.
    fn slots_over(&self, queue: &TenantQueue, slots: u64) -> u32 {
        let keeps = queue.running.saturating_sub(queue.preempted);
        keeps.saturating_sub(self.share_of(queue.weight, slots))
    }

    /// Running rollouts that are not being preempted.
    fn rollouts_that_stay(&self) -> u64 {
        self.running[ROLLOUTS].saturating_sub(self.preempted[ROLLOUTS])
    }

    /// The place in the list of a lease of the tenant that is most above its share.
    fn most_over(
        &self,
        slots: u64,
        kept: u64,
        class: RequestClass,
        preemptible: &[PreemptibleLease],
    ) -> Option<usize> {
        let rollouts = self.rollouts_that_stay() + self.claimed_rollouts;
        // A rollout takes no slot of an interactive request beyond those that rollouts keep.
        let takes_any = class == RequestClass::Interactive || rollouts < kept;
        let mut last_of_tenant: BTreeMap<&str, usize> = BTreeMap::new();
        for (place, one) in preemptible.iter().enumerate() {
            if takes_any || one.class == RequestClass::Rollout {
                last_of_tenant.insert(&one.tenant, place);
            }
        }
        let over = last_of_tenant.into_iter().filter_map(|(tenant, place)| {
            let over = self.slots_over(self.tenants.get(tenant)?, slots);
            (over > 0).then_some((over, place))
        });
        over.max_by_key(|(over, _)| *over).map(|(_, place)| place)
    }

    /// The requests that may claim a slot, in the order of the queue: interactive ones, then rollouts, and in each
    /// class the least served tenant first.
    fn claimants<'a>(
        &'a self,
        waiting: &HashMap<LeaseCallId, WaitingRequest>,
        demand: &SlotDemand<'_>,
        quotas: &Quotas,
    ) -> Vec<Claimant<'a>> {
        let may_claim = |call: &LeaseCallId| {
            !self.claimed.contains(call)
                && waiting.get(call).is_some_and(|waiting| {
                    waiting.submitted_ms <= demand.submitted_ms_max
                        && (demand.fits)(&waiting.request)
                })
        };
        let mut claimants = Vec::new();
        for class in CLASSES {
            for (_, _, tenant) in &self.turns[index(class)] {
                if claimants.len() >= 2 * quotas.slots {
                    return claimants;
                }
                let Some(queue) = self.tenants.get(tenant) else {
                    continue;
                };
                let quota = match class {
                    RequestClass::Interactive if quotas.rollouts_yield => quotas.slots,
                    _ => {
                        let share = self.share_of(queue.weight, quotas.of_all);
                        share.saturating_sub(queue.running + queue.claimed) as usize
                    }
                };
                let line = queue.lines[index(class)].by_arrival();
                let calls = line.take(LINE_LOOKED_AT_MAX).map(|place| place.call);
                let calls = calls.filter(may_claim).take(quota.min(quotas.slots));
                claimants.extend(calls.map(|call| Claimant {
                    tenant,
                    class,
                    call,
                }));
            }
        }
        claimants
    }
}
