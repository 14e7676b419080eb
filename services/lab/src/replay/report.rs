//! The report of a replay, for people and for programs.

use std::collections::BTreeMap;
use std::fmt::Write;

use refrain_speculation::draft::{Scope, Source};
use serde::Serialize;

use super::account::Reliability;
use super::breakdown::{self, Breakdown};
use super::by_length::LengthRow;
use super::clock::DurationsUs;
use super::counts::Acceptance;
use super::options::ReplayOptions;
use super::policy::Policy;
use super::setup::Outcome;
use super::shared_indexes::SharedIndexSizes;
use super::window::{self, Window};
use crate::logs::LogSummary;
use crate::text_table::{number, text_table};

/// The report. A figure is absent or `null` if nothing happened that it could be measured on.
#[derive(Clone, Debug, Serialize)]
pub struct ReplayReport {
    /// Replayed calls.
    pub docs: u64,
    /// Prompt tokens of these calls.
    pub prompt_tokens: u64,
    /// Output tokens of these calls.
    pub output_tokens: u64,
    /// Steps, each with one verification.
    pub steps: u64,
    /// Output tokens per step, the bonus token included.
    pub tokens_per_step: Option<f64>,
    /// Draft tokens per step.
    pub drafted_per_step: Option<f64>,
    /// Accepted / drafted tokens.
    pub acceptance_rate: Option<f64>,
    /// Time of one proposal over all sources, look-ups included.
    pub propose_us: Option<DurationsUs>,
    /// Time to add to the namespace's index, per output token.
    pub insert_us_per_token: Option<f64>,
    /// Time to add to the groups' indexes, per output token of calls with a group.
    pub group_insert_us_per_token: Option<f64>,
    /// Time to seal and merge, per sealed token. The replay waits for it; a worker does it beside decoding.
    pub seal_us_per_token: Option<f64>,
    /// Time to extend the request's own indexes, per token of prompt and output.
    pub extend_us_per_token: Option<f64>,
    /// Bytes of the namespaces' indexes per output token in them, warm ones included.
    pub index_bytes_per_token: Option<f64>,
    /// Sizes of the shared indexes.
    #[serde(flatten)]
    pub sizes: SharedIndexSizes,
    /// Output tokens of the warm calls.
    pub warm_tokens: u64,
    /// Warm output tokens indexed per second, without reading them.
    pub build_tokens_per_s: Option<f64>,
    /// Seconds of the replay, including reading, without warming.
    pub wall_s: f64,
    /// Steps by the source of their draft; `none` are plain steps.
    pub sources: BTreeMap<&'static str, SourceCounts>,
    /// Tokens per step over the course of the calls, with `--window`: `suffix` at the first number of requests.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<Window>,
    /// Steps by a length, with `--by`: as the windows, of the first policy.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub by: BTreeMap<Breakdown, Vec<LengthRow>>,
    /// Policies on a modelled engine, with `--policies` or `--engine-model`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<PolicyReport>,
    /// The options of the replay.
    pub settings: ReplayOptions,
    /// Counts of what was read of the traces, if they were read to their end.
    pub log: LogSummary,
    /// The same of the warm calls.
    pub warm_log: LogSummary,
}

/// One policy on the modelled engine. A step counts once for each request in it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicyReport {
    /// The policy.
    pub policy: Policy,
    /// Requests at once.
    pub concurrency: usize,
    /// Output tokens per second of modelled engine time. It includes steps and the head's drafting, but neither
    /// prompts nor this machine's time for proposals.
    pub goodput_tokens_per_s: Option<f64>,
    /// Goodput / that of `off` with the same number of requests.
    pub speedup: Option<f64>,
    /// Output tokens per step, the bonus token included.
    pub tokens_per_step: Option<f64>,
    /// Draft tokens per step.
    pub drafted_per_step: Option<f64>,
    /// Expected output tokens per step by the acceptance statistics, when drafts were chosen; the bonus token
    /// included.
    pub expected_per_step: Option<f64>,
    /// Accepted draft tokens per step.
    pub accepted_per_step: Option<f64>,
    /// Share of the steps in which the head drafted.
    pub head_share: Option<f64>,
    /// Time of proposals on this machine, microseconds per step.
    pub propose_us_per_step: Option<f64>,
    /// Share of drafted tokens that was accepted, by their expected probability.
    pub reliability: Vec<Reliability>,
    /// Tokens per step over the course of the calls, with `--window`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<Window>,
}

