//! API keys to tenants.

use refrain_protocol::{ApiError, ErrorKind};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::config::KeyConfig;

/// The table of keys. Holds hashes only, so neither a dump nor a comparison's timing gives a key away.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    entries: Vec<([u8; 32], String)>,
    anonymous_tenant: Option<String>,
}

fn hash(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

impl Keys {
    /// From a checked configuration. A hash that is no hash matches nothing.
    pub(crate) fn new(keys: &[KeyConfig], anonymous_tenant: Option<String>) -> Self {
        let entries = keys.iter().filter_map(|entry| {
            let digest = match (&entry.key, &entry.key_sha256) {
                (Some(key), _) => hash(key),
                (None, digest) => hex::decode(digest.as_deref()?).ok()?.try_into().ok()?,
            };
            Some((digest, entry.tenant.clone()))
        });
        Keys {
            entries: entries.collect(),
            anonymous_tenant,
        }
    }

    /// The tenant that an `Authorization` header belongs to.
    ///
    /// # Errors
    /// `Unauthorized` with code `invalid_api_key`.
    pub(crate) fn tenant(&self, authorization: Option<&str>) -> Result<&str, ApiError> {
        let refused = |message: &str| {
            Err(ApiError::new(ErrorKind::Unauthorized, message).with_code("invalid_api_key"))
        };
        if let (Some(tenant), true) = (&self.anonymous_tenant, self.entries.is_empty()) {
            return Ok(tenant);
        }
        let Some(authorization) = authorization else {
            return match &self.anonymous_tenant {
                Some(tenant) => Ok(tenant),
                None => refused("no API key: send it as `Authorization: Bearer <key>`"),
            };
        };
        let Some((scheme, key)) = authorization.trim().split_once(' ') else {
            return refused("malformed Authorization header: expected `Bearer <key>`");
        };
        if !scheme.eq_ignore_ascii_case("bearer") {
            return refused("unknown authorization scheme: expected `Bearer <key>`");
        }
        let given = hash(key.trim());
        // All entries are looked at, so the time taken does not tell which one matched.
        let mut found = None;
        for (digest, tenant) in &self.entries {
            if digest.ct_eq(&given).into() {
                found = Some(tenant.as_str());
            }
        }
        found.map_or_else(|| refused("incorrect API key"), Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(anonymous: Option<&str>) -> Keys {
        let entries = [
            KeyConfig {
                key: Some("sk-a".into()),
                key_sha256: None,
                tenant: "acme".into(),
            },
            KeyConfig {
                key: None,
                key_sha256: Some(hex::encode(hash("sk-b"))),
                tenant: "bolt".into(),
            },
        ];
        Keys::new(&entries, anonymous.map(str::to_owned))
    }

    #[test]
    fn a_key_names_its_tenant() {
        let keys = keys(None);
        assert_eq!(keys.tenant(Some("Bearer sk-a")).unwrap(), "acme");
        assert_eq!(keys.tenant(Some("bearer  sk-b ")).unwrap(), "bolt");
        for bad in [
            None,
            Some(""),
            Some("Bearer"),
            Some("Bearer sk-c"),
            Some("Basic sk-a"),
            Some("sk-a"),
        ] {
            let error = keys.tenant(bad).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Unauthorized);
            assert_eq!(error.code.as_deref(), Some("invalid_api_key"));
            assert!(!error.message.contains("sk-"));
        }
    }

    #[test]
    fn the_anonymous_tenant_takes_those_without_a_key_but_not_those_with_a_wrong_one() {
        assert_eq!(keys(Some("local")).tenant(None).unwrap(), "local");
        assert!(keys(Some("local")).tenant(Some("Bearer wrong")).is_err());
        let open = Keys::new(&[], Some("local".into()));
        assert_eq!(open.tenant(Some("Bearer whatever")).unwrap(), "local");
    }
}
