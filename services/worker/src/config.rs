//! The worker's configuration: every limit has its name here.

mod engine;
mod speculation;

use std::net::SocketAddr;

use refrain_draft_replica::{HarvestConfig, MemoryConfig};
use refrain_service_kit::config::Validate;
use serde::Deserialize;

pub use engine::{ApiKey, DriveMode, EngineConfig, EngineKind};
pub use speculation::{
    Eagle3Config, FallbackChoice, RouterChoice, ScoreThreshold, SpeculationConfig,
};

/// The worker's section of the configuration.
#[derive(Clone, Debug, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct WorkerConfig {
    /// Its name; unique in the mesh.
    pub id: String,
    /// Where the internal listener listens; none within one process.
    pub listen: Option<SocketAddr>,
    /// The URL that leases name: how gateways reach that listener.
    pub advertise_url: String,
    /// Threads that serve HTTP.
    pub http_threads: usize,
    /// Largest request body, bytes.
    pub body_bytes_max: usize,
    /// Most chunks at once.
    pub running_max: u32,
    /// Most tokens of one engine step, context and drafts together.
    pub step_tokens_max: u32,
    /// Most prompt tokens of one request in one step, so that prefill does not stall decoding.
    pub prefill_chunk_tokens: u32,
    /// Steps that a slow reader of a chunk may lag behind before its request pauses.
    pub event_queue: usize,
    /// How long a reader may stand still with a full queue before its chunk ends, milliseconds. Its request goes on
    /// under another lease once it has read what was said.
    pub reader_stall_ms_max: u64,
    /// How long a new chunk waits for a slot that is just being given back, milliseconds.
    pub slot_wait_ms: u64,
    /// How long the engine's steps are measured for before the first request, where it verifies drafts, milliseconds. 0
    /// learns what they take from requests alone.
    pub profile_ms_max: u64,
    /// How long a drain lets chunks run before they are handed over, milliseconds.
    pub drain_grace_ms: u64,
    /// How long a worker that stops waits for the draft store to take outputs and what was learnt, milliseconds.
    pub store_grace_ms: u64,
    /// The engine that it drives.
    pub engine: EngineConfig,
    /// Drafting.
    pub speculation: SpeculationConfig,
    /// The worker's copy of the drafts.
    pub memory: MemoryConfig,
    /// What is sent to the draft store.
    pub harvest: HarvestConfig,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        WorkerConfig {
            id: "worker-0".into(),
            listen: None,
            advertise_url: String::new(),
            http_threads: 1,
            body_bytes_max: 8 << 20,
            running_max: 16,
            step_tokens_max: 256,
            prefill_chunk_tokens: 128,
            event_queue: 256,
            reader_stall_ms_max: 2_000,
            slot_wait_ms: 1_000,
            profile_ms_max: 200,
            drain_grace_ms: 20_000,
            store_grace_ms: 5_000,
            engine: EngineConfig::default(),
            speculation: SpeculationConfig::default(),
            memory: MemoryConfig::default(),
            harvest: HarvestConfig::default(),
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
        check(self.event_queue >= 1, "event_queue: at least 1");
        check(self.http_threads >= 1, "http_threads: at least 1");
        self.engine.check(&mut check);
        self.speculation.check(&self.id, &mut check);
        self.memory.check(&mut check);
        self.harvest.check(&mut check);
        check(
            self.listen.is_none()
                || self.advertise_url.starts_with("http://")
                || self.advertise_url.starts_with("https://"),
            "advertise_url: a worker that listens says under which http:// or https:// URL",
        );
        faults
    }
}
