//! The calls of an experiment: recorded ones, or generated ones that differ by the seed.

use std::borrow::Cow;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use anyhow::ensure;

use super::generated::Kind;
use super::needs::Needs;
use super::options::PaperOptions;
use crate::logs::{Logs, RecordedCall};
use crate::progress::ProgressLine;

/// The input of an experiment.
pub(super) struct Input<'a> {
    pub(super) options: &'a PaperOptions,
    recorded: Vec<RecordedCall>,
    warm: Vec<RecordedCall>,
    pub(super) line: ProgressLine,
}

/// The calls of a seed.
#[derive(Clone, Debug, Default)]
pub(super) struct Calls {
    /// Calls that are known from the start.
    pub(super) known: Vec<RecordedCall>,
    /// The calls that are replayed.
    pub(super) replayed: Vec<RecordedCall>,
}

impl<'a> Input<'a> {
    /// Reads what the experiment needs.
    pub(super) fn read(options: &'a PaperOptions, needs: Needs) -> anyhow::Result<Self> {
        options.check()?;
        let tokenizer = options.tokenizer.load()?;
        let docs = options.docs.unwrap_or(usize::MAX);
        let read = |paths: &[PathBuf]| -> anyhow::Result<Vec<RecordedCall>> {
            let mut calls = Vec::new();
            for path in paths {
                let trace = Logs::open(std::slice::from_ref(path), tokenizer.clone())?;
                for call in trace.take(docs) {
                    calls.push(call?);
                }
            }
            Ok(calls)
        };
        let (mut recorded, mut warm) = (Vec::new(), Vec::new());
        if !matches!(needs, Needs::Rollouts | Needs::Nothing) {
            recorded = read(&options.traces)?;
            warm = read(&options.warm)?;
            ensure!(
                options.traces.is_empty() || !recorded.is_empty(),
                "the traces hold no calls"
            );
            ensure!(
                needs != Needs::OtherCalls || options.traces.is_empty() || !warm.is_empty(),
                "the experiment needs calls of another workload; name them with --warm"
            );
        }
        Ok(Input {
            options,
            recorded,
            warm,
            line: ProgressLine::default(),
        })
    }

    fn docs_max(&self) -> usize {
        self.options.docs.unwrap_or(usize::MAX)
    }

    /// Whether calls are recorded. Otherwise the seed generates them.
    pub(super) fn is_recorded(&self) -> bool {
        !self.options.traces.is_empty()
    }

    /// The seeds. There is one where nothing is drawn.
    pub(super) fn seeds(&self, draws: bool) -> RangeInclusive<u64> {
        match draws || !self.is_recorded() {
            true => 1..=self.options.seeds,
            false => 1..=1,
        }
    }

    /// The recorded calls, or generated ones of this kind.
    pub(super) fn calls(&self, kind: Kind, seed: u64) -> Cow<'_, [RecordedCall]> {
        match self.is_recorded() {
            true => Cow::Borrowed(&self.recorded),
            false => Cow::Owned(kind.calls(seed, self.docs_max())),
        }
    }

    /// All calls after the warm ones.
    pub(super) fn after_warm(&self, kind: Kind, seed: u64) -> Calls {
        Calls {
            known: self.warm.clone(),
            replayed: self.calls(kind, seed).into_owned(),
        }
    }

    /// The last quarter of the calls, to be replayed after the warm calls, or after those before it if there are
    /// none.
    pub(super) fn last_quarter(&self, kind: Kind, seed: u64) -> Calls {
        let mut calls = self.quarters(kind, seed);
        if !self.warm.is_empty() {
            calls.known.clone_from(&self.warm);
        }
        calls
    }

    /// The last quarter of the calls, to be replayed after those before it.
    pub(super) fn quarters(&self, kind: Kind, seed: u64) -> Calls {
        let mut known = self.calls(kind, seed).into_owned();
        let replayed = known.split_off(known.len() - known.len().div_ceil(4));
        Calls { known, replayed }
    }

    /// The calls of another workload.
    pub(super) fn other(&self, kind: Kind, seed: u64) -> Cow<'_, [RecordedCall]> {
        match self.is_recorded() {
            true => Cow::Borrowed(&self.warm),
            false => Cow::Owned(kind.calls(seed, self.docs_max())),
        }
    }

    /// The calls of each workload, in the order in which these first occur.
    pub(super) fn by_workload(&self, seed: u64) -> Vec<(String, Vec<RecordedCall>)> {
        let kinds = [Kind::Agents, Kind::OpenText, Kind::Samples];
        let mut workloads: Vec<(String, Vec<RecordedCall>)> = Vec::new();
        let all = match self.is_recorded() {
            true => self.recorded.clone(),
            false => (kinds.iter())
                .flat_map(|kind| kind.calls(seed, self.docs_max()))
                .collect(),
        };
        for call in all {
            let name = call.workload.clone();
            let name = name.unwrap_or_else(|| "(unnamed)".to_owned());
            match workloads.iter_mut().find(|(of, _)| *of == name) {
                Some((_, calls)) => calls.push(call),
                None => workloads.push((name, vec![call])),
            }
        }
        workloads
    }

    /// The calls of the workload with this number.
    pub(super) fn of_workload(&self, number: usize, seed: u64) -> Vec<RecordedCall> {
        let workload = self.by_workload(seed).into_iter().nth(number);
        workload.map_or_else(Vec::new, |(_, calls)| calls)
    }

    /// Says which calls were used.
    pub(super) fn in_words(&self, needs: Needs) -> String {
        let names = |paths: &[PathBuf]| {
            let names = paths.iter().map(|path| path.display().to_string());
            names.collect::<Vec<_>>().join(", ")
        };
        match (needs, self.is_recorded()) {
            (Needs::Nothing, _) => format!("drawn, seeds 1 to {}", self.options.seeds),
            (_, true) if self.warm.is_empty() => names(&self.options.traces),
            (_, true) => format!(
                "{}, after {}",
                names(&self.options.traces),
                names(&self.options.warm)
            ),
            (Needs::Rollouts, false) => format!(
                "the workloads of the paper with drawn lengths, seeds 1 to {}",
                self.options.seeds
            ),
            (_, false) => format!("generated calls, seeds 1 to {}", self.options.seeds),
        }
    }
}
