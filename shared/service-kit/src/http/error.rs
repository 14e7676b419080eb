//! [`ApiError`] as an HTTP response, and back.

use actix_web::http::StatusCode;
use actix_web::{HttpResponse, ResponseError};
use refrain_protocol::error::code;
use refrain_protocol::openai::ErrorBody;
use refrain_protocol::{ApiError, ErrorKind};

use super::access::ErrorNames;

/// An [`ApiError`] that actix can turn into a response. The orphan rule forbids that for `ApiError` itself.
#[derive(Debug, Clone, thiserror::Error)]
#[error(transparent)]
pub struct HttpError(#[from] pub ApiError);

/// The result of a handler.
pub type HttpResult<T> = Result<T, HttpError>;

impl ResponseError for HttpError {
    fn status_code(&self) -> StatusCode {
        StatusCode::from_u16(self.0.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    fn error_response(&self) -> HttpResponse {
        if self.0.kind.status() >= 500 {
            let quotes_engine = self.0.has_code(code::ENGINE_ERROR);
            let message = (!quotes_engine).then_some(&self.0.message);
            tracing::warn!(kind = ?self.0.kind, code = self.0.code, detail = self.0.detail, message, "request failed");
        }
        let mut response = HttpResponse::build(self.status_code());
        response.extensions_mut().insert(ErrorNames::of(&self.0));
        if let Some(retry_after_ms) = self.0.retry_after_ms {
            // `retry-after` has whole seconds. OpenAI's SDKs prefer the header in milliseconds.
            response.insert_header(("retry-after", retry_after_ms.div_ceil(1000).to_string()));
            response.insert_header(("retry-after-ms", retry_after_ms.to_string()));
        }
        if self.0.has_code(code::INSUFFICIENT_QUOTA) {
            // OpenAI's SDKs would retry a 429 by themselves.
            response.insert_header(("x-should-retry", "false"));
        }
        response.json(ErrorBody::from(&self.0))
    }
}

/// Reads an error response back into the error that it was made of, without the detail.
pub(crate) fn api_error_of(status: u16, retry_after_ms: Option<u64>, body: &[u8]) -> ApiError {
    let kind = match status {
        401 => ErrorKind::Unauthorized,
        403 => ErrorKind::Forbidden,
        404 => ErrorKind::NotFound,
        405 => ErrorKind::MethodNotAllowed,
        408 => ErrorKind::RequestTimeout,
        409 => ErrorKind::Conflict,
        413 => ErrorKind::TooLarge,
        429 => ErrorKind::Overloaded,
        500 => ErrorKind::Internal,
        502 => ErrorKind::Upstream,
        503 => ErrorKind::Unavailable,
        504 => ErrorKind::Timeout,
        400..=499 => ErrorKind::InvalidRequest,
        _ => ErrorKind::Upstream,
    };
    let mut error = match serde_json::from_slice::<ErrorBody>(body) {
        Ok(body) => {
            let mut error = ApiError::new(kind, body.error.message);
            error.code = body.error.code;
            error.param = body.error.param;
            error
        }
        Err(_) => ApiError::new(kind, format!("status {status} without an error body")),
    };
    error.retry_after_ms = retry_after_ms;
    error
}

#[cfg(test)]
mod tests {
    use refrain_protocol::error::code;

    use super::*;

    #[test]
    fn an_error_is_the_same_after_the_wire() {
        let error = ApiError::invalid("model", "no such model").with_code(code::MODEL_NOT_FOUND);
        let body = serde_json::to_vec(&ErrorBody::from(&error)).unwrap();
        assert_eq!(api_error_of(error.kind.status(), None, &body), error);
        assert_eq!(
            api_error_of(418, None, b"teapot").kind,
            ErrorKind::InvalidRequest
        );
    }
}
