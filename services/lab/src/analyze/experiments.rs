//! The replays that an analysis of one workload consists of.

use refrain_speculation::draft::Setting;

use super::alpha::ALPHAS;
use super::options::AnalyzeOptions;
use super::workloads::TenantWorkload;
use crate::replay::{Outcome, Policy, ReplayProgress, Setup, Tally, once};

/// Policies whose speed-up is predicted.
pub(super) const POLICIES: [Policy; 3] = [Policy::Off, Policy::Suffix, Policy::Goodput];
/// Points of a curve over the calls.
const WINDOWS: u64 = 12;

/// One replay of a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Experiment {
    /// A policy at a number of requests.
    Policy(Policy, usize),
    /// The policy `goodput` with this alpha at a number of requests, on the first calls alone.
    Alpha(Setting, usize),
    /// The size of the index of all outputs.
    Size,
}

impl Experiment {
    /// All experiments of a workload.
    pub(super) fn all(options: &AnalyzeOptions) -> Vec<Self> {
        let mut all = Vec::new();
        for &concurrency in &options.concurrency {
            all.extend(POLICIES.map(|policy| Experiment::Policy(policy, concurrency)));
            all.push(Experiment::Alpha(Setting::Auto, concurrency));
            all.extend(ALPHAS.map(|alpha| Experiment::Alpha(Setting::Fixed(alpha), concurrency)));
        }
        all.push(Experiment::Size);
        once(&all)
    }

    /// Replays the workload's calls, or the first `alpha_docs` of them to try an alpha.
    pub(super) fn run(
        self,
        workload: &TenantWorkload,
        setup: &Setup,
        alpha_docs: usize,
        progress: &dyn Fn(ReplayProgress),
    ) -> anyhow::Result<Outcome> {
        let mut calls = &workload.calls[..];
        let mut setup = match self {
            Experiment::Policy(policy, concurrency) => setup.with(policy, concurrency),
            Experiment::Alpha(alpha, concurrency) => {
                calls = &calls[..calls.len().min(alpha_docs)];
                let mut setup = setup.with(Policy::Goodput, concurrency);
                setup.serving.rules.alpha = alpha;
                setup
            }
            Experiment::Size => setup.with(Policy::Suffix, 1),
        };
        let count = calls.len();
        setup.serving.window = Some((count as u64).div_ceil(WINDOWS).max(1));
        let call_ended =
            |tally: &Tally| progress(tally.progress(tally.docs as f64 / count.max(1) as f64));
        let calls = calls.iter().cloned().map(Ok);
        let no_calls = std::iter::empty();
        if self != Experiment::Size {
            return setup.replay(no_calls, calls, call_ended);
        }
        // Calls that are known from the start go into one segment.
        setup.indexes.seal_tokens = Some(1);
        let outcome = setup.replay(calls, no_calls, call_ended)?;
        progress(ReplayProgress {
            share: 1.0,
            ..ReplayProgress::default()
        });
        Ok(outcome)
    }
}
