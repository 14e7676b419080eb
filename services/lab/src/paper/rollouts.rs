//! Simulated rollouts of an experiment: each workload with several settings, for each seed.

use std::path::PathBuf;

use super::input::Input;
use super::replays::parsed;
use super::report::Cell;
use crate::replay::{ReplayProgress, run_in_parallel};
use crate::simulate::{self, RunReport, SimulateOptions};

/// Seer's workloads, and their names in the paper.
const PRESETS: [(&str, &str); 3] = [
    ("seer-moonlight", "Moonlight"),
    ("seer-qwen2vl", "Qwen2-VL-72B"),
    ("seer-kimi", "Kimi-K2"),
];
/// Recorded samples are few, so they are served by small instances.
const SMALL: &str = "--slots 16 --kv-tokens 40000 --chunk-tokens 256 --shuffle-order";
/// Samples of a group, by which --docs limits drawn groups.
const GROUP_SIZE: usize = 8;

/// A workload of rollouts.
#[derive(Clone, Debug)]
pub(super) struct Rollouts {
    /// Its number among Seer's workloads; `None` for a trace.
    pub(super) number: Option<usize>,
    pub(super) name: String,
    options: String,
    traces: Vec<PathBuf>,
}

/// The traces, or Seer's workloads.
pub(super) fn workloads(input: &Input<'_>) -> Vec<Rollouts> {
    if input.is_recorded() {
        let traces = input.options.traces.iter().map(|path| {
            let name = path.file_name().unwrap_or(path.as_os_str());
            Rollouts {
                number: None,
                name: name.to_string_lossy().into_owned(),
                options: SMALL.to_owned(),
                traces: vec![path.clone()],
            }
        });
        return traces.collect();
    }
    let groups = input.options.docs.map_or_else(String::new, |docs| {
        format!("--groups {}", (docs / GROUP_SIZE).max(1))
    });
    let presets = PRESETS.into_iter().enumerate();
    let preset = |(number, (preset, name)): (usize, (&str, &str))| Rollouts {
        number: Some(number),
        name: name.to_owned(),
        options: format!("--presets {preset} {groups}"),
        traces: Vec::new(),
    };
    presets.map(preset).collect()
}

impl Rollouts {
    /// The workload of one engine whose runs have a course that can be read: Qwen2-VL, or the first trace.
    pub(super) fn of_course(input: &Input<'_>) -> Option<Self> {
        let mut all = workloads(input).into_iter();
        all.find(|rollouts| rollouts.number.is_none_or(|number| number == 1))
    }

    /// Simulates the workload with each of these options of `refrain simulate`, each for one simulation. Returns for
    /// each those of all seeds.
    pub(super) fn simulate(
        &self,
        input: &Input<'_>,
        cases: &[&str],
    ) -> anyhow::Result<Vec<Vec<RunReport>>> {
        let seeds = input.options.seeds as usize;
        let run_one = |piece: usize, progress: &dyn Fn(ReplayProgress)| {
            let words = format!("{} {}", self.options, cases[piece / seeds]);
            let mut options: SimulateOptions = parsed(&words)?;
            options.traces.clone_from(&self.traces);
            options.tokenizer.clone_from(&input.options.tokenizer);
            options.docs = input.options.docs;
            options.seed = 1 + (piece % seeds) as u64;
            let report = simulate::run(&options, |_, _| {})?;
            progress(ReplayProgress::done());
            anyhow::Ok(report.workloads.into_iter().flat_map(|of| of.runs))
        };
        let pieces = cases.len() * seeds;
        let runs = run_in_parallel((0..pieces).collect(), run_one, |progress| {
            let message = format!("{}: {pieces} simulations", self.name);
            input.line.show(Some(progress.share), message);
        })?;
        let runs: Vec<RunReport> = runs.into_iter().flatten().collect();
        Ok(runs.chunks(seeds).map(<[RunReport]>::to_vec).collect())
    }
}

/// A figure over the seeds.
pub(super) fn cell(runs: &[RunReport], value: impl Fn(&RunReport) -> f64) -> Option<Cell> {
    Cell::over(runs.iter().map(|run| Some(value(run))))
}

/// A figure of runs divided by that of other runs, seed by seed.
pub(super) fn ratio(
    runs: &[RunReport],
    to: &[RunReport],
    value: impl Fn(&RunReport) -> f64,
) -> Option<Cell> {
    let pairs = runs.iter().zip(to);
    Cell::over(pairs.map(|(run, to)| {
        let (run, to) = (value(run), value(to));
        (to > 0.0).then(|| run / to)
    }))
}
