//! The events that the core takes, the effects it asks for, and the state it shows.

use refrain_protocol::scheduling::{
    Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseRequest, RequestClass,
};
use refrain_protocol::{ApiError, LeaseId, RequestId, WorkerId};
use serde::Serialize;

use super::fair_queue::{LeaseCallId, PoolState};
use super::lease_table::LeaseEnd;
use super::refusal::LeaseRefusal;
use super::worker_table::WorkerState;

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum DispatchEvent {
    /// A request asks for a lease. Its namespace has been verified.
    Submit {
        /// The new call.
        call: LeaseCallId,
        /// The request for a lease.
        request: LeaseRequest,
    },
    /// The caller went away while its call waited.
    Withdraw {
        /// The call that waits.
        call: LeaseCallId,
    },
    /// The caller was gone when its grant arrived.
    Undelivered {
        /// The lease that was granted.
        lease: LeaseId,
    },
    /// A lease is given back.
    Finish(LeaseFinish),
    /// A worker reports.
    Heartbeat(Heartbeat),
    /// Time has passed.
    Tick,
    /// The scheduler shuts down and grants no more leases.
    Drain,
}

/// Something that the shell has to do or to count.
#[derive(Clone, Debug, PartialEq)]
pub enum DispatchEffect {
    /// Answer a call with a lease.
    Grant {
        /// The call.
        call: LeaseCallId,
        /// The lease.
        lease: Lease,
        /// Milliseconds from the call to the grant.
        waited_ms: u64,
        /// How it was placed.
        placed: Placed,
    },
    /// Answer a call with an error.
    Reject {
        /// The call.
        call: LeaseCallId,
        /// The error for the caller.
        error: ApiError,
        /// The limit that the request reached.
        refusal: LeaseRefusal,
    },
    /// Answer a heartbeat. Each heartbeat gets exactly one answer.
    HeartbeatAnswer(Result<HeartbeatReply, ApiError>),
    /// A lease is over.
    LeaseEnded {
        /// The lease.
        lease: LeaseId,
        /// The worker that it was granted on.
        worker: WorkerId,
        /// Why it ended.
        end: LeaseEnd,
    },
    /// A rollout has finished for which a length was expected when it started.
    LengthLearned {
        /// The expected length, tokens.
        estimated_tokens: u32,
        /// The true length.
        tokens: u32,
    },
    /// An unknown worker reported.
    WorkerJoined(WorkerId),
    /// A known worker reported as a new process.
    WorkerRestarted(WorkerId),
    /// A worker was silent for too long and was forgotten.
    WorkerLost(WorkerId),
}

/// How a request was placed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placed {
    /// The request.
    pub request: RequestId,
    /// Its class.
    pub class: RequestClass,
    /// Its output tokens so far.
    pub generated_tokens: u32,
    /// It is a rollout that finds out how long the outputs of its group are.
    pub probe: bool,
    /// The estimate of its whole output by which it was ordered. `None`: the limit is all that is known.
    pub estimated_tokens: Option<u32>,
    /// It goes on, and on another worker than its last chunk.
    pub moved: bool,
    /// Tokens of its context that the worker is taken to hold.
    pub held_tokens: u32,
    /// Tokens of its context that the worker has to read.
    pub missing_tokens: u32,
}

/// The dispatcher's state, as `/debug/state` shows it. It names no request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DispatchState {
    /// The scheduler grants no more leases.
    pub draining: bool,
    /// Requests that wait.
    pub queue_length: usize,
    /// Leases that are held.
    pub leases_running: usize,
    /// Ended leases that are still remembered.
    pub leases_ended_remembered: usize,
    /// Groups whose lengths are remembered.
    pub groups_tracked: usize,
    /// Prefixes that are known to lie on some worker.
    pub prefixes_tracked: usize,
    /// Named sessions whose worker is remembered.
    pub sessions_tracked: usize,
    /// Live workers.
    pub workers: Vec<WorkerState>,
    /// Queues, by model and tokenizer.
    pub pools: Vec<PoolState>,
}
