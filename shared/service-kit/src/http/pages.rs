//! Keeps web pages of others out of listeners that operators and trainers call.
//!
//! A page in a browser of the same network can send calls to such a listener. Three things give it away:
//!
//! * Browsers send `Origin` with what a page posts. It has to be the listener's own, as with its own pages.
//! * They send `Sec-Fetch-Site` with all calls to HTTPS and to this machine. It has to be `same-origin`, or `none`,
//!   which stands for a person who opens an address.
//! * A page whose own name leads to the listener's address (DNS rebinding) is of the same origin for its browser. So
//!   the name in `Host` has to be one that others cannot own: an IP address, `localhost`, or one of the
//!   configuration.
//!
//! Old browsers, and those that call another machine without TLS, send neither of the first two with a GET, such as
//! that of an image. So what changes something must not be a GET.

use std::net::IpAddr;
use std::sync::Arc;

use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::{HOST, HeaderMap, HeaderName, ORIGIN};
use actix_web::http::uri::Authority;
use actix_web::middleware::Next;
use actix_web::{Error, ResponseError as _};
use refrain_protocol::{ApiError, ErrorKind};

use super::HttpError;

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// The guard of a listener. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct PageGuard {
    names: Arc<[String]>,
}

/// Whether a text is the name of a host, without a port.
pub fn is_host_name(text: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    !text.is_empty() && text.bytes().all(is_part)
}

fn refused(code: &str, message: &str) -> ApiError {
    ApiError::new(ErrorKind::Forbidden, message).with_code(code)
}

impl PageGuard {
    /// A guard of a listener that has these names, beside its addresses.
    pub fn new(names: &[String]) -> Self {
        PageGuard {
            names: names.into(),
        }
    }

    /// Whether nobody else can own the name of a host, which may have a port.
    fn knows(&self, host: &str) -> bool {
        let Ok(authority) = host.parse::<Authority>() else {
            return false;
        };
        let name = authority.host().trim_end_matches('.').to_ascii_lowercase();
        let address = name.trim_start_matches('[').trim_end_matches(']');
        address.parse::<IpAddr>().is_ok()
            || name == "localhost"
            || name.ends_with(".localhost")
            || self
                .names
                .iter()
                .any(|known| known.eq_ignore_ascii_case(&name))
    }

    /// Checks the head of a call. `authority` is that of its URL, which only proxies are sent.
    fn check(&self, authority: Option<&str>, headers: &HeaderMap) -> Result<(), ApiError> {
        let texts = |name: HeaderName| {
            let values = headers.get_all(name);
            values.map(|value| value.to_str().unwrap_or_default())
        };
        // Programs with HTTP/1.0 need not send a name, browsers always do.
        let hosts: Vec<&str> = authority.into_iter().chain(texts(HOST)).collect();
        if !hosts.iter().all(|host| self.knows(host)) {
            let message = "this listener is called by an IP address, by localhost, or by a name in \
                           gateway.allowed_hosts; add the name there if it is yours";
            return Err(refused("host_refused", message));
        }
        let is_own = |origin: &str| {
            let of = origin.split_once("://").map(|(_, of)| of);
            of.is_some_and(|of| hosts.iter().any(|host| host.eq_ignore_ascii_case(of)))
        };
        let is_of_nobody = |site: &str| matches!(site, "none" | "same-origin");
        if texts(ORIGIN).all(is_own) && texts(FETCH_SITE).all(is_of_nobody) {
            return Ok(());
        }
        let message = "web pages of others may not call this listener; open its address directly, or call it from a \
                       program";
        Err(refused("origin_refused", message))
    }
}

/// Refuses a call that a browser made for a page of somebody else, and passes on any other.
pub(super) async fn refuse_pages<B: MessageBody + 'static>(
    guard: PageGuard,
    request: ServiceRequest,
    next: Next<B>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let authority = request.uri().authority().map(Authority::as_str);
    if let Err(error) = guard.check(authority, request.headers()) {
        // This is a response and not an error, so that the listener counts it like any other.
        let refused = HttpError(error).error_response().map_into_right_body();
        return Ok(request.into_response(refused));
    }
    Ok(next.call(request).await?.map_into_left_body())
}

#[cfg(test)]
mod tests {
    use actix_web::http::header::HeaderValue;

    use super::*;

    fn code(authority: Option<&str>, given: &[(&str, &str)]) -> String {
        let mut headers = HeaderMap::new();
        for (name, value) in given {
            let name = HeaderName::try_from(*name).unwrap();
            headers.append(name, HeaderValue::from_str(value).unwrap());
        }
        let guard = PageGuard::new(&["refrain-trainer.lab.svc".to_owned()]);
        let refused = guard.check(authority, &headers).err();
        refused.and_then(|error| error.code).unwrap_or_default()
    }

    #[test]
    fn only_names_that_nobody_else_can_own_lead_here() {
        for host in [
            "127.0.0.1:8091",
            "10.0.0.7",
            "[::1]:8091",
            "localhost:8091",
            "LOCALHOST",
            "localhost.",
            "refrain.localhost:1",
            "refrain-trainer.lab.svc:8091",
            "Refrain-Trainer.lab.svc.",
        ] {
            assert_eq!(code(None, &[("host", host)]), "", "{host}");
        }
        for host in [
            "evil.example",
            "evil.example:8091",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "evil-localhost",
            "refrain-trainer.lab.svc.evil.example",
            "",
            "a b",
        ] {
            assert_eq!(code(None, &[("host", host)]), "host_refused", "{host}");
        }
        let both = [("host", "127.0.0.1"), ("host", "evil.example")];
        assert_eq!(code(None, &both), "host_refused");
        assert_eq!(code(Some("evil.example"), &both[..1]), "host_refused");
        // A program that sends no name is no browser.
        assert_eq!(code(None, &[]), "");
    }

    #[test]
    fn a_page_may_call_the_listener_that_it_came_from() {
        let with = |name, value| code(None, &[("host", "127.0.0.1:8090"), (name, value)]);
        assert_eq!(with("origin", "http://127.0.0.1:8090"), "");
        assert_eq!(
            with("origin", "https://127.0.0.1:8090"),
            "",
            "behind a proxy with TLS"
        );
        for origin in ["http://127.0.0.1:8091", "http://page.example", "null", ""] {
            assert_eq!(with("origin", origin), "origin_refused", "{origin}");
        }
        assert_eq!(with("sec-fetch-site", "same-origin"), "");
        assert_eq!(with("sec-fetch-site", "none"), "");
        for site in ["cross-site", "same-site", "", "new"] {
            assert_eq!(with("sec-fetch-site", site), "origin_refused", "{site}");
        }
    }
}
