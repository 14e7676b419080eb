//! Seer's three workloads (arXiv 2511.14617, Table 3), with what the paper does not say assumed here.
//!
//! From the paper: requests, group sizes, mean and longest outputs, devices per instance, and weights. Assumed:
//! prompts of 1,000 tokens; a spread of lengths of sigma 1 with a correlation of 0.7 within a group (options change
//! both); 256 slots per instance; KV in what 90 % of the devices' 80 GB leave beside the weights; chunks of 8,192
//! tokens (the paper's first version says 8 K); and a pool that each device reaches at 50 GB/s, its network card.
//!
//! Kimi-K2 is served with data-parallel attention (DP32 in the paper), so each device has a KV cache of its own for
//! its own requests. Such a rank is simulated as an instance. The baseline pins a group to the 32 ranks of an engine,
//! which get its samples in turn. The ranks of a real engine step together; here they do not.

use clap::ValueEnum;
use serde::Serialize;

use super::shape::Shape;

/// A workload of the paper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum WorkloadPreset {
    /// Moonlight, 3,200 requests in groups of 8, on 32 instances.
    SeerMoonlight,
    /// Qwen2-VL-72B, 9,600 requests in groups of 16, on 16 instances.
    SeerQwen2vl,
    /// Kimi-K2, 6,400 requests in groups of 8, on 8 instances of 32 ranks.
    SeerKimi,
}

impl WorkloadPreset {
    pub(super) fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    pub(super) fn shape(self) -> Shape {
        let kv_tokens = |devices: f64, weights_gb: f64, bytes: f64| {
            ((devices * 72.0 - weights_gb) * 1e9 / bytes) as u64
        };
        let shape = |engine: &str, instances, requests: usize, group_size, mean, max| Shape {
            engine_model: engine.to_owned(),
            instances,
            ranks: 1,
            groups: requests / group_size,
            group_size,
            output_mean: mean,
            output_max: max,
            slots: 256,
            kv_tokens: 0,
            chunk_tokens: 8_192,
            pool_gb_per_s: 50.0,
        };
        match self {
            WorkloadPreset::SeerMoonlight => Shape {
                kv_tokens: kv_tokens(1.0, 32.0, 31_104.0),
                ..shape("h800-moonlight", 32, 3_200, 8, 22_386.0, 65_536)
            },
            WorkloadPreset::SeerQwen2vl => Shape {
                kv_tokens: kv_tokens(8.0, 146.0, 327_680.0),
                pool_gb_per_s: 400.0,
                ..shape("h800x8-qwen2vl-72b", 16, 9_600, 16, 7_615.0, 40_960)
            },
            WorkloadPreset::SeerKimi => Shape {
                kv_tokens: kv_tokens(1.0, 42.4, 70_272.0),
                ranks: 32,
                slots: 64,
                ..shape("h800-kimi-k2-rank", 256, 6_400, 8, 38_959.0, 98_304)
            },
        }
    }
}
