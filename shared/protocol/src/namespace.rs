//! Namespaces, the borders that drafts never cross.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::NamespaceId;

/// A tenant, a model and a tokenizer. No draft, cursor or statistic crosses the border of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Namespace {
    /// The tenant, which the gateway finds by the caller's API key.
    pub tenant: String,
    /// Public name of the model.
    pub model: String,
    /// Identity of the tokenizer: the hash of its map from ids to bytes and of its special tokens, in hex.
    pub tokenizer: String,
}

impl Namespace {
    /// The 128-bit id for keys, paths and messages: SHA-256 over the length-prefixed parts, cut to 16 bytes. The hash
    /// is cryptographic, so that no tenant can choose names that collide with another namespace.
    pub fn id(&self) -> NamespaceId {
        let digest = Sha256::digest(self.length_prefixed());
        let mut bytes = [0u8; 16];
        bytes.copy_from_slice(&digest[..16]);
        NamespaceId(u128::from_be_bytes(bytes))
    }

    fn length_prefixed(&self) -> Vec<u8> {
        let parts = [&self.tenant, &self.model, &self.tokenizer].into_iter();
        parts
            .flat_map(|part| [&(part.len() as u64).to_le_bytes(), part.as_bytes()].concat())
            .collect()
    }
}

/// A namespace with the signature of the gateway. Services accept no other form.
///
/// The service kit signs and verifies it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedNamespace {
    /// The namespace.
    pub namespace: Namespace,
    /// Time of the signature in Unix seconds, since a signature expires.
    pub issued_at_s: u64,
    /// Ed25519 signature over [`SignedNamespace::signed_bytes`], in hex.
    pub signature: String,
}

impl SignedNamespace {
    /// The bytes under the signature: a domain tag, the time, and the length-prefixed parts.
    pub fn signed_bytes(namespace: &Namespace, issued_at_s: u64) -> Vec<u8> {
        [
            &b"refrain-namespace-v1"[..],
            &issued_at_s.to_le_bytes(),
            &namespace.length_prefixed(),
        ]
        .concat()
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
