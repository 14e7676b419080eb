//! TLS of connections to servers that are no services of the mesh.

use std::path::Path;

use anyhow::Context as _;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use rustls_platform_verifier::BuilderVerifierExt as _;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::certificates::authorities;
use super::provider;

/// Makes a connection to `host` a TLS connection. It trusts the authorities in the PEM file `ca`, or those of the
/// system.
///
/// # Errors
/// The file cannot be used, or the server has no certificate of these authorities for `host`.
pub async fn connect(
    stream: TcpStream,
    host: &str,
    ca: Option<&Path>,
) -> anyhow::Result<TlsStream<TcpStream>> {
    let builder =
        ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
    let config = match ca {
        Some(path) => {
            let name = || path.display().to_string();
            let pem = tokio::fs::read(path).await.with_context(name)?;
            builder.with_root_certificates(authorities(&pem).with_context(name)?)
        }
        None => builder.with_platform_verifier()?,
    };
    let name = ServerName::try_from(host.to_owned()).context("the name of the host")?;
    let connector = TlsConnector::from(std::sync::Arc::new(config.with_no_client_auth()));
    Ok(connector.connect(name, stream).await?)
}
