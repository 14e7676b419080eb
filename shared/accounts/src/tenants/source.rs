//! Where a gateway's tenants are: in a file that commands edit, or in the draft store, which the admin API changes.

use std::path::PathBuf;
use std::sync::Arc;

use refrain_protocol::{ApiError, ErrorKind};

use super::file::TenantsFile;
use super::store_tenants::{StoreTenants, VersionedTenant, unreadable};

/// The place of the tenants. Cheap to clone.
#[derive(Clone)]
pub enum TenantsSource {
    /// There are no tenants but those of the configuration.
    None,
    /// A file, which commands edit.
    File(PathBuf),
    /// The draft store.
    Store(Arc<StoreTenants>),
}

impl TenantsSource {
    /// All tenants as they are now.
    ///
    /// # Errors
    /// `Conflict` if there is no place for tenants, `Internal` if the file cannot be read, or what the store says.
    pub async fn tenants(&self) -> Result<Vec<VersionedTenant>, ApiError> {
        match self {
            TenantsSource::None => Err(nowhere()),
            TenantsSource::File(path) => {
                let path = path.clone();
                let read = tokio::task::spawn_blocking(move || TenantsFile::read_text(&path)).await;
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
                store.look().await?;
                Ok(store.all().map_err(unreadable)?.tenants)
            }
        }
    }

    /// The tenant of this name as it is now.
    ///
    /// # Errors
    /// `NotFound`, or as [`TenantsSource::tenants`].
    pub async fn tenant(&self, name: &str) -> Result<VersionedTenant, ApiError> {
        let found = match self {
            TenantsSource::Store(store) => {
                store.look().await?;
                store.tenant(name)?
            }
            _ => {
                let mut tenants = self.tenants().await?.into_iter();
                tenants.find(|tenant| tenant.entry.name == *name)
            }
        };
        found.ok_or_else(|| {
            let message = format!("there is no tenant {name}");
            ApiError::new(ErrorKind::NotFound, message)
        })
    }

    /// The place where acts are carried out.
    ///
    /// # Errors
    /// `Conflict` if the tenants are in a file, or nowhere.
    pub fn writable(&self) -> Result<&Arc<StoreTenants>, ApiError> {
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
