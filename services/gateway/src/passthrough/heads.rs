//! The heads of a request and of an answer, as they are passed on.

use actix_web::HttpResponseBuilder;
use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use refrain_service_kit::http::is_of_connection;

/// Heads of a request that end here: the caller's keys, and how the body was compressed. The answer comes plain, so
/// that its usage can be read.
const OF_CALLER: [&str; 5] = [
    "accept-encoding",
    "authorization",
    "content-encoding",
    "cookie",
    "x-api-key",
];

/// Copies the heads of a request.
pub(super) fn copy_request(
    heads: &HeaderMap,
    mut call: reqwest::RequestBuilder,
) -> reqwest::RequestBuilder {
    for (name, value) in heads {
        let name = name.as_str();
        if !is_of_connection(name) && !OF_CALLER.contains(&name) {
            call = call.header(name, value.as_bytes());
        }
    }
    call
}

/// Copies the heads of an answer. Cookies of a server are not for callers.
pub(crate) fn copy_answer(heads: &reqwest::header::HeaderMap, response: &mut HttpResponseBuilder) {
    for (name, value) in heads {
        let name = name.as_str();
        if is_of_connection(name) || matches!(name, "set-cookie" | "date" | "server") {
            continue;
        }
        let name = HeaderName::from_bytes(name.as_bytes());
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(value.as_bytes())) {
            response.append_header((name, value));
        }
    }
}
