//! Who may call whom, and on whose behalf.
//!
//! Services of one mesh share a secret that every internal call carries. Namespaces are another matter: a
//! service that knows the secret must still not be able to name a tenant, so the gateway alone holds an
//! Ed25519 signing key and everybody else only its public half. (An HMAC would have been simpler, but then
//! each worker could sign for every tenant.)

use std::fmt;
use std::sync::Arc;

use actix_web::HttpRequest;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use refrain_protocol::{
    ApiError, ErrorKind, MESH_SECRET_HEADER, Namespace, NamespaceId, SignedNamespace,
};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use serde::{Deserialize, Serialize};

use crate::clocks::Clocks;
use crate::{clock, random};

/// How long a signed namespace is believed. Gateways sign anew well before.
pub const NAMESPACE_TTL_S: u64 = 24 * 3600;

/// The code of the error for one that was signed longer ago.
pub const NAMESPACE_EXPIRED: &str = "namespace_expired";

/// The code of the error for one that is signed in the future: somebody's clock is off.
pub const CLOCK_SKEW: &str = "clock_skew";

/// By how much the clocks of a mesh may differ, unless the configuration says otherwise. A clock that runs free is off by a
/// few minutes after months, and one that was set to the wrong time zone by hours.
pub(crate) const CLOCK_SKEW_S_MAX: u64 = 3_600;

/// The keys of a mesh: hex strings, made by `refrain keys`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MeshConfig {
    /// Shared by all services, at least 32 characters.
    pub secret: String,
    /// 32 bytes in hex: verifies namespaces. Every service but the gateway needs it.
    pub namespace_public_key: String,
    /// 32 bytes in hex: signs namespaces. The gateway's alone.
    pub namespace_signing_key: String,
    /// Seconds by which the clocks of the mesh may differ: a namespace signed further in the future is refused, and a service
    /// whose clock is off by more is not ready. Up to half of a signature's life, since gateways sign anew after that half.
    pub clock_skew_s_max: u64,
}

impl Default for MeshConfig {
    fn default() -> Self {
        MeshConfig {
            secret: String::new(),
            namespace_public_key: String::new(),
            namespace_signing_key: String::new(),
            clock_skew_s_max: CLOCK_SKEW_S_MAX,
        }
    }
}

/// By hand, so that a configuration can be logged without its secrets.
impl fmt::Debug for MeshConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hidden = |secret: &str| if secret.is_empty() { "missing" } else { "set" };
        f.debug_struct("MeshConfig")
            .field("secret", &hidden(&self.secret))
            .field("namespace_public_key", &self.namespace_public_key)
            .field(
                "namespace_signing_key",
                &hidden(&self.namespace_signing_key),
            )
            .field("clock_skew_s_max", &self.clock_skew_s_max)
            .finish()
    }
}

impl MeshConfig {
    /// Fresh random keys.
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

    /// Whether it has any key at all.
    pub fn has_keys(&self) -> bool {
        let keys = [
            &self.secret,
            &self.namespace_public_key,
            &self.namespace_signing_key,
        ];
        keys.iter().any(|key| !key.is_empty())
    }

    /// What is wrong with it, for a service that has to check (`signs`: and to sign).
    pub fn faults(&self, signs: bool) -> Vec<String> {
        let mut faults = Vec::new();
        if self.secret.len() < 32 {
            faults.push("mesh.secret: at least 32 characters; `refrain keys` makes one".to_owned());
        }
        if !(1..=NAMESPACE_TTL_S / 2).contains(&self.clock_skew_s_max) {
            faults.push(format!(
                "mesh.clock_skew_s_max: from 1 to {}, half of the time for which a signature is believed",
                NAMESPACE_TTL_S / 2
            ));
        }
        if hex::decode(&self.namespace_public_key).map(|key| key.len()) != Ok(32) {
            faults.push(
                "mesh.namespace_public_key: 64 hex digits; `refrain keys` makes one".to_owned(),
            );
        }
        if signs {
            match hex::decode(&self.namespace_signing_key)
                .map_err(anyhow::Error::from)
                .and_then(|seed| NamespaceSigner::from_seed(&seed))
            {
                Err(_) => faults.push(
                    "mesh.namespace_signing_key: 64 hex digits; `refrain keys` makes one"
                        .to_owned(),
                ),
                Ok(signer)
                    if signer.public_key_hex()
                        != self.namespace_public_key.to_ascii_lowercase() =>
                {
                    faults.push(
                        "mesh.namespace_signing_key: does not belong to mesh.namespace_public_key"
                            .to_owned(),
                    );
                }
                Ok(_) => {}
            }
        }
        faults
    }
}

/// Checks the mesh secret of incoming calls and the signatures of namespaces. Cheap to clone.
#[derive(Clone)]
pub struct MeshAuth {
    inner: Arc<MeshAuthInner>,
    clocks: Clocks,
}

struct MeshAuthInner {
    secret: String,
    public_key: Vec<u8>,
    clock_skew_s_max: u64,
}

