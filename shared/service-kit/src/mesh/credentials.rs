//! The mesh secret, the credential and the certificate of calls between services. All may change under a running
//! service.

use std::sync::Arc;

use anyhow::Context as _;
use rustls::ClientConfig;
use subtle::{Choice, ConstantTimeEq};

use super::config::{MeshConfig, SECRET_CHARS_MIN};
use super::roles::{Issuers, RoleCredential};
use crate::clock;
use crate::reload::Reloaded;
use crate::telemetry::Metrics;
use crate::tls::{ClientTlsFiles, open_client};

/// The secret, the credential and the certificate of calls between services, which follow their files. Cheap to
/// clone.
#[derive(Clone)]
pub struct MeshCredentials {
    secrets: Arc<Reloaded<Secrets>>,
    /// The credential, which calls carry in place of the secret.
    credential: Option<Arc<Reloaded<Credential>>>,
    tls: Option<Arc<Reloaded<ClientConfig>>>,
}

/// A credential as calls carry it.
struct Credential {
    token: Arc<str>,
    says: RoleCredential,
}

/// The secrets of a mesh.
struct Secrets {
    /// The secret that calls carry. Empty: there is none.
    own: Arc<str>,
    /// Those that are accepted besides.
    others: Vec<String>,
}

impl MeshCredentials {
    /// Reads the files of a checked configuration. The credential may be of any role.
    ///
    /// # Errors
    /// A file cannot be read, or has other contents.
    pub fn open(config: &MeshConfig, metrics: &Metrics) -> anyhow::Result<Self> {
        MeshCredentials::open_own(config, metrics, |_| Ok(()))
    }

    /// As [`MeshCredentials::open`], with a check that the credential is this process's own. One that replaces it has
    /// to pass the same check.
    ///
    /// # Errors
    /// A file cannot be read, or has other contents, or the credential does not pass.
    pub fn open_own(
        config: &MeshConfig,
        metrics: &Metrics,
        is_own: impl Fn(&RoleCredential) -> anyhow::Result<()> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let others = config.secrets_accepted.clone();
        let secrets = match &config.secret_file {
            None => Reloaded::fixed(Secrets {
                own: config.secret.as_str().into(),
                others,
            }),
            Some(path) => {
                let parse = move |files: &[Vec<u8>]| secrets(&files.concat(), others.clone());
                let reloads = &metrics.http().reloads;
                Reloaded::open("mesh secret", vec![path.clone()], reloads, parse)
                    .context("mesh.secret_file")?
            }
        };
        let credential = config.credential_file.clone().map(|path| {
            let issuers = config.issuers()?;
            let (skew_s, gauge) = (
                config.clock_skew_s_max,
                metrics.http().credential_expiry.clone(),
            );
            let parse = move |files: &[Vec<u8>]| {
                let credential = credential(&files.concat(), &issuers, clock::unix_s(), skew_s)?;
                is_own(&credential.says)?;
                let role = credential.says.role.as_str();
                gauge
                    .with_label_values(&[role])
                    .set(credential.says.expires_at_s as i64);
                Ok(credential)
            };
            let reloads = &metrics.http().reloads;
            Reloaded::open("mesh credential", vec![path], reloads, parse)
                .context("mesh.credential_file")
        });
        let identity = config.certificate.clone().zip(config.key.clone());
        let files = config.ca.clone().map(|ca| ClientTlsFiles {
            ca,
            identity,
            address_name: config.address_name.clone(),
        });
        let tls = files.map(|files| open_client(files, metrics)).transpose()?;
        Ok(MeshCredentials {
            secrets,
            credential: credential.transpose()?,
            tls,
        })
    }

    /// Credentials that have this secret and no certificate.
    pub fn of_secret(secret: &str) -> Self {
        let secrets = Reloaded::fixed(Secrets {
            own: secret.into(),
            others: Vec::new(),
        });
        MeshCredentials {
            secrets,
            credential: None,
            tls: None,
        }
    }

    /// The same certificate with another secret.
    pub fn with_secret(self, secret: &str) -> Self {
        let tls = self.tls;
        MeshCredentials {
            tls,
            ..Self::of_secret(secret)
        }
    }

