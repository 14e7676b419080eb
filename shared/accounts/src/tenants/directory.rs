//! Finds the caller of an API key: its tenant, what the key may do, and the limits on both.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use parking_lot::RwLock;
use refrain_protocol::{ApiError, ErrorKind, PARTITION_MARK, TenantName};
use subtle::ConstantTimeEq;

use super::file::{Isolation, KeyEndpoint, LimitsEntry, TenantsFile};
use super::key::KeyConfig;
use super::key::{digest, id_of};
use super::policy::TenantPolicy;

/// Somebody who calls, once the key is known.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The tenant.
    pub tenant: TenantName,
    /// The limits on the tenant.
    pub tenant_limits: LimitsEntry,
    /// The standing of the tenant among others.
    pub policy: TenantPolicy,
    /// The key, if it is one of the file of tenants, or what a token says. Keys of the configuration may do
    /// everything.
    pub key: Option<Arc<KnownKey>>,
    /// The name of a key of the configuration: the beginning of its hash.
    pub fixed_key: Option<String>,
}

/// A key of the file of tenants.
#[derive(Debug)]
pub struct KnownKey {
    pub(crate) id: String,
    digest: [u8; 32],
    tenant: TenantName,
    models: HashSet<String>,
    endpoints: HashSet<KeyEndpoint>,
    expires_unix_s: Option<i64>,
    pub(crate) limits: LimitsEntry,
}

impl KnownKey {
    /// A stand-in for the key of a token's owner. Nothing has its hash.
    pub(crate) fn of_token(
        id: String,
        tenant: TenantName,
        models: HashSet<String>,
        endpoints: HashSet<KeyEndpoint>,
    ) -> Self {
        KnownKey {
            id,
            digest: [0; 32],
            tenant,
            models,
            endpoints,
            expires_unix_s: None,
            limits: LimitsEntry::default(),
        }
    }
}

impl Caller {
    /// The name of the tenant in namespaces, with the part of it that a request stays in. `end_user` is the hash of
    /// the end user's name.
    pub fn scope(&self, end_user: Option<&str>) -> String {
        let of_key = || {
            let id = self.key.as_ref().map(|key| key.id.as_str());
            format!("key:{}", id.or(self.fixed_key.as_deref()).unwrap_or("none"))
        };
        let part = match (self.policy.isolation, end_user) {
            (Isolation::Tenant, _) => return self.tenant.to_string(),
            (Isolation::User, Some(user)) => format!("user:{user}"),
            (Isolation::Key | Isolation::User, _) => of_key(),
        };
        format!("{}{PARTITION_MARK}{part}", self.tenant)
    }

    /// Whether the caller's key may use a model.
    pub fn may_use(&self, model: &str) -> bool {
        let models = self.key.as_ref().map(|key| &key.models);
        models.is_none_or(|models| models.is_empty() || models.contains(model))
    }

    /// Checks that the caller's key may call an endpoint.
    ///
    /// # Errors
    /// `Forbidden` with code `insufficient_permissions`.
    pub fn check_endpoint(&self, endpoint: KeyEndpoint) -> Result<(), ApiError> {
        let endpoints = self.key.as_ref().map(|key| &key.endpoints);
        match endpoints.is_none_or(|some| some.is_empty() || some.contains(&endpoint)) {
            true => Ok(()),
            false => Err(ApiError::new(
                ErrorKind::Forbidden,
                "this API key may not call this endpoint; use another key, or ask for one that may",
            )
            .with_code("insufficient_permissions")),
        }
    }
}

/// All keys. It has only their hashes, so neither a memory dump nor the time of a comparison reveals a key.
pub(crate) struct Directory {
    /// Keys of the configuration, which have no public id.
    fixed: Vec<([u8; 32], TenantName)>,
    anonymous_tenant: Option<TenantName>,
    /// Whether callers may have tokens in place of keys.
    has_tokens: bool,
    of_file: RwLock<Arc<FileTable>>,
}

