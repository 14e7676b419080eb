//! Why a request gets no lease, in words for its caller.

use refrain_protocol::scheduling::LeaseRequest;
use refrain_protocol::{ApiError, ErrorKind};

use crate::config::SchedulerConfig;

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

/// 503 with a short hint: a rebuilt scheduler, or another one, knows the workers after one round of
/// heartbeats.
pub(crate) fn try_soon(message: &str) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, message).with_retry_after_ms(1_000)
}
