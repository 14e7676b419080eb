//! How much faster a modelled engine would be, over the sessions of some workloads.

use serde::Serialize;

use super::bootstrap::{Range, ratio_range};
use super::experiments::{Answers, Experiment, MEMORY_SHARES, Measured, remembered};
use super::prompts::prompt_seconds;
use super::sample::TenantWorkload;
use crate::logs::RecordedCall;
use crate::replay::{EngineModel, Policy};

/// Shortest time of a token: no engine makes 10,000 tokens of a request in a second.
const TOKEN_MS_MIN: f64 = 0.1;

/// One workload, and all that was measured on it.
pub(super) struct Row<'a> {
    pub(super) workload: &'a TenantWorkload,
    pub(super) answers: &'a Answers,
    /// The engine models.
    pub(super) engines: Vec<&'a EngineModel>,
    /// For each call, the tokens of its prompt that an engine still has.
    pub(super) reused: Vec<usize>,
}

/// The gain by drafts on an engine model with some number of requests at once. Speed-ups are over plain decoding.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SpeedReport {
    /// The engine model.
    pub engine_model: String,
    /// Requests at once. Calls of one session run one after the other, so few sessions reach fewer.
    pub concurrency: usize,
    /// Speed-up of decoding by Refrain's drafts.
    pub decoding: Option<Range>,
    /// Speed-up of whole calls with that share of decoding.
    pub whole_call: Option<Range>,
    /// Share of decoding in the time of calls, by the times of the log, or else by the model where it reuses what it
    /// still has of a prompt. `null` if no call has a prompt or such times.
    pub decoding_share: Option<f64>,
    /// Calls by whose own times that share was measured; 0 where it is modelled.
    pub decoding_share_calls: u64,
    /// The modelled share where each prompt is computed as a whole. `null` where the share was measured.
    pub decoding_share_without_reuse: Option<f64>,
    /// Speed-up of decoding by n-gram lookup in the call alone.
    pub ngram: Option<f64>,
    /// Speed-up of decoding by an EAGLE-3 head alone.
    pub head: Option<f64>,
    /// Output tokens per second of plain decoding.
    pub plain_tokens_per_s: Option<f64>,
    /// Output tokens per step with Refrain's drafts.
    pub tokens_per_step: Option<f64>,
}

/// The speed-up of the last quarter of the calls with a part of the earlier ones remembered.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct MemoryPoint {
    /// Share of the earlier calls, the latest ones.
    pub share: f64,
    /// Their output tokens.
    pub tokens: u64,
    /// Speed-up of decoding.
    pub speedup: Option<f64>,
}

/// Modelled seconds of a session.
#[derive(Clone, Copy, Debug, Default)]
struct Seconds {
    plain: f64,
    drafted: f64,
    ngram: f64,
    head: f64,
    prompt: f64,
    reused_prompt: f64,
}

