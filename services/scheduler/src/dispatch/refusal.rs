//! The reasons for refusing a lease, and the errors that callers get.

use refrain_protocol::error::code;
use refrain_protocol::prefix::PREFIXES_MAX;
use refrain_protocol::scheduling::LeaseRequest;
use refrain_protocol::{ApiError, ErrorKind};

use crate::config::SchedulerConfig;

/// Maximum number of workers that a request may exclude. A request has far fewer attempts.
pub(super) const EXCLUDE_MAX: usize = 64;
/// Longest retry hint. The estimate behind it assumes that the pace of recent chunks goes on.
pub(super) const RETRY_AFTER_MS_MAX: u64 = 30_000;
/// Retry hint while no scheduler answers. A new one knows the workers after one round of heartbeats.
const UNAVAILABLE_RETRY_AFTER_MS: u64 = 1_000;

refrain_service_kit::label_values! {
    /// The limit that a request reached: the `limit` label of `refrain_scheduler_rejections_total`.
    pub enum LeaseRefusal {
        /// `queue_max` requests wait already.
        QueueFull = "queue_max",
        /// `tenant_queue_max` requests of the tenant wait already.
        TenantQueueFull = "tenant_queue_max",
        /// `rollout_queue_max` rollouts wait already.
        RolloutQueueFull = "rollout_queue_max",
        /// `tenant_rollout_queue_max` rollouts of the tenant wait already.
        TenantRolloutQueueFull = "tenant_rollout_queue_max",
        /// The request waited for `queue_wait_ms_max`.
        QueueWait = "queue_wait_ms_max",
        /// No suitable worker appeared within `worker_wait_ms`.
        NoWorker = "worker_wait_ms",
        /// The request excludes more than [`EXCLUDE_MAX`] workers.
        ExcludeLimit = "exclude_max",
        /// The request names more prefixes than a context has.
        PrefixLimit = "prefixes_max",
        /// The same request asked again, or had asked again before this call arrived.
        Superseded = "superseded",
        /// The scheduler shuts down.
        Draining = "draining",
    }
}

impl LeaseRefusal {
    /// The error for `request`. `turn_in_ms` estimates how long a new attempt would wait for its turn. `trouble` says
    /// why no worker of the model takes chunks.
    pub(super) fn error(
        self,
        request: &LeaseRequest,
        config: &SchedulerConfig,
        turn_in_ms: u64,
        trouble: Option<String>,
    ) -> ApiError {
        let model = &request.namespace.namespace.model;
        let (kind, code, message) = match self {
            LeaseRefusal::QueueFull => (
                ErrorKind::Overloaded,
                "queue_full",
                format!(
                    "{} requests are already waiting; try again later",
                    config.queue_max
                ),
            ),
            LeaseRefusal::TenantQueueFull => (
                ErrorKind::Overloaded,
                "tenant_queue_full",
                format!(
                    "{} of your requests are already waiting; send fewer at once or try again later",
                    config.tenant_queue_max
                ),
            ),
            LeaseRefusal::RolloutQueueFull => (
                ErrorKind::Overloaded,
                "queue_full",
                format!(
                    "{} rollouts are already waiting; try again later",
                    config.rollout_queue_max
                ),
            ),
            LeaseRefusal::TenantRolloutQueueFull => (
                ErrorKind::Overloaded,
                "tenant_queue_full",
                format!(
                    "{} of your rollouts are already waiting; send fewer at once or try again later",
                    config.tenant_rollout_queue_max
                ),
            ),
            LeaseRefusal::QueueWait => (
                ErrorKind::Overloaded,
                "queue_wait",
                format!(
                    "no worker of model {model} had a free slot for {} ms; try again later",
                    config.queue_wait_ms_max
                ),
            ),
            LeaseRefusal::NoWorker => (
                ErrorKind::Unavailable,
                "no_worker",
                no_worker(request, trouble),
            ),
            LeaseRefusal::ExcludeLimit => {
                let excluded = request.exclude.len();
                return ApiError::invalid(
                    "exclude",
                    format!(
                        "the request excludes {excluded} workers; exclude at most {EXCLUDE_MAX}"
                    ),
                );
            }
            LeaseRefusal::PrefixLimit => {
                let prefixes = request.prefixes.len();
                return ApiError::invalid(
                    "prefixes",
                    format!("the request has {prefixes} prefixes; send at most {PREFIXES_MAX}"),
                );
            }
            LeaseRefusal::Superseded => {
                let message =
                    "the same request asked for a lease again; only the newer call goes on waiting";
                return ApiError::new(ErrorKind::Conflict, message).with_code("superseded");
            }
            LeaseRefusal::Draining => {
                return scheduler_unavailable("the scheduler is shutting down; try again");
            }
        };
        let retry_after_ms = match self {
            LeaseRefusal::NoWorker => config.worker_wait_ms.clamp(1, RETRY_AFTER_MS_MAX),
            _ => turn_in_ms,
        };
        ApiError::new(kind, message)
            .with_code(code)
            .with_retry_after_ms(retry_after_ms)
    }
}

fn no_worker(request: &LeaseRequest, trouble: Option<String>) -> String {
    let model = &request.namespace.namespace.model;
    if let Some(trouble) = trouble {
        return format!(
            "no worker of model {model} takes requests now ({trouble}); try again later"
        );
    }
    let excluded = match request.exclude.len() {
        0 => String::new(),
        excluded => format!(", not counting {excluded} on which this request failed"),
    };
    format!(
        "no live worker of model {model} can take a context of {} tokens{excluded}; try again later",
        request.context_tokens
    )
}

/// A 503 error with a short retry hint.
pub(crate) fn scheduler_unavailable(message: &str) -> ApiError {
    ApiError::new(ErrorKind::Unavailable, message)
        .with_code(code::SCHEDULER_UNAVAILABLE)
        .with_retry_after_ms(UNAVAILABLE_RETRY_AFTER_MS)
}
