//! `refrain analyze`: would drafting help on these recorded calls?
//!
//! The analysis answers in one sentence, with a range: how much faster drafting would make a modelled engine. It says
//! where the gain comes from, what simpler means would bring, and what to do next. For each workload and tenant, it
//! also says how predictable the text is, which alpha to set, and how much disk outputs take.
//!
//! Each workload of each tenant is replayed by itself, in order and from an empty memory, or a sample of its sessions
//! is. Drafts are made with a worker's default settings.
//!
//! [`AnalyzeReport`] has all of it, and the page shows it.

mod alpha;
mod answer;
mod bootstrap;
mod entropy;
mod experiments;
mod html;
mod options;
mod picture;
mod prompts;
mod repeats;
mod report;
mod sample;
mod speed;
#[cfg(test)]
mod tests;

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context;
use refrain_protocol::usage::{Period, hour_of};

use crate::logs::{LogTokenizer, Logs};
use crate::progress::ProgressLine;
use crate::replay::{ReplayProgress, run_in_parallel};
use crate::text_table::print_report;
use experiments::{Answers, Experiment};
use prompts::reused_tokens;
use repeats::{Origin, Repeats, repeats};
use report::PassageReport;
use sample::Sampler;
use speed::Row;

pub use alpha::{AlphaChoice, FixedAlpha};
pub use answer::{Answer, Verdict};
pub use bootstrap::Range;
pub(crate) use entropy::{ENTROPY_BANDS, entropy_of_calls};
pub use html::html;
pub use options::AnalyzeOptions;
pub use repeats::Origins;
pub use report::{AnalyzeReport, WorkloadReport};
pub use speed::{MemoryPoint, SpeedReport};

/// Passages that are shown.
const PASSAGES: usize = 3;

/// Runs `refrain analyze`, and prints its report.
///
/// # Errors
/// As [`run`], and a page that cannot be written.
pub fn command(options: &AnalyzeOptions) -> anyhow::Result<()> {
    let line = ProgressLine::default();
    let mut report = run(options, |progress| progress.show_on(&line))?;
    drop(line);
    report.date = today();
    let command: Vec<String> = std::env::args().skip(1).collect();
    report.command = format!("refrain {}", command.join(" "));
    if let Some(path) = &options.html {
        std::fs::write(path, html(&report)).with_context(|| path.display().to_string())?;
    }
    Ok(print_report(&report, options.json, AnalyzeReport::table)?)
}

/// The date in UTC.
fn today() -> String {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
    let hour = hour_of(since_1970.map_or(0, |since| since.as_secs()));
    let mut date = Period::Day.start_text(Period::Day.number(hour));
    date.truncate("2026-01-31".len());
    date
}

/// Analyzes the logs. `progress` receives the progress of all replays together.
///
/// # Errors
/// An invalid setting, a file that cannot be read, or a line that is not a call (with file and line).
pub fn run(
    options: &AnalyzeOptions,
    progress: impl FnMut(ReplayProgress) + Send,
) -> anyhow::Result<AnalyzeReport> {
    let options = &options.settled();
    options.check()?;
    let setups = options.setups()?;
    let tokenizer = options.tokenizer.load()?;
    let mut sampler = Sampler::new(options.rows, options.docs, options.sample_tokens);
    let mut logs = Logs::open(&options.logs, tokenizer.clone())?;
    while let Some(call) = logs.next_logged()? {
        // Turning text into tokens takes most of the time, and most calls of a long log are only counted.
        match sampler.keeps(&call.head) {
            true => sampler.add(logs.encoded(call)?),
            false => {
                sampler.count(&call.head, logs.counted(&call));
            }
        }
    }
    let span_s = sampler.span_s();
    let workloads = sampler.into_workloads();
    let experiments = Experiment::all(options);
    let pieces = workloads.len() * experiments.len();
    let run_piece = |piece: usize, progress: &dyn Fn(ReplayProgress)| {
        let workload = &workloads[piece / experiments.len()];
        let experiment = experiments[piece % experiments.len()];
        experiment.run(workload, &setups, options, progress)
    };
    let mut outcomes = run_in_parallel((0..pieces).collect(), run_piece, progress)?.into_iter();
    let answers: Vec<Answers> = workloads
        .iter()
        .map(|_| Answers(experiments.iter().copied().zip(&mut outcomes).collect()))
        .collect();
    let rows: Vec<(Row<'_>, Repeats)> = workloads
        .iter()
        .zip(&answers)
        .map(|(workload, answers)| {
            let row = Row {
                workload,
                answers,
                engines: setups.iter().map(|setup| &setup.judging.engine).collect(),
                reused: reused_tokens(workload),
            };
            (row, repeats(workload))
        })
        .collect();
    // Tokens that the log has itself can be shown only by the model's own tokenizer.
    let is_shown = !options.private && (logs.has_texts() || options.tokenizer.tokenizer.is_some());
    let shown = is_shown.then(|| passages(&rows, &tokenizer));
    Ok(AnalyzeReport::new(
        &rows,
        span_s,
        shown.unwrap_or_default(),
        logs.summary(),
        options,
    ))
}

/// For each origin, the passage with most tokens from there.
fn passages(rows: &[(Row<'_>, Repeats)], tokenizer: &LogTokenizer) -> Vec<PassageReport> {
    let best = |origin: Origin| {
        let of_rows = rows.iter().flat_map(|(row, repeats)| {
            let passages = repeats.passages.iter();
            passages.map(move |(count, passage)| (*count, row.workload, passage))
        });
        let of_origin = of_rows.filter(|(.., passage)| passage.of == origin);
        of_origin.max_by_key(|(count, ..)| *count)
    };
    let found = [Origin::Session, Origin::Group, Origin::Others, Origin::Call].into_iter();
    let found = found.filter_map(best).take(PASSAGES);
    let shown = found.filter_map(|(_, workload, passage)| {
        let parts = passage.parts.iter();
        let parts = parts.map(|(origin, tokens)| anyhow::Ok((*origin, tokenizer.decode(tokens)?)));
        Some(PassageReport {
            row: workload.name(),
            origin: passage.of,
            // A server may have gone. The figures are worth more than a passage.
            parts: parts.collect::<Result<_, _>>().ok()?,
        })
    });
    shown.collect()
}
