//! Grants leases for as long as some waiting request can be placed.

use refrain_protocol::scheduling::Lease;
use refrain_protocol::{LeaseId, WorkerId};

use super::Dispatch;
use super::events::DispatchEffect;
use super::fair_queue::{LeaseCallId, WaitingRequest};
use super::lease_table::RunningLease;
use super::pool_key::PoolKey;
use crate::placement::{Placement, place};

/// Fencing epochs advance by this many per millisecond of the clock, see [`Dispatch::next_epoch`].
const EPOCHS_PER_MS: u64 = 1_000;

impl Dispatch {
    /// Grants leases until no waiting request can be placed.
    pub(super) fn grant_all(&mut self, effects: &mut Vec<DispatchEffect>) {
        for pool in self.queue.pools_waiting() {
            while let Some((call, worker)) = self.next_grant(&pool) {
                self.grant(call, worker, effects);
            }
        }
    }

    /// The first request of a pool, in the order of the queue, for which a worker has a free slot.
    pub(super) fn next_grant(&self, pool: &PoolKey) -> Option<(LeaseCallId, WorkerId)> {
        let free_context_max = self.workers.headroom(pool).free_context_max;
        if free_context_max == 0 {
            return None;
        }
        self.queue
            .in_order(pool)
            // This cheap filter spares most requests of a long queue the look at every worker.
            .filter(|(_, waiting)| waiting.request.context_tokens < free_context_max)
            .find_map(|(call, waiting)| match self.place(waiting) {
                Placement::On(worker) => Some((call, worker.clone())),
                Placement::Full | Placement::NoWorker => None,
            })
    }

    pub(super) fn place(&self, waiting: &WaitingRequest) -> Placement<'_> {
        let candidates = self.workers.candidates();
        place(candidates, &waiting.request, waiting.submitted_ms)
    }

    fn grant(&mut self, call: LeaseCallId, worker: WorkerId, effects: &mut Vec<DispatchEffect>) {
        let epoch = self.next_epoch();
        let Some(live) = self.workers.get_mut(&worker) else {
            return;
        };
        let url = live.heartbeat.url.clone();
        let reads_context = self.queue.get(call).is_none_or(|waiting| {
            let request = &waiting.request;
            request.transferred || request.prefer.as_ref() != Some(&worker)
        });
        let Some((waiting, charge)) = self.queue.take(call, reads_context) else {
            return;
        };
        let request = waiting.request;
        self.waiting_by_request.remove(&request.request);
        // The id is unique because epochs are. Its low half tells a reader of logs which request it belongs to.
        let lease = LeaseId((u128::from(epoch) << 64) | (request.request.0 & u128::from(u64::MAX)));
        let pool = PoolKey::of_request(&request);
        self.leases.insert(
            lease,
            RunningLease {
                request: request.request,
                worker: worker.clone(),
                pool,
                tenant: request.namespace.namespace.tenant,
                charge,
                granted_ms: self.now_ms,
                last_seen_ms: self.now_ms,
                preempted: false,
            },
        );
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.leases.insert(lease);
        }
        effects.push(DispatchEffect::Grant {
            call,
            waited_ms: self.now_ms.saturating_sub(waiting.submitted_ms),
            lease: Lease {
                lease,
                epoch,
                worker,
                url,
                ttl_ms: self.config.lease_ttl_ms,
                chunk_tokens: request.chunk_tokens,
            },
        });
    }

    /// The next fencing epoch.
    ///
    /// One counter serves all requests: a number that grows over all leases also grows over those of each request, so
    /// nothing has to be remembered per request. The counter follows the clock, so that it goes on growing after a
    /// restart, which remembers nothing. Below a million leases per second it never runs ahead of the clock.
    fn next_epoch(&mut self) -> u64 {
        let clock = self.now_ms.saturating_mul(EPOCHS_PER_MS);
        self.epoch_last = clock.max(self.epoch_last.saturating_add(1));
        self.epoch_last
    }
}
