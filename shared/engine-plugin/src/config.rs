//! The configuration: variables `REFRAIN_CLIENT_...` of the engine's process, over a file if there is one.

use std::net::SocketAddr;
use std::path::PathBuf;

use refrain_draft_replica::{HarvestConfig, MemoryConfig};
use refrain_service_kit::config::{ConfigError, EnvRule, load};
use refrain_service_kit::mesh::MeshConfig;
use serde::Deserialize;

/// Variables such as `REFRAIN_CLIENT_STORE_URL` and `REFRAIN_CLIENT_MEMORY__TOKENS_MAX`.
const ENV_RULE: EnvRule = EnvRule {
    prefix: "REFRAIN_CLIENT_",
    top_level: &[
        "STORE_URL",
        "TOKEN",
        "TOKEN_FILE",
        "TOKENIZER",
        "LOG",
        "TIMEOUT_MS",
        "METRICS_LISTEN",
        "PATTERN_TOKENS_MAX",
        "PROMPT_TOKENS_AT_ONCE",
        "READING_TOKENS_MAX",
        "PIECE_TOKENS",
        "QUEUED_TOKENS_MAX",
        "PAUSED_REQUESTS_MAX",
        "PAUSED_TOKENS_MAX",
    ],
};

/// Everything has a default but the store, the mesh's keys and the tokenizer.
#[derive(Clone, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct InEngineConfig {
    /// The draft store.
    pub store_url: String,
    /// The mesh's keys, less the one that only the gateway has.
    pub mesh: MeshConfig,
    /// The namespace of requests that bring none, as `refrain store sign` prints it. It is believed for a day.
    pub token: Option<String>,
    /// A file with that token, read again every minute, so that it can be renewed while the engine runs.
    pub token_file: Option<PathBuf>,
    /// Folder of the model's `tokenizer.json`.
    pub tokenizer: Option<PathBuf>,
    /// What goes to standard error, as in the mesh's configuration.
    pub log: String,
    /// Where `/metrics` is served for Prometheus; nowhere, if not said. One process can have an address.
    pub metrics_listen: Option<SocketAddr>,
    /// Deadline of ordinary calls of the store, milliseconds. No step of the engine waits for them.
    pub timeout_ms: u64,
    /// Longest match that is looked for.
    pub pattern_tokens_max: u32,
    /// A prompt of at most so many tokens is read in the call that begins its request. A longer one is read on a thread
    /// beside the engine's, and drafted from once it is.
    pub prompt_tokens_at_once: usize,
    /// Most tokens of prompts that wait for that thread; what comes beyond is not drafted from.
    pub reading_tokens_max: usize,
    /// Output of a request that is handed on together.
    pub piece_tokens: u32,
    /// Most output on its way to the background thread; what is more waits with its request. Of one that ends it is not
    /// drafted from, and what the store lacks of that goes all the same.
    pub queued_tokens_max: usize,
    /// Most requests that were interrupted and are remembered, in case the engine only made room.
    pub paused_requests_max: usize,
    /// Most tokens of their texts.
    pub paused_tokens_max: usize,
    /// The copy of the drafts. Look-ups in the store are not made from here.
    pub memory: MemoryConfig,
    /// What is sent to the draft store.
    pub harvest: HarvestConfig,
}

impl Default for InEngineConfig {
    fn default() -> Self {
        InEngineConfig {
            store_url: String::new(),
            mesh: MeshConfig::default(),
            token: None,
            token_file: None,
            tokenizer: None,
            log: "warn".into(),
            metrics_listen: None,
            timeout_ms: 10_000,
            pattern_tokens_max: 64,
            prompt_tokens_at_once: 1_024,
            reading_tokens_max: 4_194_304,
            piece_tokens: 32,
            queued_tokens_max: 1_048_576,
            paused_requests_max: 1_024,
            paused_tokens_max: 4_194_304,
            memory: MemoryConfig::default(),
            harvest: HarvestConfig::default(),
        }
    }
}

impl InEngineConfig {
    /// Reads the environment, over a file.
    pub fn load(file: Option<PathBuf>) -> Result<Self, ConfigError> {
        load(
            file.as_deref(),
            ENV_RULE,
            std::env::vars_os(),
            InEngineConfig::faults,
        )
    }

    fn faults(&self) -> Vec<String> {
        let mut faults = self.mesh.faults(false);
        let mut check = |holds: bool, fault: &str| {
            if !holds {
                faults.push(fault.to_owned());
            }
        };
        check(
            self.store_url.starts_with("http://") || self.store_url.starts_with("https://"),
            "store_url: must be an http:// or https:// URL",
        );
        check(self.timeout_ms >= 1, "timeout_ms: at least 1");
        check(
            self.pattern_tokens_max >= 1,
            "pattern_tokens_max: at least 1",
        );
        check(self.piece_tokens >= 1, "piece_tokens: at least 1");
        check(
            self.token.is_none() || self.token_file.is_none(),
            "token and token_file: one of them",
        );
        check(
            self.paused_requests_max >= 1,
            "paused_requests_max: at least 1",
        );
        self.memory.check(&mut check);
        self.harvest.check(&mut check);
        faults
    }
}
