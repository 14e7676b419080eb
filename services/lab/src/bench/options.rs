//! The options of `refrain bench`.

use clap::Args;

use super::workload::WorkloadPart;

/// Arguments of `refrain bench`.
#[derive(Args, Clone, Debug)]
pub struct BenchOptions {
    /// URL of the gateway.
    #[arg(long, default_value = "http://127.0.0.1:8080")]
    pub url: String,
    /// API key of a tenant; give it once per tenant. Each mode needs its own tenants [default: the keys of `refrain
    /// up`].
    #[arg(long = "api-key", value_name = "KEY")]
    pub api_keys: Vec<String>,
    /// Values of the request field `speculation` to compare. Speed-ups are measured against `off`.
    #[arg(long, value_delimiter = ',', default_values_t = ["off", "suffix", "eagle3", "auto"].map(str::to_owned))]
    pub modes: Vec<String>,
    /// Parts of the workload.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [WorkloadPart::Repetitive, WorkloadPart::Unique, WorkloadPart::Schema])]
    pub parts: Vec<WorkloadPart>,
    /// Model [default: the first that the gateway lists].
    #[arg(long)]
    pub model: Option<String>,
    /// Rounds of each part of the workload. Ratios are medians over the rounds.
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub rounds: u64,
    /// Calls of a round.
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub calls: usize,
    /// Calls in flight at once.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub concurrency: usize,
    /// Seed of the workload.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub json: bool,
}

impl BenchOptions {
    /// The same options with these API keys, if none were given.
    pub fn or_api_keys(mut self, api_keys: impl FnOnce() -> Vec<String>) -> Self {
        if self.api_keys.is_empty() {
            self.api_keys = api_keys();
        }
        self
    }
}
