//! How many tokens a step verifies, and for which requests, decided for the whole batch at once.
//!
//! A draft token is worth its expected benefit, and costs what it adds to the step. That cost depends on the drafts
//! of all other requests: alone, a request may have thirty tokens verified for next to nothing; beside sixty-three
//! others, the second token of each already fills the machine. So all draft tokens of all requests stand in one
//! order, by acceptance probability times the weight of their request, and are admitted from the best on. Goodput
//! decides how many: expected tokens of the step over its time. The time of a step is a staircase, so every stair is
//! tried: past one that loses there may be one that wins. The nodes of one stair come for the price of the first, so
//! each stair is weighed at its end.
//!
//! Along a path probabilities never rise, so a node is never admitted before its parent. Greedy is optimal here
//! (AdaServe, arXiv 2501.12162, theorem 4.1, has the same order).
//!
//! **The rate.** The best ratio of one step is not the best for the run: a step with a good draft would stop adding
//! where a token brings less than *its own* high rate, although the steps around it bring much less per second. A
//! caller that knows the worth of time passes it ([`BudgetStep::rate`]). Then a token is admitted while it brings
//! more than its time is worth elsewhere (Dinkelbach's method for a ratio of sums).
//!
//! **Heads.** A draft of the engine's head is taken or left as a whole: it costs passes of the head before the step,
//! and its tokens are not known in advance. Requests choose between their tree and the head at the price that slots
//! have when all take trees. That choice is compared with "none" and "all", and the best of the three wins. A head's
//! draft needs room for all tokens that it may have. Where there is not enough room for every head, those with the
//! greatest advantage have it.
//!
//! **Merged trees.** Where the engine verifies both as one tree, the nodes of a request that has the head stand in
//! the order as well, at what they add to the head's draft (`merged.rs`).
//!
//! **Priorities and targets.** Weights carry priorities; Seer's two classes (arXiv 2511.14617) are two of them
//! ([`Priority`](super::Priority)). A request with a target for the time between tokens ([`Pace`](super::Pace)) that
//! is behind needs more than one token of a step. Its likeliest tokens, as many as are expected to bring what it
//! needs, count several times (the selection of AdaServe for its targets). They do not count without limit: where a
//! request cannot keep its target, the others do not pay for it with all they have.
//!
//! For chains of one probability and a measured cost this is the draft length of TurboSpec (arXiv 2406.14066).

mod nodes;
mod request;

use std::ops::Range;

use nodes::{Nodes, Owner, Places, Ranked};
pub(super) use request::{BudgetRequest, HeadOption};

use super::cost::Stair;

/// The step around the drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct BudgetStep {
    /// Tokens that are computed whatever is drafted: one for each request that decodes, and those of prompts.
    pub(super) tokens: u32,
    /// Maximum number of draft tokens in all.
    pub(super) slots_max: u32,
    /// The worth of a second, in weighted tokens; `None` looks at the step alone. It is never taken to be less than
    /// plain decoding brings.
    pub(super) rate: Option<f64>,
}

/// The draft that a request verifies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Share {
    /// None.
    Plain,
    /// These nodes of its tree, ascending and not empty. They are a tree again.
    Tree(Vec<u32>),
    /// The head's draft.
    Head,
    /// The head's draft and these nodes of its tree.
    Merged(Vec<u32>),
}

/// Slots over which the price of one is averaged: more than the edge of a tile, fewer than a batch has.
const PRICE_SLOTS: u32 = 16;

