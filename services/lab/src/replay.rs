//! `refrain replay`: what drafting would bring on recorded calls, without an engine.
//!
//! The recording stands in for the model. A draft is accepted as far as it agrees with the recorded output, and the
//! recording's next token is the bonus token. The rest is as in a worker:
//!
//! * A request drafts from its own text, from the samples of its group, and from its namespace.
//! * Its output can be drafted from at once.
//! * Requests in flight take their steps together.
//! * Acceptance statistics are learnt per namespace.
//!
//! Unlike a worker, a replay evicts nothing but groups, and prompts take no steps.
//!
//! With a modelled engine, policies are compared: what each drafts, how many tokens it brings per second of modelled
//! step time ([`EngineModel`]), and what it expected ([`PolicyReport`]).
//!
//! Counts and modelled times depend on the traces and settings alone; other times are those of this machine.

mod account;
mod adaptive;
mod breakdown;
mod by_length;
mod clock;
mod counts;
mod eagle3;
mod engine_model;
mod judge;
mod mba;
mod namespace;
mod options;
mod parallel;
mod policy;
mod presets;
mod report;
mod serve;
mod setup;
mod shared_indexes;
mod source;
mod sweep;
mod sweep_report;
#[cfg(test)]
mod tests;
mod window;

use anyhow::ensure;
use parking_lot::Mutex;

use crate::logs::{LogSummary, Logs, RecordedCall, is_stdin};
use crate::progress::ProgressLine;
use crate::text_table::print_report;

pub use account::Reliability;
pub use breakdown::Breakdown;
pub use by_length::LengthRow;
pub use clock::DurationsUs;
pub use eagle3::Eagle3;
pub use engine_model::EngineModel;
pub(crate) use engine_model::{DEFAULT_ENGINE_MODEL, StepLoad};
pub(crate) use judge::{DraftRequest, Judge, Judging, StepDraft, VerifiedChoice};
pub(crate) use mba::{DRAFT_TOKENS_MAX, draft_tokens, expected_tokens};
pub use options::ReplayOptions;
pub(crate) use options::once;
pub use parallel::ReplayProgress;
pub(crate) use parallel::run_in_parallel;
pub use policy::Policy;
pub use presets::Preset;
pub use report::{PolicyReport, ReplayReport, SourceCounts};
pub(crate) use serve::{EndedCall, Tally};
pub(crate) use setup::{Outcome, Setup, worker_rules};
pub use shared_indexes::SharedIndexSizes;
pub use source::ReplaySource;
pub use sweep::{Sweep, SweepKey};
pub use sweep_report::{SweepReport, SweepRow};
pub use window::Window;

/// Runs `refrain replay`, and prints its report.
///
/// # Errors
/// As [`run`].
pub fn command(options: &ReplayOptions) -> anyhow::Result<()> {
    let line = ProgressLine::default();
    if let Some(sweep) = &options.sweep {
        let report = SweepReport::run(sweep, options, |options, done| {
            run(options, |progress| {
                let share = done + progress.share / sweep.values.len() as f64;
                ReplayProgress { share, ..progress }.show_on(&line);
            })
        })?;
        drop(line);
        return Ok(print_report(&report, options.json, SweepReport::table)?);
    }
    let report = run(options, |progress| progress.show_on(&line))?;
    drop(line);
    Ok(print_report(&report, options.json, |report| {
        let mut text = report.table();
        if options.reliability {
            text += &report.reliability_table();
        }
        text
    })?)
}

/// Replays the traces. `progress` is called after each call.
///
/// # Errors
/// An invalid setting, a file that cannot be read, a log without any call, or more tokens than an index can hold.
pub fn run(
    options: &ReplayOptions,
    progress: impl FnMut(ReplayProgress) + Send,
) -> anyhow::Result<ReplayReport> {
    let options = &options.settled();
    options.check()?;
    let read_twice = options
        .traces
        .iter()
        .chain(&options.warm)
        .any(|path| is_stdin(path));
    ensure!(
        !read_twice,
        "a replay reads its traces several times: name a file instead of `-`"
    );
    let tokenizer = options.tokenizer.load()?;
    let setup = options.setup()?;
    let runs = runs(options);
    // Policies with a memory take longest, so they begin first.
    let mut order: Vec<usize> = (0..runs.len()).collect();
    order.sort_by_key(|&run| !runs[run].0.remembers());
    let read = Mutex::new((LogSummary::default(), LogSummary::default()));
    let replay_one = |run: usize, progress: &dyn Fn(ReplayProgress)| {
        let (policy, concurrency) = runs[run];
        let mut known = Logs::open(&options.warm, tokenizer.clone())?;
        let mut traces = Logs::open(&options.traces, tokenizer.clone())?;
        let reading = traces.progress();
        let docs_max = options.docs.unwrap_or(usize::MAX);
        let setup = setup.with(policy, concurrency);
        let calls = traces.by_ref().take(docs_max);
        let warm_docs = options.warm_docs.unwrap_or(usize::MAX);
        let known_calls = known.by_ref().take(warm_docs);
        let outcome = setup.replay(known_calls, calls, |tally, _| {
            progress(tally.progress(reading.share().max(tally.docs as f64 / docs_max as f64)));
        })?;
        // All replays read the same.
        *read.lock() = (traces.summary(), known.summary());
        Ok(outcome)
    };
    let outcomes = run_in_parallel(order, replay_one, progress)?;
    Ok(ReplayReport::new(options, &outcomes, read.into_inner()))
}

/// Replays calls that are in memory by one policy, after those that are known, at the first number of requests. The
/// files that the options name are not read.
pub(crate) fn replay_in_memory(
    options: &ReplayOptions,
    policy: Policy,
    known: &[RecordedCall],
    calls: &[RecordedCall],
) -> anyhow::Result<Outcome> {
    let options = options.settled();
    options.check()?;
    let setup = options.setup()?.with(policy, options.concurrency[0]);
    let known = known.iter().cloned().map(Ok);
    setup.replay(known, calls.iter().cloned().map(Ok), |_, _| {})
}

/// The replays to run. Most of the report is about the first; the others are compared. Plain decoding is always among
/// the compared ones, because speed-ups are measured against it.
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
