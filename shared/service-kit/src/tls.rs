//! TLS by rustls with ring: certificates of listeners and of callers, from PEM files that may change.
//!
//! A listener takes a whole new configuration for its next connections, and those that are open keep theirs. A client
//! does the same: its pool of connections is made anew.

mod certificates;
mod client;
mod outbound;
mod server;

use std::path::PathBuf;
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use serde::{Deserialize, Serialize};

pub use outbound::connect;

pub(crate) use client::{ClientTlsFiles, open as open_client};
pub(crate) use server::ServerTls;

/// The certificate of a listener, and the callers that it lets in. The files are PEM, and are read again when they
/// change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct TlsConfig {
    /// File with the certificate of this listener, and then those that lead to its authority.
    pub certificate: PathBuf,
    /// File with the private key of the certificate.
    pub key: PathBuf,
    /// File with the authorities whose certificates callers must present. Without it, callers need none.
    pub client_ca: Option<PathBuf>,
}

/// The cryptography of all connections.
fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The versions of HTTP that are offered.
fn alpn() -> Vec<Vec<u8>> {
    vec![b"http/1.1".to_vec()]
}
