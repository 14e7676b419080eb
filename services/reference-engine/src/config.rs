//! Every limit of the engine, with its default.

use std::net::SocketAddr;

use refrain_service_kit::config::Validate;
use serde::{Deserialize, Serialize};

use crate::files::{HEAD_AUTO, HEAD_OFF, SHIPPED_MODEL};

/// How weights lie in memory. Both give the same bits.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum WeightFormat {
    /// Four bytes each. A step over several tokens costs little more than a step over one, as on an
    /// accelerator, since reading the weights bounds both.
    #[default]
    F32,
    /// Two bytes each, for the matrices that bf16 holds exactly; others stay f32. Halves memory; a step over
    /// one token is about twice as fast where caches bound it, a step over many no faster.
    Bf16,
}

/// The reference engine's section of the configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// `builtin:refrain-tiny`, or a folder in Hugging Face's layout.
    pub model: String,
    /// The EAGLE-3 head that drafts for sessions which ask for it: a folder with `config.json` and
    /// `model.safetensors`; `auto` for the shipped model's own head or the folder `eagle3` inside a model's
    /// folder, if there is one and no draft model is named; `off` for none.
    pub eagle3: String,
    /// A model that drafts instead of a head: a folder like `model`'s, with the same vocabulary and tokenizer.
    pub draft_model: Option<String>,
    /// Public name of the model; by default its folder's name.
    pub model_name: Option<String>,
    /// How weights lie in memory.
    pub weights: WeightFormat,
    /// Reported with every step. Raise it when the folder's weights are replaced.
    pub weight_version: u64,
    /// Address of the HTTP listener; none when the callers live in the same process.
    pub listen: Option<SocketAddr>,
    /// Threads that share the products of a step.
    pub threads: usize,
    /// Threads that serve HTTP.
    pub http_threads: usize,
    /// Sessions in one step at most.
    pub max_batch: u32,
    /// Tokens (new context and draft nodes) of one step at most.
    pub max_step_tokens: u32,
    /// Draft nodes of one item at most.
    pub max_draft_tokens: u32,
    /// Longest text of a session, if shorter than the model's own limit.
    pub max_context: Option<u32>,
    /// Sessions at once at most, running or kept for reuse.
    pub max_sessions: u32,
    /// KV tokens at most, kept sessions included. Counted in blocks of 32; shared blocks count once, blocks of
    /// the drafter, head or model, as the share of a block that they are.
    pub kv_tokens_max: u64,
    /// Tokens per session whose hidden states wait until the head asks for them, at most. Past it the oldest
    /// are dropped, and the head reads the text from there on.
    pub eagle3_window_tokens: usize,
    /// An open session that no step touches for this long is closed; its KV is kept while there is room.
    pub session_idle_ms: u64,
    /// Steps that wait for the one in progress at most. Past it: 429.
    pub queue_steps: usize,
    /// Largest text that is tokenized, and most tokens that are turned into text, bytes and tokens.
    pub text_max: usize,
    /// Largest request body.
    pub body_bytes_max: usize,
    /// Connections per HTTP thread at most.
    pub connections_max: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            model: SHIPPED_MODEL.into(),
            eagle3: HEAD_AUTO.into(),
            draft_model: None,
            model_name: None,
            weights: WeightFormat::default(),
            weight_version: 0,
            listen: None,
            threads: 1,
            http_threads: 1,
            max_batch: 32,
            max_step_tokens: 1024,
            max_draft_tokens: 64,
            max_context: None,
            max_sessions: 256,
            kv_tokens_max: 65_536,
            eagle3_window_tokens: 2048,
            session_idle_ms: 600_000,
            queue_steps: 64,
            text_max: 1 << 20,
            body_bytes_max: 8 << 20,
            connections_max: 1024,
        }
    }
}

impl Validate for EngineConfig {
    fn faults(&self) -> Vec<String> {
        let counts = [
            ("threads", self.threads as u64),
            ("http_threads", self.http_threads as u64),
            ("max_batch", self.max_batch.into()),
            ("max_step_tokens", self.max_step_tokens.into()),
            ("max_context", self.max_context.unwrap_or(1).into()),
            ("max_sessions", self.max_sessions.into()),
            ("kv_tokens_max", self.kv_tokens_max),
            ("eagle3_window_tokens", self.eagle3_window_tokens as u64),
            ("session_idle_ms", self.session_idle_ms),
            ("queue_steps", self.queue_steps as u64),
            ("text_max", self.text_max as u64),
            ("body_bytes_max", self.body_bytes_max as u64),
            ("connections_max", self.connections_max as u64),
        ];
        let mut faults: Vec<String> = counts
            .iter()
            .filter(|(_, count)| *count == 0)
            .map(|(key, _)| format!("{key}: must be at least 1"))
            .collect();
        if self.model.is_empty() {
            faults.push(format!("model: must be a folder or {SHIPPED_MODEL}"));
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
                "eagle3, draft_model: one of them drafts; choose one, for example eagle3 = {HEAD_OFF:?}"
            ));
        }
        if self.threads > 256 || self.http_threads > 256 {
            faults.push("threads, http_threads: at most 256".into());
        }
        if self.max_draft_tokens >= self.max_step_tokens {
            faults.push("max_draft_tokens: must be below max_step_tokens".into());
        }
        faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_sound_and_zeros_are_named() {
        assert_eq!(EngineConfig::default().faults(), Vec::<String>::new());
        let config = EngineConfig {
            max_batch: 0,
            max_step_tokens: 10,
            ..EngineConfig::default()
        };
        let faults = config.faults().join("\n");
        assert!(
            faults.contains("max_batch: ") && faults.contains("max_draft_tokens: "),
            "{faults}"
        );
    }

    #[test]
    fn a_head_and_a_draft_model_are_one_too_many() {
        let faults = |eagle3: &str, draft_model: &str| {
            let config = EngineConfig {
                eagle3: eagle3.into(),
                draft_model: Some(draft_model.into()),
                ..EngineConfig::default()
            };
            config.faults().join("\n")
        };
        assert!(faults("some/head", "some/model").contains("choose one"));
        assert!(faults(HEAD_OFF, "").contains("draft_model: "));
        for eagle3 in [HEAD_AUTO, HEAD_OFF] {
            assert_eq!(faults(eagle3, "some/model"), "");
        }
    }
}
