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
pub(crate) enum DispatchEvent {
    /// A request asks for a lease. Its namespace has been verified.
    Submit {
        call: LeaseCallId,
        request: LeaseRequest,
    },
    /// The caller went away while its call waited.
    Withdraw { call: LeaseCallId },
    /// The caller was gone when its grant arrived.
    Undelivered { lease: LeaseId },
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
pub(crate) enum DispatchEffect {
    /// Answer a call with a lease.
    Grant {
        call: LeaseCallId,
        lease: Lease,
        waited_ms: u64,
    },
    /// Answer a call with an error.
    Reject {
        call: LeaseCallId,
        error: ApiError,
        refusal: LeaseRefusal,
    },
    /// Answer a heartbeat. Each heartbeat gets exactly one answer.
    HeartbeatAnswer(Result<HeartbeatReply, ApiError>),
    /// A lease is over.
    LeaseEnded {
        lease: LeaseId,
        worker: WorkerId,
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
pub(crate) struct DispatchState {
    /// The scheduler grants no more leases.
    pub(crate) draining: bool,
    /// Requests that wait.
    pub(crate) queue_length: usize,
    /// Leases that are held.
    pub(crate) leases_running: usize,
    /// Ended leases that are still remembered.
    pub(crate) leases_ended_remembered: usize,
    /// Live workers.
    pub(crate) workers: Vec<WorkerState>,
    /// Queues, by model and tokenizer.
    pub(crate) pools: Vec<PoolState>,
}