/// The file of tenants, by public id and by tenant.
#[derive(Debug, Default)]
struct FileTable {
    /// Whether there is a file, even if it has no keys.
    exists: bool,
    /// Whether nothing is known of the tenants yet.
    is_awaited: bool,
    keys: HashMap<String, Arc<KnownKey>>,
    limits: HashMap<TenantName, LimitsEntry>,
    policies: HashMap<TenantName, TenantPolicy>,
}

fn refused(message: &str) -> ApiError {
    ApiError::new(ErrorKind::Unauthorized, message).with_code("invalid_api_key")
}

impl Directory {
    /// Creates the directory from a checked configuration. An entry whose hash is malformed matches no key.
    pub(crate) fn new(keys: &[KeyConfig], anonymous_tenant: Option<TenantName>) -> Self {
        let fixed = keys
            .iter()
            .filter_map(|entry| Some((entry.digest()?, entry.tenant.clone())));
        Directory {
            fixed: fixed.collect(),
            anonymous_tenant,
            has_tokens: false,
            of_file: RwLock::default(),
        }
    }

    /// The same directory beside an identity provider, whose tokens close a gateway as keys do.
    pub(crate) fn beside_tokens(self) -> Self {
        Directory {
            has_tokens: true,
            ..self
        }
    }

    /// The caller with a valid token.
    ///
    /// # Errors
    /// `Forbidden` if its tenant is not known and has to be, or as [`Directory::check_known`].
    pub(crate) fn caller_of_token(
        &self,
        key: &Arc<KnownKey>,
        allows_unknown: bool,
    ) -> Result<Caller, ApiError> {
        self.check_known()?;
        let (table, tenant) = (self.of_file(), &key.tenant);
        let is_known = table.limits.contains_key(tenant)
            || self.fixed.iter().any(|(_, fixed)| fixed == tenant);
        if !is_known && !allows_unknown {
            let message = "the token names a tenant that this gateway does not know; ask its operator to add it";
            let error = ApiError::new(ErrorKind::Forbidden, message);
            return Err(error.with_code("unknown_tenant"));
        }
        Ok(Caller {
            key: Some(key.clone()),
            ..self.of_tenant(&table, tenant)
        })
    }

    /// Refuses all callers until tenants are taken over. Without them nobody knows what callers may do.
    pub(crate) fn await_tenants(&self) {
        let table = FileTable {
            exists: true,
            is_awaited: true,
            ..FileTable::default()
        };
        *self.of_file.write() = table.into();
    }

    /// Checks that the tenants are known.
    ///
    /// # Errors
    /// `Unavailable`, with a time to try again.
    pub(crate) fn check_known(&self) -> Result<(), ApiError> {
        if !self.of_file().is_awaited {
            return Ok(());
        }
        let message =
            "this gateway does not know its tenants yet, since the draft store is away; try again";
        let error = ApiError::new(ErrorKind::Unavailable, message);
        Err(error
            .with_code("tenants_unknown")
            .with_retry_after_ms(1_000))
    }

    /// Whether any tenant or key has a budget per day or month.
    pub(crate) fn has_budgets(&self) -> bool {
        let table = self.of_file();
        let of_keys = table.keys.values().map(|key| &key.limits);
        table
            .limits
            .values()
            .chain(of_keys)
            .any(LimitsEntry::has_budget)
    }

    /// The fault of a file of tenants beside the keys of the configuration: a key has one owner.
    pub(crate) fn fault_of(&self, file: &TenantsFile) -> Option<String> {
        let is_fixed = |sha256: &str| {
            let digest = hex::decode(sha256).unwrap_or_default();
            self.fixed.iter().any(|(fixed, _)| *fixed == *digest)
        };
        let keys = file
            .tenants
            .iter()
            .flat_map(|tenant| tenant.keys.iter().map(move |key| (tenant, key)));
        let mut twice = keys.filter(|(_, key)| is_fixed(&key.sha256));
        let (tenant, key) = twice.next()?;
        Some(format!(
            "the key {} of tenant {} is in gateway.keys as well, and a key has one owner; remove one of them",
            key.id, tenant.name
        ))
    }

