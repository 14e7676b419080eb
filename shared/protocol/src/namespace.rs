//! Who may draft from what.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::NamespaceId;

/// (tenant, model, tokenizer): the wall that no draft, cursor or statistic crosses.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Namespace {
    /// The tenant that the gateway found for the caller's API key.
    pub tenant: String,
    /// Public model name.
    pub model: String,
    /// Tokenizer identity: hex hash of the id -> bytes map and the special tokens.
    pub tokenizer: String,
}

impl Namespace {
    /// The 128-bit id used in keys, paths and messages: SHA-256 over the length-prefixed parts, cut to 16
    /// bytes. A cryptographic hash, so that no tenant can pick names that land in another's namespace.
    pub fn id(&self) -> NamespaceId {
        let mut hash = Sha256::new();
        for part in [&self.tenant, &self.model, &self.tokenizer] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        let digest = hash.finalize();
        let mut bytes = [0u8; 16];
        bytes.copy_from_slice(&digest[..16]);
        NamespaceId(u128::from_be_bytes(bytes))
    }
}

/// A namespace with the gateway's signature over it: the only form in which services accept one.
///
/// Signing and checking live in the service kit; this is what travels.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedNamespace {
    /// What was signed.
    pub namespace: Namespace,
    /// Unix seconds when it was signed; a grant has a limited life.
    pub issued_at_s: u64,
    /// Hex Ed25519 signature over the canonical bytes of the two fields above.
    pub signature: String,
}

impl SignedNamespace {
    /// The bytes that are signed: a domain tag, the time, and the length-prefixed parts.
    pub fn signed_bytes(namespace: &Namespace, issued_at_s: u64) -> Vec<u8> {
        let mut bytes = b"refrain-namespace-v1".to_vec();
        bytes.extend_from_slice(&issued_at_s.to_le_bytes());
        for part in [&namespace.tenant, &namespace.model, &namespace.tokenizer] {
            bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
            bytes.extend_from_slice(part.as_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(tenant: &str, model: &str) -> Namespace {
        Namespace {
            tenant: tenant.into(),
            model: model.into(),
            tokenizer: "t".into(),
        }
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        assert_ne!(namespace("ab", "c").id(), namespace("a", "bc").id());
        assert_eq!(namespace("a", "b").id(), namespace("a", "b").id());
    }
}
