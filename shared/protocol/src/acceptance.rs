//! Acceptance statistics of a namespace: how often drafts of each kind were accepted there.
//!
//! Workers send their observations, and the draft store keeps the sum and returns it. These types travel in bincode.
//! The bytes in them are written and read by `refrain_speculation`.

use serde::{Deserialize, Serialize};

use crate::SignedNamespace;

/// Sends what a worker observed since its last call, and asks for the sum over all workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptanceStatsRequest {
    /// The namespace, signed by the gateway.
    pub namespace: SignedNamespace,
    /// Observations, each sent once. Empty if the caller only asks.
    pub observed: Vec<u8>,
}

/// The answer to [`AcceptanceStatsRequest`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptanceStatsReply {
    /// Tables over all observations so far, those of the request included. Empty if there are none.
    pub tables: Vec<u8>,
}
