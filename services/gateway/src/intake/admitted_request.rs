//! A request between its admission and its end.

use std::sync::Arc;

use refrain_accounts::RequestAccount;

use super::admission::AdmissionTicket;
use crate::metrics::RequestSeries;

/// A request that was admitted, until it ends: it counts among those in flight, and in the limits of its caller.
pub(crate) struct AdmittedRequest {
    pub(crate) _ticket: AdmissionTicket,
    pub(crate) account: RequestAccount,
    /// The metrics that it counts in.
    pub(crate) series: Arc<RequestSeries>,
}