    /// The word that calls carry: the credential, or else the secret.
    pub(crate) fn carried(&self) -> Arc<str> {
        match &self.credential {
            Some(credential) => credential.get().token.clone(),
            None => self.secrets.get().own.clone(),
        }
    }

    /// Whether a secret is among those that are accepted. All are compared, so the time does not tell which.
    pub(crate) fn accepts(&self, given: &[u8]) -> bool {
        let secrets = self.secrets.get();
        if secrets.own.is_empty() {
            return false;
        }
        let own = given.ct_eq(secrets.own.as_bytes());
        let others = secrets.others.iter();
        let is_among = others.fold(own, |found: Choice, other| {
            found | given.ct_eq(other.as_bytes())
        });
        is_among.into()
    }

    /// The configuration of TLS now, and a number that changes with it. `None` without authorities of the mesh.
    pub(crate) fn tls(&self) -> Option<(u64, Arc<ClientConfig>)> {
        let tls = self.tls.as_ref()?;
        // In this order a change in between is noticed the next time.
        Some((tls.generation(), tls.get()))
    }

    /// The number that changes with the configuration of TLS.
    pub(crate) fn tls_generation(&self) -> u64 {
        self.tls.as_ref().map_or(0, |tls| tls.generation())
    }
}

/// Reads a file with a credential. It has to be one of this mesh, so that a wrong file is noticed here.
fn credential(
    text: &[u8],
    issuers: &Issuers,
    now_s: u64,
    skew_s: u64,
) -> anyhow::Result<Credential> {
    let text = std::str::from_utf8(text).context("it is not UTF-8")?;
    let token = text.trim();
    let says = issuers.verify(token, now_s, skew_s);
    let says = says.map_err(|why| anyhow::anyhow!("the credential cannot be used: {why}"))?;
    Ok(Credential {
        token: token.into(),
        says,
    })
}

/// Reads a file of secrets: the first line is the one that calls carry, and those of further lines are accepted
/// besides.
fn secrets(text: &[u8], others: Vec<String>) -> anyhow::Result<Secrets> {
    let text = std::str::from_utf8(text).context("it is not UTF-8")?;
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let own = lines.next().context("it has no secret")?;
    let others: Vec<String> = lines.map(str::to_owned).chain(others).collect();
    let is_long = |secret: &str| secret.len() >= SECRET_CHARS_MIN;
    anyhow::ensure!(
        is_long(own) && others.iter().all(|secret| is_long(secret)),
        "each line must have at least {SECRET_CHARS_MIN} characters; `refrain keys` makes a secret"
    );
    let is_header = |secret: &str| secret.bytes().all(|byte| (0x21..0x7f).contains(&byte));
    anyhow::ensure!(
        is_header(own),
        "the secret must be of ASCII letters, digits and signs, since calls carry it in a header"
    );
    Ok(Secrets {
        own: own.into(),
        others,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_is_carried_and_all_lines_are_accepted() {
        let (a, b, c) = ("a".repeat(32), "b".repeat(32), "c".repeat(40));
        let text = format!("{a}\n\n  {b}  \n");
        let secrets = secrets(text.as_bytes(), vec![c.clone()]).unwrap();
        let credentials = MeshCredentials {
            secrets: Reloaded::fixed(secrets),
            credential: None,
            tls: None,
        };
        assert_eq!(*credentials.carried(), *a);
        for accepted in [&a, &b, &c] {
            assert!(credentials.accepts(accepted.as_bytes()));
        }
        for refused in ["", &a[1..], "aaaa", &format!("{a}a")] {
            assert!(!credentials.accepts(refused.as_bytes()), "{refused}");
        }
    }

    #[test]
    fn a_file_without_a_usable_secret_is_refused() {
        let long = "x".repeat(32);
        for text in [
            "",
            "\n",
            "short",
            &format!("{long}\nshort"),
            &format!("{long} y"),
        ] {
            assert!(secrets(text.as_bytes(), Vec::new()).is_err(), "{text}");
        }
    }
}