/// Divides a step, and returns one share per request, in their order. `seconds(tokens)` is the time of a step of so
/// many tokens, and never falls; `head_seconds(requests, depth)` is the time of the head before it.
///
/// The step is never expected to do worse than plain decoding. It costs a sort of all nodes and up to three walks
/// over them, with one call of `seconds` for each stair.
pub(super) fn divide(
    requests: &[BudgetRequest<'_>],
    step: &BudgetStep,
    seconds: impl Fn(u32) -> Stair,
    head_seconds: impl Fn(u32, u32) -> f64,
) -> Vec<Share> {
    let division = Division {
        requests,
        step,
        nodes: Nodes::of(requests),
        rate: step
            .rate
            .map(|rate| rate.max(worth(requests) / seconds(step.tokens).seconds)),
        seconds,
        head_seconds,
    };
    let nobody = vec![false; requests.len()];
    let trees = division.weigh(&nobody);
    let mut best = (nobody, trees);
    if requests.iter().any(|request| request.head.is_some()) {
        let advantages = division.advantages(&best.1);
        let mut last = vec![false; requests.len()];
        for above in [0.0, f64::NEG_INFINITY] {
            let heads = division.fitting(&advantages, above);
            if heads != last {
                let weighed = division.weigh(&heads);
                if weighed.merit > best.1.merit {
                    best = (heads.clone(), weighed);
                }
                last = heads;
            }
        }
    }
    division.shares(&best.0, best.1.admitted)
}

/// The worth of the bonus tokens.
fn worth(requests: &[BudgetRequest<'_>]) -> f64 {
    requests
        .iter()
        .map(|request| f64::from(request.weight))
        .sum()
}

struct Division<'a, S, H> {
    requests: &'a [BudgetRequest<'a>],
    step: &'a BudgetStep,
    nodes: Nodes,
    rate: Option<f64>,
    seconds: S,
    head_seconds: H,
}

/// The best division for some choice of heads.
struct Weighed {
    /// The value that is compared.
    merit: f64,
    worth: f64,
    seconds: f64,
    /// Tokens of the step without those of trees.
    tokens: u32,
    /// Number of nodes that are admitted from the order.
    admitted: u32,
}