impl MeshAuth {
    /// From a checked configuration.
    ///
    /// # Errors
    /// The public key is not hex.
    pub fn new(config: &MeshConfig) -> anyhow::Result<Self> {
        let public_key = hex::decode(&config.namespace_public_key)?;
        Ok(MeshAuth {
            inner: Arc::new(MeshAuthInner {
                secret: config.secret.clone(),
                public_key,
                clock_skew_s_max: config.clock_skew_s_max,
            }),
            clocks: Clocks::default(),
        })
    }

    /// The same in a service that hears of others' clocks.
    pub fn with_clocks(mut self, clocks: Clocks) -> Self {
        self.clocks = clocks;
        self
    }

    /// What is known of this service's clock and of others'.
    pub fn clocks(&self) -> &Clocks {
        &self.clocks
    }

    /// The secret, for clients of the same mesh.
    pub fn secret(&self) -> &str {
        &self.inner.secret
    }

    /// Whether a call comes from the mesh.
    ///
    /// # Errors
    /// `Unauthorized` without the secret.
    pub fn check(&self, request: &HttpRequest) -> Result<(), ApiError> {
        let given = request
            .headers()
            .get(MESH_SECRET_HEADER)
            .map(|value| value.as_bytes())
            .unwrap_or_default();
        if constant_time_eq(given, self.inner.secret.as_bytes()) {
            Ok(())
        } else {
            Err(ApiError::new(
                ErrorKind::Unauthorized,
                format!(
                    "this listener serves the mesh only; send its secret in {MESH_SECRET_HEADER}"
                ),
            ))
        }
    }

    /// Whether the gateway vouches for a namespace.
    ///
    /// # Errors
    /// `Unauthorized` for a signature that does not hold; with the code [`CLOCK_SKEW`] for one from the future, and
    /// [`NAMESPACE_EXPIRED`] for one that is too old.
    pub fn verify(&self, signed: &SignedNamespace) -> Result<NamespaceId, ApiError> {
        self.verify_at(signed, clock::unix_s())
    }

    fn verify_at(&self, signed: &SignedNamespace, now_s: u64) -> Result<NamespaceId, ApiError> {
        let refused =
            |why: &str| ApiError::new(ErrorKind::Unauthorized, format!("namespace refused: {why}"));
        let signature =
            hex::decode(&signed.signature).map_err(|_| refused("signature is not hex"))?;
        let bytes = SignedNamespace::signed_bytes(&signed.namespace, signed.issued_at_s);
        UnparsedPublicKey::new(&ED25519, &self.inner.public_key)
            .verify(&bytes, &signature)
            .map_err(|_| refused("not signed by this mesh's gateway"))?;
        let ahead_s = signed.issued_at_s.saturating_sub(now_s);
        let most_s = self.inner.clock_skew_s_max;
        if ahead_s > most_s {
            let why = format!(
                "signed {ahead_s} s ahead of this service's clock, and mesh.clock_skew_s_max is {most_s}; check the clocks"
            );
            return Err(refused(&why).with_code(CLOCK_SKEW));
        }
        if is_too_old(signed.issued_at_s, now_s) {
            return Err(refused("signature is too old").with_code(NAMESPACE_EXPIRED));
        }
        Ok(signed.namespace.id())
    }
}

/// Whether what was signed then is believed no longer. Unix seconds.
pub fn is_too_old(issued_at_s: u64, now_s: u64) -> bool {
    now_s.saturating_sub(issued_at_s) > NAMESPACE_TTL_S
}

/// Signs namespaces: the gateway's.
#[derive(Clone)]
pub struct NamespaceSigner {
    key: Arc<Ed25519KeyPair>,
}

impl NamespaceSigner {
    /// From a checked configuration.
    ///
    /// # Errors
    /// The key is not 32 bytes of hex.
    pub fn new(config: &MeshConfig) -> anyhow::Result<Self> {
        NamespaceSigner::from_seed(&hex::decode(&config.namespace_signing_key)?)
    }

    fn from_seed(seed: &[u8]) -> anyhow::Result<Self> {
        let key = Ed25519KeyPair::from_seed_unchecked(seed).map_err(|_| {
            anyhow::anyhow!(
                "a namespace signing key has 32 bytes, this one {}",
                seed.len()
            )
        })?;
        Ok(NamespaceSigner { key: Arc::new(key) })
    }

    fn public_key_hex(&self) -> String {
        hex::encode(self.key.public_key().as_ref())
    }

    /// Vouches for a namespace from now on, for [`NAMESPACE_TTL_S`].
    pub fn sign(&self, namespace: Namespace) -> SignedNamespace {
        self.sign_at(namespace, clock::unix_s())
    }

    /// The same from that time on, Unix seconds.
    pub fn sign_at(&self, namespace: Namespace, issued_at_s: u64) -> SignedNamespace {
        let signature = self
            .key
            .sign(&SignedNamespace::signed_bytes(&namespace, issued_at_s));
        SignedNamespace {
            namespace,
            issued_at_s,
            signature: hex::encode(signature.as_ref()),
        }
    }
}

