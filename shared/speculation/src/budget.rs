//! How many tokens a step verifies, and whose: decided for the whole batch at once.
//!
//! A draft token is worth what it is expected to bring, and costs what it adds to the step. What it adds depends on
//! everybody else's: alone, a request may have thirty verified for next to nothing; beside sixty-three others the
//! second token of each already fills the machine. So all draft tokens of all requests stand in one order, by the
//! chance that they are accepted times the weight of their request, and are admitted from the best on. How many is decided by
//! goodput: expected tokens of the step / what it takes. Every stair is tried, since what a step takes is a
//! staircase: past one that loses there may be one that wins. Nodes of one stair come for the price of the first, so each
//! stair is weighed where it ends.
//!
//! Along a path chances never rise, so a node is never admitted before its parent: greedy is optimal here (AdaServe,
//! arXiv 2501.12162, theorem 4.1; it is the same order).
//!
//! **The going rate.** The best ratio of one step is not the best for the run: a step with a good draft stops adding where
//! a token brings less than *its own* high rate, although the steps around it bring much less per second. Who knows the
//! rate that goes here can say so ([`BudgetStep::rate`]); then a token is admitted while it brings more than the
//! time it takes would bring elsewhere (Dinkelbach's way to maximise a ratio of sums).
//!
//! **Heads.** A draft of the engine's head is taken or left as a whole: it costs passes of the head before the step,
//! and its tokens are not known before. Requests choose between their tree and the head at the price that slots have when
//! all take trees; that choice is held against "none" and "all", and the best of the three wins. A head's draft needs room
//! for all that it may have; where there is not enough for every head, those that gain most by theirs have it.
//!
//! **Merged trees.** Where the engine verifies both as one tree, nodes of a request that has the head stand in the order as
//! well, at what the head leaves them to bring (`merged.rs`).
//!
//! **Priorities and targets.** Weights are priorities: Seer's two classes (arXiv 2511.14617) are two of them ([`Priority`](crate::Priority)).
//! A request that is to have a token every so often ([`Pace`](crate::Pace)) and is behind needs more of a step than its one: the likeliest of
//! its tokens, as many as are expected to bring what it needs, stand before those that are worth as much to others (AdaServe's
//! selection for its targets). They count several times and not without end: where a request cannot keep its target, the others
//! do not pay for it with all they have.
//!
//! **What falls out.** Chains of one chance and a measured cost give the draft length of TurboSpec (arXiv 2406.14066).

mod worths;

use std::ops::Range;

use crate::Stair;

/// What one request of a step may have verified.
#[derive(Clone, Copy, Debug)]
pub struct BudgetRequest<'a> {
    /// What a token of it is worth beside one of the others; 1 if they are all the same. Above 0.
    pub weight: f32,
    /// Tokens that the step should bring it, its own one included; up to 1 asks for nothing. See
    /// [`Pace::due_tokens`](crate::Pace::due_tokens).
    pub due_tokens: f32,
    /// f of each node of its draft, parents first and never above their parents': see
    /// [`Calibration::expect`](crate::Calibration::expect). Empty if there is none.
    pub tree: &'a [f32],
    /// What the engine's head would draft instead, if it may.
    pub head: Option<HeadOffer>,
    /// What each node of the draft adds to the head's, never above their parents'; empty if they cannot be merged.
    pub beside: &'a [f32],
}

/// A draft of the engine's head, before it is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadOffer {
    /// How deep, passes.
    pub depth: u32,
    /// Tokens that it is expected to have: what is verified.
    pub slots: f32,
    /// Tokens that it may have: what the step needs room for.
    pub slots_max: u32,
    /// Of them, how many are expected to be accepted.
    pub gain: f32,
    /// Seconds beside the passes that it shares with others: what is charged for text that the head has to read first.
    pub own_seconds: f64,
}

/// The step around the drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BudgetStep {
    /// Tokens that are computed whatever is drafted: the one each request decodes with, and those of prompts.
    pub tokens: u32,
    /// Most draft tokens in all.
    pub slots_max: u32,
    /// Tokens per second, weighted as the requests are, that time brings here; `None` looks at the step alone. What plain
    /// decoding would bring is the least that is believed.
    pub rate: Option<f64>,
}

