//! `refrain analyze`: would drafting help on these recorded calls?
//!
//! For each workload and tenant, the analysis says how predictable the text is, how much faster drafting would make a
//! modelled engine, which alpha to set, and how much disk a month of outputs takes.
//!
//! Each workload of each tenant is replayed by itself, in order and from an empty memory. The prediction is therefore
//! that of a beginning; [`Window`](crate::replay::Window)s show how it grows. Drafts are made with a worker's default
//! settings.

mod alpha;
mod entropy;
mod experiments;
mod html;
mod options;
mod report;
#[cfg(test)]
mod tests;
mod workloads;

use anyhow::Context;

use crate::progress::ProgressLine;
use crate::replay::trace::{Traces, tokenizer};
use crate::replay::{ReplayProgress, once, run_in_parallel};
use crate::text_table::print_report;
use experiments::Experiment;
use workloads::WorkloadSorter;

pub use alpha::{AlphaChoice, FixedAlpha};
pub(crate) use entropy::{ENTROPY_BANDS, empirical_entropy_bits};
pub use html::html;
pub use options::AnalyzeOptions;
pub use report::{AnalyzeReport, WorkloadReport};

/// Runs `refrain analyze`, and prints its report.
///
/// # Errors
/// As [`run`], and a page that cannot be written.
pub fn command(options: &AnalyzeOptions) -> anyhow::Result<()> {
    let line = ProgressLine::default();
    let report = run(options, |progress| progress.show_on(&line))?;
    drop(line);
    if let Some(path) = &options.html {
        std::fs::write(path, html(&report)?).with_context(|| path.display().to_string())?;
    }
    Ok(print_report(&report, options.json, AnalyzeReport::table)?)
}

/// Analyzes the logs. `progress` receives the progress of all replays together.
///
/// # Errors
/// An invalid setting, a file that cannot be read, or a line that is not a call (with file and line).
pub fn run(
    options: &AnalyzeOptions,
    progress: impl FnMut(ReplayProgress) + Send,
) -> anyhow::Result<AnalyzeReport> {
    let options = &AnalyzeOptions {
        concurrency: once(&options.concurrency),
        ..options.clone()
    };
    options.check()?;
    let setup = options.setup()?;
    let tokenizer = tokenizer(options.tokenizer.as_deref())?;
    let mut sorter = WorkloadSorter::new(options.rows, options.docs);
    for call in Traces::new(&options.logs, tokenizer)? {
        sorter.add(call?);
    }
    let workloads = sorter.into_workloads();
    let experiments = Experiment::all(options);
    let pieces = workloads.len() * experiments.len();
    let run_piece = |piece: usize, progress: &dyn Fn(ReplayProgress)| {
        let workload = &workloads[piece / experiments.len()];
        let experiment = experiments[piece % experiments.len()];
        experiment.run(workload, &setup, options.alpha_docs, progress)
    };
    let mut outcomes = run_in_parallel((0..pieces).collect(), run_piece, progress)?.into_iter();
    let rows = workloads.iter().map(|workload| {
        let answers: Vec<_> = experiments.iter().copied().zip(&mut outcomes).collect();
        WorkloadReport::new(workload, &answers, options)
    });
    Ok(AnalyzeReport {
        rows: rows.collect(),
        settings: options.clone(),
    })
}
