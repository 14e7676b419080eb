//! Authentication inside the mesh: who may call whom, and for which tenant.
//!
//! The services of a mesh share a secret, which every internal call carries. The secret does not allow a service to
//! name a tenant: namespaces are signed by an Ed25519 key that only the gateway holds, and all other services have
//! its public half. An HMAC would be simpler, but then every worker could sign for every tenant.
//!
//! Secrets and signing keys can be replaced under load: services accept several of either, and a signature names its
//! key.

mod credentials;

use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use actix_web::HttpRequest;
use anyhow::Context as _;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use lru::LruCache;
use refrain_protocol::error::code;
use refrain_protocol::{
    ApiError, ErrorKind, MESH_SECRET_HEADER, Namespace, NamespaceId, SignedNamespace,
};
use ring::digest::{SHA256, digest};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use serde::{Deserialize, Serialize};

use crate::clocks::{CLOCK_SKEW_S_MAX, Clocks};
use crate::telemetry::Metrics;
use crate::{clock, random};

pub use credentials::MeshCredentials;

/// Seconds for which the signature of a namespace is valid. Gateways renew it well before.
pub const NAMESPACE_TTL_S: u64 = 24 * 3600;

/// Most namespaces whose signature is not verified again. A signature takes a twentieth of a millisecond to verify,
/// and a gateway sends the same one for hours.
const VERIFIED_MAX: NonZeroUsize = NonZeroUsize::new(4_096).unwrap();

/// Fewest characters of a mesh secret.
const SECRET_CHARS_MIN: usize = 32;

/// Most keys that verify namespaces. A rotation needs two.
const PUBLIC_KEYS_MAX: usize = 8;

/// Bytes of the id of a key.
const KID_BYTES: usize = 8;

/// The keys of a mesh, as hex strings that `refrain keys` makes, and the certificates of calls inside it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MeshConfig {
    /// The secret that all services share, at least 32 characters.
    pub secret: String,
    /// In place of `secret`: a file with it, which is read again when it changes. The secrets of further lines are
    /// accepted as well.
    pub secret_file: Option<PathBuf>,
    /// Secrets that calls may carry besides, while the secret is being replaced.
    pub secrets_accepted: Vec<String>,
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
            namespace_public_key: String::new(),
            namespace_public_keys: Vec::new(),
            namespace_signing_key: String::new(),
            namespace_signing_key_file: None,
            ca: None,
            certificate: None,
            key: None,
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
        let signer = NamespaceSigner::from_seed(seed)?;
        Ok(MeshConfig {
            secret: hex::encode(secret),
            namespace_public_key: signer.public_key_hex(),
            namespace_signing_key: hex::encode(seed),
            ..MeshConfig::default()
        })
    }

    /// Whether any key is set.
    pub fn has_keys(&self) -> bool {
        !self.secret.is_empty()
            || self.secret_file.is_some()
            || !self.namespace_public_key.is_empty()
            || !self.namespace_signing_key.is_empty()
            || self.namespace_signing_key_file.is_some()
    }

    /// The faults of the configuration, for a service that verifies namespaces and, if `signs`, also signs them.
    pub fn faults(&self, signs: bool) -> Vec<String> {
        let mut faults = Vec::new();
        let mut fault = |key: &str, rule: &str| faults.push(format!("mesh.{key}: {rule}"));
        let too_short = "must have at least 32 characters; `refrain keys` makes one";
        match (&self.secret_file, self.secret.len()) {
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
        let others = &self.namespace_public_keys;
        let is_key = |key: &String| hex::decode(key).is_ok_and(|key| key.len() == 32);
        if !others.iter().all(is_key) {
            fault("namespace_public_keys", not_a_key);
        }
        if others.len() >= PUBLIC_KEYS_MAX {
            let rule = format!("must be fewer than {PUBLIC_KEYS_MAX}");
            fault("namespace_public_keys", &rule);
        }
        if self.namespace_signing_key_file.is_some() && !self.namespace_signing_key.is_empty() {
            let rule = "give it or mesh.namespace_signing_key, not both";
            fault("namespace_signing_key_file", rule);
        } else if signs && self.namespace_signing_key_file.is_none() {
            // A file is read and checked when the gateway starts.
            match NamespaceSigner::of(self, &self.namespace_signing_key) {
                Err(SigningKeyFault::NotAKey) => fault("namespace_signing_key", not_a_key),
                Err(SigningKeyFault::Unknown) => {
                    fault("namespace_signing_key", SIGNING_KEY_UNKNOWN);
                }
                Ok(_) => {}
            }
        }
        faults
    }

    /// The keys that verify namespaces, by their ids.
    fn public_keys(&self) -> anyhow::Result<Vec<PublicKey>> {
        let keys = std::iter::once(&self.namespace_public_key).chain(&self.namespace_public_keys);
        let decoded = keys.map(|key| anyhow::Ok(PublicKey::new(hex::decode(key)?)));
        decoded.collect()
    }
}

