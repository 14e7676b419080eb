//! The heads of requests and answers that pass through a proxy.

use actix_web::HttpResponseBuilder;
use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};

/// Heads that belong to one connection, and those that the next one gets of its own (RFC 9110, 7.6.1).
const OF_CONNECTION: [&str; 11] = [
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Copies the heads of a request, but those of the connection and those that end here.
pub fn pass_request_heads(
    heads: &HeaderMap,
    mut call: reqwest::RequestBuilder,
    ends_here: impl Fn(&str) -> bool,
) -> reqwest::RequestBuilder {
    for (name, value) in heads {
        let name = name.as_str();
        if !OF_CONNECTION.contains(&name) && !ends_here(name) {
            call = call.header(name, value.as_bytes());
        }
    }
    call
}

/// Copies the heads of an answer, as [`pass_request_heads`].
pub fn pass_answer_heads(
    heads: &reqwest::header::HeaderMap,
    response: &mut HttpResponseBuilder,
    ends_here: impl Fn(&str) -> bool,
) {
    for (name, value) in heads {
        let name = name.as_str();
        if OF_CONNECTION.contains(&name) || ends_here(name) {
            continue;
        }
        let name = HeaderName::from_bytes(name.as_bytes());
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(value.as_bytes())) {
            response.append_header((name, value));
        }
    }
}
