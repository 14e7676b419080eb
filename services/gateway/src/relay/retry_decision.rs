//! The answer to a failure: try again, or give up.

use std::time::Duration;

use refrain_protocol::ApiError;

/// The decision after a failure.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RetryDecision {
    /// Ask for another lease after this pause.
    RetryAfter(Duration),
    /// End the request with this error.
    GiveUp(ApiError),
}
