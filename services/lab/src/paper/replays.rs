//! Replays of an experiment: the same calls with several settings, for each seed.

use std::collections::BTreeMap;

use anyhow::Context;
use clap::{Args, Command};

use super::input::{Calls, Input};
use super::report::{Cell, Column, Row};
use crate::replay::{
    Breakdown, LengthRow, Outcome, Policy, ReplayOptions, ReplayProgress, replay_in_memory,
    run_in_parallel,
};

/// One setting.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) policy: Policy,
    /// Options of `refrain replay`.
    pub(super) options: String,
    /// Know only so many of the known calls, the first ones.
    pub(super) known: usize,
}

/// The outcomes of a case, one for each seed, and of plain decoding beside it.
pub(super) struct Outcomes<'a> {
    case: &'a [Outcome],
    plain: &'a [Outcome],
}

/// The outcomes of all cases.
pub(super) struct Replays {
    seeds: usize,
    /// Those of plain decoding, then those of each case; each has one for each seed.
    outcomes: Vec<Outcome>,
}

impl Case {
    pub(super) fn new(policy: Policy, options: impl Into<String>) -> Self {
        Case {
            policy,
            options: options.into(),
            known: usize::MAX,
        }
    }

    /// The same case that knows fewer calls.
    pub(super) fn knowing(self, known: usize) -> Self {
        Case { known, ..self }
    }
}

impl Replays {
    /// Replays the calls of each seed with all cases.
    pub(super) fn run(
        input: &Input<'_>,
        seeds: impl Iterator<Item = u64>,
        calls: impl Fn(u64) -> Calls + Sync,
        cases: &[Case],
    ) -> anyhow::Result<Self> {
        let seeds: Vec<u64> = seeds.collect();
        let plain = Case::new(Policy::Off, "");
        let all: Vec<&Case> = std::iter::once(&plain).chain(cases).collect();
        let replay = |piece: usize, progress: &dyn Fn(ReplayProgress)| {
            let seed = seeds[piece % seeds.len()];
            let outcome = replay_case(all[piece / seeds.len()], seed, &calls(seed));
            progress(ReplayProgress::done());
            outcome
        };
        let pieces = all.len() * seeds.len();
        let outcomes = run_in_parallel((0..pieces).collect(), replay, |progress| {
            let message = format!("{pieces} replays");
            input.line.show(Some(progress.share), message);
        })?;
        Ok(Replays {
            seeds: seeds.len(),
            outcomes,
        })
    }

    /// The outcomes of each case, in order.
    pub(super) fn cases(&self) -> impl Iterator<Item = Outcomes<'_>> {
        let (plain, cases) = self.outcomes.split_at(self.seeds.min(self.outcomes.len()));
        let cases = cases.chunks(self.seeds.max(1));
        cases.map(move |case| Outcomes { case, plain })
    }
}

/// Replays the calls of a seed with one case.
pub(super) fn replay_case(case: &Case, seed: u64, calls: &Calls) -> anyhow::Result<Outcome> {
    let options: ReplayOptions = parsed(&format!(
        "calls.jsonl --engine-model h100-8b --seed {seed} {}",
        case.options
    ))?;
    let known = &calls.known[..calls.known.len().min(case.known)];
    replay_in_memory(&options, case.policy, known, &calls.replayed)
}

/// The options of another command, from its words.
pub(super) fn parsed<T: Args>(words: &str) -> anyhow::Result<T> {
    let command = T::augment_args(Command::new("paper").no_binary_name(true));
    let matches = command.try_get_matches_from(words.split_whitespace());
    let matches = matches.with_context(|| words.to_owned())?;
    Ok(T::from_arg_matches(&matches)?)
}

/// The usual columns of a replay.
pub(super) const COLUMNS: [Column; 4] = [
    Column::measured("tokens per step", 2),
    Column::measured("drafted per step", 2),
    Column::measured("acceptance", 3),
    Column::measured("speed-up", 2).drawn(),
];

impl Outcomes<'_> {
    /// A figure over the seeds.
    pub(super) fn cell(&self, value: impl Fn(&Outcome) -> Option<f64>) -> Option<Cell> {
        Cell::over(self.case.iter().map(value))
    }

    /// The counts by a length, a row for each range.
    pub(super) fn by(&self, what: Breakdown, values: &[fn(&LengthRow) -> Option<f64>]) -> Vec<Row> {
        let mut by_length: BTreeMap<u64, Vec<LengthRow>> = BTreeMap::new();
        for row in self
            .case
            .iter()
            .flat_map(|outcome| what.rows(&outcome.tally))
        {
            by_length.entry(row.from).or_default().push(row);
        }
        let row = |(from, of_seeds): (u64, Vec<LengthRow>)| {
            let cells = values
                .iter()
                .map(|value| Cell::over(of_seeds.iter().map(value)));
            Row::new(of_seeds[0].range(), cells.collect()).at(from as f64)
        };
        by_length.into_iter().map(row).collect()
    }

    /// Output tokens per second of the modelled engine, divided by those of plain decoding.
    pub(super) fn speedup(&self) -> Option<Cell> {
        let pairs = self.case.iter().zip(self.plain);
        Cell::over(pairs.map(|(case, plain)| {
            Some(case.goodput_tokens_per_s()? / plain.goodput_tokens_per_s()?)
        }))
    }

    /// Output tokens of a step.
    pub(super) fn tokens_per_step(&self) -> Option<Cell> {
        self.cell(|outcome| outcome.tally.table.total().accepted_length())
    }

    /// The share of drafted tokens that was accepted.
    pub(super) fn acceptance(&self) -> Option<Cell> {
        self.cell(|outcome| outcome.tally.table.total().acceptance_rate())
    }

    /// The cells of the usual columns.
    pub(super) fn cells(&self) -> Vec<Option<Cell>> {
        let drafted = self.cell(|outcome| {
            let total = outcome.tally.table.total();
            total.per_step(total.drafted as f64)
        });
        vec![
            self.tokens_per_step(),
            drafted,
            self.acceptance(),
            self.speedup(),
        ]
    }
}
