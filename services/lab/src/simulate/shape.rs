//! The size of a simulation.

use serde::Serialize;

/// Instances and drawn requests.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shape {
    /// The model of step times.
    pub engine_model: String,
    /// Instances.
    pub instances: usize,
    /// Instances that serve one group in the baseline: the ranks of an engine with data-parallel attention.
    pub ranks: usize,
    /// Groups, where lengths are drawn.
    pub groups: usize,
    /// Samples of a group.
    pub group_size: usize,
    /// Mean output, tokens.
    pub output_mean: f64,
    /// Longest output, tokens.
    pub output_max: u32,
    /// Most requests of an instance.
    pub slots: usize,
    /// KV tokens of an instance.
    pub kv_tokens: u64,
    /// Most tokens of a chunk.
    pub chunk_tokens: u32,
    /// Bandwidth to the pool, GB/s; 0 is no pool.
    pub pool_gb_per_s: f64,
}
