//! The goodput router: what each request of a step verifies, decided for all of them by what drafts are worth and what
//! steps take, both learnt from the steps that were made.
//!
//! One [`Goodput`] belongs to one engine. It puts the parts together: per namespace the [`Calibration`] and the trials of
//! the head, for the engine what steps and the head take ([`StepCost`], [`HeadCost`]) and what a second is worth
//! ([`GoingRate`]). Before a step [`chances`](Goodput::chances) says what a draft is worth, on any thread, and
//! [`divide`](Goodput::divide) what every request is granted; after it [`calibration`](Goodput::calibration) is told what was
//! said, and [`step_done`](Goodput::step_done) what it took. Neither is news that the very next step has to have: who is short
//! of time tells it while that one is made.
//!
//! No clock and no I/O. The worker runs it before a real engine, and `refrain replay` before a modelled one: by the same rules,
//! but where a worker hears of a step while the next one is made, replay learns from it before that one.

mod head_trials;
mod readings;

use std::collections::HashMap;
use std::hash::Hash;
use std::num::NonZeroUsize;

use lru::LruCache;
use refrain_suffix_index::Token;

use self::head_trials::HeadTrials;
use self::readings::Readings;
use crate::merged::{Rescue, pooled};
use crate::{
    BudgetRequest, BudgetStep, Calibration, Candidate, DecayedRatio, GoingRate, HeadCost,
    HeadDrafted, HeadOffer, Pace, Priority, STEP_SECONDS_MIN, Share, StepCost, divide,
};

/// The router's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GoodputParams {
    /// Namespaces whose drafts are known; the one unused longest goes first.
    pub namespaces_max: NonZeroUsize,
    /// Requests in a step above which nothing is drafted.
    pub off_above_batch: Option<u32>,
}

/// The step around the drafts.
#[derive(Clone, Copy, Debug)]
pub struct StepFrame {
    /// Tokens that are computed whatever is drafted.
    pub tokens: u32,
    /// Tokens of all texts in it.
    pub kv_tokens: u64,
    /// Most draft tokens.
    pub slots_max: u32,
    /// Requests that decode.
    pub batch: u32,
}

/// What a request could have verified in a step.
#[derive(Clone, Copy, Debug)]
pub struct Wish<'a, N> {
    /// Whose chances its drafts have.
    pub namespace: N,
    /// What its tokens count beside those of the others.
    pub priority: Priority,
    /// How it stands with the time that it wants between its tokens, if it wants one.
    pub pace: Option<Pace>,
    /// Length of its text, tokens.
    pub context_tokens: u32,
    /// The best suffix draft.
    pub found: Option<&'a Candidate>,
    /// f of each of its nodes: see [`Goodput::chances`]. Nothing of a draft is granted whose chances are not known.
    pub chances: &'a [f32],
    /// What the engine's head may draft instead, or beside it.
    pub head: Option<HeadWish>,
}

/// A draft that the engine's head may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadWish {
    /// How deep, passes.
    pub depth: u32,
    /// Tokens that it may have.
    pub tokens_max: u32,
    /// Text that the head has to read first.
    pub unread_tokens: u32,
    /// Whether the engine verifies what was found in one tree with it.
    pub merges: bool,
}

/// What a request of a step is granted.
#[derive(Clone, Debug, PartialEq)]
pub enum Grant {
    /// Nothing.
    Plain,
    /// These nodes of what was found, ascending and not empty: a tree again.
    Tree(Vec<u32>),
    /// What the head drafts.
    Head {
        /// Tokens of it that are expected to be accepted.
        gain: f32,
    },
    /// The same, and these nodes of what was found, ascending and not empty, in one tree.
    Merged {
        /// The nodes.
        nodes: Vec<u32>,
        /// Tokens of the head's draft that are expected to be accepted.
        gain: f32,
        /// How many more are by the nodes.
        beside: f32,
    },
    /// What the head drafts, to see what it brings: nobody of its namespace has had it for long.
    HeadTrial,
}

/// A step that was divided.
#[derive(Clone, Debug, PartialEq)]
pub struct Granted {
    /// One per request, in their order.
    pub grants: Vec<Grant>,
    /// Draft tokens of trees that are verified.
    pub admitted: u32,
    /// Those that are not, though their request has no draft of the head instead.
    pub refused: u32,
}

