//! The division as it is described: every number of nodes is tried. The quicker algorithm must have the same result.

use proptest::prelude::*;

use super::super::{BudgetRequest, BudgetStep, HeadOption, PRICE_SLOTS, Share, worth};
use crate::router::cost::Stair;

/// A node that may be verified.
struct Node {
    request: usize,
    node: u32,
    merged: bool,
    worth: f32,
}

/// The figures of one choice of heads.
struct Weighed {
    merit: f64,
    worth: f64,
    seconds: f64,
    tokens: u32,
    admitted: usize,
}

fn divide(
    requests: &[BudgetRequest<'_>],
    step: &BudgetStep,
    seconds: impl Fn(u32) -> f64,
    head_seconds: impl Fn(u32, u32) -> f64,
) -> Vec<Share> {
    let plain = worth(requests);
    let rate = step.rate.map(|rate| rate.max(plain / seconds(step.tokens)));
    let merit = |worth: f64, seconds: f64| match rate {
        Some(rate) => worth - rate * seconds,
        None => worth / seconds,
    };
    let mut nodes = Vec::new();
    for (at, request) in requests.iter().enumerate() {
        let mut worths = Vec::new();
        request.worths(&mut worths);
        for (place, worth) in worths.into_iter().enumerate() {
            let merged = place >= request.tree.len();
            let before = if merged { request.tree.len() } else { 0 };
            nodes.push(Node {
                request: at,
                node: (place - before) as u32,
                merged,
                worth,
            });
        }
    }
    let worths_of = |at: usize, merged: bool| -> Vec<f32> {
        let of = nodes
            .iter()
            .filter(|node| node.request == at && node.merged == merged);
        of.map(|node| node.worth).collect()
    };
    let mut order: Vec<&Node> = nodes.iter().collect();
    order.retain(|node| node.worth > 0.0 && node.worth.is_finite());
    order.sort_by(|a, b| b.worth.total_cmp(&a.worth));
    let of = |heads: &[bool]| -> Vec<&Node> {
        let mut order = order.clone();
        order.retain(|node| node.merged == heads[node.request]);
        order
    };
    let weigh = |heads: &[bool]| {
        let with: Vec<(&BudgetRequest<'_>, HeadOption)> = requests
            .iter()
            .zip(heads)
            .filter(|(_, head)| **head)
            .filter_map(|(request, _)| Some((request, request.head?)))
            .collect();
        let slots: f64 = with.iter().map(|(_, head)| f64::from(head.slots)).sum();
        let reserved: u32 = with.iter().map(|(_, head)| head.slots_max).sum();
        let drafting = with
            .iter()
            .map(|(_, head)| head.depth)
            .max()
            .map_or(0.0, |depth| {
                let own: f64 = with.iter().map(|(_, head)| head.own_seconds).sum();
                own + head_seconds(with.len() as u32, depth)
            });
        let gain: f64 = with
            .iter()
            .map(|(request, head)| request.head_worth(head))
            .sum();
        let tokens = step.tokens + slots.ceil() as u32;
        let mut sum = plain + gain;
        let mut best: Option<Weighed> = None;
        let order = of(heads);
        let room = step.slots_max.saturating_sub(reserved) as usize;
        for admitted in 0..=order.len().min(room) {
            if let Some(last) = admitted.checked_sub(1) {
                sum += f64::from(order[last].worth);
            }
            let seconds = seconds(tokens + admitted as u32) + drafting;
            let merit = merit(sum, seconds);
            if best.as_ref().is_none_or(|best| merit > best.merit) {
                best = Some(Weighed {
                    merit,
                    worth: sum,
                    seconds,
                    tokens,
                    admitted,
                });
            }
        }
        best.expect("nothing at least")
    };
    let nobody = vec![false; requests.len()];
    let trees = weigh(&nobody);
    let rate = rate.unwrap_or(trees.worth / trees.seconds);
    let at = trees.tokens + trees.admitted as u32;
    let price = rate * (seconds(at + PRICE_SLOTS) - seconds(at)) / f64::from(PRICE_SLOTS);
    let offered = requests
        .iter()
        .filter(|request| request.head.is_some())
        .count() as u32;
    let advantages = requests.iter().enumerate().filter_map(|(at, request)| {
        let head = request.head?;
        let passes = head_seconds(offered, head.depth) / f64::from(offered);
        let gain = request.head_worth(&head);
        let by_head = gain - f64::from(head.slots) * price - rate * (passes + head.own_seconds);
        let beyond = |worths: Vec<f32>| -> f64 {
            worths
                .iter()
                .map(|worth| (f64::from(*worth) - price).max(0.0))
                .sum()
        };
        let advantage = by_head + beyond(worths_of(at, true)) - beyond(worths_of(at, false));
        Some((advantage, at, head.slots_max))
    });
    let mut advantages: Vec<(f64, usize, u32)> = advantages.collect();
    advantages.sort_by(|a, b| b.0.total_cmp(&a.0));
    let fitting = |above: f64| {
        let (mut heads, mut room) = (nobody.clone(), step.slots_max);
        for (advantage, at, slots_max) in &advantages {
            if *advantage > above && *slots_max <= room {
                room -= slots_max;
                heads[*at] = true;
            }
        }
        heads
    };
    let mut best = (nobody.clone(), trees);
    for above in [0.0, f64::NEG_INFINITY] {
        let heads = fitting(above);
        let weighed = weigh(&heads);
        if weighed.merit > best.1.merit {
            best = (heads, weighed);
        }
    }
    let (heads, weighed) = best;
    let order = of(&heads);
    let admitted = &order[..weighed.admitted];
    let share = |(at, head): (usize, &bool)| {
        let of = admitted.iter().filter(|node| node.request == at);
        let mut nodes: Vec<u32> = of.map(|node| node.node).collect();
        nodes.sort_unstable();
        match (head, nodes.is_empty()) {
            (true, true) => Share::Head,
            (true, false) => Share::Merged(nodes),
            (false, true) => Share::Plain,
            (false, false) => Share::Tree(nodes),
        }
    };
    heads.iter().enumerate().map(share).collect()
}

/// Chances as they come, many of them equal, and some of next to nothing.
fn any_chances() -> impl Strategy<Value = Vec<f32>> {
    let chance = prop_oneof![
        4 => 0.001f32..1.0,
        2 => (0u8..5).prop_map(|fifths| f32::from(fifths) / 5.0),
        1 => Just(1e-30f32),
        1 => Just(f32::MIN_POSITIVE),
    ];
    prop::collection::vec(chance, 0..12)
}

fn any_head() -> impl Strategy<Value = Option<HeadOption>> {
    let head = (1u32..5, 1u32..6, 0.0f32..4.0, 0.0f64..0.2);
    prop::option::of(
        head.prop_map(|(depth, slots_max, gain, own_seconds)| HeadOption {
            depth,
            slots: slots_max as f32 * 0.8,
            slots_max,
            gain,
            own_seconds,
        }),
    )
}

/// Widths of stairs and what each costs more than the one before it.
fn any_stairs() -> impl Strategy<Value = Vec<(u32, f64)>> {
    let cost = prop_oneof![Just(0.0f64), 0.0f64..0.5];
    prop::collection::vec((1u32..20, cost), 1..40)
}

/// Past the last stair every token costs the same.
fn stair(stairs: &[(u32, f64)], tokens: u32) -> Stair {
    let (mut tokens_max, mut seconds) = (0, 1.0);
    for (width, more) in stairs {
        tokens_max += width;
        seconds += more;
        if tokens <= tokens_max {
            return Stair {
                seconds,
                tokens_max,
            };
        }
    }
    Stair {
        seconds: seconds + 0.1 * f64::from(tokens - tokens_max),
        tokens_max: tokens,
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8 * ProptestConfig::default().cases))]

    #[test]
    fn the_quick_division_is_the_plain_one(
        drafts in prop::collection::vec((any_chances(), any_chances(), any_head(), 0.5f32..2.0, 0.0f32..6.0), 0..12),
        stairs in any_stairs(),
        slots_max in 0u32..120,
        rate in prop::option::of(0.0f64..8.0),
        pass in 0.0f64..0.3,
    ) {
        let requests: Vec<BudgetRequest<'_>> = drafts
            .iter()
            .map(|(tree, merged, head, weight, due_tokens)| BudgetRequest {
                weight: *weight,
                due_tokens: *due_tokens,
                tree,
                head: *head,
                merged: if head.is_some() { merged } else { &[] },
            })
            .collect();
        let step = BudgetStep { tokens: requests.len() as u32, slots_max, rate };
        let head_seconds = |requests, depth| pass * f64::from(depth) + 0.01 * f64::from(requests);
        let quick = super::super::divide(&requests, &step, |tokens| stair(&stairs, tokens), head_seconds);
        let plain = divide(&requests, &step, |tokens| stair(&stairs, tokens).seconds, head_seconds);
        prop_assert_eq!(quick, plain);
    }
}