    /// Takes the file of tenants over, in place of an earlier one. Requests in flight go on.
    pub(crate) fn replace(&self, file: &TenantsFile) {
        let mut table = FileTable {
            exists: true,
            ..FileTable::default()
        };
        for tenant in &file.tenants {
            table.limits.insert(tenant.name.clone(), tenant.limits);
            table.policies.insert(tenant.name.clone(), tenant.into());
            for key in &tenant.keys {
                let decoded = hex::decode(&key.sha256).ok();
                let Some(digest) = decoded.and_then(|digest| digest.try_into().ok()) else {
                    continue;
                };
                let known = KnownKey {
                    id: key.id.clone(),
                    digest,
                    tenant: tenant.name.clone(),
                    models: key.models.iter().cloned().collect(),
                    endpoints: key.endpoints.iter().copied().collect(),
                    // A time that nobody can read is past: the file was checked, so there is none.
                    expires_unix_s: key.expires_unix_s().unwrap_or(Some(0)),
                    limits: key.limits,
                };
                table.keys.insert(key.id.clone(), known.into());
            }
        }
        *self.of_file.write() = table.into();
    }

    fn of_file(&self) -> Arc<FileTable> {
        self.of_file.read().clone()
    }

    /// Finds the caller of an `Authorization` header, at a time in Unix seconds.
    ///
    /// # Errors
    /// `Unauthorized` with code `invalid_api_key`, or as [`Directory::check_known`].
    pub(crate) fn caller(&self, authorization: Option<&str>, now: i64) -> Result<Caller, ApiError> {
        self.check_known()?;
        let Some(authorization) = authorization else {
            return self.anonymous().ok_or_else(|| {
                refused(
                    "the API key is missing; send it as `Authorization: Bearer <key>`, or as `x-api-key`",
                )
            });
        };
        if let Some(open) = self.open_to_all() {
            return Ok(open);
        }
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
        self.owner(key.trim(), now)
    }

    /// Finds the caller of a bare key, such as an `x-api-key` header has.
    ///
    /// # Errors
    /// As [`Directory::caller`].
    pub(crate) fn caller_of_key(&self, key: &str, now: i64) -> Result<Caller, ApiError> {
        self.check_known()?;
        match self.open_to_all() {
            Some(open) => Ok(open),
            None => self.owner(key.trim(), now),
        }
    }

    /// The caller that everybody is on a listener of this tenant.
    ///
    /// # Errors
    /// `Forbidden` for a tenant that nobody has added, or as [`Directory::check_known`].
    pub(crate) fn caller_of_listener(&self, tenant: &TenantName) -> Result<Caller, ApiError> {
        self.check_known()?;
        let table = self.of_file();
        let is_known = table.limits.contains_key(tenant)
            || self.anonymous_tenant.as_ref() == Some(tenant)
            || self.fixed.iter().any(|(_, fixed)| fixed == tenant);
        if !is_known {
            let message = format!(
                "the tenant {tenant} of this listener (gateway.trainer.tenant) does not exist; add it"
            );
            return Err(ApiError::new(ErrorKind::Forbidden, message).with_code("unknown_tenant"));
        }
        Ok(self.of_tenant(&table, tenant))
    }

    fn anonymous(&self) -> Option<Caller> {
        let tenant = self.anonymous_tenant.as_ref()?;
        Some(self.of_tenant(&self.of_file(), tenant))
    }

    /// The caller that everybody is where there are no keys at all. With a file of tenants nobody is: otherwise a
    /// client whose key was the last to be revoked would write into the memory of others.
    fn open_to_all(&self) -> Option<Caller> {
        let has_keys = self.has_tokens || !self.fixed.is_empty() || self.of_file().exists;
        self.anonymous().filter(|_| !has_keys)
    }

    fn of_tenant(&self, table: &FileTable, tenant: &TenantName) -> Caller {
        Caller {
            tenant: tenant.clone(),
            tenant_limits: table.limits.get(tenant).copied().unwrap_or_default(),
            policy: table.policies.get(tenant).copied().unwrap_or_default(),
            key: None,
            fixed_key: None,
        }
    }

