//! The tenants that the draft store keeps, as this gateway knows them, and the acts that change them.
//!
//! An act reads nothing from the store as long as nobody else changes tenants: its change names the version that it
//! was made from, and the store refuses it if there is another one. So its work does not grow with the number of
//! tenants.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;

use parking_lot::Mutex;
use refrain_protocol::error::code;
use refrain_protocol::tenants::{TenantChange, TenantRecord, TenantsRequest, state_part};
use refrain_protocol::{ApiError, ErrorKind, TenantName};
use refrain_rpc::DraftStore;

use super::act::{ActSubject, TenantAct};
use super::file::{TenantEntry, TenantsFile};

/// How often an act is tried that other gateways came before. Those of this gateway take turns.
const ATTEMPTS_MAX: u32 = 16;

/// Turns of acts. Acts on one tenant have the same.
const TURNS: usize = 64;

/// A tenant, and its version in the draft store.
#[derive(Clone, Debug, PartialEq)]
pub struct VersionedTenant {
    /// The tenant with its keys.
    pub entry: TenantEntry,
    /// `None`: it is in no store, or is new.
    pub version: Option<u64>,
}

pub(super) fn unreadable(faults: String) -> ApiError {
    let message = "the tenants cannot be read; the log of the gateway says why";
    ApiError::new(ErrorKind::Internal, message).with_detail(faults)
}

/// The tenants of a draft store.
pub struct StoreTenants {
    store: Arc<dyn DraftStore>,
    known: Mutex<KnownTenants>,
    turns: [tokio::sync::Mutex<()>; TURNS],
}

/// The tenants that were read last, with the changes that were made here since.
#[derive(Default)]
struct KnownTenants {
    /// Their state; `None` before the first answer of the store.
    state: Option<u64>,
    records: BTreeMap<String, TenantRecord>,
}

impl KnownTenants {
    fn set(&mut self, name: String, version: u64, entry: Option<String>) {
        let before = self.records.remove(&name).map(|before| before.version);
        let parts = before.into_iter().chain(entry.as_ref().map(|_| version));
        let change = parts.fold(0, |all, version| all ^ state_part(&name, version));
        self.state = self.state.map(|state| state ^ change);
        if let Some(entry) = entry {
            let record = TenantRecord {
                name: name.clone(),
                version,
                entry,
            };
            self.records.insert(name, record);
        }
    }

    /// All tenants. See [`StoreTenants::all`].
    fn all(&self) -> Result<AllTenants, String> {
        let (mut tenants, mut left_out) = (Vec::new(), Vec::new());
        for record in self.records.values() {
            match name_fault(record) {
                None => tenants.push(versioned(record)?),
                Some(fault) => left_out.push(fault),
            }
        }
        let file = file_of(&tenants);
        match file.faults().join("; ") {
            faults if faults.is_empty() => Ok(AllTenants { tenants, left_out }),
            faults => Err(faults),
        }
    }

    /// The tenant with a key of this public id.
    fn owner_of(&self, id: &str) -> Option<String> {
        let has_key = |record: &&TenantRecord| {
            record.entry.contains(id)
                && entry_of(record).is_ok_and(|entry| entry.keys.iter().any(|key| key.id == id))
        };
        let mut records = self.records.values();
        records.find(has_key).map(|record| record.name.clone())
    }
}

fn entry_of(record: &TenantRecord) -> Result<TenantEntry, String> {
    serde_json::from_str(&record.entry).map_err(|error| format!("{:?}: {error}", record.name))
}

/// Why the name of a tenant is not allowed any more, and what to do.
fn name_fault(record: &TenantRecord) -> Option<String> {
    let fault = record.name.parse::<TenantName>().err()?;
    Some(format!(
        "the name {:?} {fault}; remove this tenant by the admin API, and add it by another name",
        record.name
    ))
}

/// The tenant of a record.
///
/// # Errors
/// As [`StoreTenants::tenant`].
fn readable(record: &TenantRecord) -> Result<VersionedTenant, ApiError> {
    match name_fault(record) {
        Some(fault) => Err(ApiError::new(ErrorKind::Conflict, fault)),
        None => versioned(record).map_err(unreadable),
    }
}

fn versioned(record: &TenantRecord) -> Result<VersionedTenant, String> {
    Ok(VersionedTenant {
        entry: entry_of(record)?,
        version: Some(record.version),
    })
}

/// The tenants of the store, but for those whose names are not allowed any more.
pub(crate) struct AllTenants {
    pub(crate) tenants: Vec<VersionedTenant>,
    /// A sentence about each of the others.
    pub(crate) left_out: Vec<String>,
}

impl StoreTenants {
    /// The tenants of this store, of which nothing is known yet.
    pub(crate) fn new(store: Arc<dyn DraftStore>) -> Self {
        StoreTenants {
            store,
            known: Mutex::default(),
            turns: std::array::from_fn(|_| tokio::sync::Mutex::default()),
        }
    }

