//! Acceptance statistics of a namespace: how often drafts of each kind were accepted there.
//!
//! The draft store keeps one table per namespace for the workers that serve it. These types travel in bincode. The bytes in
//! them are written and read by `refrain_speculation::statistics`; the store does not look into them.

use serde::{Deserialize, Serialize};

use crate::SignedNamespace;

/// Saves the statistics of a namespace, or asks for them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptanceStatsRequest {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The table that takes the place of the kept one. Empty if the caller only asks.
    pub statistics: Vec<u8>,
}

/// The answer to [`AcceptanceStatsRequest`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptanceStatsReply {
    /// The kept table if the caller asked and there is one, else empty.
    pub statistics: Vec<u8>,
}
