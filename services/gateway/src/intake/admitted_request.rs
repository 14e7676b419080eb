//! A request between its admission and its end.

use std::sync::Arc;

use super::admission::AdmissionTicket;
use crate::metrics::RequestSeries;
use crate::tenants::{QuotaTicket, UrgentTicket};
use crate::usage::UsageMeter;

/// A request that was admitted, until it ends: it counts among those in flight, and in the limits of its caller.
pub(crate) struct AdmittedRequest {
    pub(crate) _ticket: AdmissionTicket,
    pub(crate) quota: QuotaTicket,
    pub(crate) urgent: UrgentTicket,
    pub(crate) meter: Arc<UsageMeter>,
    /// The metrics that it counts in.
    pub(crate) series: Arc<RequestSeries>,
}

impl AdmittedRequest {
    /// Whether the request may be urgent, if it asks for that.
    pub(crate) fn may_be_urgent(&self) -> bool {
        self.urgent.is_urgent()
    }
}
