//! The slots of an engine that drafts from a table of its own, which a primer fills.

use refrain_protocol::{ApiError, TokenId};
use serde_json::Value;

/// The slots of an engine, as it tells them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineSlots {
    /// The highest number of a request that a slot has or had. Requests are counted from the start of the engine.
    pub last_request: Option<u64>,
    /// Whether the slot of the primer is free.
    pub is_free: bool,
    /// Whether other slots have requests.
    pub has_others: bool,
}

/// The calls by which an engine's table is filled.
#[derive(Clone, Copy)]
pub(super) struct PrimerCalls {
    /// The route that tells the slots.
    pub(super) slots_path: &'static str,
    /// Reads its answer.
    pub(super) read_slots: fn(&[u8]) -> Result<EngineSlots, ApiError>,
    /// The body of the request that has the engine read a text, for the route that generates.
    pub(super) body: fn(&[TokenId]) -> Value,
}
