//! Replays with several values of one option, a row for each.

use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use clap::ValueEnum;
use refrain_speculation::draft::Setting;
use refrain_speculation::router::Threshold;
use serde::Serialize;

use super::options::ReplayOptions;
use super::report::ReplayReport;
use crate::text_table::{number, text_table};

/// Most values of a sweep: each is a replay of all calls, and all reports are held.
const VALUES_MAX: usize = 100;

/// An option that takes several values in turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum SweepKey {
    /// `--alpha`.
    Alpha,
    /// `--min-token-prob`.
    MinTokenProb,
    /// `--max-spec-tokens`.
    MaxSpecTokens,
    /// `--concurrency`.
    Concurrency,
    /// `--warm-docs`.
    WarmDocs,
    /// `--score-threshold`, the tau of SuffixDecoding.
    ScoreThreshold,
    /// `--seed`.
    Seed,
}

/// An option and its values.
#[derive(Clone, Debug, PartialEq)]
pub struct Sweep {
    key: SweepKey,
    values: Vec<f64>,
}

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

impl FromStr for Sweep {
    type Err = anyhow::Error;

    /// Reads `alpha=0.5,1,2` or `seed=1..8`; both ends of a range are values.
    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (key, values) = text
            .split_once('=')
            .context("write KEY=A,B,C or KEY=FROM..TO")?;
        let Ok(key) = SweepKey::from_str(key, true) else {
            let names = SweepKey::value_variants().iter();
            let names: Vec<String> = names.map(|key| key.name()).collect();
            bail!("{key} is none of {}", names.join(", "));
        };
        let read = |part: &str| -> anyhow::Result<f64> {
            let value: f64 =
                (part.trim().parse()).with_context(|| format!("`{part}` is not a number"))?;
            let is_whole = key.is_count() && (value.fract() != 0.0 || value < 0.0);
            ensure!(value.is_finite() && !is_whole, "`{part}` is no value of it");
            Ok(value)
        };
        let values = match values.split_once("..") {
            Some((from, to)) => {
                let (from, to) = (read(from)?, read(to)?);
                ensure!(
                    from <= to && to - from < VALUES_MAX as f64,
                    "a range has 1 to {VALUES_MAX} values"
                );
                (0..=(to - from) as u32)
                    .map(|nth| from + f64::from(nth))
                    .collect()
            }
            None => values
                .split(',')
                .map(read)
                .collect::<anyhow::Result<Vec<_>>>()?,
        };
        ensure!(
            values.len() <= VALUES_MAX,
            "a sweep has at most {VALUES_MAX} values"
        );
        Ok(Sweep { key, values })
    }
}

impl SweepKey {
    fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn is_count(self) -> bool {
        use SweepKey::{Concurrency, MaxSpecTokens, Seed, WarmDocs};
        matches!(self, MaxSpecTokens | Concurrency | WarmDocs | Seed)
    }

    /// The options with this value.
    fn set(self, options: &ReplayOptions, value: f64) -> ReplayOptions {
        let mut options = options.clone();
        options.sweep = None;
        match self {
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
}

impl Sweep {
    /// Values.
    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    /// Replays with each value. `replay` also gets the share of the replays before it.
    pub(super) fn run(
        &self,
        options: &ReplayOptions,
        mut replay: impl FnMut(&ReplayOptions, f64) -> anyhow::Result<ReplayReport>,
    ) -> anyhow::Result<SweepReport> {
        let count = self.values.len() as f64;
        let rows = self.values.iter().enumerate().map(|(nth, &value)| {
            let report = replay(&self.key.set(options, value), nth as f64 / count)?;
            Ok(SweepRow { value, report })
        });
        Ok(SweepReport {
            key: self.key,
            rows: rows.collect::<anyhow::Result<_>>()?,
        })
    }
}

impl SweepReport {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_listed_or_a_range() {
        let read = |text: &str| text.parse::<Sweep>().map(|sweep| (sweep.key, sweep.values));
        let found = read("alpha=0.5,1,16").expect("a list");
        assert_eq!(found, (SweepKey::Alpha, vec![0.5, 1.0, 16.0]));
        let found = read("seed=2..4").expect("a range");
        assert_eq!(found, (SweepKey::Seed, vec![2.0, 3.0, 4.0]));
        for (text, wanted) in [
            ("alpha", "write KEY=A,B,C"),
            ("beta=1", "beta is none of alpha, min-token-prob"),
            ("alpha=high", "`high` is not a number"),
            ("concurrency=1.5", "`1.5` is no value of it"),
            ("seed=4..2", "a range has 1 to 100 values"),
        ] {
            let error = format!("{:#}", read(text).expect_err(text));
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
