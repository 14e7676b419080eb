//! One replay: a memory, a policy and their outcome.

use std::time::{Duration, Instant};

use refrain_speculation::draft::{ProposeRules, Setting};
use refrain_suffix_index::IndexConfig;
use refrain_worker::SpeculationConfig;

use super::account::Account;
use super::judge::{Judge, Judging};
use super::policy::Policy;
use super::presets::{Drafter, SamRules, paper_params};
use super::serve::{Serving, Tally, serve};
use super::shared_indexes::{IndexCosts, SharedIndexConfig, SharedIndexes};
use super::trace::RecordedCall;

/// A worker's default settings of drafts.
pub(crate) fn worker_rules() -> ProposeRules {
    SpeculationConfig::default().rules()
}

/// The settings of a replay.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) indexes: SharedIndexConfig,
    pub(crate) serving: Serving,
    pub(crate) judging: Judging,
}

/// The outcome of a replay.
pub(crate) struct Outcome {
    pub(crate) policy: Policy,
    pub(crate) concurrency: usize,
    pub(crate) tally: Tally,
    pub(crate) account: Account,
    pub(crate) costs: IndexCosts,
    pub(crate) wall: Duration,
}

impl Setup {
    /// A replay by a worker's default settings, one request after the other.
    pub(crate) fn with_worker_defaults(judging: Judging) -> Self {
        let rules = worker_rules();
        Setup {
            indexes: SharedIndexConfig {
                index: IndexConfig {
                    pattern_tokens_max: rules.params.max_pattern,
                    ..IndexConfig::default()
                },
                global: true,
                groups: true,
                corpus: false,
                seal_tokens: None,
            },
            serving: Serving {
                drafter: Drafter::Suffix,
                rules,
                request: true,
                shared: true,
                frozen: false,
                concurrency: 1,
                window: None,
            },
            judging,
        }
    }

    /// The same settings with another policy and number of requests. Indexes that the policy does not use are turned
    /// off.
    pub(crate) fn with(&self, policy: Policy, concurrency: usize) -> Self {
        let mut setup = self.clone();
        setup.judging.policy = policy;
        setup.serving.concurrency = concurrency;
        let has_indexes = match policy {
            Policy::Suffix | Policy::Score | Policy::Goodput | Policy::Mba => return setup,
            Policy::Paper => {
                let params = paper_params();
                setup.serving.rules = ProposeRules {
                    alpha: Setting::Fixed(params.alpha),
                    min_token_prob: Setting::Fixed(params.min_token_prob),
                    params,
                };
                true
            }
            Policy::Sam => {
                setup.indexes.corpus = true;
                setup.serving.drafter = Drafter::Sam(match setup.judging.head.is_absent() {
                    true => SamRules::ALONE,
                    false => SamRules::HYBRID,
                });
                false
            }
            Policy::Pld => {
                setup.serving.drafter = Drafter::Pld;
                false
            }
            Policy::Off | Policy::Eagle3 => {
                setup.serving.drafter = Drafter::None;
                false
            }
        };
        setup.indexes.global = has_indexes;
        setup.indexes.groups = false;
        setup.serving.request = has_indexes;
        setup.serving.shared = has_indexes;
        setup
    }

    /// Replays the calls with a memory that holds the `known` ones. `ended` is called after each.
    pub(crate) fn replay(
        self,
        known: impl Iterator<Item = anyhow::Result<RecordedCall>>,
        mut calls: impl Iterator<Item = anyhow::Result<RecordedCall>>,
        ended: impl FnMut(&Tally),
    ) -> anyhow::Result<Outcome> {
        let mut indexes = SharedIndexes::new(self.indexes);
        for call in known {
            indexes.add_known(&call?)?;
        }
        indexes.warm_up()?;
        let (policy, concurrency) = (self.judging.policy, self.serving.concurrency);
        let mut judge = Judge::new(self.judging);
        let start = Instant::now();
        let tally = serve(&mut calls, &mut indexes, &self.serving, &mut judge, ended)?;
        Ok(Outcome {
            policy,
            concurrency,
            tally,
            account: judge.account,
            costs: indexes.into_costs(),
            wall: start.elapsed(),
        })
    }
}

impl Outcome {
    /// Output tokens per second of modelled engine time; `None` without a step.
    pub(crate) fn goodput_tokens_per_s(&self) -> Option<f64> {
        let engine_s = self.account.engine_s;
        (engine_s > 0.0).then(|| self.tally.table.total().emitted as f64 / engine_s)
    }
}
