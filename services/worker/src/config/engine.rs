//! How the worker joins its engine.

use serde::Deserialize;

/// What kind of engine stands at `urls.engine`, and how long the worker has patience with it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EngineConfig {
    /// What it is.
    pub kind: EngineKind,
    /// Public name of its model; not for `refrain`, which says it itself.
    pub model: String,
    /// Its name at the engine; empty: the same.
    pub served_model: String,
    /// Where the model's `tokenizer.json` is: a folder, or `builtin:` and a name. The gateway's `files` of the model
    /// name the same tokenizer.
    pub files: String,
    /// The engine's own key, if it wants one.
    pub api_key: Option<ApiKey>,
    /// Longest text, tokens, where neither the engine nor `config.json` says; else it can only lower it.
    pub max_context: Option<u32>,
    /// llama-server has one prompt cache for all requests; without it no tenant can measure what another asked.
    pub prompt_cache: bool,
    /// Deadline of calls that generate nothing, milliseconds.
    pub call_ms_max: u64,
    /// How long a chunk waits for its first token, milliseconds. Less than the gateway waits for a worker
    /// (`worker_idle_ms_max`), which else takes the worker for lost.
    pub first_token_ms_max: u64,
    /// How long it waits for each further one, milliseconds.
    pub idle_ms_max: u64,
    /// Attempts in a row to have the engine begin, at most; before a request's first token, of those that it has left
    /// (`gateway.failures_max`).
    pub attempts_max: u32,
    /// Pause after the first failed one, milliseconds; it doubles with each.
    pub retry_backoff_ms: u64,
    /// Failures in a row after which the engine is left alone.
    pub breaker_failures_max: u32,
    /// How long it is left alone, milliseconds.
    pub breaker_open_ms: u64,
    /// Whether drafts are verified by calls of their own, where that is measured to be quicker than the engine's stream.
    pub drive: DriveMode,
    /// Whether they are so for requests that are sampled as well. What comes out keeps the engine's law, but not, for one
    /// seed, token for token, what its stream would have said.
    pub drive_sampled: bool,
    /// Most draft tokens of a verify call.
    pub drive_tokens_max: u32,
    /// Most tokens of a verify call, those of all its prompts together: a fan-out repeats the text for each draft token.
    pub drive_prompt_tokens_max: u64,
    /// The engine is told the priority of each request, and heeds it in its own queue: a vLLM with
    /// `--scheduling-policy priority`. One without that policy takes the number and does not heed it (vLLM 0.32), or refuses it.
    pub pass_priority: bool,
    /// The engine has Refrain's Python client inside (vLLM only): it is told whose each request is, and which document its
    /// output is, which is written from here.
    pub attached: bool,
    /// Namespaces that were asked for last, so many at most, which such an engine is told of when it comes back: it drafts
    /// from what the mesh remembers of them soon after. Not more than `memory.namespaces_max` inside that engine, which
    /// would forget those above it. Of each it is told `attempts_max` times at most.
    pub introduced_namespaces_max: usize,
    /// The tenant whose drafts prime the n-gram pool of a llama-server started with `--spec-type ngram-mod`; empty: nobody's.
    /// The pool is one for all who use that server, and has no walls inside: only for servers of a single tenant.
    pub prime_tenant: String,
    /// Tokens of the text that stand before a draft in the pool: at least the server's `--spec-ngram-mod-n-match`.
    pub prime_context_tokens: u32,
    /// Most draft tokens of one priming.
    pub prime_tokens_max: u32,
}

/// See [`EngineConfig::drive`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, schemars::JsonSchema, serde::Serialize,
)]
#[serde(rename_all = "lowercase")]
pub enum DriveMode {
    /// Where it pays.
    Auto,
    /// Never: the worker listens, and keeps no drafts.
    #[default]
    Off,
}

/// A key that no log shows.
#[derive(Clone, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(transparent)]
pub struct ApiKey(String);

impl ApiKey {
    /// What the engine is told.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for ApiKey {
    fn from(key: &str) -> Self {
        ApiKey(key.to_owned())
    }
}

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ApiKey(..)")
    }
}

