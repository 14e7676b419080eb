//! Where a gateway's tenants are: in a file that commands edit, or in the draft store, which the admin API changes.

use std::path::PathBuf;
use std::sync::Arc;

use refrain_protocol::error::code;
use refrain_protocol::tenants::{TenantChange, TenantRecord, TenantsRequest};
use refrain_protocol::{ApiError, ErrorKind};
use refrain_rpc::DraftStore;

use super::act::TenantAct;
use super::file::{TenantEntry, TenantsFile};
use super::follow::file::read;

/// How often a change is repeated that others came before.
const ATTEMPTS_MAX: u32 = 8;

/// The place of the tenants. Cheap to clone.
#[derive(Clone)]
pub(crate) enum TenantsSource {
    /// There are no tenants but those of the configuration.
    None,
    /// A file, which commands edit.
    File(PathBuf),
    /// The draft store.
    Store(Arc<dyn DraftStore>),
}

/// A tenant, and its version in the draft store.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct VersionedTenant {
    pub(crate) entry: TenantEntry,
    pub(crate) version: Option<u64>,
}

/// The tenants of records.
///
/// # Errors
/// A record is of a later version of Refrain, or damaged.
pub(super) fn tenants_of(records: &[TenantRecord]) -> Result<TenantsFile, String> {
    let entry = |record: &TenantRecord| {
        serde_json::from_str(&record.entry).map_err(|error| format!("{}: {error}", record.name))
    };
    let tenants = records.iter().map(entry).collect::<Result<_, _>>()?;
    let file = TenantsFile { tenants };
    let faults = file.faults();
    match faults.is_empty() {
        true => Ok(file),
        false => Err(faults.join("; ")),
    }
}

/// The present records of the draft store.
async fn records(store: &dyn DraftStore) -> Result<Vec<TenantRecord>, ApiError> {
    let reply = store.tenants(TenantsRequest { known: None }).await?;
    Ok(reply.tenants.unwrap_or_default())
}

fn unreadable(faults: String) -> ApiError {
    let message = "the tenants cannot be read; the log of the gateway says why";
    ApiError::new(ErrorKind::Internal, message).with_detail(faults)
}

impl TenantsSource {
    /// All tenants as they are now.
    ///
    /// # Errors
    /// `Conflict` if there is no place for tenants, `Internal` if the file cannot be read, or what the store says.
    pub(crate) async fn tenants(&self) -> Result<Vec<VersionedTenant>, ApiError> {
        match self {
            TenantsSource::None => Err(nowhere()),
            TenantsSource::File(path) => {
                let path = path.clone();
                let read = tokio::task::spawn_blocking(move || read(&path)).await;
                let text = read.map_err(ApiError::internal)?;
                let text = text.map_err(|error| unreadable(format!("{error:#}")))?;
                let file = TenantsFile::parse(&text).map_err(unreadable)?;
                let tenants = file.tenants.into_iter();
                Ok(tenants
                    .map(|entry| VersionedTenant {
                        entry,
                        version: None,
                    })
                    .collect())
            }
            TenantsSource::Store(store) => {
                let records = records(&**store).await?;
                let file = tenants_of(&records).map_err(unreadable)?;
                let versions = records.iter().map(|record| Some(record.version));
                let tenants = file.tenants.into_iter().zip(versions);
                Ok(tenants
                    .map(|(entry, version)| VersionedTenant { entry, version })
                    .collect())
            }
        }
    }

    /// The place where acts are carried out.
    ///
    /// # Errors
    /// `Conflict` if the tenants are in a file, or nowhere.
    pub(crate) fn writable(&self) -> Result<&Arc<dyn DraftStore>, ApiError> {
        match self {
            TenantsSource::Store(store) => Ok(store),
            TenantsSource::None => Err(nowhere()),
            TenantsSource::File(path) => {
                let message = format!(
                    "the tenants are in a file (gateway.tenants_file): change them with `refrain tenants --file {}`, \
                     or set gateway.tenants_in_store in its place",
                    path.display()
                );
                Err(ApiError::new(ErrorKind::Conflict, message).with_code("tenants_in_file"))
            }
        }
    }
}

fn nowhere() -> ApiError {
    let message = "this gateway has only the tenants of its configuration: set gateway.tenants_in_store to manage \
                   tenants here";
    ApiError::new(ErrorKind::Conflict, message).with_code("tenants_in_configuration")
}

/// Carries out an act on the tenants of a draft store, at a time in Unix seconds. Returns the tenant as it is then,
/// or `None` if it was removed. With `expected`, it must have this version before.
///
/// # Errors
/// As [`TenantAct::apply`]; `Conflict` with the code `tenant_changed` for another version; or what the store says.
pub(crate) async fn carry_out(
    store: &dyn DraftStore,
    act: &TenantAct,
    expected: Option<u64>,
    now: i64,
) -> Result<Option<VersionedTenant>, ApiError> {
    let mut attempts = 0;
    loop {
        attempts += 1;
        let records = records(store).await?;
        let mut file = tenants_of(&records).map_err(unreadable)?;
        let name = act.apply(&mut file, now)?;
        let known = records.iter().find(|record| record.name == name);
        let known = known.map(|record| record.version);
        if expected.is_some() && known != expected {
            return Err(changed(known));
        }
        let entry = file.tenants.into_iter().find(|entry| entry.name == name);
        let text = entry.as_ref().map(serde_json::to_string).transpose();
        let change = TenantChange {
            name,
            expected: known,
            entry: text.map_err(ApiError::internal)?,
        };
        match store.change_tenant(change).await {
            // Somebody else was faster. The act means the same for what the tenant is now.
            Err(error)
                if error.has_code(code::TENANT_CHANGED)
                    && expected.is_none()
                    && attempts < ATTEMPTS_MAX => {}
            Err(error) => return Err(error),
            Ok(reply) => {
                let version = Some(reply.version);
                return Ok(entry.map(|entry| VersionedTenant { entry, version }));
            }
        }
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
