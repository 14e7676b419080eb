//! The state that the handlers share.

use std::path::PathBuf;
use std::sync::Arc;

use refrain_rpc::{DraftStore, MeshAdmin};

use super::figure_sources::FigureSources;
use crate::metrics::GatewayMetrics;
use crate::tenants::TenantsSource;

/// The state that the handlers share.
pub(crate) struct AdminState {
    pub(crate) source: TenantsSource,
    /// The draft stores, which have the usage.
    pub(crate) store: Arc<dyn DraftStore>,
    /// The audit log. Without it no act is carried out.
    pub(crate) audit_file: Option<PathBuf>,
    pub(crate) metrics: Arc<GatewayMetrics>,
    /// The services that operators give orders to.
    pub(crate) mesh: MeshAdmin,
    pub(crate) figures: FigureSources,
}
