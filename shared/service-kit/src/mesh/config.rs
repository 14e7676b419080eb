//! The keys and certificates of a mesh, as an operator writes them.

use std::fmt;
use std::path::PathBuf;

use anyhow::Context as _;
use rustls::pki_types::DnsName;
use serde::{Deserialize, Serialize};

use super::keys::{PublicKey, SigningKey};
use super::roles::Issuers;
use crate::clocks::CLOCK_SKEW_S_MAX;
use crate::random;

/// Seconds for which the signature of a namespace is valid. Gateways renew it well before.
pub const NAMESPACE_TTL_S: u64 = 24 * 3600;

/// Fewest characters of a mesh secret.
pub(super) const SECRET_CHARS_MIN: usize = 32;

/// Maximum number of keys that verify namespaces. A rotation needs two.
pub(super) const PUBLIC_KEYS_MAX: usize = 8;

const SIGNING_KEY_UNKNOWN: &str =
    "does not belong to mesh.namespace_public_key or one of mesh.namespace_public_keys";

/// The keys of a mesh, as hex strings that `refrain keys` makes, and the certificates of calls inside it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct MeshConfig {
    /// The secret that all services share, at least 32 characters. Whoever has it may call every internal route.
    pub secret: String,
    /// In place of `secret`: a file with it, which is read again when it changes. The secrets of further lines are
    /// accepted as well.
    pub secret_file: Option<PathBuf>,
    /// Secrets that calls may carry besides, while the secret is being replaced.
    pub secrets_accepted: Vec<String>,
    /// Keys that verify credentials of roles, 32 bytes in hex each. With any, the secret is refused unless `secret`
    /// or `secret_file` is set as well.
    pub issuer_public_keys: Vec<String>,
    /// File with the credential of this process, as `refrain mesh credential` prints it. Calls carry it in place of
    /// the secret. It is read again when it changes.
    pub credential_file: Option<PathBuf>,
    /// The key that verifies namespaces, 32 bytes in hex. Every service needs it.
    pub namespace_public_key: String,
    /// Keys that verify namespaces besides, while the signing key is being replaced.
    pub namespace_public_keys: Vec<String>,
    /// The key that signs namespaces, 32 bytes in hex. Only the gateway may have it.
    pub namespace_signing_key: String,
    /// In place of `namespace_signing_key`: a file with it, which is read at the start.
    pub namespace_signing_key_file: Option<PathBuf>,
    /// PEM file with the authorities of the services' certificates. Calls to `https://` URLs of the mesh trust these
    /// and no others; without it, they trust those of the system. It is read again when it changes.
    pub ca: Option<PathBuf>,
    /// PEM file with the certificate that calls present to services with `http.tls.client_ca`. It is read again when
    /// it changes.
    pub certificate: Option<PathBuf>,
    /// PEM file with the private key of that certificate.
    pub key: Option<PathBuf>,
    /// The name that a certificate must have at an `https://` URL with an IP address, such as that of a worker whose
    /// address nobody knows before. Without it, the certificate must name the address.
    pub address_name: Option<String>,
    /// Seconds by which the clocks of the mesh may differ. A namespace that is signed further in the future is
    /// refused, and a service whose clock is off by more is not ready. At most half of the life of a signature, since
    /// gateways renew it then.
    pub clock_skew_s_max: u64,
}

impl Default for MeshConfig {
    fn default() -> Self {
        MeshConfig {
            secret: String::new(),
            secret_file: None,
            secrets_accepted: Vec::new(),
            issuer_public_keys: Vec::new(),
            credential_file: None,
            namespace_public_key: String::new(),
            namespace_public_keys: Vec::new(),
            namespace_signing_key: String::new(),
            namespace_signing_key_file: None,
            ca: None,
            certificate: None,
            key: None,
            address_name: None,
            clock_skew_s_max: CLOCK_SKEW_S_MAX,
        }
    }
}

