//! Authentication inside the mesh: who may call whom, and for which tenant.
//!
//! The services of a mesh share a secret, which every internal call carries. The secret does not allow a service to
//! name a tenant: namespaces are signed by an Ed25519 key that only the gateway holds, and all other services have
//! its public half. An HMAC would be simpler, but then every worker could sign for every tenant.
//!
//! With an issuer's key there is a credential for each role in place of the secret: each internal route names the
//! roles that may call it.
//!
//! Secrets and signing keys can be replaced under load: services accept several of either, and a signature names its
//! key.

mod config;
mod credentials;
mod keys;
mod roles;

use std::num::NonZeroUsize;
use std::sync::Arc;

use actix_web::HttpRequest;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use lru::LruCache;
use parking_lot::Mutex;
use refrain_protocol::error::code;
use refrain_protocol::{
    ApiError, ErrorKind, MESH_SECRET_HEADER, Namespace, NamespaceId, SignedNamespace,
};

use self::keys::{KID_BYTES, PublicKey, SigningKey};
use self::roles::Issuers;
use crate::clock;
use crate::clocks::Clocks;
use crate::telemetry::Metrics;

pub use config::{MeshConfig, NAMESPACE_TTL_S};
pub use credentials::MeshCredentials;
pub use roles::{CredentialIssuer, MeshCaller, MeshRole, PART_MARK, RoleCredential};

/// Maximum number of namespaces whose signature is not verified again. A signature takes a twentieth of a millisecond
/// to verify, and a gateway sends the same one for hours.
const VERIFIED_MAX: NonZeroUsize = NonZeroUsize::new(4_096).unwrap();

/// Checks the secret or the credential of incoming calls and the signatures of namespaces. Cheap to clone.
#[derive(Clone)]
pub struct MeshAuth {
    inner: Arc<MeshAuthInner>,
    clocks: Clocks,
}

struct MeshAuthInner {
    credentials: MeshCredentials,
    issuers: Issuers,
    public_keys: Vec<PublicKey>,
    clock_skew_s_max: u64,
    /// Namespaces whose signature is valid, by the signature, with their ids.
    verified: Mutex<LruCache<Arc<str>, (SignedNamespace, NamespaceId)>>,
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
                issuers: config.issuers()?,
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

    /// Checks that a call carries the secret of the mesh, or a credential of one of these roles. Returns its caller.
    ///
    /// # Errors
    /// `Unauthorized` if it carries neither, `Forbidden` with a credential of another role.
    pub fn check(
        &self,
        request: &HttpRequest,
        allowed: &[MeshRole],
    ) -> Result<MeshCaller, ApiError> {
        let given = request
            .headers()
            .get(MESH_SECRET_HEADER)
            .map(|value| value.as_bytes())
            .unwrap_or_default();
        let refused = |message| Err(ApiError::new(ErrorKind::Unauthorized, message));
        let token = std::str::from_utf8(given).ok();
        let token = token.filter(|token| token.starts_with(roles::PREFIX));
        if let Some(token) = token.filter(|_| self.inner.issuers.exist()) {
            let (now_s, skew_s) = (clock::unix_s(), self.inner.clock_skew_s_max);
            let caller = match self.inner.issuers.verify(token, now_s, skew_s) {
                Ok(credential) => MeshCaller::Role(credential),
                Err(why) => {
                    let refused = refused(format!("credential refused: {why}"));
                    return refused.map_err(|error| error.with_code(code::CREDENTIAL_REFUSED));
                }
            };
            caller.check_role(allowed)?;
            return Ok(caller);
        }
        if self.inner.credentials.accepts(given) {
            return Ok(MeshCaller::Secret);
        }
        let wanted = match self.inner.issuers.exist() {
            true => "a credential of its role",
            false => "the mesh secret",
        };
        refused(format!(
            "this listener serves only the mesh; send {wanted} in the header {MESH_SECRET_HEADER}"
        ))
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
        // All that was signed has to be the same, not only the signature.
        let known = self
            .inner
            .verified
            .lock()
            .get(&signed.signature)
            .filter(|(known, _)| known == signed)
            .map(|(_, id)| *id);
        if let Some(id) = known {
            return Ok(id);
        }
        let signature =
            hex::decode(&*signed.signature).map_err(|_| refused("its signature is not hex"))?;
        let bytes = SignedNamespace::signed_bytes(&signed.namespace, signed.issued_at_s);
        // Services of older versions, and those that speak bincode, do not say which key it is.
        let is_named = |key: &&PublicKey| signed.kid.is_empty() || *signed.kid == *key.kid;
        let mut keys = self.inner.public_keys.iter().filter(is_named).peekable();
        if keys.peek().is_none() {
            let kid: String = signed.kid.chars().take(2 * KID_BYTES).collect();
            let why = format!(
                "it is not signed by the gateway of this mesh: its key {kid} is not among this service's public keys"
            );
            return Err(refused(&why));
        }
        if !keys.any(|key| key.verifies(&bytes, &signature)) {
            return Err(refused("it is not signed by the gateway of this mesh"));
        }
        let id = signed.namespace.id();
        let mut verified = self.inner.verified.lock();
        verified.put(signed.signature.clone(), (signed.clone(), id));
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
    key: Arc<SigningKey>,
}

impl NamespaceSigner {
    /// Creates it from a checked configuration, whose file it reads.
    ///
    /// # Errors
    /// The file cannot be read. The key is not 32 bytes of hex, or is not one of this mesh.
    pub fn new(config: &MeshConfig) -> anyhow::Result<Self> {
        let key = Arc::new(config.signing_key()?);
        Ok(NamespaceSigner { key })
    }

    /// Signs a namespace, from now on for [`NAMESPACE_TTL_S`].
    pub fn sign(&self, namespace: impl Into<Arc<Namespace>>) -> SignedNamespace {
        self.sign_at(namespace, clock::unix_s())
    }

    /// Signs a namespace from the time `issued_at_s` on, in Unix seconds.
    pub fn sign_at(
        &self,
        namespace: impl Into<Arc<Namespace>>,
        issued_at_s: u64,
    ) -> SignedNamespace {
        let namespace = namespace.into();
        let bytes = SignedNamespace::signed_bytes(&namespace, issued_at_s);
        SignedNamespace {
            namespace,
            issued_at_s,
            signature: self.key.sign(&bytes).into(),
            kid: self.key.public.kid.as_str().into(),
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