/// Steps whose draft came from one source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SourceCounts {
    /// Steps.
    pub steps: u64,
    /// Draft tokens.
    pub drafted: u64,
    /// Accepted draft tokens.
    pub accepted: u64,
    /// Output tokens of these steps.
    pub emitted: u64,
}

impl From<&Acceptance> for SourceCounts {
    fn from(counts: &Acceptance) -> Self {
        SourceCounts {
            steps: counts.steps,
            drafted: counts.drafted,
            accepted: counts.accepted,
            emitted: counts.emitted,
        }
    }
}

/// The policies in the order of the options, for each number of requests.
fn policies(options: &ReplayOptions, outcomes: &[Outcome]) -> Vec<PolicyReport> {
    let mut rows = Vec::new();
    for &concurrency in &options.concurrency {
        let of = |policy| {
            let mut outcomes = outcomes.iter();
            outcomes.find(|outcome| (outcome.policy, outcome.concurrency) == (policy, concurrency))
        };
        let plain = of(Policy::Off).and_then(Outcome::goodput_tokens_per_s);
        let compared = options.policies.iter().filter_map(|policy| of(*policy));
        rows.extend(compared.map(|outcome| PolicyReport::new(outcome, plain)));
    }
    rows
}

impl PolicyReport {
    fn name(&self) -> String {
        format!("{} at {}", self.policy.name(), self.concurrency)
    }

    pub(crate) fn new(outcome: &Outcome, plain_tokens_per_s: Option<f64>) -> Self {
        let Outcome { tally, account, .. } = outcome;
        let total = tally.table.total();
        let goodput = outcome.goodput_tokens_per_s();
        let proposing_us = tally.proposing.us().map(|us| us.mean);
        PolicyReport {
            policy: outcome.policy,
            concurrency: outcome.concurrency,
            goodput_tokens_per_s: goodput,
            speedup: goodput
                .zip(plain_tokens_per_s)
                .map(|(goodput, plain)| goodput / plain),
            tokens_per_step: total.accepted_length(),
            drafted_per_step: total.per_step(total.drafted as f64),
            expected_per_step: total
                .per_step(account.accepted_expected + account.bonus_tokens as f64),
            accepted_per_step: total.per_step(total.accepted as f64),
            head_share: total.per_step(account.head_steps as f64),
            propose_us_per_step: proposing_us,
            reliability: account.reliability(),
            windows: Window::of(outcome),
        }
    }
}

fn name(source: Source, scope: Scope) -> &'static str {
    match (source, scope) {
        (Source::None, _) => "none",
        (Source::Grammar, _) => "grammar",
        (Source::Eagle3, _) => "eagle3",
        (_, Scope::Request) => "request",
        (_, Scope::Group) => "group",
        (_, Scope::Tenant) => "global",
    }
}

impl ReplayReport {
    /// Makes a report. Most of it is about the first outcome.
    pub(super) fn new(
        options: &ReplayOptions,
        outcomes: &[Outcome],
        (log, warm_log): (LogSummary, LogSummary),
    ) -> Self {
        let Outcome { tally, costs, .. } = &outcomes[0];
        let total = tally.table.total();
        let sizes = costs.sizes;
        let mut sources: BTreeMap<_, SourceCounts> = BTreeMap::new();
        for (source, scope, counts) in tally.table.iter() {
            sources.insert(name(source, scope), counts.into());
        }
        let indexed = costs.inserted.tokens + costs.warmed.tokens;
        let index_bytes = sizes.live_bytes + sizes.segment_bytes;
        ReplayReport {
            docs: tally.docs,
            prompt_tokens: tally.prompt_tokens,
            output_tokens: total.emitted,
            steps: total.steps,
            tokens_per_step: total.accepted_length(),
            drafted_per_step: total.per_step(total.drafted as f64),
            acceptance_rate: total.acceptance_rate(),
            propose_us: tally.proposing.us(),
            insert_us_per_token: costs.inserted.us_per_token(),
            group_insert_us_per_token: costs.grouped.us_per_token(),
            seal_us_per_token: costs.sealed.us_per_token(),
            extend_us_per_token: tally.extended.us_per_token(),
            index_bytes_per_token: (indexed > 0 && index_bytes > 0)
                .then(|| index_bytes as f64 / indexed as f64),
            sizes,
            warm_tokens: costs.warmed.tokens,
            build_tokens_per_s: costs.warmed.tokens_per_s(),
            wall_s: outcomes[0].wall.as_secs_f64(),
            sources,
            windows: Window::of(&outcomes[0]),
            by: (options.by.iter())
                .map(|what| (*what, what.rows(tally)))
                .collect(),
            policies: policies(options, outcomes),
            settings: options.clone(),
            log,
            warm_log,
        }
    }