const SIGNING_KEY_UNKNOWN: &str =
    "does not belong to mesh.namespace_public_key or one of mesh.namespace_public_keys";

/// Why a text is no signing key of this mesh.
#[derive(Clone, Copy, Debug)]
enum SigningKeyFault {
    NotAKey,
    /// No service could verify its signatures.
    Unknown,
}

/// A key that verifies namespaces.
struct PublicKey {
    kid: String,
    bytes: Vec<u8>,
}

impl PublicKey {
    fn new(bytes: Vec<u8>) -> Self {
        let kid = digest(&SHA256, &bytes);
        PublicKey {
            kid: hex::encode(&kid.as_ref()[..KID_BYTES]),
            bytes,
        }
    }
}

/// Checks the mesh secret of incoming calls and the signatures of namespaces. Cheap to clone.
#[derive(Clone)]
pub struct MeshAuth {
    inner: Arc<MeshAuthInner>,
    clocks: Clocks,
}

struct MeshAuthInner {
    credentials: MeshCredentials,
    public_keys: Vec<PublicKey>,
    clock_skew_s_max: u64,
    /// Namespaces whose signature is valid, by the signature, with their ids.
    verified: Mutex<LruCache<String, (SignedNamespace, NamespaceId)>>,
}

impl MeshAuth {
    /// Creates it from a checked configuration, with credentials of its own.
    ///
    /// # Errors
    /// As [`MeshAuth::with_credentials`], or a file cannot be used.
    pub fn new(config: &MeshConfig) -> anyhow::Result<Self> {
        let credentials = MeshCredentials::open(config, &Metrics::new()?)?;
        MeshAuth::with_credentials(config, credentials)
    }

    /// Creates it from a checked configuration and the credentials of this service.
    ///
    /// # Errors
    /// A public key is not hex.
    pub fn with_credentials(
        config: &MeshConfig,
        credentials: MeshCredentials,
    ) -> anyhow::Result<Self> {
        Ok(MeshAuth {
            inner: Arc::new(MeshAuthInner {
                credentials,
                public_keys: config.public_keys()?,
                clock_skew_s_max: config.clock_skew_s_max,
                verified: Mutex::new(LruCache::new(VERIFIED_MAX)),
            }),
            clocks: Clocks::default(),
        })
    }

    /// Makes it compare the clocks of callers with these.
    pub fn with_clocks(mut self, clocks: Clocks) -> Self {
        self.clocks = clocks;
        self
    }

    /// The comparison of this service's clock with others.
    pub fn clocks(&self) -> &Clocks {
        &self.clocks
    }

    /// The credentials, for clients of the same mesh.
    pub fn credentials(&self) -> &MeshCredentials {
        &self.inner.credentials
    }

