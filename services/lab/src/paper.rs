//! `refrain paper`: the experiments of papers, on your recorded calls or on generated ones.
//!
//! Each experiment is a set of replays or simulations with fixed settings. Its report has the published figures
//! beside the measured ones. Each paper has a file, such as `suffix_decoding`. There stand its figures as constants,
//! with the version and the table that they are from. `input` says which calls are used, and `replays` and `rollouts`
//! carry the experiments out.
//!
//! Figures depend on the calls, the settings and the seeds alone, except for the times of Table 2 of SuffixDecoding.

mod experiment;
mod generated;
mod input;
mod needs;
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
use experiment::Paper;
use input::Input;

pub use options::PaperOptions;
pub use report::{Cell, Column, PaperReport, Row};

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
