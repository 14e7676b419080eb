//! The configuration of the engine.

mod kv_pool;

use std::net::SocketAddr;

use refrain_output_grammar::GrammarLimits;
use refrain_service_kit::config::Validate;
use refrain_service_kit::http::ListenerConfig;
use serde::{Deserialize, Serialize};

use crate::kernels::WeightFormat;
use crate::model::{HEAD_AUTO, HEAD_OFF, SHIPPED_MODEL};

pub use kv_pool::KvPoolConfig;
pub(crate) use kv_pool::{PEERS_MAX, PeerName};

/// Maximum number of threads of one kind. A larger number is taken for a mistake.
const THREADS_MAX: usize = 256;

/// The `[engine]` section of the configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct EngineConfig {
    /// The model: `builtin:refrain-tiny`, a folder in Hugging Face's layout, or a GGUF file, which llama.cpp
    /// computes.
    pub model: String,
    /// Number of layers of a GGUF file that llama.cpp computes on an accelerator. The default is all of them, if it
    /// was built for one.
    pub gpu_layers: Option<u32>,
    /// The EAGLE-3 head that drafts for sessions which request it: a folder with `config.json` and
    /// `model.safetensors`, `auto` or `off`. `auto` uses the compiled-in model's own head, or the folder `eagle3`
    /// inside the model's folder if it exists. A draft model replaces the head of `auto`.
    pub eagle3: String,
    /// A model that drafts instead of a head: a folder or a GGUF file like `model`, with the same vocabulary and
    /// tokenizer. In a GGUF file it has room for as many tokens of its own as `kv_tokens_max`.
    pub draft_model: Option<String>,
    /// Public name of the model. The default is the name of its folder or file.
    pub model_name: Option<String>,
    /// Storage format of the weights in memory.
    pub weights: WeightFormat,
    /// Version that steps report at first. Weights that are loaded later have a higher one. Raise it when you replace
    /// the weights in the model's folder.
    pub weight_version: u64,
    /// Address of the HTTP listener. Leave it out if all callers live in the same process.
    pub listen: Option<SocketAddr>,
    /// The certificate and the time limits of that listener.
    pub http: ListenerConfig,
    /// Number of threads that share the products of a step.
    pub threads: usize,
    /// Maximum number of sessions in one step.
    pub max_batch: u32,
    /// Maximum number of sessions at once, open or kept for reuse.
    pub max_sessions: u32,
    /// Maximum number of KV tokens, kept sessions included. They are counted in blocks of 32. Shared blocks count
    /// once, and the drafter's blocks count by their size.
    pub kv_tokens_max: u64,
    /// Blocks of KV that outlive their sessions.
    pub kv_pool: KvPoolConfig,
    /// Threads that compile forms of outputs and follow costly ones, beside those of the model. A tenant may have
    /// half of them.
    pub form_threads: usize,
    /// Maximum number of forms that wait to be compiled. A tenant may have a quarter of them. The session of a
    /// further one is not opened until there is room.
    pub forms_waiting_max: usize,
    /// Maximum number of bytes of compiled forms that are kept, so that a form that comes again is not compiled
    /// again. The bytes are estimated. At the limit, the namespace that has most gives way.
    pub form_cache_bytes_max: usize,
    /// Maximum number of states of the automaton that holds one output to its form, each of 1 to 2 kB. It bounds the
    /// memory of a session with a form. An output that needs more ends with an error. A text with a `maxLength` takes
    /// a state for each of its characters.
    pub form_states_max: usize,

    /// Number of threads that serve HTTP. One suffices, because handlers only pass requests on to the model's thread.
    #[serde(skip)]
    pub http_threads: usize,
    /// Maximum number of tokens of one step, over new text and draft nodes. It bounds the duration of a step, for
    /// which all sessions wait. Longer prompts are sent in pieces.
    #[serde(skip)]
    pub max_step_tokens: u32,
    /// Maximum number of draft nodes of one item. Each node costs a row of the step.
    #[serde(skip)]
    pub max_draft_tokens: u32,
    /// Longest text of a session, in tokens, if it is to be shorter than the model's own limit.
    #[serde(skip)]
    pub max_context: Option<u32>,
    /// Maximum number of tokens per session whose hidden states wait until the head reads them. Older states are
    /// dropped, and the head starts after the gap, so this bounds the memory of sessions that do not draft.
    #[serde(skip)]
    pub eagle3_window_tokens: usize,
    /// Time without a step after which an open session is closed, in milliseconds. Its KV is kept while there is
    /// room. Workers close their sessions, so this applies to sessions of workers that were lost.
    #[serde(skip)]
    pub session_idle_ms: u64,
    /// Time after which a parked session is closed, in milliseconds. Its KV is kept while there is room.
    #[serde(skip)]
    pub session_parked_ms: u64,
    /// Maximum number of steps that wait for the one in progress. Further ones are refused with 429.
    #[serde(skip)]
    pub queue_steps: usize,
    /// Longest text to tokenize, in bytes, and most tokens to convert to text.
    #[serde(skip)]
    pub text_max: usize,
    /// Largest request body, in bytes.
    #[serde(skip)]
    pub body_bytes_max: usize,
    /// Maximum number of connections per HTTP thread.
    #[serde(skip)]
    pub connections_max: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        let forms = GrammarLimits::default();
        EngineConfig {
            model: SHIPPED_MODEL.into(),
            gpu_layers: None,
            eagle3: HEAD_AUTO.into(),
            draft_model: None,
            model_name: None,
            weights: WeightFormat::default(),
            weight_version: 0,
            listen: None,
            http: ListenerConfig::default(),
            threads: 1,
            max_batch: 32,
            max_sessions: 256,
            kv_tokens_max: 65_536,
            kv_pool: KvPoolConfig::default(),
            form_threads: forms.threads_max,
            forms_waiting_max: forms.waiting_forms_max,
            form_cache_bytes_max: forms.cached_bytes_max,
            form_states_max: forms.states_max,
            http_threads: 1,
            max_step_tokens: 1024,
            max_draft_tokens: 64,
            max_context: None,
            eagle3_window_tokens: 2048,
            session_idle_ms: 600_000,
            session_parked_ms: 120_000,
            queue_steps: 64,
            text_max: 1 << 20,
            body_bytes_max: 8 << 20,
            connections_max: 1024,
        }
    }
}

