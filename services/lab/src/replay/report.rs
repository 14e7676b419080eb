//! What a replay came to, for people and for programs.

use std::collections::BTreeMap;
use std::fmt::Write;

use refrain_speculation::draft::{Scope, Source};
use refrain_speculation::verify::Acceptance;
use serde::Serialize;

use super::account::Reliability;
use super::clock::DurationsUs;
use super::compare::Outcome;
use super::options::{Policy, ReplayOptions};
use super::window::{self, Window};

/// The outcome. What was not measured, since nothing of it happened, is absent or `null`.
#[derive(Clone, Debug, Serialize)]
pub struct ReplayReport {
    /// Calls replayed.
    pub docs: u64,
    /// Their prompts' tokens.
    pub prompt_tokens: u64,
    /// Their outputs' tokens.
    pub output_tokens: u64,
    /// Verify steps it took.
    pub steps: u64,
    /// Output tokens per step, the bonus token included.
    pub tokens_per_step: Option<f64>,
    /// Draft tokens per step.
    pub drafted_per_step: Option<f64>,
    /// Accepted / drafted.
    pub acceptance_rate: Option<f64>,
    /// One proposal over all sources, look-ups included.
    pub propose_us: Option<DurationsUs>,
    /// Adding to the namespace's index, per output token.
    pub insert_us_per_token: Option<f64>,
    /// Adding to the groups' indexes, per output token of calls with a group.
    pub group_insert_us_per_token: Option<f64>,
    /// Sealing and merging, per token that was sealed. The replay waits for it; a worker does it beside decoding.
    pub seal_us_per_token: Option<f64>,
    /// Growing what the request alone has, per token of prompt and output.
    pub extend_us_per_token: Option<f64>,
    /// Bytes of the namespaces' indexes per output token in them, warming included.
    pub index_bytes_per_token: Option<f64>,
    /// Bytes of the parts of them that grow.
    pub live_bytes: u64,
    /// Bytes of their sealed segments.
    pub segment_bytes: u64,
    /// Number of these.
    pub segments: u64,
    /// Bytes of the groups' indexes that are kept at the end.
    pub group_bytes: u64,
    /// Namespaces met.
    pub namespaces: u64,
    /// Groups kept at the end, and those let go of before.
    pub groups: u64,
    /// See `groups`.
    pub groups_evicted: u64,
    /// Output tokens that warmed the indexes.
    pub warm_tokens: u64,
    /// Output tokens indexed per second of warming, reading apart.
    pub build_tokens_per_s: Option<f64>,
    /// Seconds of the replay, reading included and warming apart.
    pub wall_s: f64,
    /// Steps by what their draft was read from; `none` are plain steps.
    pub sources: BTreeMap<&'static str, SourceCounts>,
    /// Tokens per step as the calls went by, with `--window`: of `suffix` at the first number of requests.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<Window>,
    /// Policies compared on a modelled engine, with `--policies` or `--engine-model`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<PolicyReport>,
    /// What it was run with.
    pub settings: ReplayOptions,
}

/// One policy on the modelled engine. Steps are counted for each request that takes part in one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PolicyReport {
    /// Which.
    pub policy: Policy,
    /// Requests at once.
    pub concurrency: usize,
    /// Output tokens per second of modelled engine time: steps and the head's drafting, without prompts and without what
    /// drafting from memory takes on this machine.
    pub goodput_tokens_per_s: Option<f64>,
    /// Goodput beside that of `off` at as many requests.
    pub speedup: Option<f64>,
    /// Output tokens per step, the bonus token included.
    pub tokens_per_step: Option<f64>,
    /// Draft tokens per step.
    pub drafted_per_step: Option<f64>,
    /// Tokens per step that were expected when the drafts were chosen, by calibrated chances, the bonus token included.
    pub expected_per_step: Option<f64>,
    /// Accepted draft tokens per step.
    pub accepted_per_step: Option<f64>,
    /// Share of the steps in which the head drafted.
    pub head_share: Option<f64>,
    /// Proposals from memory on this machine, microseconds per step.
    pub propose_us_per_step: Option<f64>,
    /// How often drafted tokens were accepted, by the chance that was seen in them.
    pub reliability: Vec<Reliability>,
    /// Its tokens per step as the calls went by, with `--window`.
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
    /// Draft tokens accepted.
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

