//! Leases: who may decode the next chunk of a request, and where.

use serde::{Deserialize, Serialize};

use crate::{LeaseId, RequestId, SignedNamespace, WorkerId};

/// Asks for a worker. Answered when it is the request's turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeaseRequest {
    /// The request (one choice).
    pub request: RequestId,
    /// Signed by the gateway: gives tenant, model and tokenizer.
    pub namespace: SignedNamespace,
    /// Group of samples, for group-aware order.
    pub group: Option<String>,
    /// Tokens of the context (prompt and output so far).
    pub context_tokens: u32,
    /// Output tokens so far.
    pub generated_tokens: u32,
    /// Output tokens at most, all chunks together.
    pub max_new_tokens: u32,
    /// The worker that holds the request's KV cache, or the fallback worker that the request is transferred to.
    pub prefer: Option<WorkerId>,
    /// The last worker transferred the request to `prefer`, its fallback. The request goes there if there is a slot,
    /// however loaded that worker is, and has to be prefilled there.
    #[serde(default, rename = "handed_over")]
    pub transferred: bool,
    /// Workers that just failed this request.
    pub exclude: Vec<WorkerId>,
}

/// A grant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lease {
    /// Its id.
    pub lease: LeaseId,
    /// Grows with every lease of a request; workers refuse older ones.
    pub epoch: u64,
    /// Who.
    pub worker: WorkerId,
    /// Base URL of the worker.
    pub url: String,
    /// The lease ends by itself unless the worker's heartbeats name it.
    pub ttl_ms: u64,
}

/// How a lease ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseOutcome {
    /// The request is finished, or was given up: its client left, its time was up, or nobody else could carry it out.
    Done,
    /// The chunk ended; the request asks for another lease.
    Continues,
    /// The worker could not be reached or broke off.
    WorkerFailed,
}

/// Gives a lease back. Repeats are harmless.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseFinish {
    /// Which.
    pub lease: LeaseId,
    /// How it ended.
    pub outcome: LeaseOutcome,
    /// Output tokens of this chunk, for the tenant's share and the group's length estimate.
    pub emitted_tokens: u32,
    /// How long ago the worker brought the chunk to its end, or took word of where the output ends; `None`: the request was
    /// given up, or the worker, before either was heard of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_ended_ms_ago: Option<u64>,
}

/// A worker reports for duty: the first one registers it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Who.
    pub worker: WorkerId,
    /// Random per process start: leases of an earlier incarnation are lost.
    pub incarnation: u64,
    /// Where it can be reached.
    pub url: String,
    /// Public model name.
    pub model: String,
    /// Tokenizer identity.
    pub tokenizer: String,
    /// Longest text, tokens.
    pub max_context: u32,
    /// Most chunks at once.
    pub max_running: u32,
    /// The leases it is working on: renews them, and heals a lost `LeaseFinish`.
    pub running: Vec<LeaseId>,
    /// Takes no new chunks.
    pub draining: bool,
    /// How its own EAGLE-3 head does; `None` without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eagle3: Option<Eagle3Report>,
    /// The worker that it falls back to, if that is another one: the reply says how it does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<WorkerId>,
}

/// How a worker's EAGLE-3 head does.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Eagle3Report {
    /// Tokens per step, the target's own included.
    pub accepted_length: f32,
    /// Tokens per second with it / without it; 1 while it is not worth using, or was not measured.
    pub speedup: f32,
}

/// The scheduler's answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeartbeatReply {
    /// When to report again.
    pub next_in_ms: u64,
    /// How the worker's fallback does: `None` unless it is there, has a head, takes chunks, and serves the same model
    /// and tokenizer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Eagle3Report>,
    /// Chunks to end, so that others have a turn: their requests go on under other leases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub give_way: Vec<LeaseId>,
}

/// A model that some worker serves now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedModel {
    /// Public name.
    pub model: String,
    /// Tokenizer identity.
    pub tokenizer: String,
    /// Longest text, tokens, of the worker with the largest limit.
    pub max_context: u32,
    /// Live workers that serve it.
    pub workers: u32,
}
