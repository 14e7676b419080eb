//! The report of an analysis, for people and for programs.

use std::fmt::Write;

use refrain_speculation::draft::Setting;
use serde::Serialize;

use super::alpha::{ALPHAS, AlphaChoice, FixedAlpha};
use super::entropy::empirical_entropy_bits;
use super::experiments::Experiment;
use super::options::AnalyzeOptions;
use super::workloads::TenantWorkload;
use crate::replay::{Outcome, Policy, PolicyReport, Window};
use crate::text_table::{number, text_table};

/// Outputs from which the entropy is computed, evenly spread over the calls. More of them change little.
const ENTROPY_OUTPUTS: usize = 100;
/// A month has 30 days, as in the capacity table of the operations manual.
const MONTH_S: f64 = 30.0 * 24.0 * 3600.0;
/// The predicted speed-up from which drafting helps.
const HELPS: f64 = 1.3;
/// The predicted speed-up below which drafting hardly helps.
const HARDLY: f64 = 1.05;

/// The report. A figure is `null` if nothing happened that it could be measured on.
#[derive(Clone, Debug, Serialize)]
pub struct AnalyzeReport {
    /// One row per workload and tenant, in the order in which they first occur.
    pub rows: Vec<WorkloadReport>,
    /// The options of the analysis.
    pub settings: AnalyzeOptions,
}

/// One workload of one tenant.
#[derive(Clone, Debug, Serialize)]
pub struct WorkloadReport {
    /// Name of the row in the table.
    pub name: String,
    /// The calls' workload; `null` if they name none.
    pub workload: Option<String>,
    /// The calls' tenant; `null` if they name none.
    pub tenant: Option<String>,
    /// Calls that were read.
    pub docs_read: u64,
    /// Output tokens of the calls that were read.
    pub tokens_read: u64,
    /// Calls that were replayed.
    pub docs: u64,
    /// Output tokens of the calls that were replayed.
    pub output_tokens: u64,
    /// Mean entropy of the next token, bits (SuffixDecoding, A.2.3). Repetitive text has less.
    pub entropy_bits: Option<f64>,
    /// Whether drafting helps at any of the numbers of requests: `yes`, `a little` or `hardly`.
    pub helps: &'static str,
    /// Output tokens per step with the policy `goodput` at the first number of requests.
    pub accepted_length: Option<f64>,
    /// `off`, `suffix` and `goodput` at each number of requests.
    pub policies: Vec<PolicyReport>,
    /// The alpha to set at each number of requests.
    pub alphas: Vec<AlphaChoice>,
    /// Bytes of the sealed index of all outputs, per output token.
    pub index_bytes_per_token: Option<f64>,
    /// Bytes of a month of outputs at `tokens_per_s`, if all outputs were of this workload.
    pub month_bytes: Option<f64>,
    /// Tokens per step of the policy `suffix` over the course of the calls, at the first number of requests.
    pub windows: Vec<Window>,
}

