//! Chooses the drafts of a step for the whole batch by one policy, and keeps the account on the modelled engine.

use std::num::NonZeroUsize;

use refrain_speculation::{
    Acceptance, Asked, Candidate, DraftTree, Fallback, Found, Goodput, GoodputParams, Grant, Guard,
    Guarded, GuardedStep, HeadDrafted, HeadUse, HeadWish, HeadWork, Priority, Route, StepFrame,
    StepTaken, Threshold, Wish, route,
};
use refrain_suffix_index::Token;
use refrain_worker::{SpeculationConfig, WorkerConfig};

use super::account::Account;
use super::eagle3::Eagle3;
use super::engine_model::{EngineModel, StepLoad};
use super::policy::Policy;

/// Stands for the end of a text. No recording has this token, so no draft has it.
const END: Token = Token::MAX;

/// The settings of the choice of drafts.
#[derive(Clone, Debug)]
pub(crate) struct Judging {
    pub(crate) policy: Policy,
    pub(crate) engine: EngineModel,
    pub(crate) head: Eagle3,
    pub(crate) seed: u64,
    pub(crate) threshold: Threshold,
    /// Most tokens of a step, drafts included.
    pub(crate) step_tokens_max: u32,
}

/// A request that takes part in a step.
pub(super) struct Turn {
    /// The namespace whose acceptance statistics apply.
    pub(super) namespace: usize,
    /// Tokens of the prompt and the output so far.
    pub(super) context_tokens: usize,
    /// The best suffix draft, if one was looked for and found.
    pub(super) found: Option<Candidate>,
}

/// The draft of a request in a step.
pub(super) enum Draft {
    /// No draft.
    Plain,
    /// This part of the suffix draft is verified.
    Suffix(DraftTree),
    /// The head drafts this many tokens.
    Head(usize),
}

/// The decision of a policy for a request.
enum Routed {
    Plain,
    /// The whole suffix draft.
    Whole,
    /// These nodes of the suffix draft, ascending.
    Part(Vec<u32>),
    Head,
}

/// A [`Turn`] with its draft.
pub(super) struct Choice {
    namespace: usize,
    pub(super) draft: Draft,
    pub(super) found: Option<Candidate>,
    /// Expected acceptance probability of each drafted token.
    chances: Vec<f32>,
}

/// A [`Choice`] that was verified.
pub(super) struct Verified {
    pub(super) context_tokens: usize,
    pub(super) choice: Choice,
    /// The accepted draft tokens, from the root down.
    pub(super) path: Vec<u32>,
    /// The emitted tokens: the accepted ones and the recording's next.
    pub(super) said: Vec<Token>,
    /// Whether the recording ends with this step.
    pub(super) is_last: bool,
}

impl Draft {
    /// Number of draft tokens to verify.
    pub(super) fn tokens(&self) -> usize {
        match self {
            Draft::Plain => 0,
            Draft::Suffix(tree) => tree.len(),
            Draft::Head(depth) => *depth,
        }
    }
}

/// A policy at work.
pub(super) struct Judge {
    judging: Judging,
    /// The worker's router. The policy `goodput` follows it; the others use only its acceptance statistics.
    goodput: Goodput<usize>,
    /// The guard behind the policy `goodput`.
    guard: Guard,
    /// Whether the current step verifies nothing.
    withholds: bool,
    /// Acceptance of the head's drafts.
    head: Acceptance,
    pub(super) account: Account,
}

impl Judge {
    pub(super) fn new(judging: Judging) -> Self {
        let WorkerConfig {
            speculation: SpeculationConfig { gain_min, .. },
            memory,
            ..
        } = WorkerConfig::default();
        let namespaces_max = NonZeroUsize::new(memory.namespaces_max);
        Judge {
            judging,
            goodput: Goodput::new(GoodputParams {
                namespaces_max: namespaces_max.unwrap_or(NonZeroUsize::MIN),
                off_above_batch: None,
            }),
            guard: Guard::new(gain_min, Guarded::AllDrafts),
            withholds: false,
            head: Acceptance::default(),
            account: Account::default(),
        }
    }

    /// Number of the head's tokens that are accepted at this position of the call's output.
    pub(super) fn head_accepts(&self, call: u64, position: usize, depth: usize) -> usize {
        let Judging { head, seed, .. } = &self.judging;
        head.accepted(*seed, call, position, depth)
    }

