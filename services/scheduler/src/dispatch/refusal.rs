//! Why and when a request gets no lease, and how its caller is told.

use refrain_protocol::error::code;
use refrain_protocol::scheduling::LeaseRequest;
use refrain_protocol::{ApiError, ErrorKind};

use super::queue::{PoolKey, Ticket};
use super::workers::Headroom;
use super::{Dispatch, Effect};
use crate::config::SchedulerConfig;
use crate::placement::Placement;

/// Which limit it was: the `limit` label of `refrain_scheduler_rejections_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// `queue_max` requests wait.
    QueueFull,
    /// `tenant_queue_max` requests of the tenant wait.
    TenantQueueFull,
    /// It waited for `queue_wait_ms_max`.
    QueueWait,
    /// No worker for it appeared within `worker_wait_ms`.
    NoWorker,
    /// It excludes more than `exclude_max` workers.
    ExcludeLimit,
    /// The same request asked again.
    Superseded,
    /// The scheduler is going away.
    Draining,
}

impl Refusal {
    /// All of them.
    pub(crate) const ALL: [Refusal; 7] = [
        Refusal::QueueFull,
        Refusal::TenantQueueFull,
        Refusal::QueueWait,
        Refusal::NoWorker,
        Refusal::ExcludeLimit,
        Refusal::Superseded,
        Refusal::Draining,
    ];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Refusal::QueueFull => "queue_max",
            Refusal::TenantQueueFull => "tenant_queue_max",
            Refusal::QueueWait => "queue_wait_ms_max",
            Refusal::NoWorker => "worker_wait_ms",
            Refusal::ExcludeLimit => "exclude_max",
            Refusal::Superseded => "superseded",
            Refusal::Draining => "draining",
        }
    }

    /// The answer to `request`, of which a new attempt would have its turn in `turn_in_ms`.
    pub(super) fn error(
        self,
        request: &LeaseRequest,
        config: &SchedulerConfig,
        turn_in_ms: u64,
    ) -> ApiError {
        let model = &request.namespace.namespace.model;
        match self {
            Refusal::QueueFull => ApiError::new(
                ErrorKind::Overloaded,
                format!("{} requests wait already; try again later", config.queue_max),
            )
            .with_code("queue_full")
            .with_retry_after_ms(turn_in_ms),
            Refusal::TenantQueueFull => ApiError::new(
                ErrorKind::Overloaded,
                format!(
                    "{} of your requests wait already; send fewer at once or try again later",
                    config.tenant_queue_max
                ),
            )
            .with_code("tenant_queue_full")
            .with_retry_after_ms(turn_in_ms),
            Refusal::QueueWait => ApiError::new(
                ErrorKind::Overloaded,
                format!(
                    "no worker of model {model} had a free slot for {} ms; try again later",
                    config.queue_wait_ms_max
                ),
            )
            .with_code("queue_wait")
            .with_retry_after_ms(turn_in_ms),
            Refusal::NoWorker => ApiError::new(
                ErrorKind::Unavailable,
                format!(
                    "no live worker of model {model} can take a context of {} tokens{}; try again later",
                    request.context_tokens,
                    match request.exclude.len() {
                        0 => String::new(),
                        excluded => format!(", leaving out {excluded} that failed this request"),
                    }
                ),
            )
            .with_code("no_worker")
            .with_retry_after_ms(config.worker_wait_ms.clamp(1, config.retry_after_ms_max)),
            Refusal::ExcludeLimit => ApiError::invalid(
                "exclude",
                format!(
                    "{} workers excluded; at most {}",
                    request.exclude.len(),
                    config.exclude_max
                ),
            ),
            Refusal::Superseded => ApiError::new(
                ErrorKind::Conflict,
                "the same request asked for a lease again; the newer call waits on",
            )
            .with_code("superseded"),
            Refusal::Draining => try_soon("the scheduler is going away; try again"),
        }
    }
}

impl Dispatch {
    /// Refuses those that have waited long enough.
    pub(super) fn refuse_late(&mut self, effects: &mut Vec<Effect>) {
        for pool in self.queue.pools_waiting() {
            let headroom = self.workers.headroom(&pool);
            let tickets: Vec<Ticket> = self
                .queue
                .in_order(&pool)
                .map(|(ticket, _)| ticket)
                .collect();
            for ticket in tickets {
                let stranded_since_ms = self.mark_stranded(ticket, headroom);
                let Some(waiting) = self.queue.get(ticket) else {
                    continue;
                };
                let waited_ms = self.now_ms.saturating_sub(waiting.submitted_ms);
                let stranded_ms = stranded_since_ms.map(|since| self.now_ms.saturating_sub(since));
                if stranded_ms.is_some_and(|stranded| stranded >= self.config.worker_wait_ms) {
                    self.refuse_waiting(ticket, Refusal::NoWorker, effects);
                } else if waited_ms >= self.config.queue_wait_ms_max {
                    self.refuse_waiting(ticket, Refusal::QueueWait, effects);
                }
            }
        }
    }

    /// Notes whether any live worker could serve a waiting request, full or not. Returns since when none can.
    pub(super) fn mark_stranded(&mut self, ticket: Ticket, headroom: Headroom) -> Option<u64> {
        let waiting = self.queue.get(ticket)?;
        let stranded = if waiting.request.exclude.is_empty() {
            waiting.request.context_tokens >= headroom.open_context_max
        } else {
            self.place(waiting) == Placement::Nobody
        };
        let now_ms = self.now_ms;
        let waiting = self.queue.get_mut(ticket)?;
        waiting.stranded_since_ms = stranded.then(|| waiting.stranded_since_ms.unwrap_or(now_ms));
        waiting.stranded_since_ms
    }

    pub(super) fn refuse_waiting(
        &mut self,
        ticket: Ticket,
        refusal: Refusal,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(waiting) = self.take_out(ticket) {
            effects.push(self.refuse(ticket, &waiting.request, refusal));
        }
    }

    pub(super) fn refuse(
        &self,
        ticket: Ticket,
        request: &LeaseRequest,
        refusal: Refusal,
    ) -> Effect {
        let pool = PoolKey::of(request);
        let error = refusal.error(request, &self.config, self.turn_in_ms(&pool));
        Effect::Reject {
            ticket,
            error,
            refusal,
        }
    }

    /// When a request that came now would have its turn: the queue ahead of it, at the pace of recent chunks.
    fn turn_in_ms(&self, pool: &PoolKey) -> u64 {
        let slots = self.workers.headroom(pool).slots.max(1);
        let ahead = self.queue.waiting_in_pool(pool) + 1;
        let turn_in_ms = ahead as f64 * self.queue.service_ms(pool) / slots as f64;
        (turn_in_ms as u64).clamp(1, self.config.retry_after_ms_max)
    }
}

/// 503 with a short hint: a rebuilt scheduler, or another one, knows the workers after one round of
/// heartbeats.
pub(crate) fn try_soon(message: &str) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, message)
        .with_code(code::SCHEDULER_UNAVAILABLE)
        .with_retry_after_ms(1_000)
}
