//! The order of waiting requests: fair between tenants, and by class and rank within one.
//!
//! The naive queue is one list in order of arrival. A tenant with a thousand requests then makes everybody else wait
//! for all of them. This queue is the Virtual Token Counter with weights (Sheng et al., "Fairness in Serving Large
//! Language Models", OSDI 2024). Each tenant has a count of what it was served: the cost of its chunks (see `cost`)
//! divided by its weight. The waiting tenant with the smallest count goes first. When a tenant returns from idling,
//! its count is raised to the smallest one among the waiting tenants, so that nobody saves up claims. Counts are kept
//! per pool, because a token of one model says nothing about the cost of another model's.
//!
//! The cost of a chunk is known only when it ends. By then, a burst of the same tenant could have taken all slots. So
//! a grant charges the expected output, a moving average over the pool, and the context that the worker is taken to
//! lack. The end of the chunk corrects the charge to what was written and read, and adds the drafts that were
//! verified in vain.
//!
//! `classes` puts interactive requests before rollouts, within a bound, and [`crate::order`] ranks the rollouts of a
//! tenant. This order decides about free slots only. `slot_claims` decides which tenant has to give one up.

mod classes;
mod cost;
mod fit_tree;
mod line;
mod pool_queue;
mod slot_claims;
mod snapshot;
mod waiting_request;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use refrain_protocol::LeaseId;
use refrain_protocol::scheduling::RequestClass;

pub(super) use self::cost::{Charge, Spent};
pub(super) use self::pool_queue::{HeldLine, PoolQueue};
pub(super) use self::slot_claims::{PreemptibleLease, SlotDemand};
pub use self::snapshot::PoolState;
pub use self::waiting_request::LeaseCallId;
pub(super) use self::waiting_request::{Arrival, Place, WaitingRequest};

use self::classes::{ClassRules, index};
use self::pool_queue::{OUTPUT_TOKENS_FIRST_GUESS, SERVICE_MS_FIRST_GUESS};
use super::pool_key::PoolKey;
use crate::config::SchedulerConfig;
use crate::order::Rank;

/// All waiting requests, by pool and tenant.
#[derive(Debug)]
pub(super) struct FairQueue {
    pools: BTreeMap<PoolKey, PoolQueue>,
    waiting: HashMap<LeaseCallId, WaitingRequest>,
    /// When waiting requests have waited for too long.
    deadlines: BTreeSet<(u64, LeaseCallId)>,
    /// Requests that wait in each class.
    by_class: [usize; 2],
    /// The same by tenant. Tenants without any are left out.
    by_tenant: HashMap<String, [usize; 2]>,
    tenants_tracked_max: usize,
    rules: ClassRules,
}