    /// Chooses for all requests of a step together.
    pub(super) fn choose(&mut self, mut turns: Vec<Turn>) -> Vec<Choice> {
        let batch = turns.len() as u32;
        let policy = self.judging.policy;
        self.withholds = policy == Policy::Goodput && self.guard.withholds(batch, true);
        if self.withholds {
            // A worker does not look for drafts in such a step.
            for turn in &mut turns {
                turn.found = None;
            }
        }
        let mut room = self.judging.step_tokens_max.saturating_sub(batch);
        let chances: Vec<Vec<f32>> = turns
            .iter()
            .map(|turn| match &turn.found {
                Some(found) => self.goodput.chances(turn.namespace, found),
                None => Vec::new(),
            })
            .collect();
        let routes = if policy == Policy::Goodput {
            self.by_goodput(&turns, &chances, room)
        } else {
            turns.iter().map(|turn| self.by_itself(turn)).collect()
        };
        turns
            .into_iter()
            .zip(chances)
            .zip(routes)
            .map(|((turn, chances), route): (_, Routed)| {
                let choice = self.carry_out(turn, chances, route, room);
                room -= choice.draft.tokens() as u32;
                choice
            })
            .collect()
    }

    /// The worker's own router.
    fn by_goodput(&mut self, turns: &[Turn], chances: &[Vec<f32>], room: u32) -> Vec<Routed> {
        let depth = self.judging.head.acceptance.len() as u32;
        // The head reads what it missed in its first pass.
        let head = (depth > 0 && !self.withholds).then_some(HeadWish {
            depth,
            tokens_max: depth,
            unread_tokens: 0,
            merges: false,
        });
        let wishes: Vec<Wish<'_, usize>> = turns
            .iter()
            .zip(chances)
            .map(|(turn, chances)| Wish {
                namespace: turn.namespace,
                priority: Priority::Normal,
                pace: None,
                context_tokens: turn.context_tokens as u32,
                found: turn.found.as_ref(),
                chances,
                head,
            })
            .collect();
        let batch = turns.len() as u32;
        let kv_tokens = turns.iter().map(|turn| turn.context_tokens as u64).sum();
        let frame = StepFrame {
            tokens: batch,
            kv_tokens,
            slots_max: room,
            batch,
        };
        let granted = self.goodput.divide(&wishes, frame);
        let routes = granted.grants.into_iter().map(|grant| match grant {
            Grant::Plain => Routed::Plain,
            Grant::Tree(nodes) => Routed::Part(nodes),
            Grant::Head { .. } | Grant::Merged { .. } | Grant::HeadTrial => Routed::Head,
        });
        routes.collect()
    }

    /// The decision of a policy that looks at each request by itself.
    fn by_itself(&self, turn: &Turn) -> Routed {
        match self.judging.policy {
            Policy::Off | Policy::Goodput => Routed::Plain,
            Policy::Eagle3 => Routed::Head,
            Policy::Suffix | Policy::Pld => {
                turn.found.as_ref().map_or(Routed::Plain, |_| Routed::Whole)
            }
            // Its matches are long enough to be preferred to the head.
            Policy::Sam => match (&turn.found, self.judging.head.is_absent()) {
                (Some(_), _) => Routed::Whole,
                (None, true) => Routed::Plain,
                (None, false) => Routed::Head,
            },
            Policy::Score | Policy::Paper => self.by_score(turn.found.as_ref()),
        }
    }

    /// Makes the draft that was decided, of at most `room` tokens.
    fn carry_out(&mut self, turn: Turn, chances: Vec<f32>, route: Routed, room: u32) -> Choice {
        let depth = self.judging.head.acceptance.len().min(room as usize);
        let (draft, mut chances) = match (route, &turn.found) {
            (Routed::Whole, Some(found)) => {
                let mut tree = found.tree.clone();
                tree.truncate(room as usize);
                (Draft::Suffix(tree), chances)
            }
            (Routed::Part(nodes), Some(found)) => {
                let is_in = |node: usize| nodes.binary_search(&(node as u32)).is_ok();
                let kept = nodes.iter().map(|&node| chances[node as usize]).collect();
                (Draft::Suffix(found.tree.select(is_in)), kept)
            }
            (Routed::Head, _) => (Draft::Head(depth), self.head_chances(&turn, depth)),
            (Routed::Plain | Routed::Whole | Routed::Part(_), _) => (Draft::Plain, Vec::new()),
        };
        chances.truncate(draft.tokens());
        Choice {
            namespace: turn.namespace,
            draft,
            found: turn.found,
            chances,
        }
    }

