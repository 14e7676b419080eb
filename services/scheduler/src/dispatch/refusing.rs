//! Refuses requests: those beyond a limit, and those that have waited for too long.

use refrain_protocol::scheduling::{LeaseRequest, RequestClass};

use super::Dispatch;
use super::events::DispatchEffect;
use super::fair_queue::LeaseCallId;
use super::pool_key::PoolKey;
use super::refusal::{LeaseRefusal, RETRY_AFTER_MS_MAX};

impl Dispatch {
    /// Refuses the requests that have waited for too long.
    pub(super) fn refuse_expired(&mut self, effects: &mut Vec<DispatchEffect>) {
        for call in self.queue.overdue(self.now_ms) {
            self.mark_stranded(call);
            let Some(waiting) = self.queue.get(call) else {
                continue;
            };
            if waiting.deadline_ms > self.now_ms {
                continue;
            }
            let refusal = match waiting.stranded_since_ms {
                Some(since_ms) if self.stranded_until_ms(since_ms) <= self.now_ms => {
                    LeaseRefusal::NoWorker
                }
                _ => LeaseRefusal::QueueWait,
            };
            self.refuse_waiting(call, refusal, effects);
        }
    }

    /// Notes which waiting requests no worker can serve, in the pools whose workers have changed.
    pub(super) fn mark_all_stranded(&mut self) {
        for pool in self.queue.pools_waiting() {
            let version = Some(self.workers.version(&pool));
            let Some(queue) = self.queue.pool_mut(&pool) else {
                continue;
            };
            if std::mem::replace(&mut queue.workers_version, version) == version {
                continue;
            }
            for call in self.queue.calls_in(&pool) {
                self.mark_stranded(call);
            }
        }
    }

    /// Notes whether any live worker, full or not, could serve a waiting request.
    pub(super) fn mark_stranded(&mut self, call: LeaseCallId) {
        let Some(waiting) = self.queue.get(call) else {
            return;
        };
        let request = &waiting.request;
        let is_stranded = if request.exclude.is_empty() {
            request.context_tokens >= self.workers.headroom(&waiting.pool).open_context_max
        } else {
            let mut workers = self.workers.members(&waiting.pool);
            !workers.any(|(_, worker)| worker.suits(request, waiting.submitted_ms))
        };
        let since_ms = is_stranded.then(|| waiting.stranded_since_ms.unwrap_or(self.now_ms));
        let deadline_ms = self
            .waits_until_ms(request.class, waiting.submitted_ms)
            .min(since_ms.map_or(u64::MAX, |since_ms| self.stranded_until_ms(since_ms)));
        if (since_ms, deadline_ms) != (waiting.stranded_since_ms, waiting.deadline_ms) {
            self.queue.set_deadline(call, since_ms, deadline_ms);
        }
    }

    /// Until when a request waits for a free slot.
    pub(super) fn waits_until_ms(&self, class: RequestClass, submitted_ms: u64) -> u64 {
        match class {
            RequestClass::Interactive => submitted_ms.saturating_add(self.config.queue_wait_ms_max),
            RequestClass::Rollout => u64::MAX,
        }
    }

    /// Until when a request waits for a worker that can serve it.
    fn stranded_until_ms(&self, since_ms: u64) -> u64 {
        since_ms.saturating_add(self.config.worker_wait_ms)
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
        let turn_in_ms = self.turn_in_ms(&pool, request.class);
        // It takes a look at all workers of the pool, and no other error tells it.
        let trouble = match refusal {
            LeaseRefusal::NoWorker => self.workers.trouble(&pool),
            _ => None,
        };
        let error = refusal.error(request, &self.config, turn_in_ms, trouble);
        DispatchEffect::Reject {
            call,
            error,
            refusal,
        }
    }

    /// How long a new request would wait for its turn, if the queue ahead of it moves at the pace of recent chunks.
    fn turn_in_ms(&self, pool: &PoolKey, class: RequestClass) -> u64 {
        let slots = self.workers.headroom(pool).slots.max(1);
        let ahead = self.queue.waiting_ahead(pool, class) + 1;
        let turn_in_ms = ahead as f64 * self.queue.service_ms(pool) / slots as f64;
        (turn_in_ms as u64).clamp(1, RETRY_AFTER_MS_MAX)
    }
}
