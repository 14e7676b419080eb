//! What drafts are worth in a namespace: told by workers, kept by the draft store, known to all. These types cross in
//! bincode; what is in the bytes is the business of `refrain_speculation`.

use serde::{Deserialize, Serialize};

use crate::SignedNamespace;

/// Tells what a worker observed since it last did, and asks for what is known of all workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChancesRequest {
    /// Signed by the gateway.
    pub namespace: SignedNamespace,
    /// Observations, each told once; empty to ask only.
    pub observed: Vec<u8>,
}

/// The answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChancesReply {
    /// Tables with all that was ever told, what came with the request included; empty where nothing was.
    pub tables: Vec<u8>,
}