impl FairQueue {
    pub(super) fn new(config: &SchedulerConfig) -> Self {
        let lead_tokens = config.interactive_lead_tokens;
        FairQueue {
            pools: BTreeMap::new(),
            waiting: HashMap::new(),
            deadlines: BTreeSet::new(),
            by_class: [0; 2],
            by_tenant: HashMap::new(),
            tenants_tracked_max: config.tenants_tracked_max,
            rules: ClassRules {
                rollout_share: config.rollout_share,
                interactive_lead: lead_tokens.saturating_mul(cost::PARTS_PER_TOKEN),
            },
        }
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn contains(&self, call: LeaseCallId) -> bool {
        self.waiting.contains_key(&call)
    }

    pub(super) fn waiting_of_class(&self, class: RequestClass) -> usize {
        self.by_class[index(class)]
    }

    pub(super) fn waiting_of_tenant(&self, tenant: &str, class: RequestClass) -> usize {
        let by_class = self.by_tenant.get(tenant);
        by_class.map_or(0, |by_class| by_class[index(class)])
    }

    pub(super) fn waiting_in_pool(&self, key: &PoolKey) -> usize {
        self.pools.get(key).map_or(0, PoolQueue::waiting)
    }

    /// The rollouts that wait in a pool.
    pub(super) fn rollouts_waiting(&self, key: &PoolKey) -> u64 {
        let pool = self.pools.get(key);
        pool.map_or(0, |pool| pool.waiting[index(RequestClass::Rollout)] as u64)
    }

    /// The requests of a pool that are served before a new one of the class: no rollouts before an interactive one.
    pub(super) fn waiting_ahead(&self, key: &PoolKey, class: RequestClass) -> usize {
        let pool = self.pools.get(key);
        pool.map_or(0, |pool| pool.waiting[..=index(class)].iter().sum())
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
        let mut calls: Vec<LeaseCallId> = self.waiting.keys().copied().collect();
        calls.sort_unstable();
        calls
    }

    /// The waiting calls of a pool, in no order.
    pub(super) fn calls_in(&self, key: &PoolKey) -> Vec<LeaseCallId> {
        let waiting = self.waiting.iter();
        waiting
            .filter(|(_, waiting)| waiting.pool == *key)
            .map(|(call, _)| *call)
            .collect()
    }

    pub(super) fn push(&mut self, waiting: WaitingRequest) {
        let request = &waiting.request;
        let (class, place) = (request.class, waiting.place);
        let tenant = request.namespace.namespace.tenant_name();
        let pool = self.pools.entry(waiting.pool.clone()).or_default();
        pool.push(&waiting);
        pool.forget_idle_past(self.tenants_tracked_max);
        self.by_class[index(class)] += 1;
        match self.by_tenant.get_mut(tenant) {
            Some(by_class) => by_class[index(class)] += 1,
            None => {
                let mut by_class = [0; 2];
                by_class[index(class)] = 1;
                self.by_tenant.insert(tenant.to_owned(), by_class);
            }
        }
        self.deadlines.insert((waiting.deadline_ms, place.call));
        self.waiting.insert(place.call, waiting);
    }

    pub(super) fn get(&self, call: LeaseCallId) -> Option<&WaitingRequest> {
        self.waiting.get(&call)
    }

    /// Takes a request out without a grant.
    pub(super) fn remove(&mut self, call: LeaseCallId) -> Option<WaitingRequest> {
        let waiting = self.waiting.remove(&call)?;
        let request = &waiting.request;
        let tenant = request.namespace.namespace.tenant_name();
        let index = index(request.class);
        self.deadlines.remove(&(waiting.deadline_ms, call));
        self.by_class[index] -= 1;
        if let Some(by_class) = self.by_tenant.get_mut(tenant) {
            by_class[index] -= 1;
            if *by_class == [0; 2] {
                self.by_tenant.remove(tenant);
            }
        }
        if let Some(pool) = self.pools.get_mut(&waiting.pool) {
            pool.remove(tenant, request.class, waiting.rank, waiting.place);
        }
        Some(waiting)
    }

    /// Takes a request out for a grant, and charges its tenant. `read_tokens` are the context tokens that the worker
    /// is taken to lack.
    pub(super) fn take(
        &mut self,
        call: LeaseCallId,
        read_tokens: u32,
    ) -> Option<(WaitingRequest, Charge)> {
        let waiting = self.remove(call)?;
        let pool = self.pools.get_mut(&waiting.pool)?;
        let charge = pool.charge(&waiting, read_tokens);
        Some((waiting, charge))
    }

    /// Gives a waiting request another rank.
    pub(super) fn rerank(&mut self, call: LeaseCallId, rank: Rank) {
        let Some(waiting) = self.waiting.get_mut(&call) else {
            return;
        };
        if waiting.rank == rank {
            return;
        }
        let ranks = (std::mem::replace(&mut waiting.rank, rank), rank);
        let kv_tokens = waiting.kv_tokens;
        let request = &waiting.request;
        if let Some(pool) = self.pools.get_mut(&waiting.pool) {
            let tenant = request.namespace.namespace.tenant_name();
            pool.rerank(tenant, request.class, waiting.place, ranks, kv_tokens);
        }
    }

    /// Notes since when no worker can serve a request, and when it has waited for too long.
    pub(super) fn set_deadline(
        &mut self,
        call: LeaseCallId,
        stranded_since_ms: Option<u64>,
        deadline_ms: u64,
    ) {
        if let Some(waiting) = self.waiting.get_mut(&call) {
            waiting.stranded_since_ms = stranded_since_ms;
            self.deadlines.remove(&(waiting.deadline_ms, call));
            waiting.deadline_ms = deadline_ms;
            self.deadlines.insert((deadline_ms, call));
        }
    }

    /// The calls whose deadline has come.
    pub(super) fn overdue(&self, now_ms: u64) -> Vec<LeaseCallId> {
        let overdue = self.deadlines.iter();
        overdue
            .take_while(|(deadline_ms, _)| *deadline_ms <= now_ms)
            .map(|(_, call)| *call)
            .collect()
    }

    pub(super) fn pool(&self, key: &PoolKey) -> Option<&PoolQueue> {
        self.pools.get(key)
    }

    pub(super) fn pool_mut(&mut self, key: &PoolKey) -> Option<&mut PoolQueue> {
        self.pools.get_mut(key)
    }

    /// The leases of a pool to end, so that waiting requests get their slots.
    pub(super) fn claim_slots(
        &mut self,
        key: &PoolKey,
        demand: &SlotDemand<'_>,
        preemptible: Vec<PreemptibleLease>,
    ) -> Vec<LeaseId> {
        let Some(pool) = self.pools.get_mut(key) else {
            return Vec::new();
        };
        pool.claim_slots(&self.waiting, demand, self.rules, preemptible)
    }

    /// Tokens that a chunk without a limit is expected to write.
    pub(super) fn usual_output_tokens(&self, key: &PoolKey) -> u32 {
        let pool = self.pools.get(key);
        pool.map_or(OUTPUT_TOKENS_FIRST_GUESS, |pool| pool.output_tokens)
            .round() as u32
    }

    /// How long a chunk of the pool holds its slot, by recent chunks.
    pub(super) fn service_ms(&self, key: &PoolKey) -> f64 {
        self.pools
            .get(key)
            .map_or(SERVICE_MS_FIRST_GUESS, |pool| pool.service_ms)
    }

    /// The waiting requests of a pool with `slots` slots that need at most `room_tokens` of a KV cache, in the order
    /// in which they should be placed.
    pub(super) fn in_order(
        &self,
        key: &PoolKey,
        slots: u64,
        room_tokens: u64,
    ) -> impl Iterator<Item = &WaitingRequest> {
        let pool = self.pools.get(key).into_iter();
        pool.flat_map(move |pool| pool.in_order(self.rules, slots, room_tokens))
            .filter_map(|call| self.get(call))
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
