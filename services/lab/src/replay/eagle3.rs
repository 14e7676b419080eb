//! A simulated EAGLE-3 head with given acceptance probabilities.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use serde::Serialize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::engine_model::{EngineModel, StepLoad};

/// Longest draft that a simulated head may make.
const POSITIONS_MAX: usize = 64;

/// An EAGLE-3 head that drafts a chain.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Eagle3 {
    /// Probability, for each position of the draft, that its token is accepted if all before it were. The head drafts
    /// as many tokens as there are positions.
    pub acceptance: Vec<f64>,
    /// Time of drafting one position, as a share of a plain step of the same requests with empty contexts.
    pub cost: f64,
}

impl Default for Eagle3 {
    /// The probabilities are an assumption: a chain of five brings 2.6 tokens per step. The cost is that of
    /// SuffixDecoding's tables for Llama-3.1-8B (appendix A of arXiv 2411.04975): 2.634 ms per token * 4.647 tokens
    /// per step over 8 passes, compared with 25.08 ms of a plain step.
    fn default() -> Self {
        Eagle3 {
            acceptance: vec![0.72, 0.63, 0.55, 0.48, 0.42],
            cost: 0.06,
        }
    }
}

impl fmt::Display for Eagle3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_absent() {
            return f.write_str("off");
        }
        let acceptance: Vec<String> = self.acceptance.iter().map(f64::to_string).collect();
        write!(f, "acc={},cost={}", acceptance.join(","), self.cost)
    }
}

impl FromStr for Eagle3 {
    type Err = anyhow::Error;

    /// Reads `off`, or `acc=0.72,0.63,0.55` and `cost=0.06`, either or both, with a comma between.
    fn from_str(text: &str) -> anyhow::Result<Self> {
        if text.trim() == "off" {
            return Ok(Eagle3::absent());
        }
        let mut head = Eagle3::default();
        let mut key = "";
        for part in text.split(',').map(str::trim) {
            let value = match part.split_once('=') {
                Some((name @ ("acc" | "cost"), value)) => {
                    key = name;
                    if key == "acc" {
                        head.acceptance.clear();
                    }
                    value
                }
                Some((name, _)) => bail!("{name} is neither acc nor cost"),
                None => part,
            };
            let value: f64 = value
                .trim()
                .parse()
                .with_context(|| format!("`{part}` is not a number"))?;
            match key {
                "acc" => head.acceptance.push(value),
                "cost" => {
                    head.cost = value;
                    key = "";
                }
                _ => bail!("`{part}` has no key: write off, acc=0.72,0.63 or cost=0.06"),
            }
        }
        ensure!(
            head.acceptance.len() <= POSITIONS_MAX,
            "a draft has at most {POSITIONS_MAX} positions"
        );
        for probability in &head.acceptance {
            ensure!(
                (0.0..=1.0).contains(probability),
                "a probability must be from 0 to 1, not {probability}"
            );
        }
        ensure!(
            head.cost.is_finite() && head.cost >= 0.0,
            "the cost must be 0 or more, not {}",
            head.cost
        );
        Ok(head)
    }
}

impl Eagle3 {
    /// No head: it drafts nothing.
    pub(crate) fn absent() -> Self {
        Eagle3 {
            acceptance: Vec::new(),
            cost: 0.0,
        }
    }

    /// Whether there is no head.
    pub(super) fn is_absent(&self) -> bool {
        self.acceptance.is_empty()
    }

    /// Number of accepted tokens of a draft of `depth` tokens that starts at this position of the call's output.
    ///
    /// The seed alone determines the luck of every token of every call. So the head drafts equally well at a
    /// position, whatever was drafted before and whatever else runs.
    pub(super) fn accepted(&self, seed: u64, call: u64, position: usize, depth: usize) -> usize {
        let probabilities = self.acceptance.iter().take(depth);
        probabilities
            .zip(position as u64..)
            .take_while(|(probability, at)| uniform(seed, call, *at) < **probability)
            .count()
    }

