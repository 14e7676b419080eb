//! `refrain replay`: what drafting would be worth on recorded calls, without an engine.
//!
//! The recording stands in for the model: a draft is accepted as far as the recorded output goes along with it, and the
//! recording's next token is the one that the model would have added. Everything else is what a worker does: a
//! request drafts from its own text, from the samples of its group and from its namespace; what it says can be
//! drafted from at once; requests under way at once take their steps together.
//!
//! Counts follow from the traces and settings alone; times are this machine's.

mod clock;
mod memory;
mod namespace;
mod report;
mod serve;
#[cfg(test)]
mod tests;
pub(crate) mod trace;

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::{Args, ValueEnum};
use refrain_speculation::{Expansion, ProposeParams};
use refrain_suffix_index::IndexConfig;
use refrain_tokenization::Tokenizer;
use serde::Serialize;

pub use clock::DurationsUs;
use memory::{Memory, MemoryConfig};
pub use report::{ReplayReport, SourceCounts};
use serve::{Serving, serve};
use trace::Traces;

/// What to replay, and how.
#[derive(Args, Clone, Debug, Serialize)]
pub struct ReplayOptions {
    /// Files of recorded calls, in this order: a JSON object per line, plain or zstd.
    #[arg(required = true, value_name = "TRACE")]
    pub traces: Vec<PathBuf>,
    /// Recorded calls that are known from the start and not measured; may be given several times.
    #[arg(long, value_name = "TRACE")]
    pub warm: Vec<PathBuf>,
    /// Turns text into tokens, for traces that hold text.
    #[arg(long, value_name = "TOKENIZER.JSON")]
    pub tokenizer: Option<PathBuf>,
    /// Replay no more calls than this.
    #[arg(long, value_name = "N")]
    pub docs: Option<usize>,
    /// What to draft from.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "request,group,global"
    )]
    pub sources: Vec<ReplaySource>,
    /// A pattern of p tokens may draft alpha * p + offset tokens.
    #[arg(long, default_value_t = ProposeParams::default().alpha)]
    pub alpha: f32,
    /// See --alpha.
    #[arg(long, default_value_t = ProposeParams::default().offset)]
    pub offset: f32,
    /// Most draft tokens of a step.
    #[arg(long, default_value_t = ProposeParams::default().max_spec_tokens)]
    pub max_spec_tokens: usize,
    /// Tokens less probable than this are not drafted.
    #[arg(long, default_value_t = ProposeParams::default().min_token_prob)]
    pub min_token_prob: f32,
    /// Longest pattern that is looked for, tokens.
    #[arg(long, default_value_t = ProposeParams::default().max_pattern)]
    pub max_pattern: u32,
    /// Draft one chain.
    #[arg(long)]
    pub linear: bool,
    /// Draft a tree, best tokens first; the default.
    #[arg(long, conflicts_with_all = ["linear", "paths"])]
    #[serde(skip)]
    pub tree: bool,
    /// Draft up to K chains that may share their beginnings.
    #[arg(long, value_name = "K", conflicts_with = "linear")]
    pub paths: Option<usize>,
    /// Most tokens of a pattern and its draft together, as in an index of limited depth; for comparison with one.
    #[arg(long, value_name = "CAP")]
    pub match_plus_draft: Option<u32>,
    /// Draft from nothing but what was known from the start, and from the request's own text.
    #[arg(long)]
    pub frozen: bool,
    /// Requests under way at once; those of one session come one after the other.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub concurrency: usize,
    /// Seal what is finished once the live part of an index has N tokens, and what is known from the start at
    /// once [default: everything stays live].
    #[arg(long, value_name = "N")]
    pub seal_tokens: Option<u64>,
    /// Occurrences of a pattern that are read from sealed text, evenly spaced; 0 reads all of them.
    #[arg(long, value_name = "N", default_value_t = ProposeParams::default().samples_max)]
    pub samples: usize,
    /// Print one JSON object instead of tables.
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}

/// Where drafts are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ReplaySource {
    /// The request's own prompt and output so far.
    Request,
    /// The samples of the request's group.
    Group,
    /// All outputs of the tenant.
    Global,
}

impl ReplayOptions {
    fn has(&self, source: ReplaySource) -> bool {
        self.sources.contains(&source)
    }