impl EngineConfig {
    /// The limits of the forms of outputs.
    pub(crate) fn form_limits(&self) -> GrammarLimits {
        GrammarLimits {
            threads_max: self.form_threads,
            waiting_forms_max: self.forms_waiting_max,
            cached_bytes_max: self.form_cache_bytes_max,
            states_max: self.form_states_max,
            ..GrammarLimits::default()
        }
    }
}

impl Validate for EngineConfig {
    fn faults(&self) -> Vec<String> {
        let counts = [
            ("threads", self.threads as u64),
            ("max_batch", self.max_batch.into()),
            ("max_sessions", self.max_sessions.into()),
            ("kv_tokens_max", self.kv_tokens_max),
            ("form_threads", self.form_threads as u64),
            ("forms_waiting_max", self.forms_waiting_max as u64),
            ("form_states_max", self.form_states_max as u64),
        ];
        let mut faults: Vec<String> = counts
            .iter()
            .filter(|(_, count)| *count == 0)
            .map(|(key, _)| format!("{key}: must be at least 1"))
            .collect();
        for (key, threads) in [
            ("threads", self.threads),
            ("form_threads", self.form_threads),
        ] {
            if threads > THREADS_MAX {
                faults.push(format!("{key}: must be at most {THREADS_MAX}"));
            }
        }
        faults.extend(self.http.faults("http"));
        faults.extend(self.kv_pool.faults());
        if self.model.is_empty() {
            faults.push(format!("model: must be a folder or {SHIPPED_MODEL:?}"));
        }
        if self.eagle3.is_empty() {
            faults.push(format!(
                "eagle3: must be a folder, {HEAD_AUTO:?} or {HEAD_OFF:?}"
            ));
        }
        if self.draft_model.as_deref() == Some("") {
            faults.push("draft_model: must be a folder; leave it out for none".into());
        }
        if self.draft_model.is_some() && ![HEAD_AUTO, HEAD_OFF].contains(&self.eagle3.as_str()) {
            faults.push(format!(
                "eagle3, draft_model: only one of them can draft; to use the draft model, set eagle3 = {HEAD_OFF:?}"
            ));
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_valid_and_bad_counts_are_named() {
        assert_eq!(EngineConfig::default().faults(), Vec::<String>::new());
        let config = EngineConfig {
            max_batch: 0,
            threads: 1000,
            form_states_max: 0,
            ..EngineConfig::default()
        };
        let faults = config.faults().join("\n");
        assert!(
            ["max_batch: ", "threads: ", "form_states_max: "]
                .iter()
                .all(|key| faults.contains(key)),
            "{faults}"
        );
    }

    #[test]
    fn a_head_and_a_draft_model_exclude_each_other() {
        let faults = |eagle3: &str, draft_model: &str| {
            let config = EngineConfig {
                eagle3: eagle3.into(),
                draft_model: Some(draft_model.into()),
                ..EngineConfig::default()
            };
            config.faults().join("\n")
        };
        assert!(faults("some/head", "some/model").contains("only one of them"));
        assert!(faults(HEAD_OFF, "").contains("draft_model: "));
        for eagle3 in [HEAD_AUTO, HEAD_OFF] {
            assert_eq!(faults(eagle3, "some/model"), "");
        }
    }
}
