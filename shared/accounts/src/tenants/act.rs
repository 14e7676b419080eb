//! Administrative acts on tenants and keys, as functions of all tenants.
//!
//! Commands on a file and the admin API carry out the same acts. Bodies and changes are those of [`TenantEntry`] and
//! [`KeyEntry`], so a new field there needs nothing here.

use refrain_protocol::names::name_fault;
use refrain_protocol::{ApiError, ErrorKind};
use serde_json::{Map, Value};

use super::file::{KeyEntry, TenantEntry, TenantsFile, expiry_text};
use super::key::NewKey;

/// An act of an operator.
#[derive(Clone, Debug, PartialEq)]
pub enum TenantAct {
    /// Adds a tenant without keys.
    AddTenant(TenantEntry),
    /// Changes a tenant, but not its name and its keys.
    ChangeTenant {
        /// Its name.
        name: String,
        /// The fields that change, as in RFC 7396: null removes one.
        patch: Value,
    },
    /// Removes a tenant and its keys.
    RemoveTenant {
        /// Its name.
        name: String,
    },
    /// Adds a key, which [`TenantAct::make_key`] makes.
    AddKey {
        /// The name of its tenant.
        tenant: String,
        /// Its properties.
        entry: KeyEntry,
    },
    /// Adds a key with the properties of another one, which ends.
    RotateKey {
        /// The public id of the other one.
        id: String,
        /// Hours until that ends, if it does not end earlier.
        grace_hours: u32,
        /// The public id and the SHA-256 of the new one, which [`TenantAct::make_key`] makes.
        new: KeyEntry,
    },
    /// Removes a key.
    RevokeKey {
        /// Its public id.
        id: String,
    },
}

/// Looks up the tenant that an act is about.
pub(crate) enum ActSubject<'a> {
    /// Its name.
    Tenant(&'a str),
    /// The public id of one of its keys.
    Key(&'a str),
}

fn not_found(message: String) -> ApiError {
    ApiError::new(ErrorKind::NotFound, message)
}

impl TenantAct {
    /// Makes the key that the act adds, if it adds one.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn make_key(&mut self) -> Result<Option<NewKey>, ApiError> {
        let (TenantAct::AddKey { entry, .. } | TenantAct::RotateKey { new: entry, .. }) = self
        else {
            return Ok(None);
        };
        let key = NewKey::random()?;
        entry.id = key.id.clone();
        entry.sha256 = key.sha256.clone();
        Ok(Some(key))
    }

    /// Looks up the tenant that the act is about.
    pub(crate) fn subject(&self) -> ActSubject<'_> {
        match self {
            TenantAct::AddTenant(entry) => ActSubject::Tenant(&entry.name),
            TenantAct::ChangeTenant { name, .. } | TenantAct::RemoveTenant { name } => {
                ActSubject::Tenant(name)
            }
            TenantAct::AddKey { tenant, .. } => ActSubject::Tenant(tenant),
            TenantAct::RotateKey { id, .. } | TenantAct::RevokeKey { id } => ActSubject::Key(id),
        }
    }

    /// A description for the audit log. It names tenants and the public ids of keys.
    pub fn description(&self) -> String {
        match self {
            TenantAct::AddTenant(TenantEntry { name, .. }) => format!("tenant {name} added"),
            TenantAct::ChangeTenant { name, patch } => format!("tenant {name} changed: {patch}"),
            TenantAct::RemoveTenant { name } => format!("tenant {name} removed"),
            TenantAct::AddKey { tenant, entry } => {
                format!("key {} of tenant {tenant} added", entry.id)
            }
            TenantAct::RotateKey { id, new, .. } => format!("key {id} rotated to {}", new.id),
            TenantAct::RevokeKey { id } => format!("key {id} revoked"),
        }
    }

    /// Carries the act out at a time in Unix seconds.
    ///
    /// # Errors
    /// `NotFound` without such a tenant or key, `Conflict` if it is there already, `InvalidRequest` if the tenant has
    /// faults afterwards. The tenants may have been changed then, and are not to be used.
    pub fn apply(&self, file: &mut TenantsFile, now: i64) -> Result<(), ApiError> {
        let name = match self {
            TenantAct::AddTenant(entry) => add_tenant(file, entry)?,
            TenantAct::ChangeTenant { name, patch } => change_tenant(file, name, patch)?,
            TenantAct::RemoveTenant { name } => {
                tenant(file, name)?;
                file.tenants.retain(|tenant| tenant.name != **name);
                name.clone()
            }
            TenantAct::AddKey { tenant: of, entry } => {
                // Names of keys that are there already may stay.
                if let Some(fault) = name_fault(&entry.name) {
                    return Err(ApiError::invalid("name", format!("name: {fault}")));
                }
                let owner = tenant(file, of)?;
                owner.keys.push(entry.clone());
                of.clone()
            }
            TenantAct::RotateKey {
                id,
                grace_hours,
                new,
            } => rotate_key(file, id, new, now, now + i64::from(*grace_hours) * 3_600)?,
            TenantAct::RevokeKey { id } => {
                let (owner, at) = place_of(file, id)?;
                owner.keys.remove(at);
                owner.name.to_string()
            }
        };
        check(file, &name)
    }
}

