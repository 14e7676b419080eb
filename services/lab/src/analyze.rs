//! `refrain analyze`: would it help? For each workload and tenant of recorded calls: how open their text is, what drafting
//! from memory would bring on a modelled engine, which settings suit it, and what a month of it takes to keep.
//!
//! Each workload of each tenant is replayed by itself, in order and from an empty memory, so what is predicted is the
//! beginning; [`Window`]s show how it grows. Drafts are made with a worker's default settings.

mod entropy;
mod html;
mod report;
mod rows;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use anyhow::ensure;
use clap::Args;
use refrain_speculation::draft::Expansion;
use refrain_speculation::router::Threshold;
use refrain_suffix_index::IndexConfig;
use serde::Serialize;

use crate::replay::trace::{Traces, tokenizer};
use crate::replay::{
    Drafter, ENGINE_MODEL, Eagle3, EngineModel, Judging, MemoryConfig, Outcome, Policy,
    PolicyReport, Progress, Serving, Setup, Window, on_cores, once, worker_params,
};

pub use html::html;
pub use report::{AnalyzeReport, Choice, RowReport};
use rows::{Row, Rows};

/// Values of alpha that are tried.
const ALPHAS: [f32; 4] = [0.5, 1.0, 2.0, 4.0];
/// Values of tau that are tried: 1 drafts wherever something is found.
const TAUS: [f32; 6] = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// Policies whose speed-up is predicted.
const POLICIES: [Policy; 3] = [Policy::Off, Policy::Suffix, Policy::Goodput];
/// Points of a curve over the calls.
const WINDOWS: u64 = 12;

/// What to analyze, and for which engine.
#[derive(Args, Clone, Debug, Serialize)]
pub struct AnalyzeOptions {
    /// Files of recorded calls, as `refrain replay` reads them; `workload` and `tenant` of a call tell rows apart.
    #[arg(required = true, value_name = "LOG")]
    pub logs: Vec<PathBuf>,
    /// Turns text into tokens, for logs that hold text.
    #[arg(long, value_name = "TOKENIZER.JSON")]
    pub tokenizer: Option<PathBuf>,
    /// What a step of the engine takes: a preset or a file, as for `refrain replay`.
    #[arg(long, value_name = "NAME|FILE.toml", default_value = ENGINE_MODEL)]
    pub engine_model: String,
    /// Requests at once. Settings are tried with the first number.
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "1,16,64"
    )]
    pub concurrency: Vec<usize>,
    /// The EAGLE-3 head of that engine, as for `refrain replay` [default: it has none].
    #[arg(long, value_name = "acc=A,A,...[,cost=SHARE]")]
    pub eagle3: Option<Eagle3>,
    /// Calls that are kept of each workload and tenant, the first ones.
    #[arg(long, value_name = "N", default_value_t = 2000)]
    pub docs: usize,
    /// Workloads and tenants that are told apart; what comes after them is one row more.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub rows: usize,
    /// Output tokens per second that a memory is to be kept of, for a month.
    #[arg(long, value_name = "N", default_value_t = 5000.0)]
    pub tokens_per_s: f64,
    /// Write a page with plots to this file as well.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    pub html: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    #[serde(skip)]
    pub json: bool,
}

/// What is asked of a replay.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Question {
    Policy(Policy, usize),
    Alpha(f32),
    Tau(f32),
    /// How large the index of all of it is.
    Size,
}

impl Question {
    /// What drafts with this alpha bring at so many requests. A worker's own alpha is that of the policy.
    fn alpha(alpha: f32, concurrency: usize) -> Self {
        if alpha == worker_params().alpha {
            Question::Policy(Policy::Suffix, concurrency)
        } else {
            Question::Alpha(alpha)
        }
    }
}

/// Analyzes the logs. `progress` is told of all replays together.
///
/// # Errors
/// A setting that makes no sense, a file that cannot be read, or a line that is no call (with file and line).
pub fn run(
    options: &AnalyzeOptions,
    progress: impl FnMut(Progress),
) -> anyhow::Result<AnalyzeReport> {
    let options = &AnalyzeOptions {
        concurrency: once(&options.concurrency),
        ..options.clone()
    };
    options.check()?;
    let setup = options.setup()?;
    let tokenizer = tokenizer(options.tokenizer.as_deref())?;
    let mut rows = Rows::new(options.rows, options.docs);
    for call in Traces::new(&options.logs, tokenizer)? {
        rows.add(call?);
    }
    let rows = rows.into_rows();
    let work: Vec<(usize, Question)> = (0..rows.len())
        .flat_map(|row| {
            options
                .questions()
                .into_iter()
                .map(move |question| (row, question))
        })
        .collect();
    let one = |piece: usize, told: &dyn Fn(Progress)| {
        let (row, question) = work[piece];
        ask(&rows[row], question, &setup, options.concurrency[0], told)
    };
    let outcomes = on_cores((0..work.len()).collect(), one, progress)?;
    let mut answers = work.into_iter().zip(outcomes).peekable();
    let mut reports = Vec::with_capacity(rows.len());
    for (at, row) in rows.iter().enumerate() {
        let mut of_row = Vec::new();
        while let Some(((_, question), outcome)) = answers.next_if(|((row, _), _)| *row == at) {
            of_row.push((question, outcome));
        }
        reports.push(RowReport::new(row, &of_row, options));
    }
    Ok(AnalyzeReport {
        rows: reports,
        settings: options.clone(),
    })
}

