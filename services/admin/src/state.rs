//! The state that the handlers share.

use super::figure_sources::NewestFigures;
use super::parts::AdminParts;

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
    pub(super) parts: AdminParts,
    pub(super) families: AdminFamilies,
    pub(super) figures: NewestFigures,
}