    /// SuffixDecoding's rule. Tau is the head's own tokens per step unless a threshold is given.
    fn by_score(&self, found: Option<&Candidate>) -> Routed {
        let found = found.map_or(Found::Nothing, |found| Found::Score(found.score));
        let break_even = self.head.accepted_length().map(|length| length as f32);
        let fallback = match self.judging.head.acceptance.len() {
            0 => Fallback::Absent,
            _ => Fallback::InUse { break_even },
        };
        match route(Asked::Auto, found, self.judging.threshold, fallback).route {
            Route::Suffix => Routed::Whole,
            Route::Fallback | Route::Merged => Routed::Head,
            Route::Plain => Routed::Plain,
        }
    }

    fn head_chances(&mut self, turn: &Turn, depth: usize) -> Vec<f32> {
        let calibration = self.goodput.calibration(turn.namespace);
        let context = turn.context_tokens as u32;
        let up_to = |depth: usize| calibration.expect_head(context, depth as u32);
        (0..depth).map(|at| up_to(at + 1) - up_to(at)).collect()
    }

    /// Learns from a step, and adds its time to the account.
    pub(super) fn settle(&mut self, verified: &[Verified]) {
        let mut load = StepLoad::default();
        let mut depths = Vec::new();
        for Verified {
            context_tokens,
            choice,
            path,
            said,
            is_last,
        } in verified
        {
            let calibration = self.goodput.calibration(choice.namespace);
            load.requests += 1;
            load.tokens += 1 + choice.draft.tokens();
            load.kv_tokens += context_tokens;
            for (at, chance) in choice.chances.iter().enumerate() {
                self.account.record(*chance, path.contains(&(at as u32)));
            }
            if let Draft::Head(depth) = choice.draft {
                depths.push(depth);
                self.head.record(depth, path.len(), said.len());
                let context = *context_tokens as u32;
                calibration.observe_head(context, depth as u32, path.len() as u32);
            }
            if let Some(found) = &choice.found {
                let mut said = said.clone();
                said.extend(is_last.then_some(END));
                calibration.observe(found, &said);
            }
        }
        if load.requests == 0 {
            return;
        }
        let engine = &self.judging.engine;
        let step_s = engine.step_seconds(load);
        let head_s = self.judging.head.draft_seconds(engine, &depths);
        self.account.engine_s += step_s + head_s;
        self.account.head_s += head_s;
        self.account.head_steps += depths.len() as u64;
        if self.judging.policy == Policy::Goodput {
            let emitted = verified.iter().map(|one| one.said.len()).sum::<usize>() as u32;
            self.observe(load, &depths, step_s, head_s, emitted);
        }
    }

    /// Reports a step to the router and the guard: its time, the head's time before it, and its emitted tokens.
    /// `depths` are the lengths of the head's drafts.
    fn observe(
        &mut self,
        load: StepLoad,
        depths: &[usize],
        step_s: f64,
        head_s: f64,
        emitted: u32,
    ) {
        let batch = load.requests as u32;
        let seconds = step_s + head_s;
        let head_tokens = depths.iter().sum::<usize>() as u32;
        self.goodput.step_done(&StepTaken {
            batched_tokens: load.tokens as u32,
            kv_tokens: load.kv_tokens as u64,
            seconds,
            draft_seconds: head_s,
            compose_seconds: 0.0,
            head: HeadWork {
                requests: depths.len() as u32,
                depth: depths.iter().max().map_or(0, |depth| *depth as u32),
                drafted: HeadDrafted {
                    tokens: head_tokens,
                    asked_tokens: head_tokens,
                    read_tokens: 0,
                },
            },
            routed: Some((batch, emitted)),
        });
        let step = GuardedStep {
            batch,
            tokens: emitted,
            seconds,
            withheld: self.withholds,
            concerned: self.withholds || load.tokens > load.requests,
            is_clean: true,
        };
        // The router decides about the head on its own.
        let head = HeadUse {
            on_trial: false,
            in_use: !self.judging.head.acceptance.is_empty(),
        };
        self.guard.step_done(&step, head);
    }
}
