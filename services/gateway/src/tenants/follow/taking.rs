//! Takes tenants over, or reports why they cannot be.

use std::sync::Arc;

use crate::metrics::GatewayMetrics;
use crate::tenants::directory::Directory;
use crate::tenants::file::TenantsFile;

/// The place that tenants are taken over to.
pub(super) struct Taking {
    pub(super) directory: Arc<Directory>,
    pub(super) metrics: Arc<GatewayMetrics>,
}

impl Taking {
    pub(super) fn take_over(&self, file: &TenantsFile) {
        self.directory.replace(file);
        let families = &self.metrics.families;
        families.tenants.set(file.tenants.len() as i64);
        let keys: usize = file.tenants.iter().map(|tenant| tenant.keys.len()).sum();
        families.tenant_keys.set(keys as i64);
        families.tenants_read.with_label_values(&["read"]).inc();
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
