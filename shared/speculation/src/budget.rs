//! How many tokens a step verifies, and whose: decided for the whole batch at once.
//!
//! A draft token is worth what it is expected to bring, and costs what it adds to the step. What it adds depends on
//! everybody else's: alone, a request may have thirty verified for next to nothing; beside sixty-three others the
//! second token of each already fills the machine. So all draft tokens of all requests stand in one order, by the
//! chance that they are accepted times the weight of their request, and are admitted from the best on. How many is decided by
//! goodput: expected tokens of the step / what it takes. Every number is tried, since what a step takes is a
//! staircase: past a step that loses there may be one that wins.
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

use self::worths::Worths;

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
/// them.
pub fn divide(
    requests: &[BudgetRequest<'_>],
    step: &BudgetStep,
    seconds: impl Fn(u32) -> f64,
    head_seconds: impl Fn(u32, u32) -> f64,
) -> Budgeted {
    let worths: Vec<Worths> = requests.iter().map(BudgetRequest::worths).collect();
    let division = Division {
        requests,
        step,
        order: Order::of(&worths),
        worths,
        rate: step
            .rate
            .map(|rate| rate.max(worth(requests) / seconds(step.tokens))),
        seconds,
        head_seconds,
    };
    let nobody = vec![false; requests.len()];
    let trees = division.weigh(&nobody);
    let advantages = division.advantages(&trees);
    let priced = division.fitting(&advantages, 0.0);
    let all = division.fitting(&advantages, f64::NEG_INFINITY);
    let mut best = (nobody, trees);
    for heads in [priced, all] {
        if heads != best.0 && heads.contains(&true) {
            let weighed = division.weigh(&heads);
            if weighed.merit > best.1.merit {
                best = (heads, weighed);
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

/// All nodes, those that bring most first.
struct Order {
    slots: Vec<Slot>,
}

#[derive(Clone, Copy)]
struct Slot {
    request: u32,
    node: u32,
    worth: f32,
    /// Of a request that has the head.
    beside: bool,
}

impl Order {
    fn of(worths: &[Worths]) -> Self {
        // Positive floats are in the order of their bits. Among equals the earlier one comes first, so a parent before its child.
        let nodes = worths.iter().map(|of| of.tree.len() + of.beside.len());
        let mut keys: Vec<u64> = Vec::with_capacity(nodes.sum());
        let mut unsorted = Vec::with_capacity(keys.capacity());
        for (at, worths) in worths.iter().enumerate() {
            let alone = worths.tree.iter().enumerate().map(|node| (node, false));
            let beside = worths.beside.iter().enumerate().map(|node| (node, true));
            for ((node, &worth), beside) in alone.chain(beside) {
                if worth > 0.0 && worth.is_finite() {
                    keys.push(
                        u64::from(worth.to_bits()) << 32
                            | u64::from(u32::MAX - unsorted.len() as u32),
                    );
                    unsorted.push(Slot {
                        request: at as u32,
                        node: node as u32,
                        worth,
                        beside,
                    });
                }
            }
        }
        keys.sort_unstable_by(|a, b| b.cmp(a));
        let slots = keys
            .into_iter()
            .map(|key| unsorted[(u32::MAX - key as u32) as usize])
            .collect();
        Order { slots }
    }
}

struct Division<'a, S, H> {
    requests: &'a [BudgetRequest<'a>],
    step: &'a BudgetStep,
    /// One per request.
    worths: Vec<Worths>,
    order: Order,
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

impl<S: Fn(u32) -> f64, H: Fn(u32, u32) -> f64> Division<'_, S, H> {
    fn merit(&self, worth: f64, seconds: f64) -> f64 {
        match self.rate {
            Some(rate) => worth - rate * seconds,
            None => worth / seconds,
        }
    }

    /// The nodes of requests, best first, those that have a head at what they add to it.
    fn slots<'s>(&'s self, heads: &'s [bool]) -> impl Iterator<Item = &'s Slot> {
        self.order
            .slots
            .iter()
            .filter(|slot| slot.beside == heads[slot.request as usize])
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
        let seconds = (self.seconds)(tokens) + head_seconds;
        let mut best = Weighed {
            merit: self.merit(worth, seconds),
            worth,
            seconds,
            tokens,
            admitted: 0,
        };
        let reserved: u64 = chosen().map(|(_, head)| u64::from(head.slots_max)).sum();
        let room = u64::from(self.step.slots_max).saturating_sub(reserved);
        for (slot, admitted) in self.slots(heads).take(room as usize).zip(1..) {
            worth += f64::from(slot.worth);
            let seconds = (self.seconds)(tokens.saturating_add(admitted)) + head_seconds;
            let merit = self.merit(worth, seconds);
            if merit > best.merit {
                best = Weighed {
                    merit,
                    worth,
                    seconds,
                    tokens,
                    admitted,
                };
            }
        }
        best
    }

    /// What each request that may have the head gains by it over its tree, if slots cost what they do at `trees`.
    fn advantages(&self, trees: &Weighed) -> Vec<Option<f64>> {
        let rate = self.rate.unwrap_or(trees.worth / trees.seconds);
        let at = trees.tokens.saturating_add(trees.admitted);
        let more = (self.seconds)(at.saturating_add(PRICE_SLOTS)) - (self.seconds)(at);
        let slot_price = rate * more / f64::from(PRICE_SLOTS);
        let offered = self.requests.iter().filter(|of| of.head.is_some());
        let count = offered.count() as u32;
        let advantage = |(request, worths): (&BudgetRequest<'_>, &Worths)| {
            let head = request.head?;
            let passes = (self.head_seconds)(count, head.depth) / f64::from(count);
            let head_price = rate * (passes + head.own_seconds);
            let by_head =
                request.head_worth(&head) - f64::from(head.slots) * slot_price - head_price;
            let worth_it = |nodes: &[f32]| -> f64 {
                let more = |worth: &f32| (f64::from(*worth) - slot_price).max(0.0);
                nodes.iter().map(more).sum()
            };
            Some(by_head + worth_it(&worths.beside) - worth_it(&worths.tree))
        };
        self.requests
            .iter()
            .zip(&self.worths)
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
        let mut shares: Vec<Share> = heads
            .iter()
            .map(|head| if *head { Share::Head } else { Share::Plain })
            .collect();
        let mut expected_tokens: f64 = self.requests.len() as f64;
        for (request, _) in self.requests.iter().zip(heads).filter(|(_, head)| **head) {
            expected_tokens += request.head.map_or(0.0, |head| f64::from(head.gain));
        }
        for slot in self.slots(heads).take(weighed.admitted as usize) {
            let request = &self.requests[slot.request as usize];
            let worth = if slot.beside {
                request.beside
            } else {
                request.tree
            };
            expected_tokens += f64::from(worth[slot.node as usize]);
            match &mut shares[slot.request as usize] {
                Share::Tree(nodes) | Share::Merged(nodes) => nodes.push(slot.node),
                share if slot.beside => *share = Share::Merged(vec![slot.node]),
                share => *share = Share::Tree(vec![slot.node]),
            }
        }
        for share in &mut shares {
            if let Share::Tree(nodes) | Share::Merged(nodes) = share {
                nodes.sort_unstable();
            }
        }
        let refused = self
            .slots(heads)
            .skip(weighed.admitted as usize)
            .filter(|slot| !slot.beside)
            .count() as u32;
        Budgeted {
            shares,
            expected_tokens,
            expected_seconds: weighed.seconds,
            admitted: weighed.admitted,
            refused,
        }
    }
}

#[cfg(test)]
mod tests;
