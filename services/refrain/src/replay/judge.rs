//! Chooses the drafts of a step for the whole batch, by one policy, and keeps account of what came of it on the modelled
//! engine.

mod goodput;

use std::collections::HashMap;

use goodput::Goodput;
use refrain_speculation::{
    Acceptance, Asked, Calibration, Candidate, DraftTree, Fallback, Found, Route, Threshold, route,
};
use refrain_suffix_index::Token;

use super::account::Account;
use super::eagle3::Eagle3;
use super::engine_model::{EngineModel, StepLoad};
use super::options::Policy;

/// Stands for the end of a text, which no draft has: recordings hold no such token.
const END: Token = Token::MAX;

/// What drafts are chosen with.
#[derive(Clone, Debug)]
pub(crate) struct Judging {
    pub(crate) policy: Policy,
    pub(crate) engine: EngineModel,
    pub(crate) head: Eagle3,
    pub(crate) seed: u64,
    pub(crate) threshold: Threshold,
}

/// A request that takes part in a step.
pub(super) struct Turn {
    /// Whose chances its drafts have.
    pub(super) namespace: usize,
    /// Tokens of its prompt and output so far.
    pub(super) context_tokens: usize,
    /// The best suffix draft, if one was looked for and found.
    pub(super) found: Option<Candidate>,
}

/// What it does in the step.
pub(super) enum Draft {
    /// Nothing is drafted.
    Plain,
    /// This part of what was found is verified.
    Suffix(DraftTree),
    /// The head drafts so many tokens.
    Head(usize),
}

/// What a policy decides for a request.
enum Routed {
    Plain,
    /// All that was found.
    Whole,
    /// These nodes of it, ascending.
    Part(Vec<u32>),
    Head,
}

/// A [`Turn`] with what was chosen for it.
pub(super) struct Choice {
    namespace: usize,
    pub(super) draft: Draft,
    pub(super) found: Option<Candidate>,
    /// The chance that was seen in each drafted token.
    chances: Vec<f32>,
}

/// A [`Choice`] that was verified.
pub(super) struct Verified {
    pub(super) context_tokens: usize,
    pub(super) choice: Choice,
    /// The drafted tokens that were accepted, from the root down.
    pub(super) path: Vec<u32>,
    /// What came out: the accepted tokens and the recording's next.
    pub(super) said: Vec<Token>,
    /// Whether the recording ends with it.
    pub(super) is_last: bool,
}

impl Draft {
    /// Draft tokens to verify.
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
    /// Chances of drafts as they were observed in each namespace; every policy has them, to say what it expects, and one
    /// goes by them.
    calibrations: HashMap<usize, Calibration>,
    goodput: Goodput,
    /// What came of the head's drafts.
    head: Acceptance,
    pub(super) account: Account,
}

impl Judge {
    pub(super) fn new(judging: Judging) -> Self {
        Judge {
            judging,
            calibrations: HashMap::new(),
            goodput: Goodput::default(),
            head: Acceptance::default(),
            account: Account::default(),
        }
    }

    /// Whether the head's tokens are right where the output of this call has come so far.
    pub(super) fn head_accepts(&self, call: u64, position: usize, depth: usize) -> usize {
        let Judging { head, seed, .. } = &self.judging;
        head.accepted(*seed, call, position, depth)
    }

    /// Chooses for all requests of a step together.
    pub(super) fn choose(&mut self, turns: Vec<Turn>) -> Vec<Choice> {
        for turn in &turns {
            let unknown = self.calibrations.entry(turn.namespace);
            unknown.or_default();
        }
        let depth = self.judging.head.acceptance.len();
        let chances: Vec<Vec<f32>> = turns
            .iter()
            .map(|turn| match &turn.found {
                Some(found) => self.calibrations[&turn.namespace].expect(found),
                None => Vec::new(),
            })
            .collect();
        let routes: Vec<Routed> = match self.judging.policy {
            Policy::Off => turns.iter().map(|_| Routed::Plain).collect(),
            Policy::Eagle3 => turns.iter().map(|_| Routed::Head).collect(),
            Policy::Suffix | Policy::Pld => turns
                .iter()
                .map(|turn| turn.found.as_ref().map_or(Routed::Plain, |_| Routed::Whole))
                .collect(),
            // What it finds is long enough to go before the head.
            Policy::Sam => turns
                .iter()
                .map(|turn| match (&turn.found, self.judging.head.is_absent()) {
                    (Some(_), _) => Routed::Whole,
                    (None, true) => Routed::Plain,
                    (None, false) => Routed::Head,
                })
                .collect(),
            Policy::Score | Policy::Paper => turns
                .iter()
                .map(|turn| self.by_score(turn.found.as_ref()))
                .collect(),
            Policy::Goodput => {
                let heads = turns.iter().map(|turn| {
                    let context = turn.context_tokens as u32;
                    self.calibrations[&turn.namespace].expect_head(context, depth as u32)
                });
                let kv_tokens = turns.iter().map(|turn| turn.context_tokens).sum();
                self.goodput
                    .divide(&chances, heads, depth as u32, kv_tokens)
            }
        };
        turns
            .into_iter()
            .zip(chances)
            .zip(routes)
            .map(|((turn, chances), route)| self.carry_out(turn, chances, route))
            .collect()
    }

    fn carry_out(&self, turn: Turn, chances: Vec<f32>, route: Routed) -> Choice {
        let depth = self.judging.head.acceptance.len();
        let (draft, chances) = match (route, &turn.found) {
            (Routed::Whole, Some(found)) => (Draft::Suffix(found.tree.clone()), chances),
            (Routed::Part(nodes), Some(found)) => {
                let is_in = |node: usize| nodes.binary_search(&(node as u32)).is_ok();
                let kept = nodes.iter().map(|&node| chances[node as usize]).collect();
                (Draft::Suffix(found.tree.select(is_in)), kept)
            }
            (Routed::Head, _) => (Draft::Head(depth), self.head_chances(&turn, depth)),
            (Routed::Plain | Routed::Whole | Routed::Part(_), _) => (Draft::Plain, Vec::new()),
        };
        Choice {
            namespace: turn.namespace,
            draft,
            found: turn.found,
            chances,
        }
    }

    /// SuffixDecoding's rule, tau being the head's own tokens per step unless it is given.
    fn by_score(&self, found: Option<&Candidate>) -> Routed {
        let found = found.map_or(Found::Nothing, |found| Found::Score(found.score));
        let break_even = self.head.accepted_length().map(|length| length as f32);
        let fallback = match self.judging.head.acceptance.len() {
            0 => Fallback::Absent,
            _ => Fallback::InUse { break_even },
        };
        match route(Asked::Auto, found, self.judging.threshold, fallback).route {
            Route::Suffix => Routed::Whole,
            Route::Fallback => Routed::Head,
            Route::Plain => Routed::Plain,
        }
    }

    fn head_chances(&self, turn: &Turn, depth: usize) -> Vec<f32> {
        let calibration = &self.calibrations[&turn.namespace];
        let context = turn.context_tokens as u32;
        let up_to = |depth: usize| calibration.expect_head(context, depth as u32);
        (0..depth).map(|at| up_to(at + 1) - up_to(at)).collect()
    }

    /// Learns from a step, and charges it.
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
            let calibration = self.calibrations.entry(choice.namespace).or_default();
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
            let emitted = verified.iter().map(|one| one.said.len()).sum();
            self.goodput.observe(load, step_s, &depths, head_s, emitted);
        }
    }
}