/// A step that was made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTaken {
    /// Tokens that were computed.
    pub batched_tokens: u32,
    /// Tokens of all texts in it.
    pub kv_tokens: u64,
    /// What the engine took.
    pub seconds: f64,
    /// Of them, seconds of the head.
    pub draft_seconds: f64,
    /// What it took beside that to find drafts and to compose it.
    pub compose_seconds: f64,
    /// What the head was asked for in all, and drafted.
    pub head: HeadWork,
    /// For how many requests the step emitted how many tokens, if the router decided for all and none read a prompt.
    pub routed: Option<(u32, u32)>,
}

/// What the head did in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeadWork {
    /// For how many.
    pub requests: u32,
    /// How deep at most.
    pub depth: u32,
    /// What came of it.
    pub drafted: HeadDrafted,
}

/// What the nodes of a suffix draft add to a head's draft.
#[derive(Clone, Debug, Default)]
struct Beside {
    worth: Vec<f32>,
    /// The same, so that they can be admitted one by one.
    pooled: Vec<f32>,
}

/// What is known of a namespace.
#[derive(Clone, Debug, Default)]
struct Known {
    calibration: Calibration,
    head_trials: HeadTrials,
    readings: Readings,
    rescue: Rescue,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Goodput<N: Hash + Eq> {
    params: GoodputParams,
    namespaces: LruCache<N, Known>,
    cost: StepCost,
    head_cost: HeadCost,
    going_rate: GoingRate,
    cost_error: DecayedRatio,
}

impl<N: Copy + Hash + Eq> Goodput<N> {
    /// Knows nothing.
    pub fn new(params: GoodputParams) -> Self {
        Goodput {
            params,
            namespaces: LruCache::new(params.namespaces_max),
            cost: StepCost::new(),
            head_cost: HeadCost::new(),
            going_rate: GoingRate::default(),
            cost_error: DecayedRatio::default(),
        }
    }

    /// Starts from steps that were measured: their tokens, and their seconds with next to no KV. What is known by steps that
    /// were made is not given up for it.
    pub fn start_from(&mut self, profile: &[(u32, f64)]) {
        if !self.cost.is_known() {
            self.cost = StepCost::from_profile(profile);
        }
    }

    /// Whether nothing is drafted where so many decode.
    pub fn is_off(&self, batch: u32) -> bool {
        let most = self.params.off_above_batch;
        most.is_some_and(|most| batch > most)
    }

    /// What drafts are worth in a namespace, to be read and to be told what the target said.
    pub fn calibration(&mut self, namespace: N) -> &mut Calibration {
        &mut self.known(namespace).calibration
    }

    /// Whether anything was observed in a namespace that was not taken yet.
    pub fn has_observed(&self, namespace: &N) -> bool {
        let known = self.namespaces.peek(namespace);
        known.is_some_and(|known| known.calibration.has_observed())
    }

    /// f of each node of a draft, in their order: see [`Calibration::expect`]. Reads only, so that many are asked for at once.
    pub fn chances(&self, namespace: N, found: &Candidate) -> Vec<f32> {
        match self.namespaces.peek(&namespace) {
            Some(known) => known.calibration.expect(found),
            None => Calibration::new().expect(found),
        }
    }

    fn known(&mut self, namespace: N) -> &mut Known {
        self.namespaces.get_or_insert_mut(namespace, Known::default)
    }