/// Whose engine it is.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, schemars::JsonSchema, serde::Serialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum EngineKind {
    /// One that verifies drafts by the contract of `refrain_protocol::engine`: the reference engine.
    #[default]
    Refrain,
    /// llama.cpp's llama-server.
    LlamaCpp,
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM's trtllm-serve.
    TensorrtLlm,
    /// Anything with `/v1/completions`, text only.
    Openai,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            kind: EngineKind::Refrain,
            model: String::new(),
            served_model: String::new(),
            files: String::new(),
            api_key: None,
            max_context: None,
            prompt_cache: true,
            call_ms_max: 5_000,
            first_token_ms_max: 100_000,
            idle_ms_max: 30_000,
            attempts_max: 3,
            retry_backoff_ms: 50,
            breaker_failures_max: 5,
            breaker_open_ms: 2_000,
            drive: DriveMode::Off,
            drive_sampled: false,
            drive_tokens_max: 64,
            drive_prompt_tokens_max: 131_072,
            pass_priority: false,
            attached: false,
            introduced_namespaces_max: 64,
            prime_tenant: String::new(),
            prime_context_tokens: 24,
            prime_tokens_max: 256,
        }
    }
}

impl EngineConfig {
    /// Whether the engine generates by itself, instead of being driven step by step.
    pub fn is_external(&self) -> bool {
        self.kind != EngineKind::Refrain
    }

    /// Whether the engine generates by itself and is to be driven beyond that.
    pub(crate) fn drives(&self) -> bool {
        self.is_external() && self.drive == DriveMode::Auto
    }

    /// Whether the engine's own speculation is fed.
    pub(crate) fn primes(&self) -> bool {
        !self.prime_tenant.is_empty()
    }

    pub(super) fn check(&self, check: &mut impl FnMut(bool, &str)) {
        if self.is_external() {
            check(
                !self.model.is_empty(),
                "engine.model: the public name of the engine's model",
            );
            check(
                !self.files.is_empty(),
                "engine.files: a folder with the model's tokenizer.json, or builtin:name",
            );
        }
        for (value, fault) in [
            (self.call_ms_max, "engine.call_ms_max: at least 1"),
            (
                self.first_token_ms_max,
                "engine.first_token_ms_max: at least 1",
            ),
            (self.idle_ms_max, "engine.idle_ms_max: at least 1"),
            (
                u64::from(self.attempts_max),
                "engine.attempts_max: at least 1",
            ),
            (
                u64::from(self.breaker_failures_max),
                "engine.breaker_failures_max: at least 1",
            ),
            (
                u64::from(self.drive_tokens_max),
                "engine.drive_tokens_max: at least 1; engine.drive = \"off\" verifies nothing",
            ),
            (
                self.drive_prompt_tokens_max,
                "engine.drive_prompt_tokens_max: at least 1; engine.drive = \"off\" verifies nothing",
            ),
        ] {
            check(value >= 1, fault);
        }
        check(
            !self.attached || self.kind == EngineKind::Vllm && self.drive == DriveMode::Off,
            "engine.attached: only a vLLM has drafts inside, and then engine.drive = \"off\"",
        );
        check(
            !self.pass_priority || self.kind == EngineKind::Vllm,
            "engine.pass_priority: only a vLLM is told priorities",
        );
        check(
            !self.primes() || self.kind == EngineKind::LlamaCpp,
            "engine.prime_tenant: only a llama-server has a pool to prime",
        );
        for (value, fault) in [
            (
                self.prime_context_tokens,
                "engine.prime_context_tokens: at least 1",
            ),
            (
                self.prime_tokens_max,
                "engine.prime_tokens_max: at least 1; an empty engine.prime_tenant primes nothing",
            ),
        ] {
            check(value >= 1, fault);
        }
        check(
            self.max_context.is_none_or(|tokens| tokens >= 2),
            "engine.max_context: at least 2",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_read_and_never_shown() {
        let config: EngineConfig = serde_json::from_str("{\"api_key\":\"engine-key\"}").unwrap();
        assert_eq!(
            config.api_key.as_ref().map(ApiKey::as_str),
            Some("engine-key")
        );
        assert!(!format!("{config:?}").contains("engine-key"));
    }
}
