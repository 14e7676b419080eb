//! The options of `refrain analyze`.

use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;
use refrain_speculation::draft::Expansion;
use refrain_speculation::router::Threshold;
use serde::Serialize;

use super::alpha::ALPHAS;
use super::entropy::ENTROPY_BANDS;
use crate::replay::{
    DEFAULT_ENGINE_MODEL, Eagle3, EngineModel, Judging, Policy, Setup, worker_rules,
};

/// The logs to analyze, and the engine to model.
#[derive(Args, Clone, Debug, Serialize)]
pub struct AnalyzeOptions {
    /// Files of recorded calls, as `refrain replay` reads them. Each `workload` and `tenant` gets a row.
    #[arg(required = true, value_name = "LOG")]
    pub logs: Vec<PathBuf>,
    /// Tokenizer for logs that hold text.
    #[arg(long, value_name = "TOKENIZER.JSON")]
    pub tokenizer: Option<PathBuf>,
    /// Model of the engine's step times: a preset or a file, as for `refrain replay`.
    #[arg(long, value_name = "NAME|FILE.toml", default_value = DEFAULT_ENGINE_MODEL)]
    pub engine_model: String,
    /// Numbers of requests at once.
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "1,16,64"
    )]
    pub concurrency: Vec<usize>,
    /// The engine's EAGLE-3 head, as for `refrain replay` [default: no head].
    #[arg(long, value_name = "acc=A,A,...[,cost=SHARE]")]
    pub eagle3: Option<Eagle3>,
    /// Analyze only this many calls of each workload and tenant, the first ones.
    #[arg(long, value_name = "N", default_value_t = 2000)]
    pub docs: usize,
    /// Try alphas on this many calls of each workload and tenant, the first ones. At the beginning `auto` has not
    /// learnt much yet, so with few calls it looks worse than it is.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub alpha_docs: usize,
    /// Most rows; further workloads and tenants share one more row.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub rows: usize,
    /// Output tokens per second, from which the storage of a month is computed.
    #[arg(long, value_name = "N", default_value_t = 5000.0)]
    pub tokens_per_s: f64,
    /// Also write a page with plots to this file.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub html: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}

impl AnalyzeOptions {
    /// Checks the values.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!(
            !self.concurrency.contains(&0),
            "--concurrency must be at least 1"
        );
        ensure!(self.docs > 0, "--docs must be at least 1");
        ensure!(self.alpha_docs > 0, "--alpha-docs must be at least 1");
        ensure!(self.rows > 0, "--rows must be at least 1");
        ensure!(
            self.tokens_per_s.is_finite() && self.tokens_per_s > 0.0,
            "--tokens-per-s must be more than 0, not {}",
            self.tokens_per_s
        );
        Ok(())
    }

    /// A replay with a worker's default settings.
    pub(super) fn setup(&self) -> anyhow::Result<Setup> {
        Ok(Setup::with_worker_defaults(Judging {
            policy: Policy::Goodput,
            engine: EngineModel::load(&self.engine_model)?,
            head: self.eagle3.clone().unwrap_or_else(Eagle3::absent),
            seed: 1,
            threshold: Threshold::Auto,
            step_tokens_max: u32::MAX,
        }))
    }

    /// The assumptions behind the figures, in sentences.
    pub(super) fn assumptions(&self) -> String {
        let params = worker_rules().params;
        let shape = match params.expansion {
            Expansion::Linear => "one chain",
            Expansion::Tree | Expansion::Paths(_) => "a tree",
        };
        let tried = ALPHAS.map(|alpha| alpha.to_string()).join(", ");
        format!(
            "Speed-ups are those of `goodput` over plain decoding on {}, by requests at once. They are of decoding alone: \
             prompts are left out, so a whole call gains less. Drafts are made with a worker's default settings: {shape} of \
             at most {} tokens, as far as it pays. Tokens per step are those of column `at {}`. GB/month assumes {} output tokens per \
             second. The alphas {tried} were tried under `goodput` on at most the first {} calls of each \
             row. The last column is the line to set for a worker with so many requests at once: a fixed alpha only where \
             it gains more than 1 % over `auto`. {ENTROPY_BANDS}",
            self.engine_model,
            params.max_spec_tokens,
            self.concurrency[0],
            self.tokens_per_s,
            self.alpha_docs
        )
    }
}
