//! Errors that the writer returns.

use std::time::Duration;

use refrain_protocol::{ApiError, ErrorKind};

use crate::log::LogError;

/// Wait after a failed job.
pub(in crate::writer) const RETRY_AFTER: Duration = Duration::from_secs(60);

/// The disk refuses, so the store cannot be opened or written. The caller may try again.
pub(in crate::writer) fn disk_refused(error: &LogError) -> ApiError {
    ApiError::new(
        ErrorKind::Unavailable,
        "the draft store cannot read or write its disk; retry",
    )
    .with_retry_after_ms(1_000)
    .with_detail(error)
}

/// A copy that an operator requested was not begun, for lack of space.
pub(in crate::writer) fn no_room_for_a_copy() -> LogError {
    LogError::Refused(
        "the disk has no space for a copy of what is to be rewritten; free some space first".into(),
    )
}

pub(in crate::writer) fn outdated() -> LogError {
    LogError::Refused("the store was closed or reopened meanwhile".into())
}
