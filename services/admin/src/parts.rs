//! The objects that the admin API is given.

use std::path::PathBuf;
use std::sync::Arc;

use refrain_accounts::OperatorConfig;
use refrain_accounts::tenants::TenantsSource;
use refrain_rpc::{DraftStore, MeshAdmin, Scheduler};
use refrain_service_kit::http::Readiness;
use refrain_service_kit::telemetry::Metrics;

use super::trial::TrialChat;

/// The configuration of the admin API, and the objects that it needs.
pub struct AdminParts {
    /// Operators. Without any there is no admin API.
    pub operators: Vec<OperatorConfig>,
    /// The audit log. Without it no act is carried out.
    pub audit_file: Option<PathBuf>,
    /// Whether there is a console.
    pub has_console: bool,
    /// Public names of the models.
    pub models: Vec<String>,
    /// The place of the tenants.
    pub tenants: TenantsSource,
    /// The draft stores, which have the usage.
    pub store: Arc<dyn DraftStore>,
    /// Knows the workers.
    pub scheduler: Arc<dyn Scheduler>,
    /// The services that operators look at and give orders to.
    pub mesh: MeshAdmin,
    /// The registry of the process.
    pub metrics: Metrics,
    /// Whether the gateway can serve requests.
    pub readiness: Readiness,
    /// Carries out the chat that an operator tries.
    pub trial: TrialChat,
}
