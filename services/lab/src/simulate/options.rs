//! The options of `refrain simulate`.

use std::path::PathBuf;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use refrain_scheduler::core::{OrderPolicy, PlacementPolicy};
use serde::Serialize;

use super::presets::WorkloadPreset;
use super::shape::Shape;
use crate::logs::TokenizerOptions;
use crate::replay::DEFAULT_ENGINE_MODEL;

/// Most seeds of a command: all reports are held until the means are taken.
const SEEDS_MAX: u64 = 1_000;

/// The requests, the instances, and what to compare.
#[derive(Args, Clone, Debug, Serialize)]
pub struct SimulateOptions {
    /// Recorded calls, as `refrain replay` reads them. Calls with one `group` are samples of one prompt. Without a
    /// trace or preset, lengths are drawn.
    #[arg(value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// How texts become tokens.
    #[command(flatten)]
    #[serde(flatten)]
    pub tokenizer: TokenizerOptions,
    /// Seer's workloads, with drawn lengths; each is simulated by itself.
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with = "traces")]
    pub presets: Vec<WorkloadPreset>,
    /// Use at most this many calls of the traces.
    #[arg(long, value_name = "N")]
    pub docs: Option<usize>,
    /// Multiply recorded output lengths by this. Drafts then come from a model of acceptance, not from the text.
    #[arg(long, default_value_t = 1.0)]
    pub scale: f64,
    /// How requests get instances and turns.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "group-fifo,divided,context,auto,oracle"
    )]
    pub policies: Vec<SimulatedPolicy>,
    /// Serve the recorded calls as conversations, turn by turn, and compare these placements instead of policies.
    #[arg(long, value_enum, value_delimiter = ',', requires = "traces")]
    pub placements: Vec<SimulatedPlacement>,
    /// Drafts of the instances.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "off")]
    pub drafts: Vec<SimulatedDrafts>,
    /// How long drafts are.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "goodput")]
    pub draft_rules: Vec<DraftRule>,
    /// Tokens of a draft by the rule `fixed`.
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub draft_tokens: usize,
    /// Draft nothing in steps of more requests than this.
    #[arg(long, value_name = "N")]
    pub off_above_batch: Option<usize>,
    /// Chains of a draft: 1, 2 or 4.
    #[arg(long, value_name = "K", default_value_t = 1)]
    pub paths: usize,
    /// Share of each group's samples that an earlier run has made. Their lengths are known to `history` and `auto`,
    /// and drafts `history` read their text.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub history: f64,
    /// Control: give the samples of each group to other groups, at random.
    #[arg(long)]
    pub shuffle_groups: bool,
    /// Let the groups arrive in an order that the seed decides, not in that of the trace.
    #[arg(long)]
    pub shuffle_order: bool,
    /// Model of the instances' step times, as for `refrain replay` [default: the preset's, or h100-8b].
    #[arg(long, value_name = "NAME|FILE.toml")]
    pub engine_model: Option<String>,
    /// Instances [default: the preset's, or 4].
    #[arg(long, value_name = "N")]
    pub instances: Option<usize>,
    /// Most requests that an instance decodes at once [default: the preset's, or 64].
    #[arg(long, value_name = "N")]
    pub slots: Option<usize>,
    /// Tokens that the KV cache of an instance holds [default: the preset's, or 400000].
    #[arg(long, value_name = "N")]
    pub kv_tokens: Option<u64>,
    /// The same as a share of the text of all conversations, over all instances together.
    #[arg(
        long,
        value_name = "SHARE",
        requires = "placements",
        conflicts_with = "kv_tokens"
    )]
    pub kv_share: Option<f64>,
    /// Most tokens of a chunk [default: the preset's, or 2048]. `group-fifo` has no chunks.
    #[arg(long, value_name = "N")]
    pub chunk_tokens: Option<u32>,
    /// Bandwidth of an instance to a pool that keeps the KV of all requests, GB/s; 0 is no pool, so that a chunk
    /// elsewhere reads its context again [default: the preset's, or 0].
    #[arg(long, value_name = "GB/S")]
    pub pool_gb_per_s: Option<f64>,
    /// Most tokens of a step that reads contexts.
    #[arg(long, value_name = "N", default_value_t = 2_048)]
    pub prefill_tokens: u32,
    /// Groups whose lengths are drawn [default: the preset's, or 100].
    #[arg(long, value_name = "N")]
    pub groups: Option<usize>,
    /// Samples of each drawn group [default: the preset's, or 8].
    #[arg(long, value_name = "N")]
    pub group_size: Option<usize>,
    /// Mean of drawn lengths, tokens [default: the preset's, or 2000].
    #[arg(long, value_name = "N")]
    pub output_mean: Option<f64>,
    /// Longest output [default: the preset's, or 16384; for traces, the longest one].
    #[arg(long, value_name = "N")]
    pub output_max: Option<u32>,
    /// Prompt tokens where lengths are drawn.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    pub prompt_tokens: u32,
    /// Standard deviation of the logarithm of drawn lengths.
    #[arg(long, default_value_t = 1.0)]
    pub length_sigma: f64,
    /// Correlation of these logarithms within a group, 0 to 1.
    #[arg(long, default_value_t = 0.7)]
    pub group_correlation: f64,
    /// Conversations that go on at once.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub sessions: usize,
    /// Tell the scheduler which turns are of one conversation, as clients do that name their sessions.
    #[arg(long, requires = "placements")]
    pub session_names: bool,
    /// Mean pause before the next turn of a conversation, seconds.
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    pub think_s: f64,
    /// Time until other requests can draft from a token, milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 250.0)]
    pub feed_lag_ms: f64,
    /// Time to propose a draft for one request, microseconds.
    #[arg(long, value_name = "US", default_value_t = 10.0)]
    pub propose_us: f64,
    /// Seed of everything that is drawn.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Simulate with so many seeds, from --seed on. The report then has means, and the ranges of ratios and tails.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seeds: u64,
    /// Also write a page with pictures of the instances and of the tail to this file.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub html: Option<PathBuf>,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}

