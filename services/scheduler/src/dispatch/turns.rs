//! Slots for tenants that have too few, while others hold theirs for as long as an output takes.
//!
//! Chunks have no end by default, since each new one sends the whole context again. Without more, a tenant that fills
//! all slots keeps a newcomer waiting until one of its outputs ends. So where a tenant that has fewer slots than its
//! share has waited for [`PATIENCE_MS`], a full worker is told with its next heartbeat to end a chunk of a tenant
//! that has more than its share. The chunk ends as one does that is full, its request asks for another lease, and the
//! slot is the waiting one's. A tenant that is alone has all slots for as long as it likes, and where outputs are
//! short the queue's order decides alone.
//!
//! Small chunks for all were rejected (they cost every request its context again and again, though nobody waits), and
//! so were slots kept free for newcomers (they are of no use to anybody else). The share of a tenant is the slots of
//! the pool divided by the tenants that run or wait there, and one at least.

use std::collections::{BTreeMap, BTreeSet};

use refrain_protocol::{LeaseId, WorkerId};

use super::Dispatch;
use super::queue::{Claims, Holding, PoolKey};

/// How long a request waits before somebody gives way to it: slots become free by themselves, where outputs are
/// short.
pub(super) const PATIENCE_MS: u64 = 50;
/// A chunk that has run for less than this does not give way: it may not have read its context yet, or end by itself.
const RUN_MS_MIN: u64 = 100;
/// How soon a full worker reports again, if there is no other: that long a newcomer waits at most until it is heard.
const FULL_INTERVAL_MS_MIN: u64 = 100;
/// And how much later for each worker that there is: they report at different times, and any of them will do.
const FULL_INTERVAL_MS_PER_WORKER: u64 = 50;

impl Dispatch {
    /// When a worker reports again.
    pub(super) fn next_beat_ms(&self, worker: &WorkerId) -> u64 {
        let usual_ms = self.config.heartbeat_interval_ms;
        if !self.workers.is_full(worker) {
            return usual_ms;
        }
        let workers = self.workers.len() as u64;
        usual_ms.min(FULL_INTERVAL_MS_MIN.max(workers * FULL_INTERVAL_MS_PER_WORKER))
    }

    /// The leases among `named` that a worker is to end, those among them that it was told of before.
    pub(super) fn give_way(
        &mut self,
        worker: &WorkerId,
        named: &BTreeSet<LeaseId>,
    ) -> Vec<LeaseId> {
        let told = |lease: &LeaseId| self.leases.get(*lease).is_some_and(|of| of.gives_way);
        let mut give_way: Vec<LeaseId> = named.iter().copied().filter(told).collect();
        let Some(pool) = self.workers.pool_of(worker) else {
            return give_way;
        };
        if !self.workers.is_full(worker) || self.queue.waiting_in_pool(&pool) == 0 {
            return give_way;
        }
        let holdings = self.holdings(&pool, named);
        let workers = &self.workers;
        let claims = Claims {
            slots: workers.headroom(&pool).slots,
            submitted_ms_max: self.now_ms.saturating_sub(PATIENCE_MS),
            fits: &|request| workers.fits(worker, request),
        };
        for lease in self.queue.claim_slots(&pool, claims, holdings) {
            if let Some(running) = self.leases.get_mut(lease) {
                running.gives_way = true;
            }
            give_way.push(lease);
        }
        give_way
    }

    /// What the tenants of a pool could give: their leases among `named`, those that have run for longest last.
    fn holdings(&self, pool: &PoolKey, named: &BTreeSet<LeaseId>) -> BTreeMap<String, Holding> {
        let mut holdings: BTreeMap<String, Holding> = BTreeMap::new();
        for (lease, running) in self.leases.running_in(pool) {
            let holding = holdings.entry(running.tenant.clone()).or_default();
            if running.gives_way {
                holding.giving += 1;
            } else if named.contains(&lease)
                && self.now_ms >= running.granted_ms.saturating_add(RUN_MS_MIN)
            {
                holding.leases.push((running.granted_ms, lease));
            }
        }
        for holding in holdings.values_mut() {
            holding.leases.sort_unstable_by(|a, b| b.cmp(a));
        }
        holdings
    }
}
