//! The replays that an analysis of one workload consists of.

use refrain_speculation::draft::Setting;
use refrain_speculation::router::Threshold;

use super::options::AnalyzeOptions;
use super::workloads::TenantWorkload;
use crate::replay::{Outcome, Policy, ReplayProgress, Setup, Tally, once};

/// Values of alpha that are tried.
pub(super) const ALPHAS: [f32; 4] = [0.5, 1.0, 2.0, 4.0];
/// Values of tau that are tried. With 1, every draft that is found is verified.
pub(super) const TAUS: [f32; 6] = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// Policies whose speed-up is predicted.
pub(super) const POLICIES: [Policy; 3] = [Policy::Off, Policy::Suffix, Policy::Goodput];
/// Points of a curve over the calls.
const WINDOWS: u64 = 12;

/// One replay of a workload.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Experiment {
    /// A policy at a number of requests.
    Policy(Policy, usize),
    /// The policy `suffix` with this alpha.
    Alpha(f32),
    /// The policy `score` with this tau.
    Tau(f32),
    /// The size of the index of all outputs.
    Size,
}

impl Experiment {
    /// All experiments of a workload.
    pub(super) fn all(options: &AnalyzeOptions) -> Vec<Self> {
        let mut all = Vec::new();
        for &concurrency in &options.concurrency {
            all.extend(POLICIES.map(|policy| Experiment::Policy(policy, concurrency)));
        }
        all.extend(ALPHAS.map(Experiment::Alpha));
        all.extend(TAUS.map(Experiment::Tau));
        all.push(Experiment::Size);
        once(&all)
    }

    /// Replays the workload's calls.
    pub(super) fn run(
        self,
        workload: &TenantWorkload,
        setup: &Setup,
        concurrency: usize,
        progress: &dyn Fn(ReplayProgress),
    ) -> anyhow::Result<Outcome> {
        let count = workload.calls.len();
        let calls = || workload.calls.iter().cloned().map(Ok);
        let call_ended =
            |tally: &Tally| progress(tally.progress(tally.docs as f64 / count.max(1) as f64));
        let no_calls = std::iter::empty();
        let mut setup = match self {
            Experiment::Policy(policy, concurrency) => setup.with(policy, concurrency),
            Experiment::Alpha(_) | Experiment::Size => setup.with(Policy::Suffix, concurrency),
            Experiment::Tau(_) => setup.with(Policy::Score, concurrency),
        };
        setup.serving.window = Some((count as u64).div_ceil(WINDOWS).max(1));
        match self {
            Experiment::Policy(..) => {}
            Experiment::Alpha(alpha) => setup.serving.rules.alpha = Setting::Fixed(alpha),
            Experiment::Tau(tau) => setup.judging.threshold = Threshold::Fixed(tau),
            Experiment::Size => {
                // Calls that are known from the start go into one segment.
                setup.indexes.seal_tokens = Some(1);
                let outcome = setup.replay(calls(), no_calls, call_ended)?;
                progress(ReplayProgress {
                    share: 1.0,
                    ..ReplayProgress::default()
                });
                return Ok(outcome);
            }
        }
        setup.replay(no_calls, calls(), call_ended)
    }
}
