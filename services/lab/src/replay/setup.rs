//! One replay: a memory, a policy and their outcome.

use std::time::{Duration, Instant};

use refrain_speculation::draft::{ProposeRules, Setting};
use refrain_suffix_index::IndexConfig;
use refrain_worker::SpeculationConfig;

use super::account::Account;
use super::judge::{Judge, Judging};
use super::policy::Policy;
use super::presets::{Drafter, PLD_DRAFT_TOKENS, PresetChanges, SamRules};
use super::serve::{EndedCall, Serving, Tally, serve};
use super::shared_indexes::{IndexCosts, SharedIndexConfig, SharedIndexes};
use super::source::ReplaySource;
use crate::logs::RecordedCall;

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
    /// Draft nothing in steps of more requests than this.
    pub(crate) off_above_batch: Option<usize>,
    /// The changes of the preset of one policy.
    pub(crate) changes: Option<(Policy, PresetChanges)>,
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
            off_above_batch: None,
            changes: None,
        }
    }

    /// The same settings with another policy and number of requests. Indexes that the policy does not use are turned
    /// off.
    pub(crate) fn with(&self, policy: Policy, concurrency: usize) -> Self {
        let mut setup = self.clone();
        setup.judging.policy = policy;
        setup.serving.concurrency = concurrency;
        let changes = match &self.changes {
            Some((of, changes)) if *of == policy => changes.clone(),
            _ => PresetChanges::default(),
        };
        let is_paper = policy == Policy::Paper;
        match policy {
            Policy::Suffix
            | Policy::Score
            | Policy::Goodput
            | Policy::Mba
            | Policy::Padded
            | Policy::Adaptive => {
                return setup;
            }
            Policy::Paper => {
                let params = changes.paper_params();
                setup.serving.rules = ProposeRules {
                    alpha: Setting::Fixed(params.alpha),
                    min_token_prob: Setting::Fixed(params.min_token_prob),
                    params,
                };
            }
            Policy::Sam => {
                setup.indexes.corpus = true;
                let rules = match setup.judging.head.is_absent() {
                    true => SamRules::ALONE,
                    false => SamRules::HYBRID,
                };
                setup.serving.drafter = Drafter::Sam(changes.sam_rules(rules));
            }
            Policy::Pld => {
                let tokens = changes.draft_tokens.unwrap_or(PLD_DRAFT_TOKENS);
                setup.serving.drafter = Drafter::Pld(tokens);
            }
            Policy::Off | Policy::Eagle3 => setup.serving.drafter = Drafter::None,
        }
        let has = |source| is_paper && changes.has(source);
        setup.indexes.global = has(ReplaySource::Global);
        setup.indexes.groups = has(ReplaySource::Group);
        setup.serving.request = has(ReplaySource::Request);
        setup.serving.shared = setup.indexes.global || setup.indexes.groups;
        setup
    }

    /// Replays the calls with a memory that holds the `known` ones. `ended` is called after each.
    pub(crate) fn replay(
        self,
        known: impl Iterator<Item = anyhow::Result<RecordedCall>>,
        mut calls: impl Iterator<Item = anyhow::Result<RecordedCall>>,
        ended: impl FnMut(&Tally, EndedCall),
    ) -> anyhow::Result<Outcome> {
        let mut indexes = SharedIndexes::new(self.indexes);
        for call in known {
            indexes.add_known(&call?)?;
        }
        indexes.warm_up()?;
        let (policy, concurrency) = (self.judging.policy, self.serving.concurrency);
        let mut judge = Judge::new(self.judging).off_above(self.off_above_batch);
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
