//! Certificates, keys and authorities in PEM files.

use anyhow::Context as _;
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_cert::Certificate;
use x509_cert::der::Decode as _;

/// A certificate with those that lead to its authority, and its key.
pub(super) struct Identity {
    pub(super) chain: Vec<CertificateDer<'static>>,
    pub(super) key: PrivateKeyDer<'static>,
    /// When the certificate expires, in Unix seconds.
    pub(super) expiry_s: i64,
}

impl Identity {
    /// Reads the contents of two files.
    ///
    /// # Errors
    /// They are no PEM, or have no certificate or no key.
    pub(super) fn read(certificate: &[u8], key: &[u8]) -> anyhow::Result<Self> {
        let chain = certificates(certificate).context("the file of the certificate")?;
        let first = Certificate::from_der(&chain[0]).context("the certificate is malformed")?;
        let not_after = first.tbs_certificate().validity().not_after;
        Ok(Identity {
            key: PrivateKeyDer::from_pem_slice(key).context("the file of the key")?,
            expiry_s: i64::try_from(not_after.to_unix_duration().as_secs())?,
            chain,
        })
    }
}

/// Reads the authorities in a file.
///
/// # Errors
/// The contents are no PEM, or have no certificate.
pub(super) fn authorities(pem: &[u8]) -> anyhow::Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(pem).context("the file of the authorities")? {
        roots.add(certificate).context("an authority")?;
    }
    Ok(roots)
}

/// At least one certificate.
fn certificates(pem: &[u8]) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>()?;
    anyhow::ensure!(!certificates.is_empty(), "it has no certificate");
    Ok(certificates)
}
