//! Acceptance statistics of a namespace: how often drafts of each kind were accepted there.
//!
//! The draft store keeps one table per namespace for the workers that serve it. These types travel in bincode. The
//! bytes in them are written and read by `refrain_speculation::statistics`; the store does not look into them.

use serde::{Deserialize, Serialize};

use crate::SignedNamespace;

/// Saves the statistics of a namespace, or asks for them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptanceStatsRequest {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The table that the statistics continue, as an answer named it; 0 if they continue none. A table that was
    /// erased is not continued: the store refuses the call with the code `statistics_erased`.
    pub table: u64,
    /// The statistics that take the place of the kept ones. Empty if the caller only asks.
    pub statistics: Vec<u8>,
}

/// The answer to [`AcceptanceStatsRequest`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptanceStatsReply {
    /// The table that the store keeps; 0 if it keeps none.
    pub table: u64,
    /// The kept statistics if the caller asked and there are any, else empty.
    pub statistics: Vec<u8>,
}
