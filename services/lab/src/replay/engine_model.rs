//! A roofline model of the time of an engine's step.
//!
//! ```text
//! step = fixed + requests * per request + tokens * per token
//!      + max(weights / bandwidth, 2 * parameters * tokens / compute)
//!      + KV of all contexts / bandwidth
//! ```
//!
//! The weights are read once per step, however many tokens it verifies. So tokens are nearly free up to the *ridge*,
//! where arithmetic takes as long as reading. Past the ridge the time climbs in stairs, one per tile of tokens.
//! Attention is counted by the KV that it reads: with grouped queries, a draft of tens of tokens does not reach its
//! ridge. Prompts are not part of the model, because prefill takes the same time with every policy.

#[cfg(test)]
mod tests;

use std::path::Path;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

/// The engine that policies are compared on if none is named.
pub(crate) const DEFAULT_ENGINE_MODEL: &str = "h100-8b";

/// An engine on its hardware. Every field is a key of the TOML file that `--engine-model` takes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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

/// The share of its device that an engine reaches, and the time that it adds itself.
#[derive(Clone, Copy)]
struct Efficiency {
    bandwidth_efficiency: f64,
    compute_efficiency: f64,
    step_us: f64,
    request_us: f64,
    /// A softmax over 128 k logits reads them a few times over, and the host compares.
    token_us: f64,
    /// The narrow side of the tiles of large matrix products.
    tile_tokens: f64,
}

/// Assumptions, not data sheets. With these values the 8B model on an H200 decodes at 5.7, 6.5 and 9.9 ms per token
/// for 1, 16 and 64 requests of 500 tokens, where vLLM was measured at 5.5, 6.7 and 10.4 on Spec-Bench
/// (ArcticInference's figures for its suffix decoding in vLLM; they include prompts).
const ASSUMED: Efficiency = Efficiency {
    bandwidth_efficiency: 0.8,
    compute_efficiency: 0.6,
    step_us: 1400.0,
    request_us: 45.0,
    token_us: 5.0,
    tile_tokens: 64.0,
};

/// Fitted to an H100 SXM, for an engine whose host works while the device computes: forward passes of the 8B shape in
/// bf16 as CUDA graphs under torch 2.11 (`tests/real-engines/step_times.py`), and plain steps of SGLang 0.5.16
/// (`tests/real-engines/in_sglang.py --shape`). `bandwidth_efficiency` is the one at which growing contexts are read.
/// The time that SGLang's host adds to a verifying step is not included.
const MEASURED: Efficiency = Efficiency {
    bandwidth_efficiency: 0.91,
    compute_efficiency: 0.8,
    step_us: 1650.0,
    request_us: 0.0,
    token_us: 8.5,
    tile_tokens: 64.0,
};

fn bandwidth_efficiency() -> f64 {
    ASSUMED.bandwidth_efficiency
}

fn compute_efficiency() -> f64 {
    ASSUMED.compute_efficiency
}

fn step_us() -> f64 {
    ASSUMED.step_us
}

fn request_us() -> f64 {
    ASSUMED.request_us
}

fn token_us() -> f64 {
    ASSUMED.token_us
}

fn tile_tokens() -> f64 {
    ASSUMED.tile_tokens
}

/// The work of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct StepLoad {
    pub(super) requests: usize,
    /// Tokens to compute: one per request, plus draft tokens.
    pub(super) tokens: usize,
    /// Tokens of all contexts.
    pub(super) kv_tokens: usize,
}

/// A device by its data sheet: terabytes and 10^12 operations per second.
struct Device {
    bandwidth_tb_per_s: f64,
    compute_tflop_per_s: f64,
}