/// How requests get instances and turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum SimulatedPolicy {
    /// The baseline: whole groups are pinned to instances, which serve them in order of arrival, without chunks. A
    /// request that finds the KV cache full is recomputed later.
    GroupFifo,
    /// The scheduler, in order of arrival, chunk by chunk.
    Divided,
    /// The scheduler's order `context`.
    Context,
    /// The scheduler's order `history`; needs --history.
    History,
    /// The scheduler's order `auto`, with history if there is any.
    Auto,
    /// The longest first, by true lengths.
    Oracle,
}

impl SimulatedPolicy {
    /// The scheduler's order. `None`: there is no scheduler.
    pub(super) fn order(self) -> Option<OrderPolicy> {
        match self {
            SimulatedPolicy::GroupFifo => None,
            SimulatedPolicy::Divided => Some(OrderPolicy::Arrival),
            SimulatedPolicy::Context => Some(OrderPolicy::Context),
            SimulatedPolicy::History => Some(OrderPolicy::History),
            SimulatedPolicy::Auto => Some(OrderPolicy::Auto),
            SimulatedPolicy::Oracle => Some(OrderPolicy::Oracle),
        }
    }
}

/// How an instance is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum SimulatedPlacement {
    /// Each in turn.
    RoundRobin,
    /// The lowest busy share.
    LeastLoaded,
    /// The rule of SGLang's gateway.
    Sglang,
    /// The scheduler's usual policy: what the KV cache lacks, and the load.
    #[default]
    Kv,
}

impl SimulatedPlacement {
    pub(super) fn policy(self) -> PlacementPolicy {
        match self {
            SimulatedPlacement::RoundRobin => PlacementPolicy::RoundRobin,
            SimulatedPlacement::LeastLoaded => PlacementPolicy::LeastLoaded,
            SimulatedPlacement::Sglang => PlacementPolicy::CacheAware,
            SimulatedPlacement::Kv => PlacementPolicy::Kv,
        }
    }
}

/// The sources of drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum SimulatedDrafts {
    /// Nothing.
    Off,
    /// Their own text.
    Request,
    /// Their own text, and the samples of their group.
    Group,
    /// The same, and the group's samples of the earlier run.
    History,
}

/// How long drafts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DraftRule {
    /// Most tokens per second for the whole batch.
    Goodput,
    /// Seer's rule: one length for the batch.
    Mba,
    /// --draft-tokens, whatever the batch is.
    Fixed,
}

