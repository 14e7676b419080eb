//! TLS of calls between services.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use rustls::ClientConfig;
use rustls::client::Resumption;

use super::certificates::{Identity, authorities};
use super::{alpn, provider};
use crate::reload::Reloaded;
use crate::telemetry::Metrics;

/// The label of the certificate that calls present.
const NAME: &str = "mesh";

/// The files for calls between services.
pub(crate) struct ClientTlsFiles {
    /// The authorities whose certificates the services have.
    pub(crate) ca: PathBuf,
    /// The certificate that calls present, and its key.
    pub(crate) identity: Option<(PathBuf, PathBuf)>,
}

/// Reads the files, and follows them.
///
/// # Errors
/// A file cannot be read or has other contents, or the key is another certificate's.
pub(crate) fn open(
    files: ClientTlsFiles,
    metrics: &Metrics,
) -> anyhow::Result<Arc<Reloaded<ClientConfig>>> {
    let mut paths = vec![files.ca];
    let expiry = files.identity.map(|(certificate, key)| {
        paths.extend([certificate, key]);
        metrics.http().certificate_expiry.with_label_values(&[NAME])
    });
    let parse = move |files: &[Vec<u8>]| {
        let (expiry_s, client) = client_config(files)?;
        if let Some((gauge, expiry_s)) = expiry.as_ref().zip(expiry_s) {
            gauge.set(expiry_s);
        }
        Ok(client)
    };
    Reloaded::open("tls of mesh", paths, &metrics.http().reloads, parse)
        .context("mesh.ca, mesh.certificate and mesh.key")
}

/// Makes the configuration out of the contents of the files. Returns it with the time at which the certificate
/// expires, in Unix seconds.
fn client_config(files: &[Vec<u8>]) -> anyhow::Result<(Option<i64>, ClientConfig)> {
    let [ca, identity @ ..] = files else {
        anyhow::bail!("calls need the authorities of the mesh");
    };
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_root_certificates(authorities(ca)?);
    let (expiry_s, mut client) = match identity {
        [certificate, key] => {
            let identity = Identity::read(certificate, key)?;
            let client = builder
                .with_client_auth_cert(identity.chain, identity.key)
                .context("the certificate and the key")?;
            (Some(identity.expiry_s), client)
        }
        _ => (None, builder.with_no_client_auth()),
    };
    client.alpn_protocols = alpn();
    // A resumed session would not look at certificates again. Calls reuse connections, so handshakes are rare.
    client.resumption = Resumption::disabled();
    Ok((expiry_s, client))
}
