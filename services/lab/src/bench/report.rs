//! The report of a benchmark.

use std::collections::BTreeMap;

use serde::Serialize;

use super::step_cost::StepCostFit;
use crate::text_table::text_table;

/// Sums over the calls of one mode on one part of the workload.
#[derive(Clone, Debug, Default)]
pub(super) struct CallSums {
    pub(super) calls: u64,
    pub(super) prompt_tokens: u64,
    pub(super) output_tokens: u64,
    /// Output tokens that arrived within `decode_s`.
    pub(super) decoded_tokens: u64,
    pub(super) decode_s: f64,
    pub(super) prefill_s: f64,
    pub(super) wall_s: f64,
    pub(super) steps: u64,
    pub(super) drafted: u64,
    pub(super) accepted: u64,
}

impl CallSums {
    pub(super) fn add(&mut self, other: &CallSums) {
        self.calls += other.calls;
        self.prompt_tokens += other.prompt_tokens;
        self.output_tokens += other.output_tokens;
        self.decoded_tokens += other.decoded_tokens;
        self.decode_s += other.decode_s;
        self.prefill_s += other.prefill_s;
        self.wall_s += other.wall_s;
        self.steps += other.steps;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
    }

    pub(super) fn decode_s_per_token(&self) -> f64 {
        self.decode_s / (self.decoded_tokens.max(1)) as f64
    }

    fn figures(&self) -> ModeFigures {
        ModeFigures {
            calls: self.calls,
            prompt_tokens: self.prompt_tokens,
            output_tokens: self.output_tokens,
            tokens_per_s: self.output_tokens as f64 / self.wall_s.max(1e-9),
            decode_ms_per_token: self.decode_s_per_token() * 1e3,
            prefill_ms: self.prefill_s / self.calls.max(1) as f64 * 1e3,
            accepted_length: self.output_tokens as f64 / self.steps.max(1) as f64,
            drafted_per_step: self.drafted as f64 / self.steps.max(1) as f64,
            acceptance_rate: self.accepted as f64 / self.drafted.max(1) as f64,
        }
    }
}

/// One mode on one part of the workload.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ModeFigures {
    /// Answered calls.
    pub calls: u64,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Output tokens.
    pub output_tokens: u64,
    /// Output tokens per second of wall time, all calls together.
    pub tokens_per_s: f64,
    /// Milliseconds per output token while decoding, without prefill.
    pub decode_ms_per_token: f64,
    /// Milliseconds until the first token, mean over calls.
    pub prefill_ms: f64,
    /// Output tokens per engine step.
    pub accepted_length: f64,
    /// Draft tokens per engine step.
    pub drafted_per_step: f64,
    /// Accepted draft tokens / draft tokens.
    pub acceptance_rate: f64,
}

/// A ratio over the rounds of a benchmark. Half of the rounds are between the quartiles.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speedup {
    /// Lower quartile.
    pub lower_quartile: f64,
    /// Median.
    pub median: f64,
    /// Upper quartile.
    pub upper_quartile: f64,
}

/// The outcome of a benchmark.
#[derive(Clone, Debug, Serialize)]
pub struct BenchReport {
    /// Part of the workload -> mode -> figures.
    pub parts: BTreeMap<String, BTreeMap<String, ModeFigures>>,
    /// Part -> mode -> decode time per token of `off` / that of the mode.
    pub decode_speedup: BTreeMap<String, BTreeMap<String, Speedup>>,
    /// Part -> time of a step of 8 tokens and of 16 / that of a step of one token, from the calls of `off` and
    /// `suffix`. Empty where several calls were in flight at once.
    pub step_cost: BTreeMap<String, [f64; 2]>,
    /// Calls at temperature 0 or with a seed whose text differed between modes. It must be 0.
    pub outputs_that_differ: u64,
}

impl BenchReport {
    /// A report of the sums and of the speed-ups of each round, both by part and mode, and of the steps by part.
    pub(super) fn new(
        totals: BTreeMap<(&str, &str), CallSums>,
        speedups: BTreeMap<(&str, &str), Vec<f64>>,
        step_costs: &BTreeMap<&str, StepCostFit>,
        outputs_that_differ: u64,
    ) -> Self {
        let mut report = BenchReport {
            parts: BTreeMap::new(),
            decode_speedup: BTreeMap::new(),
            step_cost: BTreeMap::new(),
            outputs_that_differ,
        };
        for ((part, mode), sums) in totals {
            let modes = report.parts.entry(part.into()).or_default();
            modes.insert(mode.into(), sums.figures());
        }
        for ((part, mode), speedups) in speedups {
            let modes = report.decode_speedup.entry(part.into()).or_default();
            modes.insert(mode.into(), Speedup::of(speedups));
        }
        for (part, fit) in step_costs {
            if let Some((few, many)) = fit.ratio(8).zip(fit.ratio(16)) {
                report.step_cost.insert((*part).into(), [few, many]);
            }
        }
        report
    }

