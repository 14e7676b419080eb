//! `refrain replay`: what drafting would be worth on recorded calls, without an engine.
//!
//! The recording stands in for the model: a draft is accepted as far as the recorded output goes along with it, and the
//! recording's next token is the one that the model would have added. The rest is as at a worker: a request drafts from
//! its own text, from the samples of its group and from its namespace; what it says can be drafted from at once;
//! requests under way at once take their steps together; chances of drafts are learnt for each namespace apart.
//!
//! What a worker does and a replay does not: it spends no steps on trying out the head, no guard turns drafts off that
//! lose, the draft tokens of a step have no limit, nothing is evicted but groups, and prompts take no steps.
//!
//! With a modelled engine, policies are compared: what each chooses to draft, how many tokens it brings per second of
//! modelled step time ([`EngineModel`]), and what it expected ([`PolicyReport`]).
//!
//! Counts and modelled times follow from the traces and settings alone; other times are this machine's.

mod account;
mod clock;
mod compare;
mod cores;
mod eagle3;
mod engine_model;
mod judge;
mod memory;
mod namespace;
mod options;
mod presets;
mod report;
mod serve;
#[cfg(test)]
mod tests;
pub(crate) mod trace;
mod window;

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

pub use account::Reliability;
pub use clock::DurationsUs;
pub(crate) use compare::{Outcome, Setup};

pub(crate) use cores::on_cores;
pub use eagle3::Eagle3;
pub use engine_model::EngineModel;
pub(crate) use judge::Judging;
pub(crate) use memory::MemoryConfig;
pub use options::{Policy, ReplayOptions, ReplaySource};
pub(crate) use options::{once, worker_params};
pub(crate) use presets::Drafter;
pub use presets::Preset;
pub use report::{PolicyReport, ReplayReport, SourceCounts};
pub(crate) use serve::{Serving, Tally};
use trace::{Traces, tokenizer};
pub use window::Window;

/// The engine that policies are compared on unless another is named.
pub(crate) const ENGINE_MODEL: &str = "h100-8b";

/// How far a replay is, or several are together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
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
    let options = &options.settled();
    options.check()?;
    let tokenizer = tokenizer(options.tokenizer.as_deref())?;
    let setup = Setup {
        memory: options.memory(),
        serving: options.serving(),
        judging: Judging {
            policy: options.policy(),
            engine: EngineModel::load(options.engine_model.as_deref().unwrap_or(ENGINE_MODEL))?,
            head: options.head(),
            seed: options.seed,
            threshold: options.score_threshold,
            step_tokens_max: options.step_tokens_max.unwrap_or(u32::MAX),
        },
    };
    let runs = runs(options);
    // What remembers takes longest, so it goes first.
    let mut order: Vec<usize> = (0..runs.len()).collect();
    order.sort_by_key(|&run| !runs[run].0.remembers());
    let one = |run: usize, told: &dyn Fn(Progress)| {
        let (policy, concurrency) = runs[run];
        let known = Traces::new(&options.warm, tokenizer.clone())?;
        let traces = Traces::new(&options.traces, tokenizer.clone())?;
        let reading = traces.progress();
        let docs_max = options.docs.unwrap_or(usize::MAX);
        let setup = setup.with(policy, concurrency);
        setup.replay(known, traces.take(docs_max), |tally| {
            let total = tally.table.total();
            told(Progress {
                docs: tally.docs,
                steps: total.steps,
                output_tokens: total.emitted,
                share: reading.share().max(tally.docs as f64 / docs_max as f64),
            });
        })
    };
    let outcomes = on_cores(order, one, &mut progress)?;
    Ok(ReplayReport::new(options, &outcomes))
}

/// The replay that most of the report tells of; then those that are compared with it and with each other, plain
/// decoding among them, since speed-ups are measured against it.
fn runs(options: &ReplayOptions) -> Vec<(Policy, usize)> {
    let mut runs = vec![(options.policy(), options.concurrency[0])];
    if options.policies.is_empty() {
        return runs;
    }
    for &concurrency in &options.concurrency {
        for &policy in [Policy::Off].iter().chain(&options.policies) {
            if !runs.contains(&(policy, concurrency)) {
                runs.push((policy, concurrency));
            }
        }
    }
    runs
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
