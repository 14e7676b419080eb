//! Granting: who gets a lease, and where, for as long as anybody can be placed.

use refrain_protocol::scheduling::Lease;
use refrain_protocol::{LeaseId, WorkerId};

use super::leases::RunningLease;
use super::queue::{PoolKey, Ticket, Waiting};
use super::{Dispatch, Effect};
use crate::placement::{Need, Placement, place};

/// Fencing epochs count in steps of a thousandth of the clock's millisecond, see [`Dispatch::epoch`].
const EPOCHS_PER_MS: u64 = 1_000;

impl Dispatch {
    /// Grants leases until no waiting request can be placed.
    pub(super) fn fill(&mut self, effects: &mut Vec<Effect>) {
        for pool in self.queue.pools_waiting() {
            while let Some((ticket, worker)) = self.next_grant(&pool) {
                self.grant(ticket, worker, effects);
            }
        }
    }

    /// The first request of a pool, in order, for which there is a slot.
    pub(super) fn next_grant(&self, pool: &PoolKey) -> Option<(Ticket, WorkerId)> {
        let free_context_max = self.workers.headroom(pool).free_context_max;
        if free_context_max == 0 {
            return None;
        }
        self.queue
            .in_order(pool)
            // Cheap, and spares most of a long queue the look at every worker.
            .filter(|(_, waiting)| waiting.request.context_tokens < free_context_max)
            .find_map(|(ticket, waiting)| match self.place(waiting) {
                Placement::On(worker) => Some((ticket, worker.clone())),
                Placement::Full | Placement::Nobody => None,
            })
    }

    pub(super) fn place(&self, waiting: &Waiting) -> Placement<'_> {
        let request = &waiting.request;
        let need = Need {
            model: &request.namespace.namespace.model,
            tokenizer: &request.namespace.namespace.tokenizer,
            context_tokens: request.context_tokens,
            prefer: request.prefer.as_ref(),
            handed_over: request.transferred,
            exclude: &request.exclude,
            submitted_ms: waiting.submitted_ms,
        };
        place(
            self.workers.candidates(),
            &need,
            self.config.prefer_load_slack,
        )
    }

    fn grant(&mut self, ticket: Ticket, worker: WorkerId, effects: &mut Vec<Effect>) {
        let epoch = self.epoch();
        let Some(url) = self.workers.url(&worker).map(str::to_owned) else {
            return;
        };
        let reads_context = self.queue.get(ticket).is_none_or(|waiting| {
            let request = &waiting.request;
            request.transferred || request.prefer.as_ref() != Some(&worker)
        });
        let Some((waiting, charge)) = self.queue.take(ticket, reads_context) else {
            return;
        };
        let request = waiting.request;
        self.waiting_by_request.remove(&request.request);
        // Unique because epochs are; the low half tells a reader of logs which request it was.
        let lease = LeaseId((u128::from(epoch) << 64) | (request.request.0 & u128::from(u64::MAX)));
        let pool = PoolKey::of(&request);
        self.leases.insert(
            lease,
            RunningLease {
                request: request.request,
                worker: worker.clone(),
                pool,
                tenant: request.namespace.namespace.tenant,
                charge,
                granted_ms: self.now_ms,
                seen_ms: self.now_ms,
                gives_way: false,
            },
        );
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.leases.insert(lease);
        }
        effects.push(Effect::Grant {
            ticket,
            waited_ms: self.now_ms.saturating_sub(waiting.submitted_ms),
            lease: Lease {
                lease,
                epoch,
                worker,
                url,
                ttl_ms: self.config.lease_ttl_ms,
            },
        });
    }

    /// The next fencing epoch. One count serves all requests: what grows over all leases grows over those of
    /// each request, and there is nothing to remember per request. It follows the clock, so that it goes on
    /// growing after a restart, which remembers nothing; at fewer than a million leases a second it never
    /// runs ahead of it.
    fn epoch(&mut self) -> u64 {
        let clock = self.now_ms.saturating_mul(EPOCHS_PER_MS);
        self.epoch_last = clock.max(self.epoch_last.saturating_add(1));
        self.epoch_last
    }
}