    /// Asks the store for what has changed.
    ///
    /// # Errors
    /// What the store says.
    pub(crate) async fn look(&self) -> Result<(), ApiError> {
        let known = self.known.lock().state;
        let reply = self.store.tenants(TenantsRequest { known }).await?;
        if let Some(records) = reply.tenants {
            let records = records.into_iter();
            let records = records.map(|record| (record.name.clone(), record));
            *self.known.lock() = KnownTenants {
                state: Some(reply.state),
                records: records.collect(),
            };
        }
        Ok(())
    }

    /// All tenants that are known.
    ///
    /// # Errors
    /// A record is of a later version of Refrain, or damaged, or two tenants have one key.
    pub(crate) fn all(&self) -> Result<AllTenants, String> {
        self.all_with_state().1
    }

    /// All tenants that are known, with their state. It is not that of the last look if there was an act since.
    ///
    /// # Errors
    /// As [`StoreTenants::all`], for the tenants alone.
    pub(crate) fn all_with_state(&self) -> (Option<u64>, Result<AllTenants, String>) {
        let known = self.known.lock();
        (known.state, known.all())
    }

    /// The tenant of this name, if it is known.
    ///
    /// # Errors
    /// Its name is not allowed any more, or its record is of a later version of Refrain, or damaged.
    pub(crate) fn tenant(&self, name: &str) -> Result<Option<VersionedTenant>, ApiError> {
        let known = self.known.lock();
        let record = known.records.get(name);
        record.map(readable).transpose()
    }

    /// Carries out an act, at a time in Unix seconds. Returns the tenant as it is then, or `None` if it was removed.
    /// With `expected`, it must have this version before.
    ///
    /// # Errors
    /// As [`TenantAct::apply`]; `Conflict` with the code `tenant_changed` for another version; or the store's own.
    pub async fn carry_out(
        &self,
        act: &TenantAct,
        expected: Option<u64>,
        now: i64,
    ) -> Result<Option<VersionedTenant>, ApiError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            let error = match self.attempt(act, expected, now).await {
                Ok(tenant) => return Ok(tenant),
                Err(error) => error,
            };
            // The known state may be old. After another look the act means the same for what the tenant is now.
            let may_be_old = matches!(
                error.kind,
                ErrorKind::Conflict | ErrorKind::NotFound | ErrorKind::InvalidRequest
            );
            let is_beaten = error.has_code(code::TENANT_CHANGED) && expected.is_none();
            if !(attempts == 1 && may_be_old || attempts < ATTEMPTS_MAX && is_beaten) {
                return Err(error);
            }
            self.look().await?;
        }
    }

    /// Carries out an act on the tenant as it is known.
    async fn attempt(
        &self,
        act: &TenantAct,
        expected: Option<u64>,
        now: i64,
    ) -> Result<Option<VersionedTenant>, ApiError> {
        let name = match act.subject() {
            ActSubject::Tenant(name) => name.to_owned(),
            // The act itself says that nobody has a key.
            ActSubject::Key(id) => self.known.lock().owner_of(id).unwrap_or_default(),
        };
        let turn = BuildHasherDefault::<DefaultHasher>::default().hash_one(&name) as usize;
        let _turn = self.turns[turn % TURNS].lock().await;
        let record = self.known.lock().records.get(&name).cloned();
        let known = record.as_ref().map(|record| record.version);
        let entry = match (act, &record) {
            // Also one that cannot be read.
            (TenantAct::RemoveTenant { .. }, Some(_)) => None,
            _ => {
                let before = record.as_ref().map(readable).transpose()?;
                let mut file = TenantsFile {
                    tenants: before.into_iter().map(|before| before.entry).collect(),
                };
                act.apply(&mut file, now)?;
                file.tenants.pop()
            }
        };
        if expected.is_some() && known != expected {
            return Err(changed(known));
        }
        let text = entry.as_ref().map(serde_json::to_string).transpose();
        let change = TenantChange {
            name,
            expected: known,
            entry: text.map_err(ApiError::internal)?,
        };
        let reply = self.store.change_tenant(change.clone()).await?;
        let TenantChange {
            name, entry: text, ..
        } = change;
        self.known.lock().set(name, reply.version, text);
        let version = Some(reply.version);
        Ok(entry.map(|entry| VersionedTenant { entry, version }))
    }
}

/// The tenants as a file has them.
pub(super) fn file_of(tenants: &[VersionedTenant]) -> TenantsFile {
    TenantsFile {
        tenants: tenants.iter().map(|tenant| tenant.entry.clone()).collect(),
    }
}

fn changed(now: Option<u64>) -> ApiError {
    let message = match now {
        Some(version) => format!(
            "the tenant has been changed meanwhile and has version {version}; read it again, and repeat the change"
        ),
        None => "the tenant has been removed meanwhile".to_owned(),
    };
    ApiError::new(ErrorKind::Conflict, message).with_code(code::TENANT_CHANGED)
}