    /// Checks that a call carries the secret of the mesh.
    ///
    /// # Errors
    /// `Unauthorized` if it does not.
    pub fn check(&self, request: &HttpRequest) -> Result<(), ApiError> {
        let given = request
            .headers()
            .get(MESH_SECRET_HEADER)
            .map(|value| value.as_bytes())
            .unwrap_or_default();
        if self.inner.credentials.accepts(given) {
            return Ok(());
        }
        let message = format!(
            "this listener serves only the mesh; send the mesh secret in the header {MESH_SECRET_HEADER}"
        );
        Err(ApiError::new(ErrorKind::Unauthorized, message))
    }

    /// Verifies the signature of a namespace and returns its id.
    ///
    /// # Errors
    /// `Unauthorized` for an invalid signature. A signature from the future has the code [`code::CLOCK_SKEW`], one
    /// that is too old has [`code::NAMESPACE_EXPIRED`].
    pub fn verify(&self, signed: &SignedNamespace) -> Result<NamespaceId, ApiError> {
        self.verify_at(signed, clock::unix_s())
    }

    fn verify_at(&self, signed: &SignedNamespace, now_s: u64) -> Result<NamespaceId, ApiError> {
        let id = self.signed_id(signed)?;
        let ahead_s = signed.issued_at_s.saturating_sub(now_s);
        let most_s = self.inner.clock_skew_s_max;
        if ahead_s > most_s {
            let why = format!(
                "it was signed {ahead_s} s ahead of this service's clock, and mesh.clock_skew_s_max is {most_s}; check the clocks"
            );
            return Err(refused(&why).with_code(code::CLOCK_SKEW));
        }
        if is_too_old(signed.issued_at_s, now_s) {
            return Err(refused("its signature is too old").with_code(code::NAMESPACE_EXPIRED));
        }
        Ok(id)
    }

    /// Verifies a signature, whatever its time is, and returns the id of its namespace.
    fn signed_id(&self, signed: &SignedNamespace) -> Result<NamespaceId, ApiError> {
        let verified = || {
            let verified = self.inner.verified.lock();
            verified.unwrap_or_else(PoisonError::into_inner)
        };
        // All that was signed has to be the same, not only the signature.
        let known = verified()
            .get(&signed.signature)
            .filter(|(known, _)| known == signed)
            .map(|(_, id)| *id);
        if let Some(id) = known {
            return Ok(id);
        }
        let signature =
            hex::decode(&signed.signature).map_err(|_| refused("its signature is not hex"))?;
        let bytes = SignedNamespace::signed_bytes(&signed.namespace, signed.issued_at_s);
        // Services of older versions, and those that speak bincode, do not say which key it is.
        let is_named = |key: &&PublicKey| signed.kid.is_empty() || signed.kid == key.kid;
        let mut keys = self.inner.public_keys.iter().filter(is_named).peekable();
        if keys.peek().is_none() {
            let kid: String = signed.kid.chars().take(2 * KID_BYTES).collect();
            let why = format!(
                "it is signed with the key {kid}, which is not among this service's public keys"
            );
            return Err(refused(&why));
        }
        let verifies = |key: &PublicKey| {
            let key = UnparsedPublicKey::new(&ED25519, &key.bytes);
            key.verify(&bytes, &signature).is_ok()
        };
        if !keys.any(verifies) {
            return Err(refused("it is not signed by the gateway of this mesh"));
        }
        let id = signed.namespace.id();
        verified().put(signed.signature.clone(), (signed.clone(), id));
        Ok(id)
    }
}

fn refused(why: &str) -> ApiError {
    ApiError::new(ErrorKind::Unauthorized, format!("namespace refused: {why}"))
}

/// Whether a signature of the time `issued_at_s` has expired. Both times are Unix seconds.
pub fn is_too_old(issued_at_s: u64, now_s: u64) -> bool {
    now_s.saturating_sub(issued_at_s) > NAMESPACE_TTL_S
}

/// Signs namespaces. Only the gateway has one.
#[derive(Clone)]
pub struct NamespaceSigner {
    key: Arc<Ed25519KeyPair>,
    /// The id of its public half.
    kid: Arc<str>,
}

