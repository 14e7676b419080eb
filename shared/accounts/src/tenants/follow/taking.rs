//! Takes tenants over, or reports why they cannot be.

use std::sync::Arc;

use parking_lot::Mutex;
use refrain_service_kit::clock::unix_s;

use crate::metrics::AccountMetrics;
use crate::tenants::directory::Directory;
use crate::tenants::file::TenantsFile;

use super::key_ends::KeyEnds;

/// The place that tenants are taken over to.
#[derive(Clone)]
pub(super) struct Taking {
    pub(super) directory: Arc<Directory>,
    metrics: Arc<AccountMetrics>,
    key_ends: Arc<Mutex<KeyEnds>>,
}

impl Taking {
    pub(super) fn new(directory: Arc<Directory>, metrics: Arc<AccountMetrics>) -> Self {
        Taking {
            directory,
            metrics,
            key_ends: Arc::default(),
        }
    }

    /// Takes tenants over.
    ///
    /// # Errors
    /// One of them has a key of the configuration. Nothing has changed then.
    pub(super) fn take_over(&self, file: &TenantsFile) -> Result<(), String> {
        if let Some(fault) = self.directory.fault_of(file) {
            return Err(fault);
        }
        self.directory.replace(file);
        *self.key_ends.lock() = KeyEnds::of(file);
        self.show_key_ends(unix_s().cast_signed());
        let families = &self.metrics.families;
        families.tenants.set(file.tenants.len() as i64);
        let keys: usize = file.tenants.iter().map(|tenant| tenant.keys.len()).sum();
        families.tenant_keys.set(keys as i64);
        families.tenants_read.with_label_values(&["read"]).inc();
        Ok(())
    }

    /// Shows the keys that end next, at a time in Unix seconds.
    pub(super) fn show_key_ends(&self, now: i64) {
        let ends = self.key_ends.lock();
        self.metrics.set_key_ends(ends.next(now));
    }

    /// Logs a trouble once, and counts it each time.
    pub(super) fn report(&self, known: &mut Option<String>, trouble: String) {
        let failed = &self.metrics.families.tenants_read;
        failed.with_label_values(&["failed"]).inc();
        if known.as_ref() != Some(&trouble) {
            tracing::error!(
                trouble,
                "the gateway goes on with the tenants that it knows; mend this"
            );
            *known = Some(trouble);
        }
    }
}