    /// The report as a table for people.
    pub fn table(&self) -> String {
        let head = [
            "part",
            "mode",
            "calls",
            "tokens",
            "tokens/s",
            "decode\nms/token",
            "prefill\nms",
            "accepted\nlength",
            "drafted\nper step",
            "accept\nrate",
            "speed-up\nmedian",
            "speed-up\nquartiles",
        ];
        let mut rows = Vec::new();
        for (part, modes) in &self.parts {
            for (mode, figures) in modes {
                let speedups = self.decode_speedup.get(part);
                let speedup = speedups.and_then(|modes| modes.get(mode));
                rows.push(vec![
                    part.clone(),
                    mode.clone(),
                    figures.calls.to_string(),
                    figures.output_tokens.to_string(),
                    format!("{:.1}", figures.tokens_per_s),
                    format!("{:.3}", figures.decode_ms_per_token),
                    format!("{:.2}", figures.prefill_ms),
                    format!("{:.2}", figures.accepted_length),
                    format!("{:.2}", figures.drafted_per_step),
                    format!("{:.3}", figures.acceptance_rate),
                    speedup.map_or("-".into(), |of| format!("{:.2}x", of.median)),
                    speedup.map_or("-".into(), |of| {
                        format!("{:.2}-{:.2}x", of.lower_quartile, of.upper_quartile)
                    }),
                ]);
            }
        }
        let mut text = text_table(2, &head, rows);
        for (part, [few, many]) in &self.step_cost {
            text.push_str(&format!(
                "{part}: a step of 8 tokens takes {few:.2} times as long as one of 1, a step of 16 {many:.2} times\n"
            ));
        }
        text.push_str(&format!(
            "outputs that differ between modes: {}\n",
            self.outputs_that_differ
        ));
        text
    }
}

impl Speedup {
    /// The quartiles of at least one round.
    fn of(mut rounds: Vec<f64>) -> Self {
        rounds.sort_by(f64::total_cmp);
        // Between two rounds, a quantile is on the line between them.
        let quantile = |share: f64| {
            let place = share * (rounds.len() - 1) as f64;
            let (below, above) = (
                rounds[place.floor() as usize],
                rounds[place.ceil() as usize],
            );
            below + (above - below) * place.fract()
        };
        Speedup {
            lower_quartile: quantile(0.25),
            median: quantile(0.5),
            upper_quartile: quantile(0.75),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_row_per_part_and_mode_with_the_median_speed_up() {
        let sums = |steps| CallSums {
            calls: 2,
            output_tokens: 60,
            decoded_tokens: 50,
            decode_s: 0.1,
            wall_s: 0.5,
            steps,
            drafted: 40,
            accepted: 30,
            ..CallSums::default()
        };
        let totals = BTreeMap::from([
            (("unique", "off"), sums(60)),
            (("unique", "suffix"), sums(20)),
        ]);
        let speedups = BTreeMap::from([(("unique", "suffix"), vec![9.0, 2.0, 3.0])]);
        let mut fit = StepCostFit::default();
        fit.add(30, 0, 0.03);
        fit.add(5, 40, 0.009);
        let step_costs = BTreeMap::from([("unique", fit)]);
        let table = BenchReport::new(totals, speedups, &step_costs, 0).table();
        let lines: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(lines[0][..4], ["part", "mode", "calls", "tokens"]);
        assert_eq!(lines[1][0], "ms/token");
        assert_eq!(
            lines[2],
            [
                "unique", "off", "2", "60", "120.0", "2.000", "0.00", "1.00", "0.67", "0.750", "-",
                "-"
            ]
        );
        assert_eq!(
            lines[3],
            [
                "unique",
                "suffix",
                "2",
                "60",
                "120.0",
                "2.000",
                "0.00",
                "3.00",
                "2.00",
                "0.750",
                "3.00x",
                "2.50-6.00x"
            ]
        );
        assert_eq!(
            lines[4].join(" "),
            "unique: a step of 8 tokens takes 1.70 times as long as one of 1, a step of 16 2.50 times"
        );
        assert_eq!(lines[5].join(" "), "outputs that differ between modes: 0");
    }
}