fn per_step(of: f64, total: &Acceptance) -> Option<f64> {
    (total.steps > 0).then(|| of / total.steps as f64)
}

/// In the order in which they were asked for, for each number of requests.
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
            drafted_per_step: per_step(total.drafted as f64, &total),
            expected_per_step: per_step(
                account.accepted_expected + account.bonus_tokens as f64,
                &total,
            ),
            accepted_per_step: per_step(total.accepted as f64, &total),
            head_share: per_step(account.head_steps as f64, &total),
            propose_us_per_step: proposing_us,
            reliability: account.reliability(),
            windows: Window::of(outcome),
        }
    }
}

fn name(source: Source, scope: Scope) -> &'static str {
    match (source, scope) {
        (Source::None, _) => "none",
        (Source::Eagle3, _) => "eagle3",
        (_, Scope::Request) => "request",
        (_, Scope::Group) => "group",
        (_, Scope::Tenant) => "global",
    }
}

impl ReplayReport {
    /// The first outcome is what most of it tells of.
    pub(super) fn new(options: &ReplayOptions, outcomes: &[Outcome]) -> Self {
        let Outcome {
            tally,
            memory,
            wall,
            ..
        } = &outcomes[0];
        let total = tally.table.total();
        let sizes = memory.sizes;
        let mut sources: BTreeMap<_, SourceCounts> = BTreeMap::new();
        for (source, scope, counts) in tally.table.iter() {
            sources.insert(name(source, scope), counts.into());
        }
        let indexed = memory.inserted.tokens + memory.warmed.tokens;
        let index_bytes = sizes.live_bytes + sizes.segment_bytes;
        ReplayReport {
            docs: tally.docs,
            prompt_tokens: tally.prompt_tokens,
            output_tokens: total.emitted,
            steps: total.steps,
            tokens_per_step: total.accepted_length(),
            drafted_per_step: per_step(total.drafted as f64, &total),
            acceptance_rate: total.acceptance_rate(),
            propose_us: tally.proposing.us(),
            insert_us_per_token: memory.inserted.us_per_token(),
            group_insert_us_per_token: memory.grouped.us_per_token(),
            seal_us_per_token: memory.sealed.us_per_token(),
            extend_us_per_token: tally.extended.us_per_token(),
            index_bytes_per_token: (indexed > 0 && index_bytes > 0)
                .then(|| index_bytes as f64 / indexed as f64),
            live_bytes: sizes.live_bytes,
            segment_bytes: sizes.segment_bytes,
            segments: sizes.segments,
            group_bytes: sizes.group_bytes,
            namespaces: sizes.namespaces,
            groups: sizes.groups,
            groups_evicted: sizes.groups_evicted,
            warm_tokens: memory.warmed.tokens,
            build_tokens_per_s: memory.warmed.tokens_per_s(),
            wall_s: wall.as_secs_f64(),
            sources,
            windows: Window::of(&outcomes[0]),
            policies: policies(options, outcomes),
            settings: options.clone(),
        }
    }

