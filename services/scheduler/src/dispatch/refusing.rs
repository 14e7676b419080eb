//! Refuses requests: those beyond a limit, and those that have waited for too long.

use refrain_protocol::scheduling::LeaseRequest;

use super::Dispatch;
use super::events::DispatchEffect;
use super::fair_queue::LeaseCallId;
use super::pool_key::PoolKey;
use super::refusal::{LeaseRefusal, RETRY_AFTER_MS_MAX};
use super::worker_table::Headroom;
use crate::placement::Placement;

impl Dispatch {
    /// Refuses the requests that have waited for too long.
    pub(super) fn refuse_expired(&mut self, effects: &mut Vec<DispatchEffect>) {
        for pool in self.queue.pools_waiting() {
            let headroom = self.workers.headroom(&pool);
            let calls: Vec<LeaseCallId> =
                self.queue.in_order(&pool).map(|(call, _)| call).collect();
            for call in calls {
                let stranded_since_ms = self.mark_stranded(call, headroom);
                let Some(waiting) = self.queue.get(call) else {
                    continue;
                };
                let waited_ms = self.now_ms.saturating_sub(waiting.submitted_ms);
                let stranded_ms = stranded_since_ms.map(|since| self.now_ms.saturating_sub(since));
                if stranded_ms.is_some_and(|stranded| stranded >= self.config.worker_wait_ms) {
                    self.refuse_waiting(call, LeaseRefusal::NoWorker, effects);
                } else if waited_ms >= self.config.queue_wait_ms_max {
                    self.refuse_waiting(call, LeaseRefusal::QueueWait, effects);
                }
            }
        }
    }

    /// Notes whether any live worker, full or not, could serve a waiting request. Returns since when none can.
    pub(super) fn mark_stranded(&mut self, call: LeaseCallId, headroom: Headroom) -> Option<u64> {
        let waiting = self.queue.get(call)?;
        let stranded = if waiting.request.exclude.is_empty() {
            waiting.request.context_tokens >= headroom.open_context_max
        } else {
            self.place(waiting) == Placement::NoWorker
        };
        let now_ms = self.now_ms;
        let waiting = self.queue.get_mut(call)?;
        waiting.stranded_since_ms = stranded.then(|| waiting.stranded_since_ms.unwrap_or(now_ms));
        waiting.stranded_since_ms
    }

    pub(super) fn refuse_waiting(
        &mut self,
        call: LeaseCallId,
        refusal: LeaseRefusal,
        effects: &mut Vec<DispatchEffect>,
    ) {
        if let Some(waiting) = self.take_out(call) {
            effects.push(self.refuse(call, &waiting.request, refusal));
        }
    }

    pub(super) fn refuse(
        &self,
        call: LeaseCallId,
        request: &LeaseRequest,
        refusal: LeaseRefusal,
    ) -> DispatchEffect {
        let pool = PoolKey::of_request(request);
        let error = refusal.error(request, &self.config, self.turn_in_ms(&pool));
        DispatchEffect::Reject {
            call,
            error,
            refusal,
        }
    }

    /// How long a new request would wait for its turn, if the queue ahead of it moves at the pace of recent chunks.
    fn turn_in_ms(&self, pool: &PoolKey) -> u64 {
        let slots = self.workers.headroom(pool).slots.max(1);
        let ahead = self.queue.waiting_in_pool(pool) + 1;
        let turn_in_ms = ahead as f64 * self.queue.service_ms(pool) / slots as f64;
        (turn_in_ms as u64).clamp(1, RETRY_AFTER_MS_MAX)
    }
}
