//! A roofline model of the time of an engine's step.
//!
//! ```text
//! step = fixed + requests * per request + tokens * per token
//!      + max(weights / bandwidth, 2 * parameters * tokens / compute)
//!      + KV of all contexts * max(bytes / bandwidth, operations * queries / compute)
//! ```
//!
//! The weights are read once per step, however many tokens it verifies. So tokens are nearly free up to the *ridge*,
//! where arithmetic takes as long as reading. Past the ridge the time climbs in stairs, one per tile of tokens.
//! Attention is counted by the KV that it reads: with grouped queries, a draft of tens of tokens does not reach its
//! ridge. With latent attention all heads share what is read, and a draft of a few tokens does. So models of that
//! kind also name the operations of attention. Prompts are not part of the model, because prefill takes the same time
//! with every policy.

#[cfg(test)]
mod tests;

use std::path::Path;

use anyhow::{Context, ensure};
use serde::Deserialize;

/// The engine that policies are compared on if none is named.
pub(crate) const DEFAULT_ENGINE_MODEL: &str = "h100-8b";

/// An engine on its hardware. Every field is a key of the TOML file that `--engine-model` takes.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EngineModel {
    /// Weights, which every step reads, gigabytes.
    pub weights_gb: f64,
    /// Parameters, billions; each takes one multiplication and one addition per token. For a mixture of experts,
    /// count the active ones only, and in `weights_gb` those that a typical batch reads.
    pub parameters_b: f64,
    /// Bytes of the keys and values of one token, over all layers: 2 * layers * KV heads * head size * bytes per
    /// number.
    pub kv_bytes_per_token: f64,
    /// Operations of one token's attention to one token of its context, over all layers: 2 * layers * heads *
    /// (numbers of a key + numbers of a value). 0: attention is never limited by arithmetic.
    #[serde(default)]
    pub attention_flop: f64,
    /// Memory bandwidth by the data sheet, terabytes per second; the sum over all devices.
    pub bandwidth_tb_per_s: f64,
    /// Dense arithmetic at the weights' precision by the data sheet, 10^12 operations per second; the sum over all
    /// devices.
    pub compute_tflop_per_s: f64,
    /// Share of the bandwidth that the engine reaches.
    #[serde(default = "bandwidth_efficiency")]
    pub bandwidth_efficiency: f64,
    /// Share of the arithmetic that the engine reaches.
    #[serde(default = "compute_efficiency")]
    pub compute_efficiency: f64,
    /// Fixed time of a step (scheduling, launches, exchange between devices), microseconds.
    #[serde(default = "step_us")]
    pub step_us: f64,
    /// Time of each request of the batch (bookkeeping on the host), microseconds.
    #[serde(default = "request_us")]
    pub request_us: f64,
    /// Time of each verified token (sampling and comparing its logits), microseconds.
    #[serde(default = "token_us")]
    pub token_us: f64,
    /// Tokens of a tile of a matrix product. With 1 the stairs become a slope.
    #[serde(default = "tile_tokens")]
    pub tile_tokens: f64,
}

// Where a file or preset names no efficiency, these are assumed; they are on no data sheet. With them the 8B model on
// an H200 decodes at 5.7, 6.5 and 9.9 ms per token for 1, 16 and 64 requests of 500 tokens. vLLM was measured at 5.5,
// 6.7 and 10.4 on Spec-Bench (ArcticInference's figures for its suffix decoding in vLLM; they include prompts).

fn bandwidth_efficiency() -> f64 {
    0.8
}

fn compute_efficiency() -> f64 {
    0.6
}

fn step_us() -> f64 {
    1400.0
}

fn request_us() -> f64 {
    45.0
}

/// A softmax over 128 k logits reads them a few times over, and the host compares.
fn token_us() -> f64 {
    5.0
}

/// The narrow side of the tiles of large matrix products.
fn tile_tokens() -> f64 {
    64.0
}

/// The presets, in a file that is part of the binary.
#[derive(Deserialize)]
struct Presets {
    preset: Vec<Preset>,
}

#[derive(Deserialize)]
struct Preset {
    name: String,
    #[serde(flatten)]
    engine: EngineModel,
}

fn presets() -> Result<Vec<Preset>, toml::de::Error> {
    let presets: Presets = toml::from_str(include_str!("engine_model/presets.toml"))?;
    Ok(presets.preset)
}

/// The work of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepLoad {
    pub(crate) requests: usize,
    /// Tokens to compute: one per request, plus draft tokens and tokens of prompts.
    pub(crate) tokens: usize,
    /// Tokens of all contexts.
    pub(crate) kv_tokens: usize,
    /// Tokens that attend to each context, drafts included, on average over the requests that decode; 0 is as 1.
    pub(crate) queries: f64,
}

