//! The order of waiting requests: first come, first served within a tenant, and fair between tenants.
//!
//! The naive queue is one list in order of arrival. A tenant with a thousand requests then makes everybody else wait
//! for all of them. This queue is the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language
//! Models", OSDI 2024) in its plain form. Each tenant has a weighted count of the tokens that it was served, input
//! and output, and the waiting tenant with the smallest count goes first. When a tenant returns from idling, its
//! count is raised to the smallest one among the waiting tenants, so that nobody saves up claims. Counts are kept per
//! pool, because a token of one model says nothing about the cost of another model's.
//!
//! The output of a chunk is known only when it ends. By then, a burst of the same tenant could have taken all slots.
//! So a grant charges the expected output, a moving average over the pool, and the end of the chunk corrects the
//! charge.
//!
//! This order decides about free slots only. `slot_claims` decides which tenant has to give one up.

mod pool_queue;
mod slot_claims;
mod snapshot;
mod waiting_request;

use std::collections::{BTreeMap, HashMap};

use refrain_protocol::scheduling::LeaseRequest;

pub(super) use self::pool_queue::Charge;
pub(super) use self::slot_claims::{PreemptibleLeases, SlotDemand};
pub use self::snapshot::PoolState;
pub use self::waiting_request::LeaseCallId;
pub(super) use self::waiting_request::WaitingRequest;

use self::pool_queue::{PoolQueue, SERVICE_MS_FIRST_GUESS, TenantQueue};
use super::pool_key::PoolKey;

/// All waiting requests, by pool and tenant.
#[derive(Debug)]
pub(super) struct FairQueue {
    pools: BTreeMap<PoolKey, PoolQueue>,
    /// The pool and the tenant of each waiting call.
    owners: HashMap<LeaseCallId, (PoolKey, String)>,
    tenants_tracked_max: usize,
}

impl FairQueue {
    pub(super) fn new(tenants_tracked_max: usize) -> Self {
        FairQueue {
            pools: BTreeMap::new(),
            owners: HashMap::new(),
            tenants_tracked_max,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.owners.len()
    }

    pub(super) fn contains(&self, call: LeaseCallId) -> bool {
        self.owners.contains_key(&call)
    }

    pub(super) fn waiting_of_tenant(&self, tenant: &str) -> usize {
        let queues = self.pools.values();
        let queues = queues.filter_map(|pool| pool.tenants.get(tenant));
        queues.map(|queue| queue.waiting.len()).sum()
    }

    pub(super) fn waiting_in_pool(&self, key: &PoolKey) -> usize {
        self.pools.get(key).map_or(0, PoolQueue::waiting)
    }

    /// The pools in which some request waits.
    pub(super) fn pools_waiting(&self) -> Vec<PoolKey> {
        self.pools
            .iter()
            .filter(|(_, pool)| pool.waiting() > 0)
            .map(|(key, _)| key.clone())
            .collect()
    }

    /// All waiting calls, oldest first.
    pub(super) fn calls(&self) -> Vec<LeaseCallId> {
        let mut calls: Vec<LeaseCallId> = self.owners.keys().copied().collect();
        calls.sort_unstable();
        calls
    }

    pub(super) fn push(&mut self, call: LeaseCallId, request: LeaseRequest, now_ms: u64) {
        let key = PoolKey::of_request(&request);
        let tenant = request.namespace.namespace.tenant.clone();
        let pool = self.pools.entry(key.clone()).or_default();
        let waiting = WaitingRequest {
            request,
            submitted_ms: now_ms,
            stranded_since_ms: None,
        };
        pool.push(call, &tenant, waiting);
        pool.forget_idle_past(self.tenants_tracked_max);
        self.owners.insert(call, (key, tenant));
    }

    pub(super) fn get(&self, call: LeaseCallId) -> Option<&WaitingRequest> {
        let (key, tenant) = self.owners.get(&call)?;
        let queue = self.pools.get(key)?.tenants.get(tenant)?;
        queue.waiting.get(&call)
    }

    pub(super) fn get_mut(&mut self, call: LeaseCallId) -> Option<&mut WaitingRequest> {
        let (key, tenant) = self.owners.get(&call)?;
        let queue = self.pools.get_mut(key)?.tenants.get_mut(tenant)?;
        queue.waiting.get_mut(&call)
    }

    /// Takes a request out without a grant.
    pub(super) fn remove(&mut self, call: LeaseCallId) -> Option<WaitingRequest> {
        let (key, tenant) = self.owners.remove(&call)?;
        self.pools.get_mut(&key)?.remove(call, &tenant)
    }

    /// Takes a request out for a grant, and charges its tenant. `reads_context` says that the worker has no KV cache
    /// of it.
    pub(super) fn take(
        &mut self,
        call: LeaseCallId,
        reads_context: bool,
    ) -> Option<(WaitingRequest, Charge)> {
        let waiting = self.remove(call)?;
        let pool = self.pools.get_mut(&PoolKey::of_request(&waiting.request))?;
        let tenant = &waiting.request.namespace.namespace.tenant;
        let charge = pool.charge(tenant, &waiting, reads_context)?;
        Some((waiting, charge))
    }

    pub(super) fn pool_mut(&mut self, key: &PoolKey) -> Option<&mut PoolQueue> {
        self.pools.get_mut(key)
    }

    /// How long a chunk of the pool holds its slot, by recent chunks.
    pub(super) fn service_ms(&self, key: &PoolKey) -> f64 {
        self.pools
            .get(key)
            .map_or(SERVICE_MS_FIRST_GUESS, |pool| pool.service_ms)
    }

    /// The waiting calls of a pool, in the order in which they should be placed. Calls that have claimed a slot come
    /// first. Then come the tenants by tokens served (on a tie, the longest wait), each in order of arrival.
    pub(super) fn in_order(
        &self,
        key: &PoolKey,
    ) -> impl Iterator<Item = (LeaseCallId, &WaitingRequest)> {
        let pool = self.pools.get(key).into_iter();
        let claimed = pool.clone().flat_map(|pool| &pool.claimed);
        let claimed = claimed.filter_map(|call| Some((*call, self.get(*call)?)));
        let mut tenants: Vec<&TenantQueue> = pool
            .clone()
            .flat_map(|pool| pool.tenants.values())
            .filter(|queue| !queue.waiting.is_empty())
            .collect();
        tenants.sort_by_key(|queue| (queue.served, queue.waiting.keys().next().copied()));
        let others = tenants
            .into_iter()
            .flat_map(|queue| queue.waiting.iter().map(|(call, waiting)| (*call, waiting)));
        let is_claimed =
            move |call: &LeaseCallId| pool.clone().any(|pool| pool.claimed.contains(call));
        claimed.chain(others.filter(move |(call, _)| !is_claimed(call)))
    }

    /// Forgets the pools in which nothing waits or runs and for which `is_served` finds no worker.
    pub(super) fn forget_pools(&mut self, is_served: impl Fn(&PoolKey) -> bool) {
        self.pools
            .retain(|key, pool| is_served(key) || pool.is_active());
    }

    pub(super) fn observe(&self) -> Vec<PoolState> {
        let pools = self.pools.iter();
        pools.map(|(key, pool)| PoolState::of(key, pool)).collect()
    }
}
