//! A request in the queue, and its place in line.

use refrain_protocol::scheduling::LeaseRequest;

use crate::dispatch::group_key::GroupKey;
use crate::dispatch::pool_key::PoolKey;
use crate::order::Rank;

/// Names one call for a lease. The caller chooses it: ids grow, and none is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseCallId(pub u64);

/// When a request first asked. Many ask within a millisecond, so the call with which it did so tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::dispatch) struct Arrival {
    pub(in crate::dispatch) ms: u64,
    pub(in crate::dispatch) call: LeaseCallId,
}

/// A place in line: when the request first asked, and by which call it asks now. A request that continues keeps its
/// place. After a restart of the scheduler it does so by its age, which is late by the time that its call takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::dispatch) struct Place {
    pub(in crate::dispatch) arrival: Arrival,
    pub(in crate::dispatch) call: LeaseCallId,
}

/// A request in the queue.
#[derive(Debug)]
pub(in crate::dispatch) struct WaitingRequest {
    pub(in crate::dispatch) request: LeaseRequest,
    pub(in crate::dispatch) pool: PoolKey,
    pub(in crate::dispatch) place: Place,
    pub(in crate::dispatch) rank: Rank,
    /// The group of a rollout.
    pub(in crate::dispatch) group: Option<GroupKey>,
    /// Maximum number of tokens of the chunk that it will get.
    pub(in crate::dispatch) chunk_tokens: Option<u32>,
    /// KV tokens to plan for the chunk: the context and what the chunk is expected to write.
    pub(in crate::dispatch) kv_tokens: u64,
    pub(in crate::dispatch) submitted_ms: u64,
    /// Since when no live worker can serve it.
    pub(in crate::dispatch) stranded_since_ms: Option<u64>,
    /// When it has waited for too long. `u64::MAX` means never.
    pub(in crate::dispatch) deadline_ms: u64,
}