    /// Seconds of drafting: one pass per position, for the requests whose draft is that long. `depths` has the length
    /// of each request's draft.
    pub(super) fn draft_seconds(&self, engine: &EngineModel, depths: &[usize]) -> f64 {
        let longest = depths.iter().copied().max().unwrap_or(0);
        let passes = (0..longest).map(|at| {
            let requests = depths.iter().filter(|depth| **depth > at).count();
            engine.step_seconds(StepLoad::decoding(requests, requests, 0))
        });
        self.cost * passes.sum::<f64>()
    }
}

/// A uniform number from 0 to 1, 1 excluded.
fn uniform(seed: u64, call: u64, position: u64) -> f64 {
    let mut key = [0; 16];
    key[..8].copy_from_slice(&call.to_le_bytes());
    key[8..].copy_from_slice(&position.to_le_bytes());
    (xxh3_64_with_seed(&key, seed) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_position_is_accepted_as_often_as_given() -> anyhow::Result<()> {
        let head: Eagle3 = "acc=0.8,0.5,0.25".parse()?;
        let drafts = 40_000;
        let mut reached = [0; 4];
        for call in 0..drafts / 100 {
            for position in 0..100 {
                let accepted = head.accepted(7, call, position * 10, 3);
                reached[..=accepted]
                    .iter_mut()
                    .for_each(|count| *count += 1);
            }
        }
        for (position, probability) in head.acceptance.iter().enumerate() {
            let share = f64::from(reached[position + 1]) / f64::from(reached[position]);
            assert!((share - probability).abs() < 0.015, "{position}: {share}");
        }
        Ok(())
    }

    #[test]
    fn a_token_is_accepted_by_seed_call_and_place() {
        let head = Eagle3::default();
        let run = |seed, call, depth| -> Vec<usize> {
            (0..200)
                .map(|at| head.accepted(seed, call, at, depth))
                .collect()
        };
        assert_eq!(run(1, 1, 5), run(1, 1, 5));
        assert_ne!(run(1, 1, 5), run(2, 1, 5));
        assert_ne!(run(1, 1, 5), run(1, 2, 5));
        // A shorter draft is the beginning of the longer one.
        let cut: Vec<usize> = run(1, 1, 5)
            .into_iter()
            .map(|accepted| accepted.min(2))
            .collect();
        assert_eq!(run(1, 1, 2), cut);
        assert!(run(1, 1, 0).iter().all(|accepted| *accepted == 0));
    }

    #[test]
    fn drafting_takes_a_pass_per_position() -> anyhow::Result<()> {
        let engine = EngineModel::load("h100-8b")?;
        let head: Eagle3 = "cost=0.1".parse()?;
        let plain = |requests| engine.step_seconds(StepLoad::decoding(requests, requests, 0));
        assert_eq!(head.draft_seconds(&engine, &[0, 0]), 0.0);
        // Two positions for both requests, three more for one of them.
        let expected = 0.1 * (2.0 * plain(2) + 3.0 * plain(1));
        assert!((head.draft_seconds(&engine, &[5, 2]) - expected).abs() < 1e-12);
        Ok(())
    }

    #[test]
    fn what_is_given_is_read() {
        let read = |text: &str| text.parse::<Eagle3>();
        let both = read("acc=0.5, 0.25,cost=0.1").expect("both");
        assert_eq!((both.acceptance, both.cost), (vec![0.5, 0.25], 0.1));
        let order = read("cost=0.1,acc=0.5").expect("in any order");
        assert_eq!((order.acceptance, order.cost), (vec![0.5], 0.1));
        let none = read("off").expect("no head");
        assert!(none.is_absent());
        assert_eq!(none.to_string(), "off");
        for (text, wanted) in [
            ("", "not a number"),
            ("0.5", "`0.5` has no key"),
            ("cost=0.1,0.5", "`0.5` has no key"),
            ("acc=0.5,high", "`high` is not a number"),
            ("acc=1.5", "a probability must be from 0 to 1, not 1.5"),
            ("acc=nan", "a probability must be from 0 to 1, not NaN"),
            ("rate=0.5", "rate is neither acc nor cost"),
            ("cost=-1", "the cost must be 0 or more, not -1"),
        ] {
            let error = format!("{:#}", read(text).expect_err(text));
            assert!(error.contains(wanted), "{text}: {error}");
        }
    }
}
