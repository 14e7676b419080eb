//! The services and shared objects that a gateway is given.

use std::sync::Arc;

use refrain_rpc::{DraftStore, Scheduler, Workers};
use refrain_service_kit::clocks::Clocks;
use refrain_service_kit::mesh::NamespaceSigner;
use refrain_service_kit::telemetry::Metrics;
use refrain_tokenization::ModelFiles;

/// Reads the files of a model from the place that its configuration names.
pub type ModelFilesOf = Arc<dyn Fn(&str) -> anyhow::Result<ModelFiles> + Send + Sync>;

/// The services and shared objects that a gateway is given.
#[derive(Clone)]
pub struct GatewayDeps {
    /// Grants leases.
    pub scheduler: Arc<dyn Scheduler>,
    /// Finds the workers that leases name.
    pub workers: Arc<dyn Workers>,
    /// Keeps the logs of groups, knows the lengths of earlier outputs, and adds usage up.
    pub store: Arc<dyn DraftStore>,
    /// Signs namespaces, which only the gateway does.
    pub signer: NamespaceSigner,
    /// Reads the files of models.
    pub model_files: ModelFilesOf,
    /// The registry of its metrics.
    pub metrics: Metrics,
    /// The comparison of its clock with others, since signatures have a time.
    pub clocks: Clocks,
    /// Whether engines may register with the listener for trainers. They need a gateway that is reached, so it is
    /// ready before a model is served.
    pub adopts_engines: bool,
}
