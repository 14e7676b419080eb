//! TLS of listeners.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use prometheus::IntCounterVec;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{Error, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::certificates::{Identity, authorities};
use super::{TlsConfig, alpn, provider};
use crate::reload::Reloaded;
use crate::telemetry::Metrics;

/// The certificate of a listener, which follows its files. Cheap to clone.
#[derive(Clone)]
pub(crate) struct ServerTls {
    service: &'static str,
    current: Arc<Reloaded<ServerConfig>>,
    failures: IntCounterVec,
}

impl ServerTls {
    /// Reads the files of a listener.
    ///
    /// # Errors
    /// A file cannot be read or has other contents, or the key is another certificate's.
    pub(crate) fn open(
        service: &'static str,
        config: &TlsConfig,
        metrics: &Metrics,
    ) -> anyhow::Result<Self> {
        let mut paths = vec![config.certificate.clone(), config.key.clone()];
        paths.extend(config.client_ca.clone());
        let expiry = metrics
            .http()
            .certificate_expiry
            .with_label_values(&[service]);
        let parse = move |files: &[Vec<u8>]| {
            let (expiry_s, server) = server_config(files)?;
            expiry.set(expiry_s);
            Ok(server)
        };
        let name = format!("tls of {service}");
        let failures = metrics.http().handshake_failures.clone();
        for reason in ["timeout", "certificate", "protocol"] {
            failures.with_label_values(&[service, reason]);
        }
        Ok(ServerTls {
            service,
            current: Reloaded::open(&name, paths, &metrics.http().reloads, parse)
                .with_context(|| format!("{service}: http.tls"))?,
            failures,
        })
    }

    /// Makes a connection a TLS connection, within `time_max`.
    ///
    /// # Errors
    /// The caller speaks no TLS, presents no certificate of a known authority, or is too slow.
    pub(crate) async fn accept<S>(&self, stream: S, time_max: Duration) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let accept = TlsAcceptor::from(self.current.get()).accept(stream);
        let accepted = tokio::time::timeout(time_max, accept)
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        accepted.inspect_err(|error| {
            let labels = [self.service, failure_reason(error)];
            self.failures.with_label_values(&labels).inc();
            tracing::debug!(service = self.service, %error, "a TLS handshake failed");
        })
    }
}

/// Why a handshake failed, as a label.
fn failure_reason(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::TimedOut {
        return "timeout";
    }
    let rustls = error.get_ref().and_then(|error| error.downcast_ref());
    match rustls {
        Some(Error::NoCertificatesPresented | Error::InvalidCertificate(_)) => "certificate",
        // The caller does not trust the certificate of the listener, or has none that the listener would take.
        Some(Error::AlertReceived(_)) => "certificate",
        _ => "protocol",
    }
}

/// Makes the configuration out of the contents of the files. Returns it with the time at which the certificate
/// expires, in Unix seconds.
fn server_config(files: &[Vec<u8>]) -> anyhow::Result<(i64, ServerConfig)> {
    let [certificate, key, client_ca @ ..] = files else {
        anyhow::bail!("a listener needs a certificate and a key");
    };
    let identity = Identity::read(certificate, key)?;
    let builder =
        ServerConfig::builder_with_provider(provider()).with_safe_default_protocol_versions()?;
    let builder = match client_ca {
        [] => builder.with_no_client_auth(),
        [roots, ..] => {
            let roots = Arc::new(authorities(roots)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
            builder.with_client_cert_verifier(verifier.build()?)
        }
    };
    let mut server = builder
        .with_single_cert(identity.chain, identity.key)
        .context("the certificate and the key")?;
    server.alpn_protocols = alpn();
    if !client_ca.is_empty() {
        // A resumed session would not check whether the caller's certificate has expired meanwhile.
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
    }
    Ok((identity.expiry_s, server))
}