    /// The report as a table for people.
    pub fn table(&self) -> String {
        let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.3}"));
        let us = |of: fn(&DurationsUs) -> f64| number(self.propose_us.as_ref().map(of));
        let rows = [
            ("calls", self.docs.to_string()),
            ("output tokens", self.output_tokens.to_string()),
            ("steps", self.steps.to_string()),
            ("tokens per step", number(self.tokens_per_step)),
            ("drafted per step", number(self.drafted_per_step)),
            ("acceptance rate", number(self.acceptance_rate)),
            ("propose, us: mean", us(|us| us.mean)),
            ("propose, us: p50", us(|us| us.p50)),
            ("propose, us: p99", us(|us| us.p99)),
            ("insert, us per token", number(self.insert_us_per_token)),
            (
                "insert into group, us per token",
                number(self.group_insert_us_per_token),
            ),
            ("seal, us per token", number(self.seal_us_per_token)),
            ("extend, us per token", number(self.extend_us_per_token)),
            ("index, bytes per token", number(self.index_bytes_per_token)),
            ("index, live bytes", self.live_bytes.to_string()),
            ("index, segment bytes", self.segment_bytes.to_string()),
            (
                "warming, tokens per second",
                number(self.build_tokens_per_s),
            ),
            ("wall time, s", format!("{:.3}", self.wall_s)),
        ];
        let mut text = String::new();
        for (what, value) in rows {
            let _ = writeln!(text, "{what:<32} {value:>14}");
        }
        let _ = writeln!(
            text,
            "\n{:<8} {:>10} {:>10} {:>10} {:>10} {:>8}",
            "source", "steps", "drafted", "accepted", "emitted", "rate"
        );
        for (source, counts) in &self.sources {
            let SourceCounts {
                steps,
                drafted,
                accepted,
                emitted,
            } = counts;
            let rate = (*drafted > 0).then(|| *accepted as f64 / *drafted as f64);
            let _ = writeln!(
                text,
                "{source:<8} {steps:>10} {drafted:>10} {accepted:>10} {emitted:>10} {:>8}",
                number(rate)
            );
        }
        if self.policies.is_empty() {
            text += &window::table("", &self.windows);
        }
        text += &policy_table(&self.policies);
        for row in &self.policies {
            let name = format!("{} at {}", row.policy.as_str(), row.concurrency);
            text += &window::table(&name, &row.windows);
        }
        text
    }

    /// How often drafted tokens were accepted that were held to be about as likely, for people.
    pub fn reliability_table(&self) -> String {
        let mut text = String::new();
        for row in self
            .policies
            .iter()
            .filter(|row| !row.reliability.is_empty())
        {
            let _ = writeln!(
                text,
                "\n{} at {}: {:>10} {:>10} {:>10}",
                row.policy.as_str(),
                row.concurrency,
                "drafted",
                "expected",
                "accepted"
            );
            for cell in &row.reliability {
                let _ = writeln!(
                    text,
                    "{:>4.1} to {:>3.1} {:>12} {:>10.3} {:>10.3}",
                    cell.from,
                    cell.from + 0.1,
                    cell.drafted,
                    cell.expected,
                    cell.accepted
                );
            }
        }
        text
    }
}

fn policy_table(rows: &[PolicyReport]) -> String {
    let mut text = String::new();
    let number = |value: Option<f64>, digits: usize| {
        value.map_or("-".into(), |value| format!("{value:.digits$}"))
    };
    let mut concurrency = None;
    for row in rows {
        if concurrency.replace(row.concurrency) != Some(row.concurrency) {
            let _ = writeln!(
                text,
                "\n{:<12} {:>12} {:>9} {:>10} {:>10} {:>10} {:>10}",
                format!("at {}", row.concurrency),
                "tokens/s",
                "speed-up",
                "tokens",
                "expected",
                "drafted",
                "by head"
            );
        }
        let _ = writeln!(
            text,
            "{:<12} {:>12} {:>8}x {:>10} {:>10} {:>10} {:>10}",
            row.policy.as_str(),
            number(row.goodput_tokens_per_s, 1),
            number(row.speedup, 3),
            number(row.tokens_per_step, 3),
            number(row.expected_per_step, 3),
            number(row.drafted_per_step, 3),
            number(row.head_share, 3),
        );
    }
    text
}