    fn owner(&self, given: &str, now: i64) -> Result<Caller, ApiError> {
        let table = self.of_file();
        let hash = digest(given);
        if let Some(key) = id_of(given).and_then(|id| table.keys.get(id))
            && bool::from(key.digest.ct_eq(&hash))
        {
            if key.expires_unix_s.is_some_and(|end| end <= now) {
                return Err(refused("the API key has expired; ask for another one"));
            }
            let caller = self.of_tenant(&table, &key.tenant);
            return Ok(Caller {
                key: Some(key.clone()),
                ..caller
            });
        }
        // All entries are compared, so the time does not reveal which one matched.
        let mut found = None;
        for (digest, tenant) in &self.fixed {
            if digest.ct_eq(&hash).into() {
                found = Some(tenant);
            }
        }
        let tenant = found.ok_or_else(|| refused("the API key is unknown"))?;
        Ok(Caller {
            fixed_key: Some(hex::encode(&hash[..6])),
            ..self.of_tenant(&table, tenant)
        })
    }
}

#[cfg(test)]
mod tests {
    use refrain_protocol::scheduling::RequestClass;

    use super::*;
    use crate::tenants::file::{KeyEntry, TenantEntry, expiry_text};
    use crate::tenants::key::NewKey;

    const NOW: i64 = 1_800_000_000;

    fn directory(anonymous: Option<&str>) -> Directory {
        let entries = [
            KeyConfig {
                key: Some("sk-a".into()),
                key_sha256: None,
                tenant: "acme".parse().unwrap(),
            },
            KeyConfig {
                key: None,
                key_sha256: Some(hex::encode(digest("sk-b"))),
                tenant: "bolt".parse().unwrap(),
            },
        ];
        Directory::new(&entries, anonymous.map(|name| name.parse().unwrap()))
    }

    fn tenant_of(
        directory: &Directory,
        authorization: Option<&str>,
    ) -> Result<TenantName, ApiError> {
        Ok(directory.caller(authorization, NOW)?.tenant)
    }

