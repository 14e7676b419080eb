//! Errors in Anthropic's shape.

use refrain_protocol::{ApiError, ErrorKind};
use serde_json::{Value, json};

/// `{"type": "error", "error": {..}}`.
pub(super) fn error_value(error: &ApiError) -> Value {
    json!({
        "type": "error",
        "error": {"type": error_type(error.kind), "message": error.message},
    })
}

/// The body of an error response.
pub(in crate::surfaces) fn error_body(error: &ApiError) -> Vec<u8> {
    error_value(error).to_string().into_bytes()
}

fn error_type(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::InvalidRequest
        | ErrorKind::MethodNotAllowed
        | ErrorKind::RequestTimeout
        | ErrorKind::Conflict => "invalid_request_error",
        ErrorKind::Unauthorized => "authentication_error",
        ErrorKind::Forbidden => "permission_error",
        ErrorKind::NotFound => "not_found_error",
        ErrorKind::TooLarge => "request_too_large",
        ErrorKind::Overloaded => "rate_limit_error",
        ErrorKind::Unavailable => "overloaded_error",
        ErrorKind::Timeout => "timeout_error",
        ErrorKind::Internal | ErrorKind::Upstream => "api_error",
    }
}