impl SpeedReport {
    /// The speed of these rows together, each counted by its part of the log.
    pub(super) fn new(
        rows: &[&Row<'_>],
        model: usize,
        (engine_model, concurrency): (&str, usize),
    ) -> Self {
        let experiment = |policy| Experiment::Policy {
            model,
            policy,
            concurrency,
        };
        let sessions: Vec<Seconds> = rows
            .iter()
            .flat_map(|row| row.sessions((model, concurrency), experiment))
            .collect();
        let sum = |of: fn(&Seconds) -> f64| sessions.iter().map(of).sum::<f64>();
        let ratio = |a: f64, b: f64| (a > 0.0 && b > 0.0).then(|| a / b);
        let plain = sum(|one| one.plain);
        let prompts = sum(|one| one.prompt) > 0.0;
        let share = |prompt_s: f64| ratio(plain, plain + prompt_s).filter(|_| prompts);
        let modelled = share(sum(|one| one.reused_prompt));
        let measured = measured_share(rows);
        let decoding_share = measured.map(|(share, _)| share).or(modelled);
        let (mut tokens, mut emitted, mut steps) = (0.0, 0.0, 0.0);
        for row in rows {
            let weight = row.workload.weight();
            tokens += row.workload.tokens_read as f64;
            if let Some(measured) = row.answers.of(experiment(Policy::Goodput)) {
                let total = measured.outcome.tally.table.total();
                emitted += weight * total.emitted as f64;
                steps += weight * total.steps as f64;
            }
        }
        let decoding: Vec<_> = (sessions.iter())
            .map(|one| (one.plain, one.drafted))
            .collect();
        let whole_call: Vec<_> = (sessions.iter())
            .map(|one| {
                let rest = match measured {
                    Some((share, _)) => one.plain * (1.0 - share) / share,
                    None => one.reused_prompt,
                };
                (one.plain + rest, one.drafted + rest)
            })
            .collect();
        SpeedReport {
            engine_model: engine_model.to_owned(),
            concurrency,
            decoding: ratio_range(&decoding),
            whole_call: ratio_range(&whole_call).filter(|_| decoding_share.is_some()),
            decoding_share,
            decoding_share_calls: measured.map_or(0, |(_, calls)| calls),
            decoding_share_without_reuse: share(sum(|one| one.prompt))
                .filter(|_| measured.is_none()),
            ngram: ratio(plain, sum(|one| one.ngram)),
            head: ratio(plain, sum(|one| one.head)),
            plain_tokens_per_s: ratio(tokens, plain),
            tokens_per_step: ratio(emitted, steps),
        }
    }
}

/// The share of decoding in the time of calls, by the log's own times, and the number of these calls. `None` where
/// fewer than half of the calls have such times.
fn measured_share(rows: &[&Row<'_>]) -> Option<(f64, u64)> {
    let (mut decoding_ms, mut whole_ms) = (0.0, 0.0);
    let (mut measured, mut all) = (0, 0);
    for row in rows {
        let weight = row.workload.weight();
        for call in &row.workload.calls {
            all += 1;
            if let Some((decoding, whole)) = decoding_ms_of(call) {
                measured += 1;
                decoding_ms += weight * decoding;
                whole_ms += weight * whole;
            }
        }
    }
    let is_enough = measured > 0 && 2 * measured >= all;
    is_enough.then(|| (decoding_ms / whole_ms, measured))
}

/// The time from the first token of a call to its end, and that of the call. An answer that was not streamed comes at
/// once, and says nothing of when its tokens were made.
fn decoding_ms_of(call: &RecordedCall) -> Option<(f64, f64)> {
    let (first, whole) = (call.first_ms?, call.duration_ms?);
    let decoding = whole.checked_sub(first)? as f64;
    let is_streamed = decoding > TOKEN_MS_MIN * call.output.len() as f64;
    is_streamed.then_some((decoding, whole as f64))
}

impl Row<'_> {
    /// The seconds of each unit of calls, by their part of the log.
    fn sessions(
        &self,
        (model, concurrency): (usize, usize),
        experiment: impl Fn(Policy) -> Experiment,
    ) -> Vec<Seconds> {
        let workload = self.workload;
        let weight = workload.weight();
        let [plain, drafted, ngram, head] =
            [Policy::Off, Policy::Goodput, Policy::Pld, Policy::Eagle3].map(|policy| {
                let measured = self.answers.of(experiment(policy));
                measured.map_or(&[][..], |measured| &measured.call_s)
            });
        let of = |seconds: &[f64], call: usize| weight * seconds.get(call).copied().unwrap_or(0.0);
        let mut sessions = vec![Seconds::default(); workload.unit_count];
        for (call, unit) in workload.units.iter().enumerate() {
            let session = &mut sessions[*unit];
            session.plain += of(plain, call);
            session.drafted += of(drafted, call);
            session.ngram += of(ngram, call);
            session.head += of(head, call);
            let (engine, recorded) = (self.engines[model], &workload.calls[call]);
            let prompt = |known| weight * prompt_seconds(engine, recorded, known, concurrency - 1);
            session.prompt += prompt(0);
            session.reused_prompt += prompt(self.reused[call]);
        }
        sessions
    }
}

/// How the speed-up of these rows together grows with what is remembered.
pub(super) fn memory_points(rows: &[&Row<'_>]) -> Vec<MemoryPoint> {
    let seconds = |policy: Policy, share: usize| {
        let of_row = |row: &&Row<'_>| {
            let measured = row.answers.of(Experiment::Memory(policy, share));
            let seconds = measured.map_or(0.0, Measured::seconds);
            row.workload.weight() * seconds
        };
        rows.iter().map(of_row).sum::<f64>()
    };
    let plain = seconds(Policy::Off, 0);
    let points = MEMORY_SHARES.iter().enumerate().map(|(at, &share)| {
        let drafted = seconds(Policy::Goodput, at);
        let known = rows
            .iter()
            .flat_map(|row| remembered(&row.workload.calls, share).0);
        MemoryPoint {
            share,
            tokens: known.map(|call| call.output.len() as u64).sum(),
            speedup: (drafted > 0.0).then(|| plain / drafted),
        }
    });
    points.collect()
}

impl Measured {
    fn seconds(&self) -> f64 {
        self.call_s.iter().sum()
    }
}
