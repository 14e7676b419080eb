//! Leases, which allow one worker to decode the next chunk of a request, and heartbeats of workers.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::engine_order::EngineState;
use crate::prefix::PrefixHash;
use crate::{LeaseId, NamespaceId, RequestId, SignedNamespace, WorkerId};

/// Whether somebody waits for each token of a request, or only for all of its output.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum RequestClass {
    /// Somebody waits for each token. Interactive requests go first at the end of each chunk.
    #[default]
    Interactive,
    /// Only the whole output counts, as in the rollouts of a training run. It waits for as long as it takes.
    Rollout,
}

impl RequestClass {
    /// The value of the `class` label of metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            RequestClass::Interactive => "interactive",
            RequestClass::Rollout => "rollout",
        }
    }
}

/// The weight of a tenant: its share of the engines among the tenants that wait, relative to theirs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct TenantWeight {
    thousandths: u32,
}

impl TenantWeight {
    /// Thousandths in a weight of 1.
    pub const THOUSANDTHS: u64 = 1_000;
    /// The smallest weight.
    pub const MIN: f64 = 0.01;
    /// The largest weight.
    pub const MAX: f64 = 100.0;

    /// The weight in thousandths, at least 10.
    pub fn thousandths(self) -> u64 {
        u64::from(self.thousandths)
    }

    /// Whether it is the weight of those who have no other.
    pub fn is_default(&self) -> bool {
        *self == TenantWeight::default()
    }
}

impl Default for TenantWeight {
    fn default() -> Self {
        TenantWeight { thousandths: 1_000 }
    }
}

impl TryFrom<f64> for TenantWeight {
    type Error = String;

    fn try_from(weight: f64) -> Result<Self, String> {
        match (TenantWeight::MIN..=TenantWeight::MAX).contains(&weight) {
            true => Ok(TenantWeight {
                thousandths: (weight * TenantWeight::THOUSANDTHS as f64).round() as u32,
            }),
            false => Err(format!(
                "a weight must be {} to {}, and {weight} is not",
                TenantWeight::MIN,
                TenantWeight::MAX
            )),
        }
    }
}

impl From<TenantWeight> for f64 {
    fn from(weight: TenantWeight) -> f64 {
        f64::from(weight.thousandths) / TenantWeight::THOUSANDTHS as f64
    }
}

/// The name of a conversation, hashed with its namespace: a scheduler tells conversations apart and knows no names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SessionHash(pub u64);

impl SessionHash {
    /// Hashes the name of a conversation.
    pub fn new(namespace: NamespaceId, session: &str) -> Self {
        let namespace = namespace.0.to_le_bytes();
        SessionHash(xxh3_64(&[&namespace, session.as_bytes()].concat()))
    }
}

/// Asks for a worker. The answer comes when it is the request's turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeaseRequest {
    /// The request, which is one choice.
    pub request: RequestId,
    /// Tenant, model and tokenizer, signed by the gateway.
    pub namespace: SignedNamespace,
    /// The group of samples, since the order of requests depends on it.
    pub group: Option<String>,
    /// The conversation, whose turns stay on one worker. `None`: it has no name, or nobody would use it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionHash>,
    /// Whether somebody waits for each token.
    #[serde(default)]
    pub class: RequestClass,
    /// The weight of the tenant, as the gateway knows it.
    #[serde(default, skip_serializing_if = "TenantWeight::is_default")]
    pub weight: TenantWeight,
    /// Milliseconds since the request first asked for a lease. A request that continues keeps its place in line by
    /// it, also where the scheduler has been restarted. It tells which of two calls of a request was made later.
    #[serde(default)]
    pub age_ms: u64,
    /// The highest epoch of the request's leases so far; 0 before the first. A scheduler that was started with a
    /// clock that is behind grants a higher one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub epoch_seen: u64,
    /// The chunk of this request that has just ended, so that one call ends a chunk and asks for the next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<LeaseFinish>,
    /// Output tokens that earlier outputs to the same prompt had, as the draft store remembers them. `None`: no such
    /// output is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_tokens: Option<u32>,
    /// Hashes of the context's prefixes, see [`crate::prefix`]. Empty: the context is short, or nobody would use
    /// them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefixes: Vec<PrefixHash>,
    /// Most tokens of a chunk that the request asks for. `None`: it has no wish. The lease says how many it gets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk_tokens: Option<u32>,
    /// Tokens of prompt and output so far.
    pub context_tokens: u32,
    /// Output tokens so far.
    pub generated_tokens: u32,
    /// Most output tokens of all chunks together.
    pub max_new_tokens: u32,
    /// The worker that holds the request's KV cache, or the fallback worker that the request is transferred to.
    pub prefer: Option<WorkerId>,
    /// The last worker transferred the request to `prefer`, its fallback. The request goes there if there is a slot,
    /// however loaded that worker is, and has to be prefilled there.
    #[serde(default, rename = "handed_over")]
    pub transferred: bool,
    /// Workers that have just failed this request.
    pub exclude: Vec<WorkerId>,
}

/// A granted lease.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lease {
    /// Its id.
    pub lease: LeaseId,
    /// Fencing epoch, which grows with every lease of a request. Workers refuse older ones.
    pub epoch: u64,
    /// The worker that may decode the chunk.
    pub worker: WorkerId,
    /// Base URL of the worker.
    pub url: String,
    /// Milliseconds after which the lease ends, unless heartbeats of the worker renew it.
    pub ttl_ms: u64,
    /// Most tokens of the chunk. `None`: the chunk has no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk_tokens: Option<u32>,
}