impl StepLoad {
    /// The same step with draft tokens, shared by so many decoding requests.
    pub(crate) fn with_drafts(self, draft_tokens: usize, decoding: usize) -> Self {
        StepLoad {
            tokens: self.tokens + draft_tokens,
            queries: 1.0 + draft_tokens as f64 / decoding.max(1) as f64,
            ..self
        }
    }

    /// A step in which all requests decode; drafts are among the `tokens`.
    pub(crate) fn decoding(requests: usize, tokens: usize, kv_tokens: usize) -> Self {
        StepLoad {
            requests,
            tokens,
            kv_tokens,
            queries: tokens as f64 / requests.max(1) as f64,
        }
    }
}

impl EngineModel {
    /// Loads the preset of this name, or a TOML file.
    ///
    /// # Errors
    /// No such preset or file; a missing or unknown key; or a number out of range.
    pub fn load(name: &str) -> anyhow::Result<Self> {
        let presets = presets()?;
        if let Some(preset) = presets.iter().find(|preset| preset.name == name) {
            return Ok(preset.engine.clone());
        }
        let path = Path::new(name);
        let text = std::fs::read_to_string(path).with_context(|| {
            let names: Vec<&str> = presets.iter().map(|preset| &*preset.name).collect();
            let names = names.join(", ");
            format!("--engine-model {name}: neither a preset ({names}) nor a file that can be read")
        })?;
        let model: EngineModel =
            toml::from_str(&text).with_context(|| path.display().to_string())?;
        model.check().with_context(|| path.display().to_string())?;
        Ok(model)
    }

    fn check(&self) -> anyhow::Result<()> {
        let more_than_0 = &(f64::MIN_POSITIVE..=f64::MAX, "must be more than 0");
        let at_least_0 = &(0.0..=f64::MAX, "must be 0 or more");
        let at_least_1 = &(1.0..=f64::MAX, "must be at least 1");
        let share = &(
            f64::MIN_POSITIVE..=1.0,
            "is a share, more than 0 and at most 1",
        );
        for (key, value, (range, rule)) in [
            ("weights_gb", self.weights_gb, more_than_0),
            ("parameters_b", self.parameters_b, more_than_0),
            ("bandwidth_tb_per_s", self.bandwidth_tb_per_s, more_than_0),
            ("compute_tflop_per_s", self.compute_tflop_per_s, more_than_0),
            ("bandwidth_efficiency", self.bandwidth_efficiency, share),
            ("compute_efficiency", self.compute_efficiency, share),
            ("kv_bytes_per_token", self.kv_bytes_per_token, at_least_0),
            ("attention_flop", self.attention_flop, at_least_0),
            ("step_us", self.step_us, at_least_0),
            ("request_us", self.request_us, at_least_0),
            ("token_us", self.token_us, at_least_0),
            ("tile_tokens", self.tile_tokens, at_least_1),
        ] {
            ensure!(range.contains(&value), "{key} {rule}, not {value}");
        }
        Ok(())
    }

    /// Seconds of a step with this load; 0 for an empty one.
    pub(crate) fn step_seconds(&self, load: StepLoad) -> f64 {
        if load.tokens == 0 {
            return 0.0;
        }
        let bytes_per_s = self.bytes_per_s();
        let flop_per_s = self.flop_per_s();
        let computed = (load.tokens as f64 / self.tile_tokens).ceil() * self.tile_tokens;
        let reading = self.weights_gb * 1e9 / bytes_per_s;
        let computing = 2.0 * self.parameters_b * 1e9 * computed / flop_per_s;
        let attending = load.kv_tokens as f64 * self.kv_token_seconds(load.queries);
        let host_us = self.step_us
            + load.requests as f64 * self.request_us
            + load.tokens as f64 * self.token_us;
        host_us / 1e6 + reading.max(computing) + attending
    }

    /// Seconds that a step takes longer for each token of context, to which so many tokens attend.
    pub(crate) fn kv_token_seconds(&self, queries: f64) -> f64 {
        let reading = self.kv_bytes_per_token / self.bytes_per_s();
        reading.max(self.attention_flop * queries.max(1.0) / self.flop_per_s())
    }

    fn flop_per_s(&self) -> f64 {
        self.compute_tflop_per_s * 1e12 * self.compute_efficiency
    }

    fn bytes_per_s(&self) -> f64 {
        self.bandwidth_tb_per_s * 1e12 * self.bandwidth_efficiency
    }
}
