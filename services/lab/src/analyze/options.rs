//! The options of `refrain analyze`.

use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;
use refrain_speculation::draft::Expansion;
use refrain_speculation::router::Threshold;
use serde::Serialize;

use super::alpha::ALPHAS;
use super::entropy::ENTROPY_BANDS;
use crate::logs::TokenizerOptions;
use crate::replay::{DEFAULT_ENGINE_MODEL, Eagle3, EngineModel, Judging, Policy, Setup, once};

/// The number of requests at once that the answer is about, where it is among the given ones.
const USUAL_CONCURRENCY: usize = 16;

/// Most tokens of a draft: as many as vLLM verifies with `"method": "suffix"` and no other argument.
const DRAFT_TOKENS_MAX: usize = 24;

/// The logs to analyze, and the engine to model.
#[derive(Args, Clone, Debug, Serialize)]
pub struct AnalyzeOptions {
    /// Logs of calls: files, folders, or `-`. docs/logs.md lists the forms. Each workload and tenant gets a row.
    #[arg(required = true, value_name = "LOG")]
    pub logs: Vec<PathBuf>,
    /// How texts become tokens.
    #[command(flatten)]
    #[serde(flatten)]
    pub tokenizer: TokenizerOptions,
    /// Models of the engine's step times: presets or files, as for `refrain replay`. The answer is about the first.
    #[arg(
        long,
        value_name = "NAME|FILE.toml",
        value_delimiter = ',',
        default_value = DEFAULT_ENGINE_MODEL
    )]
    pub engine_model: Vec<String>,
    /// Numbers of requests at once. The answer is about 16, or else about the middle one.
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "1,16,64"
    )]
    pub concurrency: Vec<usize>,
    /// The engine's EAGLE-3 head, as for `refrain replay` [default: no head; alone, one of 2.6 tokens per step].
    #[arg(long, value_name = "acc=A,A,...[,cost=SHARE]")]
    pub eagle3: Option<Eagle3>,
    /// Replay at most this many calls: whole sessions, evenly over the log.
    #[arg(long, value_name = "N", default_value_t = 3000)]
    pub docs: usize,
    /// Keep at most this many tokens of all calls in memory, prompts included.
    #[arg(long, value_name = "N", default_value_t = 20_000_000)]
    pub sample_tokens: u64,
    /// Most rows; further workloads and tenants share one more row.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub rows: usize,
    /// Output tokens per second, from which the storage of a month is computed [default: the log's own, else 5000].
    #[arg(long, value_name = "N")]
    pub tokens_per_s: Option<f64>,
    /// Show no text of the calls.
    #[arg(long)]
    pub private: bool,
    /// Also write the answer as a page to this file.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub html: Option<PathBuf>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}

impl AnalyzeOptions {
    /// The same options with each value once.
    pub(super) fn settled(&self) -> Self {
        AnalyzeOptions {
            concurrency: once(&self.concurrency),
            engine_model: once(&self.engine_model),
            ..self.clone()
        }
    }

    /// Checks the values.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!(
            !self.concurrency.contains(&0),
            "--concurrency must be at least 1"
        );
        ensure!(self.docs > 0, "--docs must be at least 1");
        ensure!(self.sample_tokens > 0, "--sample-tokens must be at least 1");
        ensure!(self.rows > 0, "--rows must be at least 1");
        if let Some(rate) = self.tokens_per_s {
            ensure!(
                rate.is_finite() && rate > 0.0,
                "--tokens-per-s must be more than 0, not {rate}"
            );
        }
        Ok(())
    }

    /// The number of requests at once that the answer is about.
    pub(super) fn headline_concurrency(&self) -> usize {
        let mut sorted = self.concurrency.clone();
        sorted.sort_unstable();
        match sorted.contains(&USUAL_CONCURRENCY) {
            true => USUAL_CONCURRENCY,
            false => sorted[sorted.len() / 2],
        }
    }

    /// A replay with a worker's default settings on each engine model.
    pub(super) fn setups(&self) -> anyhow::Result<Vec<Setup>> {
        let setup = |name: &String| {
            let mut setup = Setup::with_worker_defaults(Judging {
                policy: Policy::Goodput,
                engine: EngineModel::load(name)?,
                head: self.eagle3.clone().unwrap_or_else(Eagle3::absent),
                seed: 1,
                threshold: Threshold::Auto,
                step_tokens_max: u32::MAX,
            });
            let params = &mut setup.serving.rules.params;
            params.expansion = Expansion::Linear;
            params.max_spec_tokens = DRAFT_TOKENS_MAX;
            anyhow::Ok(setup)
        };
        self.engine_model.iter().map(setup).collect()
    }

    /// The assumptions behind the figures, in sentences.
    pub(super) fn assumptions(&self) -> Vec<String> {
        let tried = ALPHAS.map(|alpha| alpha.to_string()).join(", ");
        let head = match &self.eagle3 {
            Some(_) => {
                "The engine has the head that --eagle3 describes, and Refrain's drafts are beside it."
            }
            None => {
                "The EAGLE-3 head is assumed to bring 2.6 tokens per step on any text; --eagle3 describes yours."
            }
        };
        vec![
            "The calls were replayed in order on a model of an engine, from an empty memory, and compared with plain \
             decoding."
                .into(),
            format!(
                "Drafts are made with a worker's default settings, as chains of at most {DRAFT_TOKENS_MAX} tokens, which is \
                 how vLLM verifies them."
            ),
            "The model knows the engine's steps only: the work of drafting, and that of the host for longer steps, take a \
             part of the gain."
                .into(),
            "Each workload and tenant has a memory of its own.".into(),
            "A range holds nine of ten results if the sessions are drawn anew.".into(),
            head.into(),
            format!(
                "The fixed alphas {tried} were tried at {} requests at once. One is recommended where it gains more than \
                 1 % over `auto`.",
                self.headline_concurrency()
            ),
            ENTROPY_BANDS.into(),
        ]
    }
}
