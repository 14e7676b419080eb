//! Replays with several values of one option, a row for each.

use refrain_speculation::draft::Setting;
use refrain_speculation::router::Threshold;
use serde::Serialize;

use super::options::ReplayOptions;
use super::report::ReplayReport;
use super::sweep::{Sweep, SweepKey};
use crate::text_table::{number, text_table};

/// The report of all values.
#[derive(Clone, Debug, Serialize)]
pub struct SweepReport {
    /// The option.
    pub key: SweepKey,
    /// Its values, in order.
    pub rows: Vec<SweepRow>,
}

/// The replay with one value.
#[derive(Clone, Debug, Serialize)]
pub struct SweepRow {
    /// The value.
    pub value: f64,
    /// Its report.
    pub report: ReplayReport,
}

impl SweepReport {
    /// Replays with each value. `replay` also gets the share of the replays before it.
    pub(super) fn run(
        sweep: &Sweep,
        options: &ReplayOptions,
        mut replay: impl FnMut(&ReplayOptions, f64) -> anyhow::Result<ReplayReport>,
    ) -> anyhow::Result<Self> {
        let count = sweep.values.len() as f64;
        let rows = sweep.values.iter().enumerate().map(|(nth, &value)| {
            let report = replay(&set(sweep.key, options, value), nth as f64 / count)?;
            Ok(SweepRow { value, report })
        });
        Ok(SweepReport {
            key: sweep.key,
            rows: rows.collect::<anyhow::Result<_>>()?,
        })
    }

    /// The figures of the first policy, and the speed-ups of all, for people.
    pub(super) fn table(&self) -> String {
        let names = self.rows.iter().flat_map(|row| &row.report.policies);
        let mut names: Vec<String> = names.map(|policy| policy.policy.name()).collect();
        names.sort();
        names.dedup();
        let mut head: Vec<String> = vec![self.key.name()];
        head.extend(["tokens per step", "drafted", "rate"].map(str::to_owned));
        head.extend(names.iter().map(|name| format!("{name}, speed-up")));
        let figures = |report: &ReplayReport| -> Vec<Option<f64>> {
            let mut figures = vec![
                report.tokens_per_step,
                report.drafted_per_step,
                report.acceptance_rate,
            ];
            figures.extend(names.iter().map(|name| {
                let mut policies = report.policies.iter();
                policies.find(|row| row.policy.name() == *name)?.speedup
            }));
            figures
        };
        let rows: Vec<Vec<Option<f64>>> =
            self.rows.iter().map(|row| figures(&row.report)).collect();
        let line = |name: String, figures: &[Option<f64>]| {
            let cells = figures.iter().map(|figure| number(*figure, 3));
            std::iter::once(name).chain(cells).collect::<Vec<String>>()
        };
        let mut lines: Vec<Vec<String>> = (self.rows.iter().zip(&rows))
            .map(|(row, figures)| line(row.value.to_string(), figures))
            .collect();
        if self.key == SweepKey::Seed {
            let mean = (0..head.len() - 1).map(|at| {
                let sum: Option<f64> = rows.iter().map(|row| row[at]).sum();
                sum.map(|sum| sum / rows.len() as f64)
            });
            lines.push(line("mean".to_owned(), &mean.collect::<Vec<_>>()));
        }
        let head: Vec<&str> = head.iter().map(String::as_str).collect();
        text_table(1, &head, lines)
    }
}

/// The options with this value.
fn set(key: SweepKey, options: &ReplayOptions, value: f64) -> ReplayOptions {
    let mut options = options.clone();
    options.sweep = None;
    match key {
        SweepKey::Alpha => options.alpha = Setting::Fixed(value as f32),
        SweepKey::MinTokenProb => options.min_token_prob = Setting::Fixed(value as f32),
        SweepKey::MaxSpecTokens => options.max_spec_tokens = Some(value as usize),
        SweepKey::Concurrency => options.concurrency = vec![value as usize],
        SweepKey::WarmDocs => options.warm_docs = Some(value as usize),
        SweepKey::ScoreThreshold => options.score_threshold = Threshold::Fixed(value as f32),
        SweepKey::Seed => options.seed = value as u64,
    }
    options
}