impl WorkloadReport {
    pub(super) fn new(
        row: &TenantWorkload,
        answers: &[(Experiment, Outcome)],
        options: &AnalyzeOptions,
    ) -> Self {
        let first = options.concurrency[0];
        let of = |wanted: Experiment| {
            let mut answers = answers.iter();
            answers.find_map(|(question, outcome)| (*question == wanted).then_some(outcome))
        };
        let mut policies = Vec::new();
        for (question, outcome) in answers {
            if let Experiment::Policy(_, concurrency) = question {
                let plain = of(Experiment::Policy(Policy::Off, *concurrency))
                    .and_then(Outcome::goodput_tokens_per_s);
                policies.push(PolicyReport {
                    // The report shows the windows of the row instead.
                    windows: Vec::new(),
                    ..PolicyReport::new(outcome, plain)
                });
            }
        }
        let tried = |alpha: Setting, concurrency: usize| {
            of(Experiment::Alpha(alpha, concurrency)).and_then(Outcome::goodput_tokens_per_s)
        };
        let alphas = options.concurrency.iter().map(|&concurrency| {
            let fixed = ALPHAS.map(|alpha| FixedAlpha {
                alpha,
                goodput_tokens_per_s: tried(Setting::Fixed(alpha), concurrency),
            });
            let docs = row.calls.len().min(options.alpha_docs) as u64;
            let auto = tried(Setting::Auto, concurrency);
            AlphaChoice::new(concurrency, docs, auto, fixed.to_vec())
        });
        let alphas = alphas.collect();
        let index_bytes_per_token = of(Experiment::Size).and_then(|outcome| {
            let costs = &outcome.costs;
            let (bytes, tokens) = (costs.sizes.segment_bytes, costs.warmed.tokens);
            (tokens > 0).then(|| bytes as f64 / tokens as f64)
        });
        let suffix = of(Experiment::Policy(Policy::Suffix, first));
        let best = policies
            .iter()
            .filter_map(|row: &PolicyReport| row.speedup)
            .fold(1.0, f64::max);
        let goodput = policies
            .iter()
            .find(|row| (row.policy, row.concurrency) == (Policy::Goodput, first));
        WorkloadReport {
            name: row.name(),
            workload: row.workload.clone(),
            tenant: row.tenant.clone(),
            docs_read: row.calls_read,
            tokens_read: row.tokens_read,
            docs: row.calls.len() as u64,
            output_tokens: row.calls.iter().map(|call| call.output.len() as u64).sum(),
            entropy_bits: entropy_bits(row),
            helps: match best {
                best if best >= HELPS => "yes",
                best if best >= HARDLY => "a little",
                _ => "hardly",
            },
            accepted_length: goodput.and_then(|row| row.tokens_per_step),
            alphas,
            index_bytes_per_token,
            month_bytes: index_bytes_per_token.map(|bytes| bytes * options.tokens_per_s * MONTH_S),
            windows: suffix.map(Window::of).unwrap_or_default(),
            policies,
        }
    }

    /// Speed-up of the policy with this many requests at once.
    pub fn speedup(&self, policy: Policy, concurrency: usize) -> Option<f64> {
        let mut rows = self.policies.iter();
        rows.find(|row| (row.policy, row.concurrency) == (policy, concurrency))?
            .speedup
    }
}

fn entropy_bits(row: &TenantWorkload) -> Option<f64> {
    let apart = row.calls.len().div_ceil(ENTROPY_OUTPUTS).max(1);
    let outputs: Vec<&[_]> = row
        .calls
        .iter()
        .step_by(apart)
        .map(|call| &call.output[..])
        .collect();
    empirical_entropy_bits(&outputs)
}

impl AnalyzeReport {
    /// The report as tables for people.
    pub fn table(&self) -> String {
        let mut text = text_table(1, &[], self.lines());
        text.push('\n');
        text += &text_table(1, &[], self.alpha_lines());
        for sentence in self.settings.assumptions().split_inclusive(". ") {
            let _ = write!(text, "\n{}", sentence.trim_end());
        }
        text.push('\n');
        text
    }

    /// The cells of the first table; the first line is its head.
    pub(super) fn lines(&self) -> Vec<Vec<String>> {
        let mut head: Vec<String> = ["", "calls", "tokens", "entropy", "helps", "tok/step"]
            .map(str::to_owned)
            .to_vec();
        for concurrency in &self.settings.concurrency {
            head.push(format!("at {concurrency}"));
        }
        head.extend(["B/token", "GB/month"].map(str::to_owned));
        let mut lines = vec![head];
        for row in &self.rows {
            let mut line = vec![
                row.name.clone(),
                row.docs.to_string(),
                row.output_tokens.to_string(),
                number(row.entropy_bits, 2),
                row.helps.to_owned(),
                number(row.accepted_length, 2),
            ];
            for &concurrency in &self.settings.concurrency {
                let speedup = row.speedup(Policy::Goodput, concurrency);
                line.push(format!("{}x", number(speedup, 2)));
            }
            line.push(number(row.index_bytes_per_token, 1));
            line.push(number(row.month_bytes.map(|bytes| bytes / 1e9), 1));
            lines.push(line);
        }
        lines
    }
    /// The cells of the table of alphas; the first line is its head.
    pub(super) fn alpha_lines(&self) -> Vec<Vec<String>> {
        let mut lines = vec![AlphaChoice::HEAD.map(str::to_owned).to_vec()];
        for row in &self.rows {
            let lines_of_row = row
                .alphas
                .iter()
                .map(|choice| [vec![row.name.clone()], choice.cells().to_vec()].concat());
            lines.extend(lines_of_row);
        }
        lines
    }
}
