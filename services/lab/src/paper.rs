//! `refrain paper`: the experiments of papers, on your recorded calls or on generated ones.
//!
//! Each experiment is a set of replays or simulations with fixed settings. Its report has the published figures beside
//! the measured ones. [`suffix_decoding`], [`seer`], [`sam`] and [`speculative_sampling`] are the papers; what a paper
//! says stands there as constants, with the version and the table that it is from. `input` says which calls are used,
//! and `replays` and `rollouts` carry the experiments out.
//!
//! Figures depend on the calls, the settings and the seeds alone, except for the times of Table 2 of SuffixDecoding.

mod generated;
mod input;
mod options;
mod picture;
mod replays;
mod report;
mod rollouts;
mod sam;
mod seer;
mod speculative_sampling;
mod suffix_decoding;
#[cfg(test)]
mod tests;

use anyhow::{Context, bail};

use crate::text_table::{print_report, text_table};
use input::Input;
use report::Findings;

pub use options::PaperOptions;
pub use report::{Cell, Column, PaperReport, Row};

/// A paper, in the version whose figures are shown.
#[derive(Debug)]
struct Paper {
    title: &'static str,
    version: &'static str,
    experiments: &'static [Experiment],
}

/// An experiment of a paper.
#[derive(Debug)]
struct Experiment {
    name: &'static str,
    /// Where it stands in the paper.
    place: &'static str,
    title: &'static str,
    /// What the paper says about it.
    claim: &'static str,
    needs: Needs,
    run: fn(&Input<'_>) -> anyhow::Result<Findings>,
}

impl Experiment {
    const fn new(
        name: &'static str,
        place: &'static str,
        title: &'static str,
        claim: &'static str,
        needs: Needs,
        run: fn(&Input<'_>) -> anyhow::Result<Findings>,
    ) -> Self {
        Experiment {
            name,
            place,
            title,
            claim,
            needs,
            run,
        }
    }
}

/// The calls of an experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    /// Recorded calls; without a trace they are generated.
    Calls,
    /// Recorded calls, and those of another workload as --warm.
    OtherCalls,
    /// Recorded samples of prompts, many of each.
    Groups,
    /// Recorded samples of prompts; without a trace the lengths of Seer's three workloads are drawn.
    Rollouts,
    /// None.
    Nothing,
}

impl Needs {
    fn in_words(self) -> &'static str {
        match self {
            Needs::Calls => "calls",
            Needs::OtherCalls => "calls, and others as --warm",
            Needs::Groups => "samples of prompts",
            Needs::Rollouts => "samples of prompts, or nothing",
            Needs::Nothing => "nothing",
        }
    }
}

/// All papers, in the order of the list.
const PAPERS: [&Paper; 4] = [
    &suffix_decoding::PAPER,
    &seer::PAPER,
    &sam::PAPER,
    &speculative_sampling::PAPER,
];

/// Runs `refrain paper`, and prints its list or its report.
///
/// # Errors
/// As [`run`], and a picture that cannot be drawn or written.
pub fn command(options: &PaperOptions) -> anyhow::Result<()> {
    if options.name == "list" {
        print!("{}", list());
        return Ok(());
    }
    let report = run(options)?;
    if let Some(path) = &options.svg {
        std::fs::write(path, picture::svg(&report)?).with_context(|| path.display().to_string())?;
    }
    if let Some(path) = &options.html {
        std::fs::write(path, picture::html(&report)?)
            .with_context(|| path.display().to_string())?;
    }
    Ok(print_report(&report, options.json, PaperReport::table)?)
}

/// Runs one experiment.
///
/// # Errors
/// An unknown name, an invalid setting, calls that cannot be read, or calls that the experiment cannot use.
pub fn run(options: &PaperOptions) -> anyhow::Result<PaperReport> {
    let all = PAPERS
        .iter()
        .flat_map(|paper| paper.experiments.iter().map(move |of| (*paper, of)));
    let mut named = all.filter(|(_, experiment)| experiment.name == options.name);
    let Some((paper, experiment)) = named.next() else {
        bail!(
            "there is no experiment {:?}; `refrain paper list` names them",
            options.name
        );
    };
    let input = Input::read(options, experiment.needs)?;
    let findings = (experiment.run)(&input)?;
    Ok(PaperReport {
        name: experiment.name,
        title: experiment.title,
        paper: paper.title,
        version: paper.version,
        place: experiment.place,
        claim: experiment.claim,
        data: input.in_words(experiment.needs),
        findings,
        settings: options.clone(),
    })
}

/// The experiments, for people.
fn list() -> String {
    let rows = PAPERS.iter().flat_map(|paper| {
        paper.experiments.iter().map(|experiment| {
            let place = format!("{}, {}", paper.title, experiment.place);
            vec![
                experiment.name.to_owned(),
                place,
                experiment.title.to_owned(),
                experiment.needs.in_words().to_owned(),
            ]
        })
    });
    text_table(4, &["name", "paper", "shows", "needs"], rows)
}
