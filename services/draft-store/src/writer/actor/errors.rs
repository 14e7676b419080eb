//! Errors that the writer answers with.

use refrain_protocol::{ApiError, ErrorKind};

use crate::log::LogError;

/// The store cannot be opened or written; the caller may try again.
pub(super) fn disk_refused(error: &LogError) -> ApiError {
    ApiError::new(
        ErrorKind::Unavailable,
        "the draft store's disk refuses; try again",
    )
    .with_retry_after_ms(1_000)
    .with_detail(error)
}

/// Why a copy that an operator wants is not begun.
pub(super) fn no_room_for_a_copy() -> LogError {
    LogError::Refused(
        "the disk has no room for a copy of what is to be rewritten: make room first".into(),
    )
}

pub(super) fn outdated() -> LogError {
    LogError::Refused("the store was closed or opened again".into())
}