/// Written by hand, so that a configuration can be logged without its secrets.
impl fmt::Debug for MeshConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hidden = |secret: &str| if secret.is_empty() { "missing" } else { "set" };
        f.debug_struct("MeshConfig")
            .field("secret", &hidden(&self.secret))
            .field("secret_file", &self.secret_file)
            .field("secrets_accepted", &self.secrets_accepted.len())
            .field("issuer_public_keys", &self.issuer_public_keys)
            .field("credential_file", &self.credential_file)
            .field("namespace_public_key", &self.namespace_public_key)
            .field("namespace_public_keys", &self.namespace_public_keys)
            .field(
                "namespace_signing_key",
                &hidden(&self.namespace_signing_key),
            )
            .field(
                "namespace_signing_key_file",
                &self.namespace_signing_key_file,
            )
            .field("ca", &self.ca)
            .field("certificate", &self.certificate)
            .field("address_name", &self.address_name)
            .field("clock_skew_s_max", &self.clock_skew_s_max)
            .finish()
    }
}

impl MeshConfig {
    /// Generates random keys.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn generate() -> anyhow::Result<Self> {
        let bytes = random::bytes::<64>()?;
        let (secret, seed) = bytes.split_at(32);
        let key = SigningKey::from_seed(seed)?;
        Ok(MeshConfig {
            secret: hex::encode(secret),
            namespace_public_key: key.public.hex(),
            namespace_signing_key: hex::encode(seed),
            ..MeshConfig::default()
        })
    }

    /// Whether any key is set.
    pub fn has_keys(&self) -> bool {
        !self.secret.is_empty()
            || self.secret_file.is_some()
            || !self.issuer_public_keys.is_empty()
            || self.credential_file.is_some()
            || !self.namespace_public_key.is_empty()
            || !self.namespace_signing_key.is_empty()
            || self.namespace_signing_key_file.is_some()
    }

    /// The faults of the configuration, for a service that verifies namespaces and, if `signs`, also signs them.
    pub fn faults(&self, signs: bool) -> Vec<String> {
        let mut faults = Vec::new();
        let mut fault = |key: &str, rule: &str| faults.push(format!("mesh.{key}: {rule}"));
        let too_short = "must have at least 32 characters; `refrain keys` makes one";
        let has_roles = !self.issuer_public_keys.is_empty() && self.credential_file.is_some();
        match (&self.secret_file, self.secret.len()) {
            (None, 0) if has_roles => {}
            (None, 0) if !self.issuer_public_keys.is_empty() => {
                fault("credential_file", "calls need it or mesh.secret");
            }
            (None, ..SECRET_CHARS_MIN) => fault("secret", too_short),
            (Some(_), 1..) => fault("secret_file", "give it or mesh.secret, not both"),
            _ => {}
        }
        let accepted = &self.secrets_accepted;
        if accepted
            .iter()
            .any(|secret| secret.len() < SECRET_CHARS_MIN)
        {
            fault("secrets_accepted", too_short);
        }
        match (&self.certificate, &self.key, &self.ca) {
            (None, None, _) | (Some(_), Some(_), Some(_)) => {}
            (Some(_), Some(_), None) => fault("certificate", "needs mesh.ca as well"),
            _ => fault("certificate", "give both mesh.certificate and mesh.key"),
        }
        if let Some(name) = &self.address_name {
            if self.ca.is_none() {
                fault("address_name", "needs mesh.ca as well");
            }
            if DnsName::try_from(name.as_str()).is_err() {
                fault(
                    "address_name",
                    "must be a DNS name, such as `refrain-worker`",
                );
            }
        }
        let skew_s_max = NAMESPACE_TTL_S / 2;
        if !(1..=skew_s_max).contains(&self.clock_skew_s_max) {
            let rule = format!("must be from 1 to {skew_s_max}, half of the life of a signature");
            fault("clock_skew_s_max", &rule);
        }
        let not_a_key = "must be 64 hex digits; `refrain keys` makes one";
        let public_key = self.namespace_public_key.to_ascii_lowercase();
        if hex::decode(&public_key).map(|key| key.len()) != Ok(32) {
            fault("namespace_public_key", not_a_key);
        }
        if !self.has_secret() && !accepted.is_empty() {
            fault("secrets_accepted", "needs mesh.secret or mesh.secret_file");
        }
        let others = &self.namespace_public_keys;
        let is_key = |key: &String| hex::decode(key).is_ok_and(|key| key.len() == 32);
        if !others.iter().all(is_key) {
            fault("namespace_public_keys", not_a_key);
        }
        if others.len() >= PUBLIC_KEYS_MAX {
            let rule = format!("must be fewer than {PUBLIC_KEYS_MAX}");
            fault("namespace_public_keys", &rule);
        }
        if self.credential_file.is_some() && self.issuer_public_keys.is_empty() {
            fault("credential_file", "needs mesh.issuer_public_keys");
        }
        if !self.issuer_public_keys.iter().all(is_key) {
            fault(
                "issuer_public_keys",
                "must be 64 hex digits each; `refrain mesh issuer` makes one",
            );
        }
        if self.issuer_public_keys.len() > PUBLIC_KEYS_MAX {
            let rule = format!("must be at most {PUBLIC_KEYS_MAX}");
            fault("issuer_public_keys", &rule);
        }
        if self.namespace_signing_key_file.is_some() && !self.namespace_signing_key.is_empty() {
            let rule = "give it or mesh.namespace_signing_key, not both";
            fault("namespace_signing_key_file", rule);
        } else if signs && self.namespace_signing_key_file.is_none() {
            // A file is read and checked when the gateway starts.
            match self.signing_key_of(&self.namespace_signing_key) {
                Err(SigningKeyFault::NotAKey) => fault("namespace_signing_key", not_a_key),
                Err(SigningKeyFault::Unknown) => {
                    fault("namespace_signing_key", SIGNING_KEY_UNKNOWN);
                }
                Ok(_) => {}
            }
        }
        faults
    }

    /// Whether there is a secret that allows everything.
    pub(super) fn has_secret(&self) -> bool {
        !self.secret.is_empty() || self.secret_file.is_some()
    }

    /// The keys that verify credentials.
    pub(super) fn issuers(&self) -> anyhow::Result<Issuers> {
        let keys = self.issuer_public_keys.iter();
        let decoded = keys.map(|key| anyhow::Ok(PublicKey::new(hex::decode(key)?)));
        Ok(Issuers::new(decoded.collect::<Result<_, _>>()?))
    }

    /// The keys that verify namespaces.
    pub(super) fn public_keys(&self) -> anyhow::Result<Vec<PublicKey>> {
        let keys = std::iter::once(&self.namespace_public_key).chain(&self.namespace_public_keys);
        let decoded = keys.map(|key| anyhow::Ok(PublicKey::new(hex::decode(key)?)));
        decoded.collect()
    }

    /// The key that signs namespaces, from its file if it is in one.
    pub(super) fn signing_key(&self) -> anyhow::Result<SigningKey> {
        let (name, key) = match &self.namespace_signing_key_file {
            None => (
                "mesh.namespace_signing_key",
                self.namespace_signing_key.clone(),
            ),
            Some(path) => {
                let name = "mesh.namespace_signing_key_file";
                let key = std::fs::read_to_string(path)
                    .with_context(|| format!("{name}: cannot read {}", path.display()))?;
                (name, key)
            }
        };
        self.signing_key_of(&key).map_err(|fault| match fault {
            SigningKeyFault::NotAKey => anyhow::anyhow!("{name}: must be 64 hex digits"),
            SigningKeyFault::Unknown => anyhow::anyhow!("{name}: {SIGNING_KEY_UNKNOWN}"),
        })
    }

    fn signing_key_of(&self, text: &str) -> Result<SigningKey, SigningKeyFault> {
        let seed = hex::decode(text.trim()).map_err(|_| SigningKeyFault::NotAKey)?;
        let key = SigningKey::from_seed(&seed).map_err(|_| SigningKeyFault::NotAKey)?;
        // Public keys that are malformed are faults of their own.
        let public_keys = self.public_keys().unwrap_or_default();
        match public_keys.contains(&key.public) {
            true => Ok(key),
            false => Err(SigningKeyFault::Unknown),
        }
    }
}

/// Why a text is no signing key of this mesh.
#[derive(Clone, Copy, Debug)]
enum SigningKeyFault {
    NotAKey,
    /// No service could verify its signatures.
    Unknown,
}