/// What a request has verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Share {
    /// Nothing.
    Plain,
    /// These nodes of its tree, ascending and not empty: a tree again.
    Tree(Vec<u32>),
    /// What the head drafts.
    Head,
    /// The same, and these nodes of its tree.
    Merged(Vec<u32>),
}

/// A budget that was divided.
#[derive(Clone, Debug, PartialEq)]
pub struct Budgeted {
    /// One per request, in their order.
    pub shares: Vec<Share>,
    /// Tokens that the step is expected to bring, the targets' own included.
    pub expected_tokens: f64,
    /// What it is expected to take, seconds.
    pub expected_seconds: f64,
    /// Draft tokens of trees that are verified.
    pub admitted: u32,
    /// Those that are not, though their request has no draft of the head instead.
    pub refused: u32,
}

/// The price of a slot is taken over so many of them: more than a tile's edge, less than the batch.
const PRICE_SLOTS: u32 = 16;

/// Divides a step. `seconds(tokens)` is what a step of so many tokens takes, and never falls; `head_seconds(requests,
/// depth)` what the head takes before it.
///
/// The step is never expected to do worse than plain decoding. Costs a sort of all nodes and up to three walks over
/// them, with one question for each stair.
pub fn divide(
    requests: &[BudgetRequest<'_>],
    step: &BudgetStep,
    seconds: impl Fn(u32) -> Stair,
    head_seconds: impl Fn(u32, u32) -> f64,
) -> Budgeted {
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
        let priced = division.fitting(&advantages, 0.0);
        let all = division.fitting(&advantages, f64::NEG_INFINITY);
        let differs = all != priced;
        for heads in [Some(priced), differs.then_some(all)].into_iter().flatten() {
            if heads.contains(&true) {
                let weighed = division.weigh(&heads);
                if weighed.merit > best.1.merit {
                    best = (heads, weighed);
                }
            }
        }
    }
    division.carry_out(&best.0, &best.1)
}

/// What the requests' own tokens are worth.
fn worth(requests: &[BudgetRequest<'_>]) -> f64 {
    requests
        .iter()
        .map(|request| f64::from(request.weight))
        .sum()
}

/// The nodes of all requests, one list after the other: of each request those of its tree, then the same beside the head.
struct Nodes {
    /// What each is worth.
    worths: Vec<f32>,
    /// Whose each is.
    owners: Vec<Owner>,
    /// Where those of each request are.
    of: Vec<Places>,
    /// Those that are worth anything, the best first. Among equals the earlier one comes first, so a parent before its child.
    order: Vec<u32>,
}

/// Where a request's nodes are.
struct Places {
    tree: Range<usize>,
    beside: Range<usize>,
}

#[derive(Clone, Copy)]
struct Owner {
    request: u32,
    /// Where it has the head.
    beside: bool,
}

impl Nodes {
    fn of(requests: &[BudgetRequest<'_>]) -> Self {
        let lengths = requests.iter().map(|of| of.tree.len() + of.beside.len());
        let count = lengths.sum();
        let mut worths: Vec<f32> = Vec::with_capacity(count);
        let mut owners: Vec<Owner> = Vec::with_capacity(count);
        let mut of = Vec::with_capacity(requests.len());
        for (request, wanted) in (0u32..).zip(requests) {
            let first = worths.len();
            let middle = first + wanted.tree.len();
            wanted.worths(&mut worths);
            for (end, beside) in [(middle, false), (worths.len(), true)] {
                owners.resize(end, Owner { request, beside });
            }
            of.push(Places {
                tree: first..middle,
                beside: middle..worths.len(),
            });
        }
        let ranked = (0u32..).zip(&worths);
        let mut keys: Vec<u64> = Vec::with_capacity(count);
        keys.extend(
            ranked
                .filter(|(_, worth)| **worth > 0.0 && worth.is_finite())
                // Positive floats are in the order of their bits.
                .map(|(at, worth)| u64::from(!worth.to_bits()) << 32 | u64::from(at)),
        );
        keys.sort_unstable();
        Nodes {
            worths,
            owners,
            of,
            order: keys.into_iter().map(|key| key as u32).collect(),
        }
    }

    fn owner(&self, at: u32) -> Owner {
        self.owners[at as usize]
    }

    fn worth(&self, at: u32) -> f64 {
        f64::from(self.worths[at as usize])
    }
}

struct Division<'a, S, H> {
    requests: &'a [BudgetRequest<'a>],
    step: &'a BudgetStep,
    nodes: Nodes,
    rate: Option<f64>,
    seconds: S,
    head_seconds: H,
}

