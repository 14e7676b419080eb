//! What goes into the core, what comes out, and how it looks from outside.

use refrain_protocol::scheduling::{Heartbeat, HeartbeatReply, Lease, LeaseFinish, LeaseRequest};
use refrain_protocol::{ApiError, LeaseId, WorkerId};
use serde::Serialize;

use super::leases::LeaseEnd;
use super::queue::{PoolState, Ticket};
use super::refusal::Refusal;
use super::workers::WorkerState;

/// Something happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A request wants a lease. Its namespace has been verified.
    Submit {
        /// Names the call; grows from submit to submit.
        ticket: Ticket,
        /// What it wants.
        request: LeaseRequest,
    },
    /// The caller went away while it waited.
    Withdraw {
        /// The call.
        ticket: Ticket,
    },
    /// A granted lease found no caller any more.
    Undelivered {
        /// The lease.
        lease: LeaseId,
    },
    /// A lease is given back.
    Finish(LeaseFinish),
    /// A worker reports.
    Heartbeat(Heartbeat),
    /// Time passed.
    Tick,
    /// No new leases from now on.
    Drain,
}

/// Something has to be done, or is worth counting.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Answers a submit.
    Grant {
        /// The call.
        ticket: Ticket,
        /// The answer.
        lease: Lease,
        /// How long it waited.
        waited_ms: u64,
    },
    /// Answers a submit.
    Reject {
        /// The call.
        ticket: Ticket,
        /// The answer.
        error: ApiError,
        /// Which limit it was.
        refusal: Refusal,
    },
    /// Answers a heartbeat; one per heartbeat.
    Beat(Result<HeartbeatReply, ApiError>),
    /// A lease is over.
    LeaseEnded {
        /// Which.
        lease: LeaseId,
        /// Where it ran.
        worker: WorkerId,
        /// Why.
        end: LeaseEnd,
    },
    /// A worker nobody knew reported.
    WorkerJoined(WorkerId),
    /// A known worker reported as a new process.
    WorkerRestarted(WorkerId),
    /// A worker went silent and was forgotten.
    WorkerLost(WorkerId),
}

/// What the dispatcher knows, as shown under `/debug/state`. No request is named in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DispatchState {
    /// Grants nothing any more.
    pub draining: bool,
    /// Requests that wait.
    pub queue_length: usize,
    /// Leases that run.
    pub leases_running: usize,
    /// Ended leases still remembered.
    pub leases_ended_remembered: usize,
    /// Live workers.
    pub workers: Vec<WorkerState>,
    /// Queues by model.
    pub pools: Vec<PoolState>,
}