    /// What each request verifies. `frame` has the tokens and the room that are left beside those whose drafts are settled.
    pub fn divide(&mut self, wishes: &[Wish<'_, N>], frame: StepFrame) -> Granted {
        let mut granted = Granted {
            grants: vec![Grant::Plain; wishes.len()],
            admitted: 0,
            refused: 0,
        };
        if self.is_off(frame.batch) {
            return granted;
        }
        let frame = self.try_heads(wishes, frame, &mut granted.grants);
        let open: Vec<usize> = (0..wishes.len())
            .filter(|at| granted.grants[*at] != Grant::HeadTrial)
            .collect();
        self.divide_among(&open, wishes, frame, &mut granted);
        granted
    }

    /// Has requests try the head where nobody of their namespace has for long, first those that nothing was found for.
    /// Gives what is left of the step.
    fn try_heads(
        &mut self,
        wishes: &[Wish<'_, N>],
        mut frame: StepFrame,
        grants: &mut [Grant],
    ) -> StepFrame {
        if !self.may_try_heads(wishes) {
            return frame;
        }
        let mut order: Vec<usize> = (0..wishes.len()).collect();
        order.retain(|at| wishes[*at].head.is_some());
        order.sort_by_key(|at| wishes[*at].found.is_some());
        let mut offered: HashMap<N, u32> = HashMap::new();
        for at in &order {
            *offered.entry(wishes[*at].namespace).or_default() += 1;
        }
        let step_seconds = self.cost.seconds(frame.tokens, frame.kv_tokens);
        // Requests of a namespace that may still try it.
        let mut left: HashMap<N, u32> = HashMap::new();
        for at in order {
            let namespace = wishes[at].namespace;
            let Some(head) = wishes[at].head else {
                continue;
            };
            if head.tokens_max > frame.slots_max {
                continue;
            }
            let is_first = !left.contains_key(&namespace);
            if is_first {
                let trials = self.known(namespace).head_trials;
                let width = trials.width().min(offered[&namespace]);
                let cost = self.head_cost.seconds(width, head.depth) / step_seconds;
                let width = if trials.is_due(cost) { width } else { 0 };
                left.insert(namespace, width);
            }
            let left = left.entry(namespace).or_default();
            if *left == 0 {
                continue;
            }
            *left -= 1;
            if is_first {
                let known = self.known(namespace);
                known.head_trials.tried();
                known.readings.tried();
            }
            frame.slots_max -= head.tokens_max;
            frame.tokens += head.tokens_max;
            grants[at] = Grant::HeadTrial;
        }
        frame
    }

    /// Whether there is a namespace whose next trial would be due if it took no time: most steps have none.
    fn may_try_heads(&self, wishes: &[Wish<'_, N>]) -> bool {
        let wishes = wishes.iter().filter(|wish| wish.head.is_some());
        // Requests of one namespace often stand together.
        let mut last = None;
        let mut namespaces = wishes
            .map(|wish| wish.namespace)
            .filter(|namespace| last.replace(*namespace) != Some(*namespace));
        namespaces.any(|namespace| {
            let known = self.namespaces.peek(&namespace);
            known.is_some_and(|known| known.head_trials.is_due(0.0))
        })
    }

    /// Divides the budget among those of the requests that are `open`.
    fn divide_among(
        &mut self,
        open: &[usize],
        wishes: &[Wish<'_, N>],
        frame: StepFrame,
        granted: &mut Granted,
    ) {
        let heads: Vec<Option<HeadOffer>> = open
            .iter()
            .map(|at| self.head_offer(&wishes[*at]))
            .collect();
        let beside: Vec<Beside> = open.iter().map(|at| self.beside(&wishes[*at])).collect();
        // Against the mean of the batch: where all count the same, whatever that is, nothing differs, and time is worth what
        // it is.
        let weight = |at: &usize| wishes[*at].priority.weight();
        let mean_weight = open.iter().map(weight).sum::<f32>() / open.len().max(1) as f32;
        let step_seconds = self.cost.seconds(frame.tokens, frame.kv_tokens);
        let requests: Vec<BudgetRequest<'_>> = open
            .iter()
            .zip(heads.iter().zip(&beside))
            .map(|(at, (head, beside))| BudgetRequest {
                weight: weight(at) / mean_weight,
                due_tokens: wishes[*at]
                    .pace
                    .map_or(0.0, |pace| pace.due_tokens(step_seconds)),
                tree: wishes[*at].chances,
                head: *head,
                beside: &beside.pooled,
            })
            .collect();
        let step = BudgetStep {
            tokens: frame.tokens,
            slots_max: frame.slots_max,
            rate: self.going_rate.tokens_per_s(frame.batch),
        };
        let head_cost = &self.head_cost;
        let budgeted = divide(
            &requests,
            &step,
            self.cost.at_kv(frame.kv_tokens),
            |requests, depth| head_cost.seconds(requests, depth),
        );
        granted.admitted = budgeted.admitted;
        granted.refused = budgeted.refused;
        // By namespace whose head could have drafted: whether it is to.
        let mut heads_chosen: HashMap<N, bool> = HashMap::new();
        let shares = budgeted.shares.into_iter().zip(heads).zip(beside);
        for (at, ((share, head), beside)) in open.iter().zip(shares) {
            if head.is_some() {
                let chosen = matches!(share, Share::Head | Share::Merged(_));
                *heads_chosen.entry(wishes[*at].namespace).or_default() |= chosen;
            }
            granted.grants[*at] = match (share, head) {
                (Share::Tree(nodes), _) => Grant::Tree(nodes),
                (Share::Head, Some(head)) => Grant::Head { gain: head.gain },
                (Share::Merged(nodes), Some(head)) => Grant::Merged {
                    gain: head.gain,
                    beside: nodes.iter().map(|node| beside.worth[*node as usize]).sum(),
                    nodes,
                },
                (Share::Plain | Share::Head | Share::Merged(_), _) => Grant::Plain,
            };
        }
        for (namespace, chosen) in heads_chosen {
            self.known(namespace).head_trials.offered(chosen);
        }
    }

    /// What the nodes of what was found add to the head's draft.
    fn beside(&mut self, wish: &Wish<'_, N>) -> Beside {
        let found = wish
            .found
            .filter(|found| found.tree.len() == wish.chances.len());
        let (Some(found), Some(head)) = (found, wish.head.filter(|head| head.merges)) else {
            return Beside::default();
        };
        let known = self.known(wish.namespace);
        let paths = known
            .calibration
            .head_paths(wish.context_tokens, head.depth);
        let paths: Vec<f32> = paths.collect();
        let worth = known.rescue.beside(found, wish.chances, &paths);
        Beside {
            pooled: pooled(found.tree.nodes(), &worth),
            worth,
        }
    }

    /// The head's draft brought `by_head` tokens where `found` was there too, and the target said `said`. To be told before
    /// the namespace's calibration is.
    pub fn observe_beside(
        &mut self,
        namespace: N,
        found: &Candidate,
        said: &[Token],
        by_head: u32,
    ) {
        let known = self.known(namespace);
        let chances = known.calibration.expect(found);
        known.rescue.observe(found, &chances, said, by_head);
    }

    fn head_offer(&mut self, wish: &Wish<'_, N>) -> Option<HeadOffer> {
        let head = wish.head?;
        let known = self.known(wish.namespace);
        let (calibration, share) = (&known.calibration, known.readings.share());
        Some(HeadOffer {
            depth: head.depth,
            gain: calibration.expect_head(wish.context_tokens, head.depth),
            slots: self.head_cost.tokens(head.tokens_max),
            slots_max: head.tokens_max,
            own_seconds: self.head_cost.reading_seconds(head.unread_tokens) * share,
        })
    }

    /// The head drafted where it was chosen to, for a text of so many tokens, some of which it had to read first.
    pub fn head_drafted(&mut self, namespace: N, context_tokens: u32, unread_tokens: u32) {
        let readings = &mut self.known(namespace).readings;
        readings.drafted(context_tokens, unread_tokens);
    }

    /// Takes a step into account.
    pub fn step_done(&mut self, step: &StepTaken) {
        let seconds = step.seconds - step.draft_seconds;
        if !(seconds.is_finite() && seconds >= STEP_SECONDS_MIN) {
            return;
        }
        if self.cost.is_known() {
            let expected = self.cost.seconds(step.batched_tokens, step.kv_tokens);
            self.cost_error.add((expected / seconds - 1.0).abs(), 1.0);
        }
        self.cost
            .observe(step.batched_tokens, step.kv_tokens, seconds);
        let HeadWork {
            requests,
            depth,
            drafted,
        } = step.head;
        self.head_cost
            .observe(requests, depth, drafted, step.draft_seconds);
        if let Some((batch, emitted)) = step.routed {
            let seconds = step.seconds + step.compose_seconds;
            self.going_rate.observe(batch, emitted, seconds);
        }
    }

    /// How far what steps were expected to take was from what they took lately, as a share of it.
    pub fn step_cost_error(&self) -> Option<f64> {
        self.cost_error.value()
    }
}

#[cfg(test)]
mod tests;