    /// The report as a table for people.
    pub fn table(&self) -> String {
        let counted = |name: &str, count: u64| vec![name.to_owned(), count.to_string()];
        let measured = |name: &str, value| vec![name.to_owned(), number(value, 3)];
        let propose = |of: fn(&DurationsUs) -> f64| self.propose_us.as_ref().map(of);
        let into_group_us = self.group_insert_us_per_token;
        let rows = [
            counted("calls", self.docs),
            counted("output tokens", self.output_tokens),
            counted("steps", self.steps),
            measured("tokens per step", self.tokens_per_step),
            measured("drafted per step", self.drafted_per_step),
            measured("acceptance rate", self.acceptance_rate),
            measured("propose, us: mean", propose(|us| us.mean)),
            measured("propose, us: p50", propose(|us| us.p50)),
            measured("propose, us: p99", propose(|us| us.p99)),
            measured("insert, us per token", self.insert_us_per_token),
            measured("insert into group, us per token", into_group_us),
            measured("seal, us per token", self.seal_us_per_token),
            measured("extend, us per token", self.extend_us_per_token),
            measured("index, bytes per token", self.index_bytes_per_token),
            counted("index, live bytes", self.sizes.live_bytes),
            counted("index, segment bytes", self.sizes.segment_bytes),
            measured("warming, tokens per second", self.build_tokens_per_s),
            measured("wall time, s", Some(self.wall_s)),
        ];
        let mut text = text_table(1, &[], rows);
        let left_out = [&self.warm_log, &self.log].map(LogSummary::left_out_sentences);
        for sentence in left_out.into_iter().flatten() {
            let _ = writeln!(text, "{sentence}");
        }
        text.push('\n');
        text += &source_table(&self.sources);
        for (what, rows) in &self.by {
            text += &breakdown::table(*what, rows);
        }
        if self.policies.is_empty() {
            text += &window::table("", &self.windows);
        }
        text += &policy_tables(&self.policies);
        for row in &self.policies {
            text += &window::table(&row.name(), &row.windows);
        }
        text
    }

    /// Expected and observed acceptance of drafted tokens, for people.
    pub fn reliability_table(&self) -> String {
        let mut text = String::new();
        for row in &self.policies {
            if row.reliability.is_empty() {
                continue;
            }
            let name = row.name();
            let head = [&*name, "drafted", "expected", "accepted"];
            let rows = row.reliability.iter().map(|bucket| {
                vec![
                    format!("{:.1} to {:.1}", bucket.from, bucket.from + 0.1),
                    bucket.drafted.to_string(),
                    format!("{:.3}", bucket.expected),
                    format!("{:.3}", bucket.accepted),
                ]
            });
            text.push('\n');
            text += &text_table(1, &head, rows);
        }
        text
    }
}

fn source_table(sources: &BTreeMap<&'static str, SourceCounts>) -> String {
    let head = ["source", "steps", "drafted", "accepted", "emitted", "rate"];
    let rows = sources.iter().map(|(source, counts)| {
        let rate = (counts.drafted > 0).then(|| counts.accepted as f64 / counts.drafted as f64);
        vec![
            (*source).to_owned(),
            counts.steps.to_string(),
            counts.drafted.to_string(),
            counts.accepted.to_string(),
            counts.emitted.to_string(),
            number(rate, 3),
        ]
    });
    text_table(1, &head, rows)
}

/// A table for each number of requests.
fn policy_tables(policies: &[PolicyReport]) -> String {
    let mut text = String::new();
    for rows in policies.chunk_by(|a, b| a.concurrency == b.concurrency) {
        let concurrency = format!("at {}", rows[0].concurrency);
        let head = [
            &*concurrency,
            "tokens/s",
            "speed-up",
            "tokens",
            "expected",
            "drafted",
            "by head",
        ];
        let rows = rows.iter().map(|row| {
            vec![
                row.policy.name(),
                number(row.goodput_tokens_per_s, 1),
                format!("{}x", number(row.speedup, 3)),
                number(row.tokens_per_step, 3),
                number(row.expected_per_step, 3),
                number(row.drafted_per_step, 3),
                number(row.head_share, 3),
            ]
        });
        text.push('\n');
        text += &text_table(1, &head, rows);
    }
    text
}
