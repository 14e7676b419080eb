//! The worker's configuration.

mod adoption;
mod engine;
mod primer;
mod speculation;

use std::net::SocketAddr;

use refrain_draft_replica::{ReplicaConfig, UploaderConfig};
use refrain_service_kit::config::{Validate, is_http_url};
use refrain_service_kit::http::ListenerConfig;
use serde::Deserialize;

pub use adoption::AdoptionConfig;
pub use engine::{ApiKey, EngineConfig, EngineKind};
pub use primer::PrimerConfig;
pub use speculation::{
    DrafterConfig, ExpansionChoice, FallbackChoice, RouterChoice, SpeculationConfig,
};

/// The worker's section of the configuration.
///
/// Fields that are not deserialised are constants of production; tests in one process may set them.
#[derive(Clone, Debug, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct WorkerConfig {
    /// Name of the worker, unique in the mesh.
    pub id: String,
    /// Address of the internal listener; `None` within one process.
    pub listen: Option<SocketAddr>,
    /// The certificate and the time limits of that listener.
    pub http: ListenerConfig,
    /// URL by which gateways reach that listener; leases carry it.
    pub advertise_url: String,
    /// Maximum number of chunks at once.
    pub running_max: u32,
    /// Maximum number of tokens in one engine step, context and drafts together.
    pub step_tokens_max: u32,
    /// Maximum number of prompt tokens of one request in one step, so that prefill does not stall decoding.
    pub prefill_chunk_tokens: u32,
    /// Maximum number of requests between two chunks whose text, own index and engine session stay here. 0: none.
    pub parked_requests_max: u32,
    /// Maximum number of tokens of their texts together. The oldest requests make room for newer ones.
    pub parked_tokens_max: u64,
    /// How long a request stays parked, milliseconds. After that, its next chunk is sent its whole context.
    pub parked_ms_max: u64,
    /// How long a drain lets chunks finish before it evacuates them, milliseconds. Other workers then continue them.
    pub evacuate_after_ms: u64,
    /// The engine.
    pub engine: EngineConfig,
    /// Engines that register while the process runs.
    pub adoption: AdoptionConfig,
    /// Drafts and their routing.
    pub speculation: SpeculationConfig,
    /// The worker's copy of the drafts.
    pub replica: ReplicaConfig,
    /// The upload of outputs to the draft store.
    pub uploader: UploaderConfig,
    /// How long the steps of a verifying engine are measured before the first request, milliseconds. 0: step times
    /// are learnt from requests alone.
    #[serde(skip)]
    pub profile_ms_max: u64,
    /// Number of steps that the reader of a chunk may lag behind before its request pauses. 256 steps are a few
    /// seconds of decoding.
    #[serde(skip)]
    pub event_queue: usize,
    /// How long a reader may stall with a full queue before its chunk ends, milliseconds. The request continues under
    /// another lease once the reader has read the queue. Two seconds are far longer than a network hiccup.
    #[serde(skip)]
    pub reader_stall_ms_max: u64,
    /// How long a new chunk waits for a slot that is just becoming free, milliseconds: a few steps, which may be
    /// slow.
    #[serde(skip)]
    pub slot_wait_ms: u64,
    /// How long a stopping worker waits for the draft store to take outputs and statistics, milliseconds.
    #[serde(skip)]
    pub store_grace_ms: u64,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        WorkerConfig {
            id: "worker-0".into(),
            listen: None,
            http: ListenerConfig::default(),
            advertise_url: String::new(),
            running_max: 16,
            step_tokens_max: 256,
            prefill_chunk_tokens: 128,
            parked_requests_max: 256,
            parked_tokens_max: 1 << 20,
            parked_ms_max: 60_000,
            evacuate_after_ms: 20_000,
            engine: EngineConfig::default(),
            adoption: AdoptionConfig::default(),
            speculation: SpeculationConfig::default(),
            replica: ReplicaConfig::default(),
            uploader: UploaderConfig::default(),
            profile_ms_max: 200,
            event_queue: 256,
            reader_stall_ms_max: 2_000,
            slot_wait_ms: 1_000,
            store_grace_ms: 5_000,
        }
    }
}

impl Validate for WorkerConfig {
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut check = |holds: bool, fault: &str| {
            if !holds {
                faults.push(fault.to_owned());
            }
        };
        check(!self.id.is_empty(), "id: must not be empty");
        check(self.running_max >= 1, "running_max: at least 1");
        check(
            self.prefill_chunk_tokens >= 1,
            "prefill_chunk_tokens: at least 1",
        );
        check(
            self.step_tokens_max >= self.prefill_chunk_tokens.saturating_add(self.running_max),
            "step_tokens_max: at least prefill_chunk_tokens + running_max, so that every request can move",
        );
        self.engine.check(&mut check);
        self.adoption.check(&self.engine, &mut check);
        self.speculation.check(&self.id, &mut check);
        self.replica.check(&mut check);
        self.uploader.check(&mut check);
        check(
            self.listen.is_none() || is_http_url(&self.advertise_url),
            "advertise_url: a worker that listens needs its own http:// or https:// URL here",
        );
        faults.extend(self.http.faults("http"));
        faults
    }
}
