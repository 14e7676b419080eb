//! TLS of calls between services.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

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
    /// The name that certificates must have at URLs with an IP address, in place of the address.
    pub(crate) address_name: Option<String>,
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
    let address_name = files.address_name;
    let parse = move |files: &[Vec<u8>]| {
        let (expiry_s, client) = client_config(files, address_name.as_deref())?;
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
fn client_config(
    files: &[Vec<u8>],
    address_name: Option<&str>,
) -> anyhow::Result<(Option<i64>, ClientConfig)> {
    let [ca, identity @ ..] = files else {
        anyhow::bail!("calls need the authorities of the mesh");
    };
    let roots = authorities(ca)?;
    let builder =
        ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
    let builder = match address_name {
        None => builder.with_root_certificates(roots),
        Some(name) => builder
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(NamedAddresses::new(roots, name)?)),
    };
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

/// Verifies certificates as usual, but expects one name at all IP addresses. Processes whose address nobody knows
/// before then have a certificate with a name.
#[derive(Debug)]
struct NamedAddresses {
    verifier: Arc<WebPkiServerVerifier>,
    name: ServerName<'static>,
}

impl NamedAddresses {
    fn new(roots: RootCertStore, name: &str) -> anyhow::Result<Self> {
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider()).build()?;
        let name = ServerName::try_from(name.to_owned()).context("mesh.address_name")?;
        Ok(NamedAddresses { verifier, name })
    }
}

impl ServerCertVerifier for NamedAddresses {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let name = match server_name {
            ServerName::IpAddress(_) => &self.name,
            name => name,
        };
        self.verifier
            .verify_server_cert(end_entity, intermediates, name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier
            .verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier
            .verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}
