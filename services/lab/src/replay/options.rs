//! The options of `refrain replay`.

use std::path::PathBuf;

use anyhow::ensure;
use clap::{ArgGroup, Args};
use refrain_speculation::draft::{Expansion, Setting};
use refrain_speculation::router::Threshold;
use serde::{Serialize, Serializer};

use super::breakdown::Breakdown;
use super::eagle3::Eagle3;
use super::engine_model::{DEFAULT_ENGINE_MODEL, EngineModel};
use super::judge::Judging;
use super::policy::Policy;
use super::presets::{Preset, PresetChanges};
use super::setup::{Setup, worker_rules};
use super::source::ReplaySource;
use super::sweep::Sweep;
use crate::logs::TokenizerOptions;

/// The traces to replay, and the settings. Defaults of drafts are those of a worker.
#[derive(Args, Clone, Debug, Serialize)]
#[command(group(ArgGroup::new("comparison").args(["policies", "engine_model"]).multiple(true)))]
pub struct ReplayOptions {
    /// Logs of calls, replayed in this order: files or folders. docs/logs.md lists the forms.
    #[arg(required = true, value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// Recorded calls that are known from the start and not measured. May be given several times.
    #[arg(long, value_name = "TRACE")]
    pub warm: Vec<PathBuf>,
    /// Know only the first N of the --warm calls.
    #[arg(long, value_name = "N", requires = "warm")]
    pub warm_docs: Option<usize>,
    /// How texts become tokens.
    #[command(flatten)]
    #[serde(flatten)]
    pub tokenizer: TokenizerOptions,
    /// Replay at most this many calls.
    #[arg(long, value_name = "N")]
    pub docs: Option<usize>,
    /// Sources of drafts [default: request,group,global, or the preset's].
    #[arg(long, value_enum, value_delimiter = ',')]
    pub sources: Option<Vec<ReplaySource>>,
    /// Draft by the rules of another system. --max-spec-tokens changes the length of its drafts; for `paper`, so do
    /// --alpha and --offset, and --sources and --linear change the rest.
    #[arg(
        long,
        value_enum,
        conflicts_with_all = ["min_token_prob", "max_pattern", "tree", "paths", "match_plus_draft", "samples"]
    )]
    pub preset: Option<Preset>,
    /// A pattern of p tokens may draft alpha * p + offset tokens: a number, or `auto`. Drafts then end by what is
    /// learnt. With a number here and for --min-token-prob, drafts of policies other than `goodput` are those of
    /// Algorithm 1.
    #[arg(long, value_name = "ALPHA|auto", value_parser = setting, default_value = "auto")]
    pub alpha: Setting,
    /// Constant part of the draft length; see --alpha [default: a worker's, or the preset's].
    #[arg(long, allow_negative_numbers = true)]
    pub offset: Option<f32>,
    /// Most draft tokens of a request in a step [default: a worker's, or the preset's].
    #[arg(long)]
    pub max_spec_tokens: Option<usize>,
    /// Leave out draft tokens that are less probable than this: a number, or `auto` for what pays beside as many
    /// requests.
    #[arg(long, value_name = "P|auto", value_parser = setting, default_value = "auto")]
    pub min_token_prob: Setting,
    /// Longest pattern that is looked up, tokens.
    #[arg(long, default_value_t = worker_rules().params.max_pattern)]
    pub max_pattern: u32,
    /// Draft a single chain.
    #[arg(long)]
    pub linear: bool,
    /// Draft a tree, best tokens first.
    #[arg(long, conflicts_with_all = ["linear", "paths"])]
    pub tree: bool,
    /// Draft up to K chains that may share a prefix.
    #[arg(long, value_name = "K", conflicts_with = "linear")]
    pub paths: Option<usize>,
    /// Limit a pattern and its draft together to this many tokens, to compare with an index of limited depth.
    #[arg(long, value_name = "CAP")]
    pub match_plus_draft: Option<u32>,
    /// Draft only from --warm calls and from the request's own text.
    #[arg(long)]
    pub frozen: bool,
    /// Requests in flight at once; those of one session run one after the other. Several numbers need --policies.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1")]
    pub concurrency: Vec<usize>,
    /// Seal finished outputs once the live part of an index has N tokens, and warm calls at once [default: never
    /// seal].
    #[arg(long, value_name = "N")]
    pub seal_tokens: Option<u64>,
    /// Occurrences of a pattern to read from sealed text, evenly spaced; 0 reads all.
    #[arg(long, value_name = "N", default_value_t = worker_rules().params.samples_max)]
    pub samples: usize,
    /// Compare these policies on a modelled engine; each replays the traces with its own memory [default with
    /// --engine-model: Refrain's policies, and --preset].
    #[arg(long, value_enum, value_name = "POLICY", value_delimiter = ',')]
    pub policies: Vec<Policy>,
    /// Model of the engine's step times, for --policies: a preset or a file [default: h100-8b].
    ///
    /// Presets: h100-8b, h100-8b-measured, h200-8b, a100-8b, l4-8b, rtx4090-8b (Llama-3.1-8B), h100-32b (Qwen3-32B),
    /// h200-70b (Llama-3.1-70B, FP8 weights), h100x4-70b (on four devices), and those of `refrain simulate
    /// --presets`. A file has the keys `weights_gb`, `parameters_b`, `kv_bytes_per_token`, `bandwidth_tb_per_s`,
    /// `compute_tflop_per_s`, and may have `bandwidth_efficiency` (0.8), `compute_efficiency` (0.6), `step_us`
    /// (1400), `request_us` (45), `token_us` (5), `tile_tokens` (64).
    #[arg(long, value_name = "NAME|FILE.toml")]
    pub engine_model: Option<String>,
    /// The engine's EAGLE-3 head: `acc=0.72,0.63,...,cost=0.06`, or `off`.
    ///
    /// `acc` has, for each position of the draft, the probability that its token is accepted if all earlier ones
    /// were. (If your engine reports rates over all drafts, divide each rate by the one before.) `cost` is the time
    /// of drafting one position, as a share of a plain step.
    #[arg(
        long,
        value_name = "off|acc=A,A,...[,cost=SHARE]",
        default_value_t = Eagle3::default(),
        requires = "comparison"
    )]
    pub eagle3: Eagle3,
    /// Most tokens of a step, drafts included, as `worker.step_tokens_max` [default: no limit].
    #[arg(long, value_name = "N", requires = "comparison")]
    pub step_tokens_max: Option<u32>,
    /// For the policy `score`: the SCORE that a suffix draft must exceed, or `auto` for the head's measured tokens
    /// per step. 0 never uses the head.
    #[arg(
        long,
        value_name = "TAU|auto",
        value_parser = threshold,
        default_value = "auto",
        requires = "comparison"
    )]
    #[serde(serialize_with = "serialize_threshold")]
    pub score_threshold: Threshold,
    /// Seed of the simulated head's luck.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "comparison")]
    pub seed: u64,
    /// Print for each policy how often drafted tokens were accepted, by their expected probability.
    #[arg(long, requires = "comparison")]
    #[serde(skip)]
    pub reliability: bool,
    /// Also print tokens per step for every N calls, for each compared policy. This shows how a memory grows or
    /// adapts.
    #[arg(long, value_name = "N")]
    pub window: Option<u64>,
    /// Also print what drafts brought by a length.
    #[arg(long, value_enum, value_name = "WHAT", value_delimiter = ',')]
    pub by: Vec<Breakdown>,
    /// Draft nothing in steps of more requests than this.
    #[arg(long, value_name = "N")]
    pub off_above_batch: Option<usize>,
    /// Replay with each of these values in turn, and print a row for each: alpha, min-token-prob, max-spec-tokens,
    /// concurrency, warm-docs, score-threshold or seed. Seeds also have a mean.
    #[arg(long, value_name = "KEY=A,B,...|KEY=FROM..TO")]
    #[serde(skip)]
    pub sweep: Option<Sweep>,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}

