//! The one error that crosses a service border.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What went wrong, as far as a caller can act on it. Each kind has one HTTP status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// 400: the request can never succeed as it stands.
    InvalidRequest,
    /// 401: no key, or one that nobody knows.
    Unauthorized,
    /// 403: the key is known, the thing is not for it.
    Forbidden,
    /// 404: no such model, session or route.
    NotFound,
    /// 405: the route is there, for other methods.
    MethodNotAllowed,
    /// 408: the request did not arrive in time.
    RequestTimeout,
    /// 409: a newer attempt (fencing epoch) has taken over.
    Conflict,
    /// 413: the body is over its limit.
    TooLarge,
    /// 429: a limit is reached; try again after `retry_after_ms`.
    Overloaded,
    /// 500: a fault of ours.
    Internal,
    /// 502: an engine or a service behind this one failed.
    Upstream,
    /// 503: not ready, draining, or nobody to do the work.
    Unavailable,
    /// 504: a deadline passed.
    Timeout,
}

impl ErrorKind {
    /// The HTTP status of this kind.
    pub fn status(self) -> u16 {
        match self {
            ErrorKind::InvalidRequest => 400,
            ErrorKind::Unauthorized => 401,
            ErrorKind::Forbidden => 403,
            ErrorKind::NotFound => 404,
            ErrorKind::MethodNotAllowed => 405,
            ErrorKind::RequestTimeout => 408,
            ErrorKind::Conflict => 409,
            ErrorKind::TooLarge => 413,
            ErrorKind::Overloaded => 429,
            ErrorKind::Internal => 500,
            ErrorKind::Upstream => 502,
            ErrorKind::Unavailable => 503,
            ErrorKind::Timeout => 504,
        }
    }

    /// OpenAI's `error.type` for this kind.
    pub fn openai_type(self) -> &'static str {
        match self {
            ErrorKind::InvalidRequest
            | ErrorKind::NotFound
            | ErrorKind::MethodNotAllowed
            | ErrorKind::RequestTimeout
            | ErrorKind::TooLarge
            | ErrorKind::Conflict => "invalid_request_error",
            ErrorKind::Unauthorized => "authentication_error",
            ErrorKind::Forbidden => "permission_error",
            ErrorKind::Overloaded => "rate_limit_error",
            ErrorKind::Internal
            | ErrorKind::Upstream
            | ErrorKind::Unavailable
            | ErrorKind::Timeout => "server_error",
        }
    }
}

/// An error with a message for the caller and a detail for the log only.
///
/// Messages say what was wrong and what to do; they never hold prompt or output text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiError {
    /// What a caller can act on.
    pub kind: ErrorKind,
    /// For the caller.
    pub message: String,
    /// OpenAI's `error.code`, such as `model_not_found`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// OpenAI's `error.param`: the request field at fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub param: Option<String>,
    /// When a retry makes sense, milliseconds from now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after_ms: Option<u64>,
    /// For the log; never sent.
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

    /// A fault of ours: the caller is told no more than that, the log gets `detail`.
    pub fn internal(detail: impl fmt::Display) -> Self {
        ApiError::new(ErrorKind::Internal, "internal error").with_detail(detail)
    }

    /// A request that can never succeed because of the field `param`.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let mut error = ApiError::new(ErrorKind::InvalidRequest, message);
        error.param = Some(param.into());
        error
    }

    /// The same with OpenAI's `code`.
    pub fn with_code(mut self, code: impl Into<String>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// The same with a hint when to retry.
    pub fn with_retry_after_ms(mut self, retry_after_ms: u64) -> Self {
        self.retry_after_ms = Some(retry_after_ms);
        self
    }

    /// The same with a detail for the log.
    pub fn with_detail(mut self, detail: impl fmt::Display) -> Self {
        self.detail = Some(detail.to_string());
        self
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
