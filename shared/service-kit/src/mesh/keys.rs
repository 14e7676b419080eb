//! The Ed25519 keys that sign and verify namespaces and credentials.

use ring::digest::{SHA256, digest};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};

/// Bytes of the id of a key.
pub(super) const KID_BYTES: usize = 8;

/// A key that verifies signatures.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PublicKey {
    /// Its id in signatures, in hex: the start of its SHA-256.
    pub(super) kid: String,
    bytes: Vec<u8>,
}

impl PublicKey {
    pub(super) fn new(bytes: Vec<u8>) -> Self {
        let kid = digest(&SHA256, &bytes);
        PublicKey {
            kid: hex::encode(&kid.as_ref()[..KID_BYTES]),
            bytes,
        }
    }

    pub(super) fn hex(&self) -> String {
        hex::encode(&self.bytes)
    }

    /// Whether the signature of these bytes is of the private half.
    pub(super) fn verifies(&self, bytes: &[u8], signature: &[u8]) -> bool {
        let key = UnparsedPublicKey::new(&ED25519, &self.bytes);
        key.verify(bytes, signature).is_ok()
    }
}

/// A key that signs.
pub(super) struct SigningKey {
    pair: Ed25519KeyPair,
    pub(super) public: PublicKey,
}

impl SigningKey {
    /// Creates it from its 32 bytes.
    ///
    /// # Errors
    /// There are more or fewer bytes.
    pub(super) fn from_seed(seed: &[u8]) -> anyhow::Result<Self> {
        let pair = Ed25519KeyPair::from_seed_unchecked(seed).map_err(|_| {
            anyhow::anyhow!(
                "a signing key must have 32 bytes, but this one has {}",
                seed.len()
            )
        })?;
        let public = PublicKey::new(pair.public_key().as_ref().to_vec());
        Ok(SigningKey { pair, public })
    }

    /// The signature of these bytes, in hex.
    pub(super) fn sign(&self, bytes: &[u8]) -> String {
        hex::encode(self.pair.sign(bytes).as_ref())
    }
}