impl ReplayOptions {
    /// The same options with each value once, and with the defaults filled in. `policies` is empty if nothing is
    /// compared. Changes of a preset stay as they are.
    pub(super) fn settled(&self) -> Self {
        let mut settled = self.clone();
        settled.concurrency = once(&self.concurrency);
        settled.policies = match (&self.policies[..], &self.engine_model) {
            ([], Some(_)) => Policy::OWN
                .into_iter()
                .chain(self.preset.map(Policy::from))
                .collect(),
            (policies, _) => once(policies),
        };
        settled.by = once(&self.by);
        if self.preset.is_none() {
            let params = worker_rules().params;
            settled.sources.get_or_insert(ReplaySource::ALL.to_vec());
            settled.offset.get_or_insert(params.offset);
            settled
                .max_spec_tokens
                .get_or_insert(params.max_spec_tokens);
        }
        if !settled.policies.is_empty() {
            let name = || DEFAULT_ENGINE_MODEL.to_owned();
            settled.engine_model.get_or_insert_with(name);
        }
        settled
    }

    /// The policy that most of the report is about.
    pub(super) fn policy(&self) -> Policy {
        self.preset.map_or(Policy::Suffix, Policy::from)
    }

    pub(super) fn has(&self, source: ReplaySource) -> bool {
        let sources = self.sources.as_deref().unwrap_or(&ReplaySource::ALL);
        sources.contains(&source)
    }

