//! The replays that an analysis of one workload consists of.

use refrain_speculation::draft::Setting;

use super::alpha::ALPHAS;
use super::options::AnalyzeOptions;
use super::sample::TenantWorkload;
use crate::replay::{Eagle3, EndedCall, Outcome, Policy, ReplayProgress, Setup, Tally};

/// Policies of which the speed is predicted: plain decoding, n-gram lookup alone, a head alone, and Refrain.
const POLICIES: [Policy; 4] = [Policy::Off, Policy::Pld, Policy::Eagle3, Policy::Goodput];
/// Parts of the earlier calls that are remembered, the latest ones, when the last quarter of the calls is replayed.
pub(super) const MEMORY_SHARES: [f64; 4] = [0.0, 1.0 / 16.0, 0.25, 1.0];

/// One replay of a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Experiment {
    /// A policy on the engine model of this number, with so many requests at once.
    Policy {
        model: usize,
        policy: Policy,
        concurrency: usize,
    },
    /// The policy `goodput` with this alpha.
    Alpha(Setting),
    /// The last quarter of the calls by a policy, with this one of the [`MEMORY_SHARES`].
    Memory(Policy, usize),
    /// The size of the index of all outputs.
    Size,
}

/// A replay, and the modelled seconds of each of its calls.
pub(super) struct Measured {
    pub(super) outcome: Outcome,
    pub(super) call_s: Vec<f64>,
}

/// All replays of a workload.
pub(super) struct Answers(pub(super) Vec<(Experiment, Measured)>);

impl Answers {
    pub(super) fn of(&self, wanted: Experiment) -> Option<&Measured> {
        let mut answers = self.0.iter();
        answers.find_map(|(experiment, measured)| (*experiment == wanted).then_some(measured))
    }
}

impl Experiment {
    /// All experiments of a workload. Alphas and memories are tried on the first engine model, at the number of
    /// requests that the answer is about.
    pub(super) fn all(options: &AnalyzeOptions) -> Vec<Self> {
        let mut all = Vec::new();
        for model in 0..options.engine_model.len() {
            for &concurrency in &options.concurrency {
                all.extend(POLICIES.map(|policy| Experiment::Policy {
                    model,
                    policy,
                    concurrency,
                }));
            }
        }
        all.extend(ALPHAS.map(|alpha| Experiment::Alpha(Setting::Fixed(alpha))));
        all.push(Experiment::Memory(Policy::Off, 0));
        all.extend((0..MEMORY_SHARES.len()).map(|at| Experiment::Memory(Policy::Goodput, at)));
        all.push(Experiment::Size);
        all
    }

    /// Replays the workload's calls. `setups` has one replay for each engine model.
    pub(super) fn run(
        self,
        workload: &TenantWorkload,
        setups: &[Setup],
        options: &AnalyzeOptions,
        progress: &dyn Fn(ReplayProgress),
    ) -> anyhow::Result<Measured> {
        let headline = options.headline_concurrency();
        let (mut known, mut calls) = (&workload.calls[..0], &workload.calls[..]);
        let setup = match self {
            Experiment::Policy {
                model,
                policy,
                concurrency,
            } => {
                let mut setup = setups[model].with(policy, concurrency);
                if policy == Policy::Eagle3 && options.eagle3.is_none() {
                    setup.judging.head = Eagle3::default();
                }
                setup
            }
            Experiment::Alpha(alpha) => {
                let mut setup = setups[0].with(Policy::Goodput, headline);
                setup.serving.rules.alpha = alpha;
                setup
            }
            Experiment::Memory(policy, share) => {
                (known, calls) = remembered(&workload.calls, MEMORY_SHARES[share]);
                setups[0].with(policy, headline)
            }
            Experiment::Size => {
                // Calls that are known from the start go into one segment.
                (known, calls) = (calls, known);
                let mut setup = setups[0].with(Policy::Suffix, 1);
                setup.indexes.seal_tokens = Some(1);
                setup
            }
        };
        let count = calls.len();
        let mut call_s = vec![0.0; count];
        let ended = |tally: &Tally, call: EndedCall| {
            call_s[call.number as usize] = call.engine_s;
            progress(tally.progress(tally.docs as f64 / count.max(1) as f64));
        };
        let known = known.iter().cloned().map(Ok);
        let outcome = setup.replay(known, calls.iter().cloned().map(Ok), ended)?;
        if count == 0 {
            progress(ReplayProgress::done());
        }
        Ok(Measured { outcome, call_s })
    }
}

/// The latest share of the first three quarters of the calls, and the last quarter.
pub(super) fn remembered<T>(calls: &[T], share: f64) -> (&[T], &[T]) {
    let (earlier, last) = calls.split_at(calls.len() * 3 / 4);
    let forgotten = (earlier.len() as f64 * (1.0 - share)).round() as usize;
    (&earlier[forgotten..], last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_quarter_is_replayed_with_the_calls_before_it() {
        let calls: Vec<usize> = (0..64).collect();
        let of = |share| remembered(&calls, share);
        assert_eq!(of(1.0), (&calls[..48], &calls[48..]));
        assert_eq!(of(0.25), (&calls[36..48], &calls[48..]));
        assert_eq!(of(0.0), (&calls[..0], &calls[48..]));
        assert_eq!(remembered(&calls[..1], 1.0), (&calls[..0], &calls[..1]));
    }
}