impl NamespaceSigner {
    /// Creates it from a checked configuration, whose file it reads.
    ///
    /// # Errors
    /// The file cannot be read. The key is not 32 bytes of hex, or is not one of this mesh.
    pub fn new(config: &MeshConfig) -> anyhow::Result<Self> {
        let (name, key) = match &config.namespace_signing_key_file {
            None => (
                "mesh.namespace_signing_key",
                config.namespace_signing_key.clone(),
            ),
            Some(path) => {
                let key = std::fs::read_to_string(path).with_context(|| {
                    format!("mesh.namespace_signing_key_file: {}", path.display())
                })?;
                ("mesh.namespace_signing_key_file", key)
            }
        };
        NamespaceSigner::of(config, &key).map_err(|fault| match fault {
            SigningKeyFault::NotAKey => anyhow::anyhow!("{name}: must hold 64 hex digits"),
            SigningKeyFault::Unknown => anyhow::anyhow!("{name}: {SIGNING_KEY_UNKNOWN}"),
        })
    }

    fn of(config: &MeshConfig, key: &str) -> Result<Self, SigningKeyFault> {
        let seed = hex::decode(key.trim()).map_err(|_| SigningKeyFault::NotAKey)?;
        let signer = NamespaceSigner::from_seed(&seed).map_err(|_| SigningKeyFault::NotAKey)?;
        // Public keys that are malformed are faults of their own.
        let keys = config.public_keys().unwrap_or_default();
        match keys.iter().any(|key| key.kid == *signer.kid) {
            true => Ok(signer),
            false => Err(SigningKeyFault::Unknown),
        }
    }

    fn from_seed(seed: &[u8]) -> anyhow::Result<Self> {
        let key = Ed25519KeyPair::from_seed_unchecked(seed).map_err(|_| {
            anyhow::anyhow!(
                "a namespace signing key must have 32 bytes, but this one has {}",
                seed.len()
            )
        })?;
        let public_key = PublicKey::new(key.public_key().as_ref().to_vec());
        Ok(NamespaceSigner {
            key: Arc::new(key),
            kid: public_key.kid.into(),
        })
    }

    fn public_key_hex(&self) -> String {
        hex::encode(self.key.public_key().as_ref())
    }

    /// Signs a namespace, from now on for [`NAMESPACE_TTL_S`].
    pub fn sign(&self, namespace: Namespace) -> SignedNamespace {
        self.sign_at(namespace, clock::unix_s())
    }

    /// Signs a namespace from the time `issued_at_s` on, in Unix seconds.
    pub fn sign_at(&self, namespace: Namespace, issued_at_s: u64) -> SignedNamespace {
        let signature = self
            .key
            .sign(&SignedNamespace::signed_bytes(&namespace, issued_at_s));
        SignedNamespace {
            namespace,
            issued_at_s,
            signature: hex::encode(signature.as_ref()),
            kid: self.kid.to_string(),
        }
    }
}

/// Encodes a signed namespace as one word, for environment variables and request fields.
///
/// # Errors
/// The namespace cannot be written as JSON.
pub fn token_of(signed: &SignedNamespace) -> anyhow::Result<String> {
    Ok(URL_SAFE_NO_PAD.encode(serde_json::to_vec(signed)?))
}

/// Decodes a word that [`token_of`] made. The signature is not checked: call [`MeshAuth::verify`].
///
/// # Errors
/// `Unauthorized` for any other word.
pub fn from_token(token: &str) -> Result<SignedNamespace, ApiError> {
    let bytes = URL_SAFE_NO_PAD.decode(token.trim()).ok();
    let signed = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let message = "namespace refused: it is not a token that `refrain store sign` printed";
    signed.ok_or_else(|| ApiError::new(ErrorKind::Unauthorized, message))
}

#[cfg(test)]
mod tests;