    fn index(&self) -> IndexConfig {
        IndexConfig {
            pattern_tokens_max: self.max_pattern,
            ..IndexConfig::default()
        }
    }

    fn serving(&self) -> Serving {
        Serving {
            params: ProposeParams {
                expansion: match (self.linear, self.paths) {
                    (true, _) => Expansion::Linear,
                    (false, Some(paths)) => Expansion::Paths(paths),
                    (false, None) => Expansion::Tree,
                },
                alpha: self.alpha,
                offset: self.offset,
                max_spec_tokens: self.max_spec_tokens,
                min_token_prob: self.min_token_prob,
                max_pattern: self.max_pattern,
                match_plus_draft_cap: self.match_plus_draft,
                samples_max: match self.samples {
                    0 => usize::MAX,
                    samples => samples,
                },
                ..ProposeParams::default()
            },
            request: self.has(ReplaySource::Request),
            frozen: self.frozen,
            concurrency: self.concurrency,
        }
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(self.concurrency > 0, "--concurrency must be at least 1");
        ensure!(self.paths != Some(0), "--paths must be at least 1");
        ensure!(self.max_pattern > 0, "--max-pattern must be at least 1");
        for (name, value) in [
            ("--alpha", self.alpha),
            ("--offset", self.offset),
            ("--min-token-prob", self.min_token_prob),
        ] {
            ensure!(value.is_finite(), "{name} must be a number, not {value}");
        }
        Ok(())
    }
}

/// How far a replay is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Calls replayed.
    pub docs: u64,
    /// Steps taken.
    pub steps: u64,
    /// Tokens of the outputs.
    pub output_tokens: u64,
    /// Share of the work that is done, 0 to 1.
    pub share: f64,
}

/// Replays the traces. `progress` is told after each call.
///
/// # Errors
/// A setting that makes no sense, a file that cannot be read, a line that is no call (with file and line), or more
/// tokens than an index can hold.
pub fn run(
    options: &ReplayOptions,
    mut progress: impl FnMut(Progress),
) -> anyhow::Result<ReplayReport> {
    options.check()?;
    let tokenizer = options.tokenizer.as_ref().map(|path| {
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        let tokenizer =
            Tokenizer::from_bytes(&bytes).with_context(|| path.display().to_string())?;
        anyhow::Ok(Arc::new(tokenizer))
    });
    let tokenizer = tokenizer.transpose()?;
    let traces = Traces::new(&options.traces, tokenizer.clone())?;
    let mut memory = Memory::new(MemoryConfig {
        index: options.index(),
        global: options.has(ReplaySource::Global),
        groups: options.has(ReplaySource::Group),
        seal_tokens: options.seal_tokens,
    });
    for call in Traces::new(&options.warm, tokenizer)? {
        memory.add_known(&call?)?;
    }
    memory.warm_up()?;
    let start = Instant::now();
    let reading = traces.reading();
    let docs_max = options.docs.unwrap_or(usize::MAX);
    let tally = serve(
        &mut traces.take(docs_max),
        &mut memory,
        &options.serving(),
        |tally| {
            let total = tally.table.total();
            progress(Progress {
                docs: tally.docs,
                steps: total.steps,
                output_tokens: total.emitted,
                share: reading.share().max(tally.docs as f64 / docs_max as f64),
            });
        },
    )?;
    Ok(ReplayReport::new(options, &memory, &tally, start.elapsed()))
}

/// A line on the terminal that says how far a replay is; nothing where standard error is no terminal.
#[derive(Default)]
pub struct ProgressLine {
    shown: Option<Instant>,
}

impl ProgressLine {
    /// Writes it anew, if the last time is a while ago.
    pub fn show(&mut self, progress: Progress) {
        let is_due = |shown: Instant| shown.elapsed() >= Duration::from_millis(200);
        let mut stderr = std::io::stderr().lock();
        if self.shown.is_none_or(is_due) && stderr.is_terminal() {
            let Progress {
                docs,
                steps,
                output_tokens,
                share,
            } = progress;
            let _ = write!(
                stderr,
                "\r\x1b[K{:>3.0} %  {docs} calls, {output_tokens} tokens, {:.3} tokens per step",
                share * 100.0,
                output_tokens as f64 / steps.max(1) as f64
            );
            let _ = stderr.flush();
            self.shown = Some(Instant::now());
        }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if self.shown.is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
