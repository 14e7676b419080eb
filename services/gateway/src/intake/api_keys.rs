//! Finds the tenant of an API key.

use refrain_protocol::{ApiError, ErrorKind};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::config::KeyConfig;

/// The table of API keys. It has only their hashes, so neither a memory dump nor the time of a comparison reveals a
/// key.
#[derive(Clone, Debug)]
pub(crate) struct ApiKeys {
    entries: Vec<([u8; 32], String)>,
    anonymous_tenant: Option<String>,
}

fn hash(key: &str) -> [u8; 32] {
    Sha256::digest(key.as_bytes()).into()
}

fn refused(message: &str) -> ApiError {
    ApiError::new(ErrorKind::Unauthorized, message).with_code("invalid_api_key")
}

impl ApiKeys {
    /// Creates the table from a checked configuration. An entry whose hash is malformed matches no key.
    pub(crate) fn new(keys: &[KeyConfig], anonymous_tenant: Option<String>) -> Self {
        let entries = keys.iter().filter_map(|entry| {
            let digest = match (&entry.key, &entry.key_sha256) {
                (Some(key), _) => hash(key),
                (None, digest) => hex::decode(digest.as_deref()?).ok()?.try_into().ok()?,
            };
            Some((digest, entry.tenant.clone()))
        });
        ApiKeys {
            entries: entries.collect(),
            anonymous_tenant,
        }
    }

    /// Finds the tenant of an `Authorization` header.
    ///
    /// # Errors
    /// `Unauthorized` with code `invalid_api_key`.
    pub(crate) fn tenant(&self, authorization: Option<&str>) -> Result<&str, ApiError> {
        if let (Some(tenant), true) = (&self.anonymous_tenant, self.entries.is_empty()) {
            return Ok(tenant);
        }
        let Some(authorization) = authorization else {
            return match &self.anonymous_tenant {
                Some(tenant) => Ok(tenant),
                None => Err(refused(
                    "the API key is missing; send it as `Authorization: Bearer <key>`, or as `x-api-key`",
                )),
            };
        };
        let Some((scheme, key)) = authorization.trim().split_once(' ') else {
            return Err(refused(
                "the Authorization header is malformed; send `Bearer <key>`",
            ));
        };
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(refused(
                "the authorization scheme is unknown; send `Bearer <key>`",
            ));
        }
        self.owner(key.trim())
    }

    /// Finds the tenant of a bare key, such as an `x-api-key` header has.
    ///
    /// # Errors
    /// As [`ApiKeys::tenant`].
    pub(crate) fn tenant_of_key(&self, key: &str) -> Result<&str, ApiError> {
        match (&self.anonymous_tenant, self.entries.is_empty()) {
            (Some(tenant), true) => Ok(tenant),
            _ => self.owner(key.trim()),
        }
    }

    fn owner(&self, key: &str) -> Result<&str, ApiError> {
        let given = hash(key);
        // All entries are compared, so the time does not reveal which one matched.
        let mut found = None;
        for (digest, tenant) in &self.entries {
            if digest.ct_eq(&given).into() {
                found = Some(tenant.as_str());
            }
        }
        found.ok_or_else(|| refused("the API key is unknown"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(anonymous: Option<&str>) -> ApiKeys {
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
        ApiKeys::new(&entries, anonymous.map(str::to_owned))
    }

    #[test]
    fn a_key_belongs_to_its_tenant() {
        let keys = keys(None);
        assert_eq!(keys.tenant(Some("Bearer sk-a")).unwrap(), "acme");
        assert_eq!(keys.tenant(Some("bearer  sk-b ")).unwrap(), "bolt");
        assert_eq!(keys.tenant_of_key(" sk-a ").unwrap(), "acme");
        assert!(keys.tenant_of_key("sk-c").is_err());
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
    fn the_anonymous_tenant_is_for_callers_without_a_key_and_not_for_wrong_keys() {
        assert_eq!(keys(Some("local")).tenant(None).unwrap(), "local");
        assert!(keys(Some("local")).tenant(Some("Bearer wrong")).is_err());
        let open = ApiKeys::new(&[], Some("local".into()));
        assert_eq!(open.tenant(Some("Bearer whatever")).unwrap(), "local");
    }
}