impl<S: Fn(u32) -> Stair, H: Fn(u32, u32) -> f64> Division<'_, S, H> {
    fn merit(&self, worth: f64, seconds: f64) -> f64 {
        match self.rate {
            Some(rate) => worth - rate * seconds,
            None => worth / seconds,
        }
    }

    /// The nodes of requests, best first; where a request has the head, at what they add to it.
    fn slots<'s>(&'s self, heads: &'s [bool]) -> impl Iterator<Item = Ranked> + Clone {
        self.nodes.order.iter().copied().filter(|node| {
            let Owner { request, merged } = self.nodes.owner(*node);
            merged == heads[request as usize]
        })
    }

    /// Admits as many nodes as is best.
    fn weigh(&self, heads: &[bool]) -> Weighed {
        let chosen = || {
            self.requests
                .iter()
                .zip(heads)
                .filter(|(_, head)| **head)
                .filter_map(|(request, _)| Some((request, request.head?)))
        };
        let slots = chosen()
            .map(|(_, head)| f64::from(head.slots))
            .sum::<f64>()
            .ceil() as u32;
        let head_seconds = match chosen().map(|(_, head)| head.depth).max() {
            Some(depth) => {
                let own: f64 = chosen().map(|(_, head)| head.own_seconds).sum();
                own + (self.head_seconds)(chosen().count() as u32, depth)
            }
            None => 0.0,
        };
        let gain: f64 = chosen()
            .map(|(request, head)| request.head_worth(&head))
            .sum();
        let tokens = self.step.tokens.saturating_add(slots);
        let mut worth = worth(self.requests) + gain;
        let seconds = (self.seconds)(tokens).seconds + head_seconds;
        let mut best = Weighed {
            merit: self.merit(worth, seconds),
            worth,
            seconds,
            tokens,
            admitted: 0,
        };
        let reserved: u64 = chosen().map(|(_, head)| u64::from(head.slots_max)).sum();
        let room = u64::from(self.step.slots_max).saturating_sub(reserved);
        let mut slots = self.slots(heads).take(room as usize);
        let mut admitted = 0;
        // The position at which the best stair begins.
        let mut best_from = None;
        loop {
            let from = (slots.clone(), worth, admitted);
            let stair = (self.seconds)(tokens.saturating_add(admitted + 1));
            let more = stair
                .tokens_max
                .saturating_sub(tokens.saturating_add(admitted));
            for node in slots.by_ref().take(more.max(1) as usize) {
                worth += node.worth();
                admitted += 1;
            }
            if admitted == from.2 {
                break;
            }
            let seconds = stair.seconds + head_seconds;
            let merit = self.merit(worth, seconds);
            if merit > best.merit {
                best_from = Some(from);
                best = Weighed {
                    merit,
                    worth,
                    seconds,
                    tokens,
                    admitted,
                };
            }
        }
        // The last nodes of a stair may bring so little that they make nothing better.
        if let Some((slots, mut worth, mut admitted)) = best_from {
            for node in slots {
                worth += node.worth();
                admitted += 1;
                if self.merit(worth, best.seconds) >= best.merit {
                    (best.worth, best.admitted) = (worth, admitted);
                    break;
                }
            }
        }
        best
    }

    /// The advantage of the head over the tree for each request that may have it, at the price of slots in `trees`.
    fn advantages(&self, trees: &Weighed) -> Vec<Option<f64>> {
        let rate = self.rate.unwrap_or(trees.worth / trees.seconds);
        let at = trees.tokens.saturating_add(trees.admitted);
        let seconds = |tokens| (self.seconds)(tokens).seconds;
        let more = seconds(at.saturating_add(PRICE_SLOTS)) - seconds(at);
        let slot_price = rate * more / f64::from(PRICE_SLOTS);
        let offered = self.requests.iter().filter(|of| of.head.is_some());
        let count = offered.count() as u32;
        let advantage = |(request, places): (&BudgetRequest<'_>, &Places)| {
            let head = request.head?;
            let passes = (self.head_seconds)(count, head.depth) / f64::from(count);
            let head_price = rate * (passes + head.own_seconds);
            let by_head =
                request.head_worth(&head) - f64::from(head.slots) * slot_price - head_price;
            let worth_it = |places: &Range<usize>| -> f64 {
                let more = |worth: &f32| (f64::from(*worth) - slot_price).max(0.0);
                self.nodes.worths[places.clone()].iter().map(more).sum()
            };
            Some(by_head + worth_it(&places.merged) - worth_it(&places.tree))
        };
        self.requests
            .iter()
            .zip(&self.nodes.of)
            .map(advantage)
            .collect()
    }

    /// The requests that take the head: those with a greater advantage than `above`, the greatest first, while there
    /// is room.
    fn fitting(&self, advantages: &[Option<f64>], above: f64) -> Vec<bool> {
        let mut wanting: Vec<(f64, usize, u32)> = advantages
            .iter()
            .zip(self.requests)
            .enumerate()
            .filter_map(|(at, (advantage, request))| {
                let advantage = advantage.filter(|advantage| *advantage > above)?;
                Some((advantage, at, request.head?.slots_max))
            })
            .collect();
        wanting.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut room = self.step.slots_max;
        let mut heads = vec![false; advantages.len()];
        for (_, at, slots_max) in wanting {
            if let Some(left) = room.checked_sub(slots_max) {
                room = left;
                heads[at] = true;
            }
        }
        heads
    }

    /// The shares, where so many nodes of the order are admitted.
    fn shares(&self, heads: &[bool], admitted: u32) -> Vec<Share> {
        let mut is_admitted = vec![false; self.nodes.worths.len()];
        for node in self.slots(heads).take(admitted as usize) {
            is_admitted[node.at() as usize] = true;
        }
        let share = |(places, has_head): (&Places, &bool)| {
            let places = match has_head {
                true => &places.merged,
                false => &places.tree,
            };
            let mut nodes: Vec<u32> = Vec::with_capacity(places.len());
            let admitted = (0u32..).zip(&is_admitted[places.clone()]);
            nodes.extend(admitted.filter(|(_, is)| **is).map(|(node, _)| node));
            match (has_head, nodes.is_empty()) {
                (true, true) => Share::Head,
                (true, false) => Share::Merged(nodes),
                (false, true) => Share::Plain,
                (false, false) => Share::Tree(nodes),
            }
        };
        self.nodes.of.iter().zip(heads).map(share).collect()
    }
}

#[cfg(test)]
mod tests;