/// NVIDIA H100 SXM data sheet: HBM3 3.35 TB/s, bf16 989 TFLOP/s dense.
const H100: Device = device(3.35, 989.0);
/// NVIDIA H200 SXM data sheet: HBM3e 4.8 TB/s, arithmetic of the H100.
const H200: Device = device(4.8, 989.0);
/// NVIDIA H200 SXM with FP8: 1,979 TFLOP/s dense.
const H200_FP8: Device = device(4.8, 1979.0);
/// NVIDIA A100 80 GB SXM data sheet: 2,039 GB/s, bf16 312 TFLOP/s dense.
const A100: Device = device(2.039, 312.0);
/// NVIDIA L4 data sheet: 300 GB/s, bf16 242 TFLOP/s with sparsity, half of it dense.
const L4: Device = device(0.3, 121.0);
/// NVIDIA Ada architecture paper, GeForce RTX 4090: 1,008 GB/s, bf16 165.2 TFLOP/s dense.
const RTX_4090: Device = device(1.008, 165.2);

const fn device(bandwidth_tb_per_s: f64, compute_tflop_per_s: f64) -> Device {
    Device {
        bandwidth_tb_per_s,
        compute_tflop_per_s,
    }
}

/// A model by its published configuration.
struct Weights {
    parameters_b: f64,
    bytes_per_parameter: f64,
    layers: f64,
    kv_heads: f64,
}

/// Llama-3.1-8B: 8.03 B parameters, 32 layers, 8 KV heads of 128.
const LLAMA_8B: Weights = weights(8.03, 2.0, 32.0, 8.0);
/// Qwen3-32B: 32.8 B parameters, 64 layers, 8 KV heads of 128.
const QWEN_32B: Weights = weights(32.8, 2.0, 64.0, 8.0);
/// Llama-3.1-70B: 70.6 B parameters, 80 layers, 8 KV heads of 128.
const LLAMA_70B: Weights = weights(70.6, 2.0, 80.0, 8.0);
/// Llama-3.1-70B with FP8 weights; KV stays bf16.
const LLAMA_70B_FP8: Weights = weights(70.6, 1.0, 80.0, 8.0);

const fn weights(
    parameters_b: f64,
    bytes_per_parameter: f64,
    layers: f64,
    kv_heads: f64,
) -> Weights {
    Weights {
        parameters_b,
        bytes_per_parameter,
        layers,
        kv_heads,
    }
}

const HEAD_SIZE: f64 = 128.0;
const KV_BYTES: f64 = 2.0;

/// Time that two exchanges per layer between four devices add to a step of 80 layers, at about 10 us each,
/// microseconds.
const EXCHANGES_US: f64 = 1600.0;

/// Name, device, number of devices, weights, microseconds added to a step, and efficiency.
const PRESETS: [(&str, Device, f64, Weights, f64, Efficiency); 9] = [
    ("h100-8b", H100, 1.0, LLAMA_8B, 0.0, ASSUMED),
    ("h100-8b-measured", H100, 1.0, LLAMA_8B, 0.0, MEASURED),
    ("h200-8b", H200, 1.0, LLAMA_8B, 0.0, ASSUMED),
    ("a100-8b", A100, 1.0, LLAMA_8B, 0.0, ASSUMED),
    ("l4-8b", L4, 1.0, LLAMA_8B, 0.0, ASSUMED),
    ("rtx4090-8b", RTX_4090, 1.0, LLAMA_8B, 0.0, ASSUMED),
    ("h100-32b", H100, 1.0, QWEN_32B, 0.0, ASSUMED),
    ("h200-70b", H200_FP8, 1.0, LLAMA_70B_FP8, 0.0, ASSUMED),
    ("h100x4-70b", H100, 4.0, LLAMA_70B, EXCHANGES_US, ASSUMED),
];

