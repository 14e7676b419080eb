//! The events that the core takes, the effects it asks for, and the state it shows.

use refrain_protocol::scheduling::{Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseRequest};
use refrain_protocol::{ApiError, LeaseId, WorkerId};
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
        /// What it asks for.
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
    /// An unknown worker reported.
    WorkerJoined(WorkerId),
    /// A known worker reported as a new process.
    WorkerRestarted(WorkerId),
    /// A worker was silent for too long and was forgotten.
    WorkerLost(WorkerId),
}

/// The dispatcher's state, as `/debug/state` shows it. It names no request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DispatchState {
    /// The scheduler grants no more leases.
    pub draining: bool,
    /// Requests that wait.
    pub queue_length: usize,
    /// Leases that are held.
    pub leases_running: usize,
    /// Ended leases that are still remembered.
    pub leases_ended_remembered: usize,
    /// Live workers.
    pub workers: Vec<WorkerState>,
    /// Queues, by model and tokenizer.
    pub pools: Vec<PoolState>,
}
