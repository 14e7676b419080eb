//! The connection to the worker's engine.

use serde::Deserialize;

use super::primer::PrimerConfig;

/// The kind of engine at `urls.engine`, and how the worker uses it.
///
/// Fields that are not deserialised are constants of production; tests in one process may set them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(default)]
pub struct EngineConfig {
    /// Kind of engine.
    pub kind: EngineKind,
    /// Public name of the model. Not for `refrain`, which reports it itself.
    pub model: String,
    /// Name of the model at the engine; empty: the same.
    pub served_model: String,
    /// Source of the model's `tokenizer.json`: a folder, or `builtin:` and a name. The gateway's `files` of the model
    /// must name the same tokenizer. For `refrain` it may be empty; then drafts come from no form of an output,
    /// unless the engine runs in the same process.
    pub files: String,
    /// The engine's own key, if it wants one.
    pub api_key: Option<ApiKey>,
    /// Longest text, tokens, if neither the engine nor `config.json` reports it. It can only lower a reported length.
    pub max_context: Option<u32>,
    /// Whether a llama-server may use its prompt cache, which all requests share. Without it, no tenant can find out
    /// by timing what another tenant has asked.
    pub prompt_cache: bool,
    /// Timeout of the first token of a chunk, milliseconds. It must be below ten minutes of silence, after which the
    /// gateway gives up the worker.
    pub first_token_ms_max: u64,
    /// Timeout of each further token, milliseconds.
    pub idle_ms_max: u64,
    /// Whether requests carry their priority, for a vLLM with `--scheduling-policy priority`. Without that policy,
    /// vLLM 0.32 ignores the number, and other versions may refuse it.
    pub pass_priority: bool,
    /// Whether the engine has Refrain's Python client inside (vLLM and SGLang only). Then requests carry their
    /// namespace and their document, which the worker uploads.
    pub attached: bool,
    /// The primer of a llama-server's own drafts.
    pub primer: PrimerConfig,
    /// Timeout of calls that generate nothing, milliseconds.
    #[serde(skip)]
    pub call_ms_max: u64,
    /// Maximum number of consecutive attempts to open a stream. Before a request's first token they also draw on the
    /// attempts that the gateway allows the request.
    #[serde(skip)]
    pub attempts_max: u32,
    /// Pause after the first failed attempt to open a stream, milliseconds; it doubles with each further one.
    #[serde(skip)]
    pub retry_backoff_ms: u64,
    /// Number of consecutive failures that open the circuit breaker. More than the attempts of one chunk, so that a
    /// single bad request does not open it.
    #[serde(skip)]
    pub breaker_failures_max: u32,
    /// How long the circuit breaker stays open, milliseconds: long enough to relieve a failing engine, and short
    /// enough to notice soon that it has recovered.
    #[serde(skip)]
    pub breaker_open_ms: u64,
}

/// A key that no log shows.
#[derive(Clone, PartialEq, Eq, Deserialize, schemars::JsonSchema)]
#[serde(transparent)]
pub struct ApiKey(String);

impl ApiKey {
    /// The key as it is sent to the engine.
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

/// The kind of an engine.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, schemars::JsonSchema, serde::Serialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum EngineKind {
    /// An engine with the contract of `refrain_protocol::engine`, such as the reference engine.
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
    /// Any server with `/v1/completions`, text only.
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
            first_token_ms_max: 100_000,
            idle_ms_max: 30_000,
            pass_priority: false,
            attached: false,
            primer: PrimerConfig::default(),
            call_ms_max: 5_000,
            attempts_max: 3,
            retry_backoff_ms: 50,
            breaker_failures_max: 5,
            breaker_open_ms: 2_000,
        }
    }
}

impl EngineConfig {
    /// Whether the engine is a third-party engine, which generates by itself.
    pub fn is_external(&self) -> bool {
        self.kind != EngineKind::Refrain
    }

    pub(super) fn check(&self, check: &mut impl FnMut(bool, &str)) {
        if self.is_external() {
            check(
                !self.model.is_empty(),
                "engine.model: must be the public name of the engine's model",
            );
            check(
                !self.files.is_empty(),
                "engine.files: must be a folder with the model's tokenizer.json, or builtin:name",
            );
        }
        check(
            self.first_token_ms_max >= 1,
            "engine.first_token_ms_max: at least 1",
        );
        check(self.idle_ms_max >= 1, "engine.idle_ms_max: at least 1");
        check(
            !self.attached || matches!(self.kind, EngineKind::Vllm | EngineKind::Sglang),
            "engine.attached: needs engine.kind = \"vllm\" or \"sglang\"",
        );
        check(
            !self.pass_priority || self.kind == EngineKind::Vllm,
            "engine.pass_priority: needs engine.kind = \"vllm\"",
        );
        check(
            !self.primer.is_on() || self.kind == EngineKind::LlamaCpp,
            "engine.primer.tokens_max: needs engine.kind = \"llama-cpp\"",
        );
        check(
            !self.primer.is_on() || self.prompt_cache,
            "engine.primer.tokens_max: must be 0 with engine.prompt_cache = false, since both share texts of tenants",
        );
        self.primer.check(check);
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
    fn debug_output_hides_the_key() {
        let config: EngineConfig = serde_json::from_str("{\"api_key\":\"engine-key\"}").unwrap();
        assert_eq!(
            config.api_key.as_ref().map(ApiKey::as_str),
            Some("engine-key")
        );
        assert!(!format!("{config:?}").contains("engine-key"));
    }

    #[test]
    fn only_a_llama_server_whose_tenants_share_a_cache_has_a_primer() {
        let faults = |kind, prompt_cache, tokens_max| {
            let mut engine = EngineConfig {
                kind,
                prompt_cache,
                model: "m".into(),
                files: "f".into(),
                ..EngineConfig::default()
            };
            engine.primer.tokens_max = tokens_max;
            let mut faults = Vec::new();
            engine.check(&mut |holds, fault| {
                if !holds {
                    faults.push(fault.to_owned());
                }
            });
            faults.join("\n")
        };
        assert_eq!(faults(EngineKind::LlamaCpp, true, 65_536), "");
        assert_eq!(faults(EngineKind::Vllm, false, 0), "");
        for kind in [
            EngineKind::Refrain,
            EngineKind::Vllm,
            EngineKind::Sglang,
            EngineKind::TensorrtLlm,
            EngineKind::Openai,
        ] {
            assert!(faults(kind, true, 1).contains("needs engine.kind = \"llama-cpp\""));
        }
        assert!(faults(EngineKind::LlamaCpp, false, 1).contains("prompt_cache"));
        assert!(faults(EngineKind::LlamaCpp, true, 65_537).contains("at most 65536"));
    }

    #[test]
    fn constants_are_not_keys() {
        let schema = schemars::schema_for!(EngineConfig);
        let keys = &schema.as_value()["properties"];
        assert!(keys["kind"].is_object());
        for key in [
            "call_ms_max",
            "attempts_max",
            "retry_backoff_ms",
            "breaker_failures_max",
            "breaker_open_ms",
        ] {
            assert!(keys[key].is_null(), "{key}");
        }
    }
}
