//! API keys that Refrain makes: `rfk-<id>-<secret>`, with a public id and 256 random bits.
//!
//! The id finds the entry, so that one comparison is enough however many keys there are. Only the SHA-256 of the
//! whole key is kept. A slow hash is for passwords: nobody can guess 256 random bits.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use refrain_protocol::ApiError;
use refrain_service_kit::random;
use sha2::{Digest, Sha256};

/// The first characters of each key.
const PREFIX: &str = "rfk-";

/// A new key. It is shown once.
#[derive(Clone, PartialEq, Eq)]
pub struct NewKey {
    /// The key, which only its owner gets.
    pub key: String,
    /// Its public id, 12 hex digits.
    pub id: String,
    /// SHA-256 of the key, in hex.
    pub sha256: String,
}

impl std::fmt::Debug for NewKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("NewKey");
        shown.field("id", &self.id).finish_non_exhaustive()
    }
}

impl NewKey {
    /// Makes a key.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn random() -> Result<Self, ApiError> {
        let id = hex::encode(random::bytes::<6>()?);
        let secret = URL_SAFE_NO_PAD.encode(random::bytes::<32>()?);
        let key = format!("{PREFIX}{id}-{secret}");
        Ok(NewKey {
            sha256: hex::encode(digest(&key)),
            id,
            key,
        })
    }
}

/// The public id of a key, if it has the form of those that Refrain makes.
pub fn id_of(key: &str) -> Option<&str> {
    key.strip_prefix(PREFIX)?.split_once('-').map(|(id, _)| id)
}

/// SHA-256 of a key.
pub(crate) fn digest(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_shows_its_id_and_nothing_else() {
        let (one, other) = (NewKey::random().unwrap(), NewKey::random().unwrap());
        assert_ne!(one.key, other.key);
        assert_eq!(id_of(&one.key), Some(&*one.id));
        assert_eq!(one.sha256, hex::encode(digest(&one.key)));
        assert_eq!(one.key.len(), PREFIX.len() + 12 + 1 + 43);
        let shown = format!("{one:?}");
        assert!(
            shown.contains(&one.id) && !shown.contains(&one.key) && !shown.contains(&one.sha256)
        );
        for foreign in ["sk-abc-def", "rfk-", "rfk-abc", ""] {
            assert_eq!(id_of(foreign), None, "{foreign}");
        }
    }
}