/// The best that some choice of heads comes to.
struct Weighed {
    /// What is compared.
    merit: f64,
    worth: f64,
    seconds: f64,
    /// Tokens of the step without those of trees.
    tokens: u32,
    /// How many nodes are admitted, of those in the order.
    admitted: u32,
}

impl<S: Fn(u32) -> Stair, H: Fn(u32, u32) -> f64> Division<'_, S, H> {
    fn merit(&self, worth: f64, seconds: f64) -> f64 {
        match self.rate {
            Some(rate) => worth - rate * seconds,
            None => worth / seconds,
        }
    }

    /// The nodes of requests, best first, those that have a head at what they add to it.
    fn slots<'s>(&'s self, heads: &'s [bool]) -> impl Iterator<Item = u32> + Clone {
        self.nodes.order.iter().copied().filter(|at| {
            let Owner { request, beside } = self.nodes.owner(*at);
            beside == heads[request as usize]
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
        // Where the best stair begins.
        let mut best_from = None;
        loop {
            let from = (slots.clone(), worth, admitted);
            let stair = (self.seconds)(tokens.saturating_add(admitted + 1));
            let more = stair
                .tokens_max
                .saturating_sub(tokens.saturating_add(admitted));
            for at in slots.by_ref().take(more.max(1) as usize) {
                worth += self.nodes.worth(at);
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
        // The last nodes of a stair may bring so little that nothing is better with them.
        if let Some((slots, mut worth, mut admitted)) = best_from {
            for at in slots {
                worth += self.nodes.worth(at);
                admitted += 1;
                if self.merit(worth, best.seconds) >= best.merit {
                    (best.worth, best.admitted) = (worth, admitted);
                    break;
                }
            }
        }
        best
    }

    /// What each request that may have the head gains by it over its tree, if slots cost what they do at `trees`.
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
            Some(by_head + worth_it(&places.beside) - worth_it(&places.tree))
        };
        self.requests
            .iter()
            .zip(&self.nodes.of)
            .map(advantage)
            .collect()
    }

    /// Who takes the head of those with a greater advantage than `above`, the greatest first, as long as there is room.
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

    fn carry_out(&self, heads: &[bool], weighed: &Weighed) -> Budgeted {
        let mut expected_tokens: f64 = self.requests.len() as f64;
        for (request, _) in self.requests.iter().zip(heads).filter(|(_, head)| **head) {
            expected_tokens += request.head.map_or(0.0, |head| f64::from(head.gain));
        }
        let mut is_admitted = vec![false; self.nodes.worths.len()];
        let mut counts = vec![0; self.requests.len()];
        let mut slots = self.slots(heads);
        for at in slots.by_ref().take(weighed.admitted as usize) {
            let Owner { request, beside } = self.nodes.owner(at);
            let (request, at) = (request as usize, at as usize);
            let places = &self.nodes.of[request];
            let chance = match beside {
                true => self.requests[request].beside[at - places.beside.start],
                false => self.requests[request].tree[at - places.tree.start],
            };
            expected_tokens += f64::from(chance);
            is_admitted[at] = true;
            counts[request] += 1;
        }
        let refused = slots.filter(|at| !self.nodes.owner(*at).beside).count() as u32;
        let share = |((places, head), count): ((&Places, &bool), usize)| {
            let places = if *head { &places.beside } else { &places.tree };
            let mut nodes = Vec::with_capacity(count);
            if count > 0 {
                let admitted = (0u32..).zip(&is_admitted[places.clone()]);
                nodes.extend(admitted.filter(|(_, is)| **is).map(|(node, _)| node));
            }
            match (head, count) {
                (true, 0) => Share::Head,
                (true, _) => Share::Merged(nodes),
                (false, 0) => Share::Plain,
                (false, _) => Share::Tree(nodes),
            }
        };
        let requests = self.nodes.of.iter().zip(heads).zip(counts);
        Budgeted {
            shares: requests.map(share).collect(),
            expected_tokens,
            expected_seconds: weighed.seconds,
            admitted: weighed.admitted,
            refused,
        }
    }
}

#[cfg(test)]
mod tests;
