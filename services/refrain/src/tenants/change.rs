//! Changes of the file of tenants, as functions of its value.

use anyhow::{Context, ensure};
use refrain_gateway::tenants::file::{
    KeyEndpoint, KeyEntry, LimitsEntry, TenantEntry, TenantsFile, expiry_text,
};
use refrain_gateway::tenants::key::NewKey;

/// The properties of a new key.
pub(super) struct NewKeyOptions {
    pub(super) name: String,
    pub(super) models: Vec<String>,
    pub(super) endpoints: Vec<KeyEndpoint>,
    pub(super) expires_unix_s: Option<i64>,
    pub(super) limits: LimitsEntry,
}

/// The tenant of this name.
pub(super) fn tenant<'a>(
    file: &'a mut TenantsFile,
    name: &str,
) -> anyhow::Result<&'a mut TenantEntry> {
    let mut tenants = file.tenants.iter_mut();
    let found = tenants.find(|tenant| tenant.name == name);
    found
        .with_context(|| format!("there is no tenant {name}; `refrain tenants add {name}` adds it"))
}

pub(super) fn add_tenant(
    file: &mut TenantsFile,
    name: &str,
    limits: LimitsEntry,
) -> anyhow::Result<()> {
    let is_new = file.tenants.iter().all(|tenant| tenant.name != name);
    ensure!(
        is_new,
        "there is a tenant {name}; `refrain tenants set` changes it"
    );
    file.tenants.push(TenantEntry {
        name: name.to_owned(),
        limits,
        ..TenantEntry::default()
    });
    Ok(())
}

pub(super) fn remove_tenant(file: &mut TenantsFile, name: &str) -> anyhow::Result<()> {
    tenant(file, name)?;
    file.tenants.retain(|tenant| tenant.name != name);
    Ok(())
}

pub(super) fn add_key(
    file: &mut TenantsFile,
    of: &str,
    key: &NewKey,
    options: NewKeyOptions,
) -> anyhow::Result<()> {
    let expires_at = options.expires_unix_s.map(expiry_text).transpose()?;
    tenant(file, of)?.keys.push(KeyEntry {
        name: options.name,
        id: key.id.clone(),
        sha256: key.sha256.clone(),
        models: options.models,
        endpoints: options.endpoints,
        expires_at,
        limits: options.limits,
    });
    Ok(())
}

/// Adds a key with the properties of another one, which ends at `ends` or earlier. Times are in Unix seconds.
pub(super) fn rotate_key(
    file: &mut TenantsFile,
    id: &str,
    new: &NewKey,
    now: i64,
    ends: i64,
) -> anyhow::Result<()> {
    let (tenant, at) = place_of(file, id)?;
    let keys = &mut file.tenants[tenant].keys;
    let successor = KeyEntry {
        id: new.id.clone(),
        sha256: new.sha256.clone(),
        ..keys[at].clone()
    };
    let planned = keys[at].expires_unix_s().map_err(anyhow::Error::msg)?;
    ensure!(
        planned.is_none_or(|planned| planned > now),
        "the key {id} has ended, and its successor would end with it; add another key"
    );
    let ends = planned.map_or(ends, |planned| planned.min(ends));
    keys[at].expires_at = Some(expiry_text(ends)?);
    keys.push(successor);
    Ok(())
}

pub(super) fn revoke_key(file: &mut TenantsFile, id: &str) -> anyhow::Result<()> {
    let (tenant, at) = place_of(file, id)?;
    file.tenants[tenant].keys.remove(at);
    Ok(())
}

/// The places of a key's tenant and of the key there.
fn place_of(file: &TenantsFile, id: &str) -> anyhow::Result<(usize, usize)> {
    let mut places = file
        .tenants
        .iter()
        .enumerate()
        .filter_map(|(tenant, entry)| {
            let at = entry.keys.iter().position(|key| key.id == id)?;
            Some((tenant, at))
        });
    let place = places.next();
    place.with_context(|| format!("there is no key {id}; `refrain keys list` has all ids"))
}
