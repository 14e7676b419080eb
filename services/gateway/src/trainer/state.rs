//! The state that all routes of the listener share.

use std::net::SocketAddr;
use std::sync::Arc;

use refrain_protocol::TenantName;
use refrain_rpc::{Scheduler, Workers};

use super::adopters::Adopters;
use super::fleet::Fleet;
use super::hold::Hold;
use super::in_flight::InFlight;
use crate::http::GatewayState;

/// The state of the listener.
pub(super) struct TrainerState {
    pub(super) gateway: Arc<GatewayState>,
    pub(super) tenant: TenantName,
    /// The model that is trained.
    pub(super) model: String,
    pub(super) body_bytes_max: usize,
    pub(super) in_flight: Arc<InFlight>,
    pub(super) hold: Hold,
    pub(super) fleet: Arc<Fleet>,
    /// The processes that adopt engines.
    pub(super) adopters: Adopters,
    /// The URL scheme of the listener.
    pub(super) scheme: &'static str,
    /// The configured address, for a caller that does not say how it reaches the listener.
    pub(super) listen: SocketAddr,
}

impl TrainerState {
    /// The workers of the model.
    pub(super) fn fleet_of(
        gateway: &Arc<GatewayState>,
        model: &str,
        scheduler: Arc<dyn Scheduler>,
        workers: Arc<dyn Workers>,
    ) -> Arc<Fleet> {
        let metrics = gateway.metrics.clone();
        let weights = gateway.models.weights(model);
        Arc::new(Fleet::new(
            model.to_owned(),
            scheduler,
            workers,
            metrics,
            weights,
        ))
    }
}