/// A signed namespace as one word, for environment variables and request fields.
///
/// # Errors
/// A namespace that is no JSON.
pub fn token_of(signed: &SignedNamespace) -> anyhow::Result<String> {
    Ok(URL_SAFE_NO_PAD.encode(serde_json::to_vec(signed)?))
}

/// Reads what [`token_of`] wrote. It is not believed by that: see [`MeshAuth::verify`].
///
/// # Errors
/// `Unauthorized` for a word that is none.
pub fn from_token(token: &str) -> Result<SignedNamespace, ApiError> {
    let bytes = URL_SAFE_NO_PAD.decode(token.trim()).ok();
    bytes
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .ok_or_else(|| {
            ApiError::new(
                ErrorKind::Unauthorized,
                "namespace refused: no token as `refrain store sign` prints it",
            )
        })
}

/// Compares secrets in a time that depends on lengths only.
pub fn constant_time_eq(left: &[u8], right: &[u8]) -> bool {
    left.len() == right.len()
        && left
            .iter()
            .zip(right)
            .fold(0u8, |diff, (a, b)| diff | (a ^ b))
            == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(tenant: &str) -> Namespace {
        Namespace {
            tenant: tenant.into(),
            model: "m".into(),
            tokenizer: "t".into(),
        }
    }

    #[test]
    fn only_the_gateways_signature_is_believed() {
        let config = MeshConfig::generate().unwrap();
        assert!(config.faults(true).is_empty());
        let auth = MeshAuth::new(&config).unwrap();
        let signer = NamespaceSigner::new(&config).unwrap();
        let signed = signer.sign_at(namespace("acme"), 1_000_000);
        assert_eq!(
            auth.verify_at(&signed, 1_000_000).unwrap(),
            namespace("acme").id()
        );

        let mut forged = signed.clone();
        forged.namespace.tenant = "other".into();
        assert!(auth.verify_at(&forged, 1_000_000).is_err());
        let stranger = NamespaceSigner::new(&MeshConfig::generate().unwrap()).unwrap();
        assert!(
            auth.verify_at(&stranger.sign_at(namespace("acme"), 1_000_000), 1_000_000)
                .is_err()
        );
        assert!(
            auth.verify_at(&signed, 1_000_000 + NAMESPACE_TTL_S + 1)
                .is_err()
        );
        assert!(
            auth.verify_at(&signed, 1_000_000 - CLOCK_SKEW_S_MAX - 1)
                .is_err()
        );
    }

    #[test]
    fn clocks_may_differ_by_what_is_configured_and_errors_tell_of_them() {
        let mut config = MeshConfig::generate().unwrap();
        config.clock_skew_s_max = 600;
        let auth = MeshAuth::new(&config).unwrap();
        let signer = NamespaceSigner::new(&config).unwrap();
        let now_s = 1_000_000;
        let outcome = |issued_at_s| {
            let signed = signer.sign_at(namespace("acme"), issued_at_s);
            auth.verify_at(&signed, now_s).map(drop)
        };
        assert_eq!(outcome(now_s + 600), Ok(()));
        let ahead = outcome(now_s + 601).unwrap_err();
        assert_eq!(ahead.code.as_deref(), Some(CLOCK_SKEW));
        assert!(ahead.message.contains("601 s ahead"), "{}", ahead.message);
        assert_eq!(outcome(now_s - NAMESPACE_TTL_S), Ok(()));
        let old = outcome(now_s - NAMESPACE_TTL_S - 1).unwrap_err();
        assert_eq!(old.code.as_deref(), Some(NAMESPACE_EXPIRED));
    }

    #[test]
    fn a_token_holds_what_was_signed() {
        let config = MeshConfig::generate().unwrap();
        let signed = NamespaceSigner::new(&config)
            .unwrap()
            .sign(namespace("acme"));
        let token = token_of(&signed).unwrap();
        assert_eq!(from_token(&format!("{token}\n")).unwrap(), signed);
        assert!(from_token(&token[1..]).is_err());
        assert!(from_token("").is_err());
    }

    #[test]
    fn a_logged_configuration_holds_no_secret() {
        let config = MeshConfig::generate().unwrap();
        let logged = format!("{config:?}");
        assert!(!logged.contains(&config.secret));
        assert!(!logged.contains(&config.namespace_signing_key));
        assert!(logged.contains(&config.namespace_public_key));
    }

    #[test]
    fn faults_name_the_keys() {
        let mut config = MeshConfig::generate().unwrap();
        config.namespace_signing_key = MeshConfig::generate().unwrap().namespace_signing_key;
        config.secret = "short".into();
        assert_eq!(config.faults(true).len(), 2);
        assert_eq!(config.faults(false).len(), 1);
        for (skew_s, faults) in [(0, 1), (1, 0), (43_200, 0), (43_201, 1)] {
            let mut config = MeshConfig::generate().unwrap();
            config.clock_skew_s_max = skew_s;
            assert_eq!(config.faults(false).len(), faults, "{skew_s}");
        }
    }
}