/// The tenant of this name.
fn tenant<'a>(file: &'a mut TenantsFile, name: &str) -> Result<&'a mut TenantEntry, ApiError> {
    let mut tenants = file.tenants.iter_mut();
    let found = tenants.find(|tenant| tenant.name == *name);
    found.ok_or_else(|| {
        not_found(format!(
            "there is no tenant {name}; `refrain tenants add {name}` adds it"
        ))
    })
}

fn add_tenant(file: &mut TenantsFile, entry: &TenantEntry) -> Result<String, ApiError> {
    let name = &entry.name;
    if !entry.keys.is_empty() {
        let message = "a new tenant has no keys; add them afterwards, since Refrain makes them";
        return Err(ApiError::invalid("keys", message));
    }
    if file.tenants.iter().any(|tenant| tenant.name == *name) {
        let message = format!("there is a tenant {name}; `refrain tenants set` changes it");
        return Err(ApiError::new(ErrorKind::Conflict, message).with_code("tenant_exists"));
    }
    file.tenants.push(entry.clone());
    Ok(name.to_string())
}

fn change_tenant(file: &mut TenantsFile, name: &str, patch: &Value) -> Result<String, ApiError> {
    let tenant = tenant(file, name)?;
    let Value::Object(fields) = patch else {
        let message = "the change must be an object of the fields that change";
        return Err(ApiError::new(ErrorKind::InvalidRequest, message));
    };
    for fixed in ["name", "keys"] {
        if fields.contains_key(fixed) {
            let message = format!("{fixed} cannot be changed here; keys have routes of their own");
            return Err(ApiError::invalid(fixed, message));
        }
    }
    let mut value = serde_json::to_value(&*tenant).map_err(ApiError::internal)?;
    merge(&mut value, patch);
    *tenant = serde_json::from_value(value).map_err(|error| {
        let message = format!("the tenant would have a fault: {error}");
        ApiError::new(ErrorKind::InvalidRequest, message)
    })?;
    Ok(name.to_owned())
}

/// Adds a key with the properties of another one, which ends at `ends` or earlier. Times are in Unix seconds.
fn rotate_key(
    file: &mut TenantsFile,
    id: &str,
    new: &KeyEntry,
    now: i64,
    ends: i64,
) -> Result<String, ApiError> {
    let (owner, at) = place_of(file, id)?;
    let successor = KeyEntry {
        id: new.id.clone(),
        sha256: new.sha256.clone(),
        ..owner.keys[at].clone()
    };
    let planned = owner.keys[at].expires_unix_s();
    let planned = planned.map_err(|fault| ApiError::invalid("expires_at", fault))?;
    if planned.is_some_and(|planned| planned <= now) {
        let message =
            format!("the key {id} has ended, and its successor would end with it; add another key");
        return Err(ApiError::new(ErrorKind::Conflict, message).with_code("key_expired"));
    }
    let ends = planned.map_or(ends, |planned| planned.min(ends));
    let ends = expiry_text(ends)
        .map_err(|_| ApiError::invalid("grace_hours", "the key would end after the year 9999"))?;
    owner.keys[at].expires_at = Some(ends);
    owner.keys.push(successor);
    Ok(owner.name.to_string())
}

