//! How messages for people name an engine, and what it cannot do.

use refrain_protocol::error::code;
use refrain_protocol::{ApiError, ErrorKind};
use reqwest::Url;

/// The error of a request for something that the engine cannot do.
pub(crate) fn unsupported(message: impl Into<String>) -> ApiError {
    ApiError::new(ErrorKind::InvalidRequest, message).with_code(code::UNSUPPORTED_BY_ENGINE)
}

/// The error of a field of a request that asks for something that the engine cannot do.
pub(crate) fn unsupported_field(field: &str, message: impl Into<String>) -> ApiError {
    ApiError::invalid(field, message).with_code(code::UNSUPPORTED_BY_ENGINE)
}

/// The engine at `url`, with its host and port, and with the key of the configuration that names it. The rest of a
/// URL may be secret.
pub(crate) fn engine_words(url: Option<&str>, is_configured: bool) -> String {
    let url = url.and_then(|url| Url::parse(url).ok());
    let at = url.map(|url| format!(" at {}", url.origin().ascii_serialization()));
    let key = if is_configured { " (urls.engine)" } else { "" };
    match at {
        Some(at) => format!("the engine{at}{key}"),
        None => "the engine".to_owned(),
    }
}
