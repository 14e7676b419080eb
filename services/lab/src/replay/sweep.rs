//! An option that takes several values in turn.

use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use clap::ValueEnum;
use serde::Serialize;

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
    pub(super) key: SweepKey,
    pub(super) values: Vec<f64>,
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
    pub(super) fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    fn is_count(self) -> bool {
        use SweepKey::{Concurrency, MaxSpecTokens, Seed, WarmDocs};
        matches!(self, MaxSpecTokens | Concurrency | WarmDocs | Seed)
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
