//! The one error type that crosses the border of a service.

pub mod code;

use std::fmt;

use serde::{Deserialize, Serialize};

/// The kind of an error, as far as a caller can act on it. Each kind has one HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// 400: the request can never succeed as it stands.
    InvalidRequest = 400,
    /// 401: the key or secret is missing or unknown.
    Unauthorized = 401,
    /// 403: the key is known, and may not do this.
    Forbidden = 403,
    /// 404: there is no such model, session or route.
    NotFound = 404,
    /// 405: the route exists, but takes other methods.
    MethodNotAllowed = 405,
    /// 408: the request did not arrive in time.
    RequestTimeout = 408,
    /// 409: a newer attempt, with a higher fencing epoch, has taken over.
    Conflict = 409,
    /// 413: the body is over its limit.
    TooLarge = 413,
    /// 429: a limit is reached; the caller may retry after `retry_after_ms`.
    Overloaded = 429,
    /// 500: a fault of the service itself.
    Internal = 500,
    /// 502: an engine or a service behind this one failed while it carried out the call.
    Upstream = 502,
    /// 503: the service is not ready, drains, cannot be reached, or has nobody to do the work.
    Unavailable = 503,
    /// 504: a deadline passed.
    Timeout = 504,
}

impl ErrorKind {
    /// The HTTP status of this kind.
    pub fn status(self) -> u16 {
        self as u16
    }

    /// OpenAI's `error.type` for this kind.
    pub fn openai_type(self) -> &'static str {
        match self.status() {
            401 => "authentication_error",
            429 => "rate_limit_error",
            ..500 => "invalid_request_error",
            _ => "server_error",
        }
    }
}

/// An error with a message for the caller and a detail for the log only.
///
/// Messages say what was wrong and what to do. They never contain text of prompts or outputs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    /// The kind, which decides the HTTP status.
    pub kind: ErrorKind,
    /// A sentence for the caller.
    pub message: String,
    /// OpenAI's `error.code`: the exact reason, one of the constants in [`code`] where other services act on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// OpenAI's `error.param`: the request field at fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub param: Option<String>,
    /// Milliseconds after which a retry makes sense.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// Detail for the log of the service; it is never sent.
    #[serde(skip)]
    pub detail: Option<String>,
}

impl ApiError {
    /// An error of `kind` with a message for the caller.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        ApiError {
            kind,
            message: message.into(),
            code: None,
            param: None,
            retry_after_ms: None,
            detail: None,
        }
    }

    /// A fault of the service itself. Only the log gets `detail`; the caller learns nothing beyond the kind.
    pub fn internal(detail: impl fmt::Display) -> Self {
        ApiError::new(ErrorKind::Internal, "internal error").with_detail(detail)
    }

    /// A request that can never succeed because of the field `param`.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = ApiError::new(ErrorKind::InvalidRequest, message);
        error.param = Some(param.into());
        error
    }

    /// Sets OpenAI's `code`.
    pub fn with_code(mut self, code: impl Into<String>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// Sets the time after which a retry makes sense.
    pub fn with_retry_after_ms(mut self, retry_after_ms: u64) -> Self {
        self.retry_after_ms = Some(retry_after_ms);
        self
    }

    /// Sets the detail for the log.
    pub fn with_detail(mut self, detail: impl fmt::Display) -> Self {
        self.detail = Some(detail.to_string());
        self
    }

    /// Whether this error has the given `code`.
    pub fn has_code(&self, code: &str) -> bool {
        self.code.as_deref() == Some(code)
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.message, self.kind)?;
        if let Some(detail) = &self.detail {
            write!(f, ": {detail}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ApiError {}
