//! The errors of calls to an engine that have no response.

use std::error::Error;

use refrain_protocol::{ApiError, ErrorKind};
use refrain_service_kit::{causes, descriptors};

/// The error of a connection that was refused (`Unavailable`), timed out (`Timeout`) or broke. A process without free
/// file descriptors cannot open one, which is not the engine's failure and has a code of its own.
pub(super) fn failed_call(kind: ErrorKind, error: &(dyn Error + 'static)) -> ApiError {
    if let Some(error) = descriptors::exhausted(error) {
        return error;
    }
    let message = match kind {
        ErrorKind::Unavailable => "the engine cannot be reached",
        ErrorKind::Timeout => "the engine did not answer in time",
        _ => "the connection to the engine broke off",
    };
    let error = ApiError::new(kind, message).with_detail(causes::plain(error));
    match kind {
        ErrorKind::Unavailable => error.with_code("engine_unreachable"),
        _ => error,
    }
}
