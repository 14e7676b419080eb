//! The steps before a request is parsed: its key, its admission, its body, and its turn to be tokenized. Each step
//! has its own limit and its own error.

mod admission;
mod admitted_request;
mod bodies;
mod form_check;
mod tenant_counts;
mod tokenizing;
mod tokenizing_threads;
mod unknown_fields;

pub(crate) use admission::{Admission, AdmissionLimits, AdmissionTicket, ClassLimits};
pub(crate) use admitted_request::AdmittedRequest;
pub(crate) use bodies::{BodyLimits, BodyReader};
pub(crate) use form_check::{FormCheck, FormLimits, FormVerdict};
pub(crate) use tokenizing::TokenizingLimiter;
pub(crate) use tokenizing_threads::TokenizingThreads;
pub(crate) use unknown_fields::UnknownFields;

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};

/// Time after which a refused client may try again.
const RETRY_AFTER_MS: u64 = 1_000;

/// The error of a request beyond a limit on what is in flight.
fn rate_limited(message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorKind::Overloaded, message)
        .with_code(code::RATE_LIMIT_EXCEEDED)
        .with_retry_after_ms(RETRY_AFTER_MS)
}