/// A key's tenant, and the place of the key there.
fn place_of<'a>(
    file: &'a mut TenantsFile,
    id: &str,
) -> Result<(&'a mut TenantEntry, usize), ApiError> {
    let mut places = file.tenants.iter_mut().filter_map(|tenant| {
        let at = tenant.keys.iter().position(|key| key.id == id)?;
        Some((tenant, at))
    });
    places.next().ok_or_else(|| {
        not_found(format!(
            "there is no key {id}; `refrain keys list` has all ids"
        ))
    })
}

/// Checks one tenant, if it is there.
fn check(file: &TenantsFile, name: &str) -> Result<(), ApiError> {
    let tenants = file.tenants.iter().filter(|tenant| tenant.name == *name);
    let only = TenantsFile {
        tenants: tenants.cloned().collect(),
    };
    let faults = only.faults();
    if faults.is_empty() {
        return Ok(());
    }
    // There is only one tenant, so its number tells nothing.
    let faults: Vec<&str> = faults
        .iter()
        .map(|fault| fault.trim_start_matches("tenants[0]."))
        .collect();
    Err(ApiError::new(ErrorKind::InvalidRequest, faults.join("; ")))
}

/// Merges a change into a value, as in RFC 7396.
fn merge(value: &mut Value, patch: &Value) {
    let Value::Object(fields) = patch else {
        *value = patch.clone();
        return;
    };
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    let Some(object) = value.as_object_mut() else {
        return;
    };
    for (name, field) in fields {
        match field {
            Value::Null => drop(object.shift_remove(name)),
            _ => merge(object.entry(name).or_insert(Value::Null), field),
        }
    }
}

/// The change that makes one tenant out of another of the same name, apart from their keys.
///
/// # Errors
/// Never for values that were read from a file or an answer.
pub fn difference(before: &TenantEntry, after: &TenantEntry) -> Result<Value, ApiError> {
    let value = |entry: &TenantEntry| {
        let bare = TenantEntry {
            keys: Vec::new(),
            ..entry.clone()
        };
        serde_json::to_value(bare).map_err(ApiError::internal)
    };
    Ok(difference_of(&value(before)?, &value(after)?))
}

