//! API keys that Refrain makes: `rfk-<id>-<secret>`, with a public id and 256 random bits.
//!
//! The id finds the entry, so that one comparison is enough however many keys there are. Only the SHA-256 of the
//! whole key is kept. A slow hash is for passwords: nobody can guess 256 random bits.

use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use refrain_protocol::{ApiError, TenantName};
use refrain_service_kit::random;
use serde::Deserialize;
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

/// One API key, in clear text or as a hash.
#[derive(Clone, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
pub struct KeyConfig {
    /// The key in clear text.
    pub key: Option<String>,
    /// SHA-256 of the key in hex, for files that others may read.
    pub key_sha256: Option<String>,
    /// The tenant that the key belongs to.
    #[schemars(with = "String")]
    pub tenant: TenantName,
}

impl KeyConfig {
    /// The SHA-256 of the key, if the entry has one that can be read.
    pub(crate) fn digest(&self) -> Option<[u8; 32]> {
        match (&self.key, &self.key_sha256) {
            (Some(key), _) => Some(digest(key)),
            (None, digest) => hex::decode(digest.as_deref()?).ok()?.try_into().ok(),
        }
    }
}

impl std::fmt::Debug for KeyConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeyConfig")
            .field("tenant", &self.tenant)
            .finish_non_exhaustive()
    }
}

/// The faults of the keys of a configuration, one sentence per fault.
pub(crate) fn key_faults(keys: &[KeyConfig]) -> Vec<String> {
    let mut faults = Vec::new();
    let mut digests = HashMap::new();
    for (place, entry) in keys.iter().enumerate() {
        let at = format!("keys[{place}]");
        let is_hash = |text: &String| hex::decode(text).is_ok_and(|bytes| bytes.len() == 32);
        let (holds, fault) = match (&entry.key, &entry.key_sha256) {
            (Some(key), None) => (!key.is_empty(), ".key: must not be empty"),
            (None, Some(hash)) => (is_hash(hash), ".key_sha256: must be 64 hex digits"),
            _ => (false, ": set either key or key_sha256"),
        };
        if !holds {
            faults.push(format!("{at}{fault}"));
        }
        let first = *digests.entry(entry.digest()).or_insert(place);
        if first != place && entry.digest().is_some() {
            faults.push(format!(
                "{at}: is the same key as keys[{first}], and a key has one owner"
            ));
        }
    }
    faults
}

/// The public id of a key, if it has the form of those that Refrain makes.
pub fn id_of(key: &str) -> Option<&str> {
    key.strip_prefix(PREFIX)?.split_once('-').map(|(id, _)| id)
}

/// SHA-256 of a key.
pub fn digest(key: &str) -> [u8; 32] {
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

    #[test]
    fn keys_do_not_show_in_debug_output() {
        let key = KeyConfig {
            key: Some("sk-secret".into()),
            key_sha256: None,
            tenant: "acme".parse().unwrap(),
        };
        assert!(!format!("{key:?}").contains("secret"));
    }

    #[test]
    fn a_key_has_one_owner_however_it_is_written() {
        let key = |key: Option<&str>, hash: Option<&str>, tenant: &str| KeyConfig {
            key: key.map(str::to_owned),
            key_sha256: hash.map(str::to_owned),
            tenant: tenant.parse().unwrap(),
        };
        let hash = hex::encode(digest("sk-a")).to_ascii_uppercase();
        for (second, is_twice) in [
            (key(Some("sk-a"), None, "bolt"), true),
            (key(None, Some(&hash), "bolt"), true),
            (key(Some("sk-b"), None, "acme"), false),
        ] {
            let faults = key_faults(&[key(Some("sk-a"), None, "acme"), second]).join("\n");
            let fault = "keys[1]: is the same key as keys[0]";
            assert_eq!(faults.contains(fault), is_twice, "{faults}");
        }
    }
}