    /// The settings of the replay by the policy that most of the report is about.
    pub(super) fn setup(&self) -> anyhow::Result<Setup> {
        let engine = self.engine_model.as_deref();
        let mut setup = Setup::with_worker_defaults(Judging {
            policy: self.policy(),
            engine: EngineModel::load(engine.unwrap_or(DEFAULT_ENGINE_MODEL))?,
            // Without a comparison there is no engine, so it has no head.
            head: match self.policies.is_empty() {
                true => Eagle3::absent(),
                false => self.eagle3.clone(),
            },
            seed: self.seed,
            threshold: self.score_threshold,
            step_tokens_max: self.step_tokens_max.unwrap_or(u32::MAX),
        });
        let Setup {
            indexes, serving, ..
        } = &mut setup;
        indexes.index.pattern_tokens_max = self.max_pattern;
        indexes.global = self.has(ReplaySource::Global);
        indexes.groups = self.has(ReplaySource::Group);
        indexes.seal_tokens = self.seal_tokens;
        serving.request = self.has(ReplaySource::Request);
        serving.frozen = self.frozen;
        serving.concurrency = self.concurrency[0];
        serving.window = self.window;
        serving.rules.alpha = self.alpha;
        serving.rules.min_token_prob = self.min_token_prob;
        let params = &mut serving.rules.params;
        match (self.linear, self.tree, self.paths) {
            (true, ..) => params.expansion = Expansion::Linear,
            (_, true, _) => params.expansion = Expansion::Tree,
            (.., Some(paths)) => params.expansion = Expansion::Paths(paths),
            (false, false, None) => {}
        }
        params.offset = self.offset.unwrap_or(params.offset);
        params.max_spec_tokens = self.max_spec_tokens.unwrap_or(params.max_spec_tokens);
        params.max_pattern = self.max_pattern;
        params.match_plus_draft_cap = self.match_plus_draft;
        params.samples_max = match self.samples {
            0 => usize::MAX,
            samples => samples,
        };
        setup.off_above_batch = self.off_above_batch;
        setup.changes = self.preset.map(|preset| {
            let changes = PresetChanges {
                alpha: match self.alpha {
                    Setting::Fixed(alpha) => Some(alpha),
                    Setting::Auto => None,
                },
                offset: self.offset,
                draft_tokens: self.max_spec_tokens,
                is_linear: self.linear,
                sources: self.sources.clone(),
            };
            (Policy::from(preset), changes)
        });
        Ok(setup)
    }

    pub(super) fn check(&self) -> anyhow::Result<()> {
        ensure!(
            !self.concurrency.contains(&0),
            "--concurrency must be at least 1"
        );
        ensure!(
            self.concurrency.len() == 1 || !self.policies.is_empty(),
            "several numbers for --concurrency need --policies"
        );
        ensure!(self.window != Some(0), "--window must be at least 1");
        ensure!(self.paths != Some(0), "--paths must be at least 1");
        ensure!(self.max_pattern > 0, "--max-pattern must be at least 1");
        let offset = self.offset.unwrap_or_default();
        ensure!(
            offset.is_finite(),
            "--offset must be a number, not {offset}"
        );
        let copies = matches!(self.preset, Some(Preset::Sam | Preset::Pld));
        let has_rules = self.alpha != Setting::Auto || self.offset.is_some() || self.linear;
        ensure!(
            !copies || !(has_rules || self.sources.is_some()),
            "of the rules of drafts, only --max-spec-tokens changes the presets sam and pld"
        );
        Ok(())
    }
}

/// The values without repeats, in their order.
pub(crate) fn once<T: Clone + PartialEq>(values: &[T]) -> Vec<T> {
    let mut once = Vec::with_capacity(values.len());
    for value in values {
        if !once.contains(value) {
            once.push(value.clone());
        }
    }
    once
}

fn setting(text: &str) -> Result<Setting, String> {
    if text == "auto" {
        return Ok(Setting::Auto);
    }
    match text.parse() {
        Ok(value) if f32::is_finite(value) => Ok(Setting::Fixed(value)),
        _ => Err("must be `auto` or a number".into()),
    }
}

fn threshold(text: &str) -> Result<Threshold, String> {
    if text == "auto" {
        return Ok(Threshold::Auto);
    }
    match text.parse() {
        Ok(score) if f32::is_finite(score) && score >= 0.0 => Ok(Threshold::Fixed(score)),
        _ => Err("must be `auto` or a number of at least 0".into()),
    }
}

fn serialize_threshold<S: Serializer>(
    threshold: &Threshold,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match threshold {
        Threshold::Auto => serializer.serialize_str("auto"),
        Threshold::Fixed(score) => serializer.serialize_f32(*score),
    }
}
