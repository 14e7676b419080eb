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
    /// Values of the request field `speculation` to compare, with commas or spaces between them. Speed-ups are
    /// measured against `off`.
    #[arg(long, value_delimiter = ',', num_args = 1.., default_values_t = ["off", "suffix", "eagle3", "auto"].map(str::to_owned))]
    pub modes: Vec<String>,
    /// Parts of the workload, with commas or spaces between them.
    #[arg(long, value_enum, value_delimiter = ',', num_args = 1.., default_values_t = [WorkloadPart::Repetitive, WorkloadPart::Unique, WorkloadPart::Schema])]
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Bench {
        #[command(flatten)]
        options: BenchOptions,
    }

    #[test]
    fn lists_have_commas_or_spaces_between_their_values() {
        let read = |arguments: &str| {
            let arguments = std::iter::once("bench").chain(arguments.split(' '));
            Bench::try_parse_from(arguments).map(|bench| bench.options)
        };
        for list in [
            "--modes off,auto",
            "--modes off auto",
            "--modes off --modes auto",
        ] {
            let options = read(&format!("{list} --parts unique schema --rounds 2")).unwrap();
            assert_eq!(options.modes, ["off", "auto"], "{list}");
            let parts = [WorkloadPart::Unique, WorkloadPart::Schema];
            assert_eq!((&options.parts[..], options.rounds), (&parts[..], 2));
        }
        // The help shows the default in a form that is accepted.
        let shown = read("--seed 1").unwrap().modes.join(" ");
        assert_eq!(
            read(&format!("--modes {shown}")).unwrap().modes.join(" "),
            shown
        );
        assert!(read("--modes").is_err());
        assert!(read("--parts unknown").is_err());
    }
}
