//! Preemption: a tenant with more than its share of the slots gives one up for a tenant with less.
//!
//! A chunk has no end by default, because each new chunk sends the whole context again. So a tenant that fills all
//! slots would keep a newcomer waiting until one of its outputs ends. Therefore, when a tenant below its share has
//! waited for [`PATIENCE_MS`], the heartbeat reply of a full worker names a chunk to end (`give_way`). That chunk
//! belongs to a tenant above its share. It ends early, its request asks for another lease, and the waiting request
//! gets the slot. A tenant that is alone keeps all slots, and where outputs are short the order of the queue is
//! enough.
//!
//! Interactive requests claim slots of rollouts in the same way, whatever the tenants, while rollouts have more slots
//! than they keep (`rollout_share`). Only chunks without a limit give way to them: a chunk with a limit ends soon
//! enough, and the interactive request is first in line then. A rollout claims no slot of an interactive request
//! beyond those that rollouts keep.
//!
//! A tenant's share is its part of the slots in the pool, by its weight among those of all tenants that run or wait
//! there, and at least one slot. Two alternatives were rejected. Small chunks for all requests would send each
//! context again and again even if nobody waits. Slots reserved for newcomers would be of no use to anybody else.

use std::collections::BTreeSet;

use refrain_protocol::{LeaseId, WorkerId};

use super::Dispatch;
use super::fair_queue::{PreemptibleLease, SlotDemand};
use super::live_worker::LiveWorker;
use super::pool_key::PoolKey;

/// How long a request waits before it may preempt a chunk. Where outputs are short, a slot becomes free by then.
pub(super) const PATIENCE_MS: u64 = 50;
/// Youngest chunk that may be preempted. A younger one may still be in prefill, or end by itself soon.
const RUN_MS_MIN: u64 = 100;
/// Shortest pause between two heartbeats of a full worker. A lone full worker cannot preempt sooner.
const FULL_INTERVAL_MS_MIN: u64 = 100;
/// Addition to that pause for each worker. Full workers report at different times, and any of them can preempt.
const FULL_INTERVAL_MS_PER_WORKER: u64 = 50;

impl Dispatch {
    /// The pause until a worker's next heartbeat.
    pub(super) fn next_heartbeat_in_ms(&self, worker: &WorkerId) -> u64 {
        let usual_ms = self.config.heartbeat_interval_ms();
        let worker = self.workers.get(worker);
        if !worker.is_some_and(LiveWorker::is_full) {
            return usual_ms;
        }
        let workers = self.workers.len() as u64;
        usual_ms.min(FULL_INTERVAL_MS_MIN.max(workers * FULL_INTERVAL_MS_PER_WORKER))
    }

    /// Chooses the leases among `reported` that a worker has to end. Leases that were chosen earlier and are still
    /// running come first.
    pub(super) fn preempt(
        &mut self,
        worker: &WorkerId,
        reported: &BTreeSet<LeaseId>,
    ) -> Vec<LeaseId> {
        let is_preempted = |lease: &LeaseId| {
            let running = self.leases.get(*lease);
            running.is_some_and(|running| running.preempted)
        };
        let mut preempted: Vec<LeaseId> = reported.iter().copied().filter(is_preempted).collect();
        let Some(worker) = self.workers.get(worker).filter(|worker| worker.is_full()) else {
            return preempted;
        };
        let pool = PoolKey::of_worker(&worker.heartbeat);
        if self.queue.waiting_in_pool(&pool) == 0 {
            return preempted;
        }
        let demand = SlotDemand {
            slots: self.workers.headroom(&pool).slots,
            submitted_ms_max: self.now_ms.saturating_sub(PATIENCE_MS),
            fits: &|request| worker.fits(request),
        };
        let preemptible = self.preemptible_leases(reported);
        for lease in self.queue.claim_slots(&pool, &demand, preemptible) {
            if let Some(running) = self.leases.get_mut(lease) {
                running.preempted = true;
            }
            preempted.push(lease);
        }
        preempted
    }

    /// The leases among `reported` that may be preempted.
    fn preemptible_leases(&self, reported: &BTreeSet<LeaseId>) -> Vec<PreemptibleLease> {
        let leases = reported.iter().filter_map(|lease| {
            let running = self.leases.get(*lease)?;
            let may_end =
                !running.preempted && self.now_ms >= running.granted_ms.saturating_add(RUN_MS_MIN);
            may_end.then(|| PreemptibleLease {
                lease: *lease,
                tenant: running.tenant.clone(),
                class: running.class,
                granted_ms: running.granted_ms,
                bounded: running.bounded,
            })
        });
        leases.collect()
    }
}