/// The end of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LeaseOutcome {
    /// The request is finished: its output has the length that estimates learn from.
    Finished,
    /// The request is given up: its time was up, or no worker could carry it out.
    GivenUp,
    /// The client left, or aborted the request.
    Aborted,
    /// The chunk ended; the request asks for another lease.
    Continues,
    /// The worker could not be reached, or failed during the chunk.
    WorkerFailed,
}

/// Gives a lease back. Repeats are harmless.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseFinish {
    /// The lease.
    pub lease: LeaseId,
    /// Its end.
    pub outcome: LeaseOutcome,
    /// Output tokens of the chunk, for the share of the tenant and the length estimate of the group.
    pub emitted_tokens: u32,
    /// Milliseconds since the worker finished the chunk, or learnt where the output ends. `None`: neither is known,
    /// because the request or the worker was given up before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_ended_ms_ago: Option<u64>,
    /// Tokens of the chunk's context that the engine had in its KV cache. `None`: the chunk did not get that far.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u32>,
    /// Draft tokens that the engine verified for the chunk and rejected.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub rejected_tokens: u32,
    /// Draft tokens that it accepted. The other output tokens took a step each.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub accepted_tokens: u32,
}

fn is_zero<N: Default + PartialEq>(number: &N) -> bool {
    *number == N::default()
}

/// The report of a worker. The first one registers it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// The worker.
    pub worker: WorkerId,
    /// A random number of the process. Leases of an earlier process are lost.
    pub incarnation: u64,
    /// Base URL of the worker.
    pub url: String,
    /// Public model name.
    pub model: String,
    /// Identity of the tokenizer.
    pub tokenizer: String,
    /// Longest text in tokens.
    pub max_context: u32,
    /// Most chunks that it decodes at once.
    pub max_running: u32,
    /// The leases that it works on. This renews them, and ends those whose `LeaseFinish` was lost.
    pub running: Vec<LeaseId>,
    /// The highest epoch of all leases that it has run; 0 before the first. It refuses a request for which it has
    /// seen a higher epoch, so a scheduler has to go on above this one.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub epoch_seen: u64,
    /// Whether it takes no new chunks: it drains, or its engine is away.
    pub draining: bool,
    /// Why it takes none, in words for people. `None`: it takes chunks, or it is of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// Whether this is its last report: it has ended, and the scheduler forgets it at once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaves: bool,
    /// Whether its engine holds outputs to a form by the grammars of this project. Gateways can then tell a form that
    /// cannot be compiled; any other engine judges forms by itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compiles_forms: bool,
    /// The state of its own EAGLE-3 head; `None` without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eagle3: Option<Eagle3Report>,
    /// Its fallback worker, if it has one. The reply has the state of that one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<WorkerId>,
    /// The state of its engine's KV cache; `None` where the engine does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv: Option<KvReport>,
    /// Its weights and its pause; `None` from a worker of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<EngineState>,
}

/// The KV cache of an engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KvReport {
    /// Tokens that it holds at most.
    pub capacity_tokens: u64,
    /// Tokens of running requests.
    pub running_tokens: u64,
    /// Tokens that it keeps for requests that may come back. They yield to running requests.
    pub kept_tokens: u64,
    /// Milliseconds to read a thousand tokens of context, measured. `None`: not measured yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_ms_per_1k: Option<f32>,
    /// The longest prefix of each context that it holds, running or kept. `None`: the engine does not say, so callers
    /// go by what they sent there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<Vec<PrefixHash>>,
}

/// The state of the EAGLE-3 head of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Eagle3Report {
    /// Tokens per step, the bonus token included.
    pub accepted_length: f32,
    /// Tokens per second with the head, divided by those without. 1 while the head is not used or not measured.
    pub speedup: f32,
}

/// The answer to a [`Heartbeat`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeartbeatReply {
    /// Milliseconds until the next report.
    pub next_in_ms: u64,
    /// The state of the fallback worker. `None` unless it is alive, has a head, takes chunks, and serves the same
    /// model and tokenizer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Eagle3Report>,
    /// Chunks that must end to let others run. Their requests continue under other leases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub give_way: Vec<LeaseId>,
}

/// A live worker, as operators see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// Its name.
    pub worker: WorkerId,
    /// Its base URL.
    pub url: String,
    /// Public name of its model.
    pub model: String,
    /// Chunks that it runs or is about to run.
    pub running: u32,
    /// Most chunks that it decodes at once.
    pub max_running: u32,
    /// It takes no new chunks.
    pub draining: bool,
    /// Why it takes none, if it says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// A chunk failed there, and it has neither reported nor completed one since.
    pub suspect: bool,
    /// Milliseconds since its last heartbeat.
    pub silent_ms: u64,
    /// The KV cache of its engine; `None` where the engine does not say.
    pub kv: Option<KvUse>,
    /// Its weights and its pause; `None` where the worker does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<EngineState>,
}

/// The use of a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvUse {
    /// Tokens that it holds at most.
    pub capacity_tokens: u64,
    /// Tokens of running requests.
    pub running_tokens: u64,
    /// Tokens that it keeps for requests that may come back.
    pub kept_tokens: u64,
}

/// The order of an operator to a worker. It holds until another one, or until the worker's process ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerDrain {
    /// Whether the worker takes no new chunks, and sends its running ones elsewhere after its grace. `false` takes an
    /// earlier order back.
    pub drains: bool,
}

/// A model that at least one live worker serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedModel {
    /// Public name of the model.
    pub model: String,
    /// Identity of the tokenizer.
    pub tokenizer: String,
    /// Longest text in tokens, of the worker with the largest limit.
    pub max_context: u32,
    /// Number of live workers that serve it.
    pub workers: u32,
    /// Number of them that take new chunks. `None` from a scheduler of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<u32>,
    /// Why one of the others takes none, in words for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
    /// Whether the engines of all of them hold outputs to a form by the grammars of this project.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compiles_forms: bool,
}