    #[test]
    fn a_key_of_the_configuration_belongs_to_its_tenant() {
        let keys = directory(None);
        assert_eq!(tenant_of(&keys, Some("Bearer sk-a")).unwrap(), "acme");
        assert_eq!(tenant_of(&keys, Some("bearer  sk-b ")).unwrap(), "bolt");
        assert_eq!(keys.caller_of_key(" sk-a ", NOW).unwrap().tenant, "acme");
        assert!(keys.caller_of_key("sk-c", NOW).is_err());
        for bad in [
            None,
            Some(""),
            Some("Bearer"),
            Some("Bearer sk-c"),
            Some("Basic sk-a"),
            Some("sk-a"),
        ] {
            let error = tenant_of(&keys, bad).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Unauthorized);
            assert_eq!(error.code.as_deref(), Some("invalid_api_key"));
            assert!(!error.message.contains("sk-"));
        }
    }

    #[test]
    fn the_anonymous_tenant_is_for_callers_without_a_key_and_not_for_wrong_keys() {
        let keys = directory(Some("local"));
        assert_eq!(tenant_of(&keys, None).unwrap(), "local");
        assert!(tenant_of(&keys, Some("Bearer wrong")).is_err());
        let open = Directory::new(&[], Some("local".parse().unwrap()));
        assert_eq!(tenant_of(&open, Some("Bearer whatever")).unwrap(), "local");
        // The first key of the file ends that.
        open.replace(&file(&NewKey::random().unwrap(), KeyEntry::default()));
        assert!(tenant_of(&open, Some("Bearer whatever")).is_err());
        assert_eq!(tenant_of(&open, None).unwrap(), "local");
        // Without its last key the file does not open the gateway again.
        open.replace(&TenantsFile::default());
        assert!(tenant_of(&open, Some("Bearer whatever")).is_err());
    }

    #[test]
    fn nobody_gets_in_until_the_tenants_are_known() {
        let keys = directory(Some("local"));
        keys.await_tenants();
        for header in [None, Some("Bearer sk-a"), Some("Bearer wrong")] {
            let error = tenant_of(&keys, header).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Unavailable);
        }
        assert!(keys.caller_of_key("sk-a", NOW).is_err());
        keys.replace(&TenantsFile::default());
        assert_eq!(tenant_of(&keys, Some("Bearer sk-a")).unwrap(), "acme");
        assert!(keys.check_known().is_ok());
    }

    fn file(key: &NewKey, entry: KeyEntry) -> TenantsFile {
        TenantsFile {
            tenants: vec![TenantEntry {
                limits: LimitsEntry {
                    requests_per_minute: Some(7),
                    ..LimitsEntry::default()
                },
                class_max: RequestClass::Rollout,
                keys: vec![KeyEntry {
                    name: "ci".into(),
                    id: key.id.clone(),
                    sha256: key.sha256.clone(),
                    ..entry
                }],
                ..TenantEntry::named("acme".parse().unwrap())
            }],
        }
    }

    #[test]
    fn a_key_of_the_configuration_is_no_key_of_the_file_as_well() {
        let key = NewKey::random().unwrap();
        let of_file = file(&key, KeyEntry::default());
        let beside = |sha256: &str| {
            let entry = KeyConfig {
                key: None,
                key_sha256: Some(sha256.to_owned()),
                tenant: "bolt".parse().unwrap(),
            };
            Directory::new(&[entry], None).fault_of(&of_file)
        };
        assert_eq!(beside(&hex::encode(digest("sk-b"))), None);
        let fault = beside(&key.sha256.to_ascii_uppercase()).unwrap();
        assert!(fault.contains(&key.id) && fault.contains("acme"), "{fault}");
    }

    #[test]
    fn a_key_of_the_file_may_do_what_its_entry_says_until_it_ends() {
        let keys = directory(None);
        let key = NewKey::random().unwrap();
        let bearer = format!("Bearer {}", key.key);
        assert!(tenant_of(&keys, Some(&bearer)).is_err());
        let entry = KeyEntry {
            models: vec!["small".into()],
            endpoints: vec![KeyEndpoint::Chat],
            expires_at: Some(expiry_text(NOW + 60).unwrap()),
            ..KeyEntry::default()
        };
        keys.replace(&file(&key, entry));
        let caller = keys.caller(Some(&bearer), NOW).unwrap();
        assert_eq!(caller.tenant, "acme");
        assert_eq!(caller.tenant_limits.requests_per_minute, Some(7));
        assert!(caller.may_use("small") && !caller.may_use("large"));
        assert!(caller.check_endpoint(KeyEndpoint::Chat).is_ok());
        let error = caller.check_endpoint(KeyEndpoint::Completions).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Forbidden);
        // The limits of the file are also for the tenant's other keys.
        let other = keys.caller(Some("Bearer sk-a"), NOW).unwrap();
        assert_eq!(other.tenant_limits.requests_per_minute, Some(7));
        assert!(other.may_use("large"));
        // Where keys are isolated, each has a part of the tenant, also those of the configuration.
        let part = |caller: &Caller, isolation| {
            let policy = TenantPolicy {
                isolation,
                ..caller.policy
            };
            let caller = Caller {
                policy,
                ..caller.clone()
            };
            caller.scope(None)
        };
        assert_eq!(part(&caller, Isolation::Tenant), "acme");
        assert_eq!(
            part(&caller, Isolation::Key),
            format!("acme\u{1f}key:{}", key.id)
        );
        let of_config = part(&other, Isolation::Key);
        assert!(
            of_config.starts_with("acme\u{1f}key:") && of_config.len() == 21,
            "{of_config}"
        );
        assert_eq!(part(&other, Isolation::User), of_config);
        // So is its standing, and who is not in the file has the usual one.
        assert_eq!(
            other.policy.class(RequestClass::Interactive),
            RequestClass::Rollout
        );
        let elsewhere = keys.caller(Some("Bearer sk-b"), NOW).unwrap();
        assert_eq!(elsewhere.policy, TenantPolicy::default());
        let expired = keys.caller(Some(&bearer), NOW + 60).unwrap_err();
        assert!(expired.message.contains("expired"));
        // The public id alone opens nothing.
        let forged = format!("Bearer rfk-{}-{}", key.id, "A".repeat(43));
        assert!(keys.caller(Some(&forged), NOW).is_err());
        keys.replace(&TenantsFile::default());
        assert!(keys.caller(Some(&bearer), NOW).is_err());
    }
}
