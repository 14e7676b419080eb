//! Puts a gateway together: its listener for clients, the admin API and the console on that for operators, and the
//! listener for trainers.

use std::sync::Arc;

use futures_util::FutureExt as _;
use refrain_admin::{AdminApi, AdminParts};
use refrain_gateway::{Gateway, GatewayConfig, GatewayDeps, GatewayServer};
use refrain_rpc::{EngineAdopter, MeshAdmin};

/// The services that the admin API and the listener for trainers need beside those of the gateway.
pub struct GuestDeps {
    /// The services that operators look at and give orders to.
    pub mesh: MeshAdmin,
    /// The processes that adopt engines which register with the listener for trainers.
    pub adopters: Vec<Arc<dyn EngineAdopter>>,
}

/// Starts a gateway with all its listeners.
///
/// # Errors
/// The configuration has faults, files cannot be used, or an address is taken.
pub async fn start(
    config: GatewayConfig,
    deps: GatewayDeps,
    guests: GuestDeps,
) -> anyhow::Result<GatewayServer> {
    let gateway = Gateway::build(config, deps.clone()).await?;
    let (config, handle) = (gateway.config(), gateway.handle());
    let trainer = refrain_trainer::listen(config, handle, &deps, guests.adopters)?;
    let chats = handle.clone();
    let admin = AdminApi::new(AdminParts {
        operators: config.operators.clone(),
        audit_file: config.audit_file.clone(),
        has_console: config.console == Some(true),
        models: config.models.iter().map(|model| model.id.clone()).collect(),
        tenants: handle.accounts().source().clone(),
        store: deps.store,
        scheduler: deps.scheduler,
        mesh: guests.mesh,
        metrics: deps.metrics,
        readiness: handle.readiness().clone(),
        trial: Arc::new(move |request, payload| chats.clone().chat(request, payload).boxed_local()),
    })?;
    gateway.listen(trainer, move |app| admin.routes(app)).await
}
