//! A request in the queue.

use refrain_protocol::scheduling::LeaseRequest;

/// Names one call for a lease. The caller chooses it: ids grow, and none is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseCallId(pub u64);

/// A request in the queue.
#[derive(Debug)]
pub(crate) struct WaitingRequest {
    pub(crate) request: LeaseRequest,
    pub(crate) submitted_ms: u64,
    /// Since when no live worker can serve it.
    pub(crate) stranded_since_ms: Option<u64>,
}