fn difference_of(before: &Value, after: &Value) -> Value {
    let (Value::Object(before), Value::Object(after)) = (before, after) else {
        return after.clone();
    };
    let mut patch = Map::new();
    for (name, field) in after {
        match before.get(name) {
            Some(known) if known == field => {}
            Some(known) => drop(patch.insert(name.clone(), difference_of(known, field))),
            None => drop(patch.insert(name.clone(), field.clone())),
        }
    }
    for name in before.keys().filter(|name| !after.contains_key(*name)) {
        patch.insert(name.clone(), Value::Null);
    }
    Value::Object(patch)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tenants::file::LimitsEntry;

    const NOW: i64 = 1_800_000_000;

    fn acme() -> TenantsFile {
        let entry = TenantEntry {
            limits: LimitsEntry {
                requests_per_minute: Some(600),
                tokens_per_minute: Some(9_000),
                ..LimitsEntry::default()
            },
            ..TenantEntry::named("acme".parse().unwrap())
        };
        TenantsFile {
            tenants: vec![entry],
        }
    }

    fn apply(file: &mut TenantsFile, mut act: TenantAct) -> Result<Option<NewKey>, ApiError> {
        let key = act.make_key()?;
        act.apply(file, NOW)?;
        Ok(key)
    }

    fn add_key(name: &str) -> TenantAct {
        TenantAct::AddKey {
            tenant: "acme".into(),
            entry: KeyEntry {
                name: name.into(),
                ..KeyEntry::default()
            },
        }
    }

    #[test]
    fn a_change_touches_the_fields_that_it_names() {
        let change = |patch| TenantAct::ChangeTenant {
            name: "acme".into(),
            patch,
        };
        let mut file = acme();
        let patch = json!({"limits": {"requests_per_minute": null, "requests_in_flight_max": 3}});
        apply(&mut file, change(patch)).unwrap();
        let limits = file.tenants[0].limits;
        assert_eq!(limits.requests_per_minute, None);
        assert_eq!(limits.tokens_per_minute, Some(9_000));
        assert_eq!(limits.requests_in_flight_max, Some(3));
        for (patch, part) in [
            (
                json!({"limits": {"tokens_per_minute": 0}}),
                "limits.tokens_per_minute",
            ),
            (json!({"limit": {}}), "limit"),
            (json!({"limits": 7}), "fault"),
            (json!({"keys": []}), "keys"),
            (json!({"name": "b"}), "name"),
            (json!([]), "object"),
        ] {
            let error = apply(&mut file.clone(), change(patch)).err().unwrap();
            assert_eq!(error.kind, ErrorKind::InvalidRequest);
            assert!(error.message.contains(part), "{error}");
        }
    }

    #[test]
    fn the_difference_of_two_tenants_makes_one_of_the_other() {
        let mut file = acme();
        apply(&mut file, add_key("ci")).unwrap();
        let before = file.tenants[0].clone();
        let after = TenantEntry {
            limits: LimitsEntry {
                tokens_per_minute: Some(1),
                requests_in_flight_max: Some(2),
                ..LimitsEntry::default()
            },
            ..before.clone()
        };
        let patch = difference(&before, &after).unwrap();
        let expected = json!({"limits": {
            "requests_per_minute": null, "tokens_per_minute": 1, "requests_in_flight_max": 2,
        }});
        assert_eq!(patch, expected);
        let change = TenantAct::ChangeTenant {
            name: "acme".into(),
            patch,
        };
        apply(&mut file, change).unwrap();
        assert_eq!(file.tenants[0], after);
        assert_eq!(difference(&after, &after).unwrap(), json!({}));
    }

    #[test]
    fn a_rotated_key_ends_after_its_grace_and_no_later_than_planned() {
        let mut file = acme();
        let old = apply(&mut file, add_key("ci")).unwrap().unwrap();
        let rotate = |id: &str, grace_hours| TenantAct::RotateKey {
            id: id.to_owned(),
            grace_hours,
            new: KeyEntry::default(),
        };
        let new = apply(&mut file, rotate(&old.id, 2)).unwrap().unwrap();
        let ends = |file: &TenantsFile, at: usize| file.tenants[0].keys[at].expires_unix_s();
        assert_eq!(ends(&file, 0), Ok(Some(NOW + 7_200)));
        assert_eq!(ends(&file, 1), Ok(None));
        assert_eq!(file.tenants[0].keys[1].sha256, new.sha256);
        assert_eq!(file.tenants[0].keys[1].name, "ci");
        apply(&mut file, rotate(&old.id, 100)).unwrap();
        assert_eq!(ends(&file, 0), Ok(Some(NOW + 7_200)));
        file.tenants[0].keys[0].expires_at = Some(expiry_text(NOW).unwrap());
        let error = apply(&mut file, rotate(&old.id, 2)).err().unwrap();
        assert_eq!(error.kind, ErrorKind::Conflict);
    }

    #[test]
    fn unknown_names_and_names_in_use_are_refused() {
        let mut file = acme();
        let kind = |file: &mut TenantsFile, act| apply(file, act).err().unwrap().kind;
        let again = TenantAct::AddTenant(acme().tenants[0].clone());
        assert_eq!(kind(&mut file, again), ErrorKind::Conflict);
        let (name, id) = ("bolt".to_owned(), "0123".to_owned());
        let unknown = [
            TenantAct::RemoveTenant { name: name.clone() },
            TenantAct::ChangeTenant {
                name,
                patch: json!({}),
            },
            TenantAct::RevokeKey { id },
        ];
        for act in unknown {
            assert_eq!(kind(&mut file, act), ErrorKind::NotFound);
        }
        for name in [" ", "", "a\nb", "a\u{202e}b"] {
            assert_eq!(kind(&mut file, add_key(name)), ErrorKind::InvalidRequest);
        }
        let key = apply(&mut acme(), add_key("ci")).unwrap().unwrap();
        assert!(!add_key("ci").description().contains(&key.key));
    }
}
