//! Errors that name the field at fault.

use refrain_protocol::ApiError;

/// Refuses a field, whose name begins the message.
pub(super) fn invalid<T>(param: &str, fault: impl std::fmt::Display) -> Result<T, ApiError> {
    Err(ApiError::invalid(param, format!("{param}: {fault}")))
}

/// Refuses a field that other servers know.
pub(super) fn unsupported<T>(param: &str, message: &str) -> Result<T, ApiError> {
    Err(ApiError::invalid(param, message).with_code("unsupported_parameter"))
}
