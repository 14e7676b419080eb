//! The state that all routes of the listener share.

use std::net::SocketAddr;
use std::sync::Arc;

use refrain_gateway::GatewayHandle;
use refrain_protocol::TenantName;
use refrain_service_kit::actors::Actor;

use super::adopters::Adopters;
use super::fleet::Fleet;
use super::hold::Hold;
use super::in_flight::InFlight;
use super::sessions::SessionTable;

/// The state of the listener.
pub(super) struct TrainerState {
    pub(super) gateway: GatewayHandle,
    pub(super) tenant: TenantName,
    /// The model that is trained.
    pub(super) model: String,
    pub(super) body_bytes_max: usize,
    pub(super) in_flight: Arc<InFlight>,
    pub(super) hold: Hold,
    pub(super) fleet: Arc<Fleet>,
    /// The sessions whose tokens are kept.
    pub(super) sessions: Arc<SessionTable>,
    /// Erases sessions that nobody uses any more.
    pub(super) _expiry: Actor,
    /// The processes that adopt engines.
    pub(super) adopters: Adopters,
    /// The URL scheme of the listener.
    pub(super) scheme: &'static str,
    /// The configured address, for a caller that does not say how it reaches the listener.
    pub(super) listen: SocketAddr,
}
