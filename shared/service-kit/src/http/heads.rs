//! Heads that a request or an answer does not keep on its way through a proxy.

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

/// Whether a head of this name, in small letters, belongs to one connection.
pub fn is_of_connection(name: &str) -> bool {
    OF_CONNECTION.contains(&name)
}
