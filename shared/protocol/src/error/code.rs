//! Values of [`ApiError::code`](super::ApiError::code) that several services share, or that a service decides by.
//!
//! A code that only one place writes and nobody decides by may stay a literal there.

/// The worker has no free slot. No engine was asked.
pub const WORKER_FULL: &str = "worker_full";

/// The worker or the scheduler is draining and takes nothing new. No engine was asked.
pub const DRAINING: &str = "draining";

/// The worker has seen a newer lease of the request. No engine was asked.
pub const STALE_EPOCH: &str = "stale_epoch";

/// The worker's circuit breaker is open after failures of its engine. No engine was asked.
pub const ENGINE_BREAKER_OPEN: &str = "engine_breaker_open";

/// The engine was silent for as long as it may be.
pub const ENGINE_TIMEOUT: &str = "engine_timeout";

/// The engine failed, and the message quotes it. It may repeat the request, so it is never logged.
pub const ENGINE_ERROR: &str = "engine_error";

/// The time of the whole request is up, so nobody waits for its output any more.
pub const REQUEST_TIMEOUT: &str = "request_timeout";

/// The scheduler cannot be reached, starts, stops, or has lost its queue. The same call may succeed in a moment.
pub const SCHEDULER_UNAVAILABLE: &str = "scheduler_unavailable";

/// A namespace is signed in the future, so somebody's clock is off.
pub const CLOCK_SKEW: &str = "clock_skew";

/// A namespace was signed too long ago.
pub const NAMESPACE_EXPIRED: &str = "namespace_expired";

/// This process has as many files and connections open as it may. The service that it meant to call has not failed.
pub const OUT_OF_DESCRIPTORS: &str = "out_of_descriptors";

/// Engines of this kind cannot do what is asked. Others may.
pub const UNSUPPORTED_BY_ENGINE: &str = "unsupported_by_engine";

/// No connection to a service of the mesh could be made, so nothing was asked of it.
pub const SERVICE_UNREACHABLE: &str = "service_unreachable";

/// The gateway drains: it takes no new request, or cuts this one off.
pub const SERVER_IS_DRAINING: &str = "server_is_draining";

/// Nobody serves the model, or the caller may not use it.
pub const MODEL_NOT_FOUND: &str = "model_not_found";

/// Prompt and output do not fit the context of the model.
pub const CONTEXT_LENGTH_EXCEEDED: &str = "context_length_exceeded";

/// A limit of the gateway on requests or bytes in flight is reached.
pub const RATE_LIMIT_EXCEEDED: &str = "rate_limit_exceeded";

/// A budget of tokens is spent. A retry before the next day or month is of no use.
pub const INSUFFICIENT_QUOTA: &str = "insufficient_quota";

/// The body is larger than the listener reads.
pub const REQUEST_TOO_LARGE: &str = "request_too_large";

/// The body is not JSON.
pub const INVALID_JSON: &str = "invalid_json";

/// The acceptance statistics that a worker continues were erased.
pub const STATISTICS_ERASED: &str = "statistics_erased";

/// The worker no longer has the context that the request resumes, so it wants all of it. Nothing has failed.
pub const CONTEXT_GONE: &str = "context_gone";

/// The tenant has another version than the change was made from, or has been removed.
pub const TENANT_CHANGED: &str = "tenant_changed";

/// The credential of a process of the mesh has ended, or is not one of this mesh. A new one may follow.
pub const CREDENTIAL_REFUSED: &str = "credential_refused";
