//! The state that the handlers share.

use std::path::PathBuf;
use std::sync::Arc;

use refrain_accounts::tenants::TenantsSource;
use refrain_rpc::{DraftStore, MeshAdmin};

use super::figure_sources::FigureSources;

refrain_service_kit::metric_families! {
    /// The metrics of the admin API.
    pub(super) struct AdminFamilies {
        /// Administrative acts by their outcome. A refused one has changed nothing.
        pub(super) admin_acts: IntCounterVec =
            "refrain_gateway_admin_acts_total" ["outcome"] with ["done", "refused"],
        /// Calls of the admin API without the token of an operator.
        pub(super) admin_token_refusals: IntCounter = "refrain_gateway_admin_token_refusals_total",
    }
}

/// The state that the handlers share.
pub(super) struct AdminState {
    pub(super) source: TenantsSource,
    /// The draft stores, which have the usage.
    pub(super) store: Arc<dyn DraftStore>,
    /// The audit log. Without it no act is carried out.
    pub(super) audit_file: Option<PathBuf>,
    pub(super) families: AdminFamilies,
    /// The services that operators give orders to.
    pub(super) mesh: MeshAdmin,
    pub(super) figures: FigureSources,
}
