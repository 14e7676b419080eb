//! `refrain simulate`: rollouts and conversations on several simulated instances, scheduled by the real scheduler.
//!
//! The scheduler's core ([`refrain_scheduler::core`]) takes the requests and decides their order and their instances.
//! Everything around it is simulated: the clock, the instances with their batches and KV caches, and the time of
//! their steps ([`EngineModel`](crate::replay::EngineModel)). The baseline `group-fifo` does without the scheduler.
//!
//! Read `mesh` first, which is the loop of events. `instance` is one engine, `desk` the scheduler, `drafting` what
//! drafts bring. `workload`, `lengths`, `presets` and `conversations` are the requests.
//!
//! A simulation depends on its options alone, not on this machine.

mod conversations;
mod course;
mod decoding;
mod desk;
mod drafting;
mod html;
mod instance;
mod job_progress;
mod lengths;
mod mesh;
mod options;
mod plan;
mod plot;
mod presets;
mod random;
mod report;
mod runs;
mod seat;
mod seeds;
mod shape;
#[cfg(test)]
mod tests;
mod token_drafts;
mod workload;

use anyhow::Context;

use crate::progress::ProgressLine;
use crate::text_table::print_report;

pub use course::Moment;
pub use options::{
    DraftRule, SimulateOptions, SimulatedDrafts, SimulatedPlacement, SimulatedPolicy,
};
pub use presets::WorkloadPreset;
pub(crate) use random::Random;
pub use report::{KvBounds, RunReport, SimulateReport, Spread, WorkloadReport};
pub use seeds::run;
pub use shape::Shape;

/// Runs `refrain simulate`, and prints its report.
///
/// # Errors
/// As [`run`], and a page that cannot be written.
pub fn command(options: &SimulateOptions) -> anyhow::Result<()> {
    let line = ProgressLine::default();
    let report = run(options, |share, message| line.show(Some(share), message))?;
    drop(line);
    if let Some(path) = &options.html {
        std::fs::write(path, html::html(&report)?).with_context(|| path.display().to_string())?;
    }
    Ok(print_report(&report, options.json, SimulateReport::table)?)
}