/// Replays a row's calls.
fn ask(
    row: &Row,
    question: Question,
    setup: &Setup,
    concurrency: usize,
    told: &dyn Fn(Progress),
) -> anyhow::Result<Outcome> {
    let calls = || row.calls.iter().cloned().map(Ok);
    let ended = |tally: &crate::replay::Tally| {
        let total = tally.table.total();
        told(Progress {
            docs: tally.docs,
            steps: total.steps,
            output_tokens: total.emitted,
            share: tally.docs as f64 / row.calls.len().max(1) as f64,
        });
    };
    let nothing = std::iter::empty();
    let mut setup = match question {
        Question::Policy(policy, concurrency) => setup.with(policy, concurrency),
        Question::Alpha(_) | Question::Size => setup.with(Policy::Suffix, concurrency),
        Question::Tau(_) => setup.with(Policy::Score, concurrency),
    };
    setup.serving.window = Some((row.calls.len() as u64).div_ceil(WINDOWS).max(1));
    match question {
        Question::Policy(..) => {}
        Question::Alpha(alpha) => setup.serving.params.alpha = alpha,
        Question::Tau(tau) => setup.judging.threshold = Threshold::Fixed(tau),
        Question::Size => {
            // What is known from the start goes into one segment.
            setup.memory.seal_tokens = Some(1);
            let outcome = setup.replay(calls(), nothing, ended)?;
            told(Progress {
                share: 1.0,
                ..Progress::default()
            });
            return Ok(outcome);
        }
    }
    setup.replay(nothing, calls(), ended)
}

impl AnalyzeOptions {
    fn check(&self) -> anyhow::Result<()> {
        ensure!(
            !self.concurrency.contains(&0),
            "--concurrency must be at least 1"
        );
        ensure!(self.docs > 0, "--docs must be at least 1");
        ensure!(self.rows > 0, "--rows must be at least 1");
        ensure!(
            self.tokens_per_s.is_finite() && self.tokens_per_s > 0.0,
            "--tokens-per-s must be more than 0, not {}",
            self.tokens_per_s
        );
        Ok(())
    }

    fn setup(&self) -> anyhow::Result<Setup> {
        let params = worker_params();
        Ok(Setup {
            memory: MemoryConfig {
                index: IndexConfig {
                    pattern_tokens_max: params.max_pattern,
                    ..IndexConfig::default()
                },
                global: true,
                groups: true,
                corpus: false,
                seal_tokens: None,
            },
            serving: Serving {
                drafter: Drafter::Suffix,
                params,
                request: true,
                shared: true,
                frozen: false,
                concurrency: self.concurrency[0],
                window: None,
            },
            judging: Judging {
                policy: Policy::Goodput,
                engine: EngineModel::load(&self.engine_model)?,
                head: self.eagle3.clone().unwrap_or_else(Eagle3::absent),
                seed: 1,
                threshold: Threshold::Auto,
                step_tokens_max: u32::MAX,
            },
        })
    }

    fn questions(&self) -> Vec<Question> {
        let mut questions = Vec::new();
        for &concurrency in &self.concurrency {
            questions.extend(POLICIES.map(|policy| Question::Policy(policy, concurrency)));
        }
        questions.extend(ALPHAS.map(|alpha| Question::alpha(alpha, self.concurrency[0])));
        questions.extend(TAUS.map(Question::Tau));
        questions.push(Question::Size);
        once(&questions)
    }

    /// What the figures hold for, in words.
    fn terms(&self) -> String {
        let params = worker_params();
        let shape = match params.expansion {
            Expansion::Linear => "one chain",
            Expansion::Tree | Expansion::Paths(_) => "a tree",
        };
        format!(
            "Speed-ups are those of `goodput` beside plain decoding on {}, by requests at once. They are of decoding alone: \
             prompts are left out, so a whole call gains less. Drafts are made as a worker makes them by default: {shape} of \
             at most {} tokens, none less likely than {}. Tokens per step, alpha and tau are at {} at once; GB a month at \
             {} output tokens per second.",
            self.engine_model,
            params.max_spec_tokens,
            params.min_token_prob,
            self.concurrency[0],
            self.tokens_per_s
        )
    }
}