/// The name of a value on the command line.
pub(super) fn name(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

impl SimulateOptions {
    /// The shape of a preset, or the default one, with what the options name.
    pub(super) fn shape(&self, preset: Option<WorkloadPreset>) -> Shape {
        let base = preset.map_or_else(
            || Shape {
                engine_model: DEFAULT_ENGINE_MODEL.to_owned(),
                instances: 4,
                ranks: 1,
                groups: 100,
                group_size: 8,
                output_mean: 2_000.0,
                output_max: 16_384,
                slots: 64,
                kv_tokens: 400_000,
                chunk_tokens: 2_048,
                pool_gb_per_s: 0.0,
            },
            WorkloadPreset::shape,
        );
        Shape {
            engine_model: self.engine_model.clone().unwrap_or(base.engine_model),
            instances: self.instances.unwrap_or(base.instances),
            ranks: match self.instances {
                Some(instances) if !instances.is_multiple_of(base.ranks) => 1,
                _ => base.ranks,
            },
            groups: self.groups.unwrap_or(base.groups),
            group_size: self.group_size.unwrap_or(base.group_size),
            output_mean: self.output_mean.unwrap_or(base.output_mean),
            output_max: self.output_max.unwrap_or(base.output_max),
            slots: self.slots.unwrap_or(base.slots),
            kv_tokens: self.kv_tokens.unwrap_or(base.kv_tokens),
            chunk_tokens: self.chunk_tokens.unwrap_or(base.chunk_tokens),
            pool_gb_per_s: self.pool_gb_per_s.unwrap_or(base.pool_gb_per_s),
        }
    }

    pub(super) fn check(&self) -> anyhow::Result<()> {
        for (name, value) in [
            ("--instances", self.instances),
            ("--slots", self.slots),
            ("--groups", self.groups),
            ("--group-size", self.group_size),
            ("--sessions", Some(self.sessions)),
            ("--draft-tokens", Some(self.draft_tokens)),
        ] {
            ensure!(value != Some(0), "{name} must be at least 1");
        }
        ensure!(
            self.instances.is_none_or(|instances| instances <= 1_024)
                && self.slots.is_none_or(|slots| slots <= 4_096),
            "at most 1024 --instances and 4096 --slots can be simulated, the scheduler's limits"
        );
        ensure!(
            (1..=SEEDS_MAX).contains(&self.seeds),
            "--seeds must be from 1 to {SEEDS_MAX}"
        );
        ensure!(
            self.prefill_tokens > 0,
            "--prefill-tokens must be at least 1"
        );
        ensure!(
            self.chunk_tokens != Some(0),
            "--chunk-tokens must be at least 1"
        );
        ensure!(
            self.output_max != Some(0),
            "--output-max must be at least 1"
        );
        ensure!(
            [1, 2, 4].contains(&self.paths),
            "--paths must be 1, 2 or 4, not {}",
            self.paths
        );
        for (name, value, most) in [
            ("--scale", Some(self.scale), f64::MAX),
            ("--history", Some(self.history), 0.99),
            ("--group-correlation", Some(self.group_correlation), 1.0),
            ("--length-sigma", Some(self.length_sigma), 5.0),
            ("--think-s", Some(self.think_s), f64::MAX),
            ("--propose-us", Some(self.propose_us), f64::MAX),
            ("--feed-lag-ms", Some(self.feed_lag_ms), f64::MAX),
            ("--pool-gb-per-s", self.pool_gb_per_s, f64::MAX),
            ("--output-mean", self.output_mean, f64::MAX),
            ("--kv-share", self.kv_share, f64::MAX),
        ] {
            ensure!(
                value.is_none_or(|value| (0.0..=most).contains(&value)),
                "{name} must be from 0 to {most}"
            );
        }
        ensure!(self.scale > 0.0, "--scale must be more than 0");
        ensure!(
            self.history > 0.0 || !self.policies.contains(&SimulatedPolicy::History),
            "the policy history needs --history, the share of samples that an earlier run has made"
        );
        ensure!(
            self.history > 0.0 || !self.drafts.contains(&SimulatedDrafts::History),
            "drafts from history need --history, the share of samples that an earlier run has made"
        );
        ensure!(
            self.placements.is_empty() || self.drafts == [SimulatedDrafts::Off],
            "conversations are simulated without drafts; leave out --drafts"
        );
        Ok(())
    }
}