impl EngineModel {
    /// Loads the preset of this name, or a TOML file.
    ///
    /// # Errors
    /// No such preset or file; a missing or unknown key; or a number out of range.
    pub fn load(name: &str) -> anyhow::Result<Self> {
        if let Some(preset) = Self::preset(name) {
            return Ok(preset);
        }
        let path = Path::new(name);
        let text = std::fs::read_to_string(path).with_context(|| {
            let names = Self::preset_names().collect::<Vec<_>>().join(", ");
            format!("--engine-model {name}: neither a preset ({names}) nor a file that can be read")
        })?;
        let model: EngineModel =
            toml::from_str(&text).with_context(|| path.display().to_string())?;
        model.check().with_context(|| path.display().to_string())?;
        Ok(model)
    }

    /// Names of the presets.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        PRESETS.into_iter().map(|(name, ..)| name)
    }

    fn preset(name: &str) -> Option<Self> {
        let (_, device, devices, weights, exchanges_us, efficiency) =
            PRESETS.into_iter().find(|(preset, ..)| *preset == name)?;
        Some(EngineModel {
            weights_gb: weights.parameters_b * weights.bytes_per_parameter,
            parameters_b: weights.parameters_b,
            kv_bytes_per_token: 2.0 * weights.layers * weights.kv_heads * HEAD_SIZE * KV_BYTES,
            bandwidth_tb_per_s: device.bandwidth_tb_per_s * devices,
            compute_tflop_per_s: device.compute_tflop_per_s * devices,
            bandwidth_efficiency: efficiency.bandwidth_efficiency,
            compute_efficiency: efficiency.compute_efficiency,
            step_us: efficiency.step_us + exchanges_us,
            request_us: efficiency.request_us,
            token_us: efficiency.token_us,
            tile_tokens: efficiency.tile_tokens,
        })
    }

    fn check(&self) -> anyhow::Result<()> {
        for (key, value) in [
            ("weights_gb", self.weights_gb),
            ("parameters_b", self.parameters_b),
            ("bandwidth_tb_per_s", self.bandwidth_tb_per_s),
            ("compute_tflop_per_s", self.compute_tflop_per_s),
            ("bandwidth_efficiency", self.bandwidth_efficiency),
            ("compute_efficiency", self.compute_efficiency),
        ] {
            ensure!(
                value.is_finite() && value > 0.0,
                "{key} must be more than 0, not {value}"
            );
        }
        for (key, value) in [
            ("bandwidth_efficiency", self.bandwidth_efficiency),
            ("compute_efficiency", self.compute_efficiency),
        ] {
            ensure!(value <= 1.0, "{key} is a share and at most 1, not {value}");
        }
        for (key, value) in [
            ("kv_bytes_per_token", self.kv_bytes_per_token),
            ("step_us", self.step_us),
            ("request_us", self.request_us),
            ("token_us", self.token_us),
        ] {
            ensure!(
                value.is_finite() && value >= 0.0,
                "{key} must be 0 or more, not {value}"
            );
        }
        ensure!(
            self.tile_tokens.is_finite() && self.tile_tokens >= 1.0,
            "tile_tokens must be at least 1, not {}",
            self.tile_tokens
        );
        Ok(())
    }

    /// Seconds of a step with this load; 0 for an empty one.
    pub(super) fn step_seconds(&self, load: StepLoad) -> f64 {
        if load.tokens == 0 {
            return 0.0;
        }
        let bytes_per_s = self.bandwidth_tb_per_s * 1e12 * self.bandwidth_efficiency;
        let flop_per_s = self.compute_tflop_per_s * 1e12 * self.compute_efficiency;
        let computed = (load.tokens as f64 / self.tile_tokens).ceil() * self.tile_tokens;
        let reading = self.weights_gb * 1e9 / bytes_per_s;
        let computing = 2.0 * self.parameters_b * 1e9 * computed / flop_per_s;
        let attending = load.kv_tokens as f64 * self.kv_bytes_per_token / bytes_per_s;
        let host_us = self.step_us
            + load.requests as f64 * self.request_us
            + load.tokens as f64 * self.token_us;
        host_us / 1e6 + reading.max(computing) + attending
    }
}
