//! The state that the handlers share.

use std::path::PathBuf;
use std::sync::Arc;

use crate::metrics::GatewayMetrics;
use crate::tenants::TenantsSource;

/// The state that the handlers share.
pub(crate) struct AdminState {
    pub(crate) source: TenantsSource,
    /// The audit log. Without it no act is carried out.
    pub(crate) audit_file: Option<PathBuf>,
    pub(crate) metrics: Arc<GatewayMetrics>,
}
