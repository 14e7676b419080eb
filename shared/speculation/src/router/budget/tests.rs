mod plain;

use std::cell::Cell;

use proptest::prelude::*;

use super::*;
use crate::router::Priority;

/// A divided step, and what it is expected to bring and to take.
struct Budgeted {
    shares: Vec<Share>,
    /// Bonus tokens included.
    expected_tokens: f64,
    expected_seconds: f64,
    /// Draft tokens of trees that are verified.
    admitted: u32,
}

impl Budgeted {
    /// `seconds` are those of a step of so many tokens, and of the head for so many requests and passes.
    fn of(
        shares: Vec<Share>,
        requests: &[BudgetRequest<'_>],
        step: &BudgetStep,
        seconds: impl Fn(u32) -> f64,
        head_seconds: impl Fn(u32, u32) -> f64,
    ) -> Self {
        let mut expected_tokens = requests.len() as f64;
        let (mut admitted, mut slots, mut own_seconds) = (0, 0.0, 0.0);
        let (mut heads, mut depth) = (0, 0);
        for (request, share) in requests.iter().zip(&shares) {
            let (nodes, of, head) = match share {
                Share::Plain => (&[][..], request.tree, None),
                Share::Tree(nodes) => (&nodes[..], request.tree, None),
                Share::Head => (&[][..], request.merged, request.head),
                Share::Merged(nodes) => (&nodes[..], request.merged, request.head),
            };
            admitted += nodes.len() as u32;
            for node in nodes {
                expected_tokens += f64::from(of[*node as usize]);
            }
            if let Some(head) = head {
                expected_tokens += f64::from(head.gain);
                slots += f64::from(head.slots);
                own_seconds += head.own_seconds;
                heads += 1;
                depth = depth.max(head.depth);
            }
        }
        let mut expected_seconds = seconds(step.tokens + slots.ceil() as u32 + admitted);
        if heads > 0 {
            expected_seconds += own_seconds + head_seconds(heads, depth);
        }
        Budgeted {
            shares,
            expected_tokens,
            expected_seconds,
            admitted,
        }
    }
}

/// Where every number of tokens is a stair of its own.
fn divide(
    requests: &[BudgetRequest<'_>],
    step: &BudgetStep,
    seconds: impl Fn(u32) -> f64,
    head_seconds: impl Fn(u32, u32) -> f64,
) -> Budgeted {
    let stair = |tokens| Stair {
        seconds: seconds(tokens),
        tokens_max: tokens,
    };
    let shares = super::divide(requests, step, stair, &head_seconds);
    Budgeted::of(shares, requests, step, seconds, head_seconds)
}

fn request(tree: &[f32]) -> BudgetRequest<'_> {
    BudgetRequest {
        merged: &[],
        weight: 1.0,
        due_tokens: 0.0,
        tree,
        head: None,
    }
}

fn step(requests: usize) -> BudgetStep {
    BudgetStep {
        tokens: requests as u32,
        slots_max: 10_000,
        rate: None,
    }
}

fn no_head(_: u32, _: u32) -> f64 {
    unreachable!("no request has a head")
}

/// A chain whose tokens are each right with the same chance.
fn chain(chance: f32, len: i32) -> Vec<f32> {
    (1..=len).map(|position| chance.powi(position)).collect()
}

fn sizes(budgeted: &Budgeted) -> Vec<usize> {
    budgeted
        .shares
        .iter()
        .map(|share| match share {
            Share::Plain => 0,
            Share::Tree(nodes) => nodes.len(),
            Share::Head | Share::Merged(_) => 1000,
        })
        .collect()
}

#[test]
fn free_tokens_are_all_admitted_and_dear_ones_not_at_all() {
    let (a, b) = (chain(0.9, 5), vec![0.2, 0.1, 0.01]);
    let requests = [request(&a), request(&b)];
    let all = divide(&requests, &step(2), |_| 0.01, no_head);
    assert_eq!(sizes(&all), [5, 3]);
    assert_eq!(all.admitted, 8);
    let sum: f32 = a.iter().chain(&b).sum();
    assert!((all.expected_tokens - 2.0 - f64::from(sum)).abs() < 1e-5);
    // As dear as decoding.
    let none = divide(&requests, &step(2), f64::from, no_head);
    assert_eq!(none.shares, [Share::Plain, Share::Plain]);
    assert_eq!((none.expected_tokens, none.expected_seconds), (2.0, 2.0));
    // Room for the best three, which are one request's.
    let few = BudgetStep {
        slots_max: 3,
        ..step(2)
    };
    assert_eq!(sizes(&divide(&requests, &few, |_| 0.01, no_head)), [3, 0]);
    let nobody = divide(&[], &step(0), |_| 0.01, no_head);
    assert_eq!((nobody.shares.len(), nobody.expected_tokens), (0, 0.0));
}

#[test]
fn past_a_stair_that_loses_there_may_be_one_that_wins() {
    let tree = chain(0.95, 30);
    // The fourth token opens a tile: alone it loses, with those that it makes room for it wins.
    let stairs = |tokens: u32| {
        if tokens <= 4 {
            1.0
        } else if tokens <= 31 {
            1.9
        } else {
            10.0
        }
    };
    let budgeted = divide(&[request(&tree)], &step(1), stairs, no_head);
    assert_eq!(sizes(&budgeted), [30]);
    // Its first four tokens are all that is worth having if there is no more.
    assert_eq!(
        sizes(&divide(&[request(&tree[..4])], &step(1), stairs, no_head)),
        [3]
    );
}

#[test]
fn a_going_rate_admits_what_brings_more_than_time_does_elsewhere() {
    let tree = chain(0.9, 40);
    let seconds = |tokens: u32| 1.0 + 0.2 * f64::from(tokens - 1);
    let alone = divide(&[request(&tree)], &step(1), seconds, no_head);
    let at = |rate| {
        sizes(&divide(
            &[request(&tree)],
            &BudgetStep {
                rate: Some(rate),
                ..step(1)
            },
            seconds,
            no_head,
        ))[0]
    };
    // Its own rate is the best ratio: the same choice; less is going elsewhere: more is worth it.
    let own = alone.expected_tokens / alone.expected_seconds;
    assert_eq!(at(own), sizes(&alone)[0]);
    assert!(
        at(1.2) > sizes(&alone)[0],
        "{} {:?}",
        at(1.2),
        sizes(&alone)
    );
    // Nothing goes for less than plain decoding.
    assert_eq!(at(0.0), at(1.0));
    // And the last admitted token brings just more than it takes at that rate.
    let admitted = at(1.5) as i32;
    assert!(0.9f32.powi(admitted) > 0.3 && 0.9f32.powi(admitted + 1) <= 0.3);
}

#[test]
fn weights_are_priorities() {
    // Seer's two classes: the same drafts, one counts double. A budget of twelve.
    let tree = chain(0.7, 8);
    let mut requests = [request(&tree); 4];
    requests[0].weight = 2.0;
    requests[1].weight = 2.0;
    let limits = BudgetStep {
        slots_max: 12,
        ..step(4)
    };
    let split = sizes(&divide(&requests, &limits, |_| 1.0, no_head));
    assert_eq!(split, [4, 4, 2, 2]);
    for request in &mut requests {
        request.weight = 1.0;
    }
    assert_eq!(
        sizes(&divide(&requests, &limits, |_| 1.0, no_head)),
        [3, 3, 3, 3]
    );
}

#[test]
fn drafts_shorten_as_the_batch_grows() {
    // TurboSpec: chains of one chance, a floor and a price per token; the length that maximises goodput.
    let chance = 0.8f32;
    let seconds =
        |tokens: u32| 0.01f64.max(0.000_2 * f64::from(tokens)) + 0.000_02 * f64::from(tokens);
    let tree = chain(chance, 12);
    let mut last = 13;
    for batch in [1usize, 4, 8, 16, 32, 64, 128] {
        let requests = vec![request(&tree); batch];
        let lengths = sizes(&divide(&requests, &step(batch), seconds, no_head));
        let (least, most) = (lengths.iter().min().unwrap(), lengths.iter().max().unwrap());
        assert!(most - least <= 1, "{lengths:?}");
        let goodput = |len: usize| {
            let tokens: f32 = tree[..len].iter().sum::<f32>() + 1.0;
            batch as f64 * f64::from(tokens) / seconds((batch * (len + 1)) as u32)
        };
        let best = (0..=12)
            .max_by(|a, b| goodput(*a).total_cmp(&goodput(*b)))
            .unwrap();
        assert!(
            *least <= best + 1 && best <= *most,
            "{batch}: {lengths:?}, {best} is best"
        );
        assert!(*most <= last);
        last = *most;
    }
    assert_eq!(last, 0, "the last batch fills the machine without drafts");
}

#[test]
fn a_head_is_taken_where_it_brings_more() {
    let (good, bad) = (chain(0.95, 8), vec![0.2]);
    let head = Some(HeadOption {
        depth: 4,
        slots: 4.0,
        slots_max: 4,
        gain: 1.8,
        own_seconds: 0.0,
    });
    let seconds = |tokens: u32| 1.0 + 0.02 * f64::from(tokens);
    let requests = [good.as_slice(), &bad, &[]].map(|tree| BudgetRequest {
        merged: &[],
        head,
        ..request(tree)
    });
    let cheap = divide(&requests, &step(3), seconds, |requests, _| {
        0.05 * f64::from(requests)
    });
    assert_eq!(cheap.shares[1..], [Share::Head, Share::Head]);
    assert_eq!(sizes(&cheap)[0], 8);
    let dear = divide(&requests, &step(3), seconds, |_, _| 5.0);
    assert_eq!(dear.shares[1..], [Share::Tree(vec![0]), Share::Plain]);
    // One that has much to read first.
    let mut unread = requests;
    unread[2].head = head.map(|head| HeadOption {
        own_seconds: 5.0,
        ..head
    });
    let budgeted = divide(&unread, &step(3), seconds, |requests, _| {
        0.05 * f64::from(requests)
    });
    assert_eq!(budgeted.shares[1..], [Share::Head, Share::Plain]);
    // No room for what it would draft.
    let few = BudgetStep {
        slots_max: 3,
        ..step(3)
    };
    let budgeted = divide(&requests, &few, seconds, |_, _| 0.0);
    assert!(!budgeted.shares.contains(&Share::Head));
}

#[test]
fn where_there_is_no_room_for_all_heads_those_that_gain_most_have_theirs() {
    let trees = [vec![], vec![0.9, 0.8], vec![0.1], vec![0.9, 0.7]];
    let head = Some(HeadOption {
        depth: 4,
        slots: 4.0,
        slots_max: 4,
        gain: 3.0,
        own_seconds: 0.0,
    });
    let requests: Vec<BudgetRequest<'_>> = trees
        .iter()
        .map(|tree| BudgetRequest {
            merged: &[],
            head,
            ..request(tree)
        })
        .collect();
    let heads = |slots_max| {
        let step = BudgetStep {
            slots_max,
            ..step(4)
        };
        divide(&requests, &step, |_| 1.0, |_, _| 0.01)
    };
    assert!(heads(16).shares.iter().all(|share| *share == Share::Head));
    let half = heads(9);
    assert_eq!(sizes(&half), [1000, 1, 1000, 0]);
    assert_eq!(sizes(&heads(3)), [0, 2, 0, 1]);
}

#[test]
fn the_work_is_a_sort_and_three_walks() {
    let tree = chain(0.97, 32);
    let head = Some(HeadOption {
        depth: 4,
        slots: 4.0,
        slots_max: 4,
        gain: 1.8,
        own_seconds: 0.0,
    });
    let requests = vec![
        BudgetRequest {
            merged: &[],
            head,
            ..request(&tree)
        };
        64
    ];
    let asked = Cell::new(0);
    divide(
        &requests,
        &step(64),
        |tokens| {
            asked.set(asked.get() + 1);
            1.0 + 0.001 * f64::from(tokens)
        },
        |_, _| 0.1,
    );
    assert!(asked.get() <= 3 * (64 * 32 + 2), "{}", asked.get());
}

#[test]
fn a_stair_is_asked_about_once_in_a_walk() {
    let tree = chain(0.97, 32);
    let asked = Cell::new(0);
    let stairs = |tokens: u32| {
        asked.set(asked.get() + 1);
        let tokens_max = tokens.next_multiple_of(64);
        let seconds = 1.0 + 0.001 * f64::from(tokens_max);
        Stair {
            seconds,
            tokens_max,
        }
    };
    let shares = super::divide(&[request(&tree); 64], &step(64), stairs, no_head);
    let nodes = |share: &Share| matches!(share, Share::Tree(nodes) if nodes.len() > 1);
    assert!(shares.iter().all(nodes));
    // 33 stairs, the plain step, and the one that would come after the last.
    assert!(asked.get() <= 35, "{}", asked.get());
}

/// A request as parents and chances.
type Tree = Vec<(Option<usize>, f32)>;

fn any_tree() -> impl Strategy<Value = Tree> {
    prop::collection::vec((0usize..6, 0.05f32..0.99), 0..5).prop_map(|nodes| {
        let mut tree: Tree = Vec::new();
        for (at, (parent, chance)) in nodes.into_iter().enumerate() {
            let parent = parent.checked_sub(1).filter(|parent| *parent < at);
            let above = parent.map_or(1.0, |parent| tree[parent].1);
            tree.push((parent, above * chance));
        }
        tree
    })
}

/// Every set of nodes that is a tree: (nodes, worth).
fn subtrees(tree: &Tree) -> Vec<(usize, f64)> {
    (0..1usize << tree.len())
        .filter(|set| {
            tree.iter().enumerate().all(|(at, (parent, _))| {
                set >> at & 1 == 0 || parent.is_none_or(|parent| set >> parent & 1 == 1)
            })
        })
        .map(|set| {
            (
                set.count_ones() as usize,
                tree.iter()
                    .enumerate()
                    .filter(|(at, _)| set >> at & 1 == 1)
                    .map(|(_, (_, f))| f64::from(*f))
                    .sum(),
            )
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2 * ProptestConfig::default().cases))]

    #[test]
    fn no_other_choice_is_better(
        trees in prop::collection::vec((any_tree(), 0.5f32..3.0, prop::option::of((1u32..4, 0.0f32..2.0))), 1..4),
        stairs in prop::collection::vec(0.0f64..0.6, 20),
        slots_max in 0u32..14,
        rate in prop::option::of(0.0f64..4.0),
        head_s in 0.0f64..0.5,
    ) {
        let seconds = |tokens: u32| 1.0 + stairs.iter().take(tokens as usize).sum::<f64>();
        let head_seconds = |requests: u32, depth: u32| head_s * f64::from(requests * depth) / 4.0;
        let f: Vec<Vec<f32>> = trees.iter().map(|(tree, _, _)| tree.iter().map(|node| node.1).collect()).collect();
        let with_heads: Vec<BudgetRequest<'_>> = trees.iter().zip(&f).map(|((_, weight, head), f)| BudgetRequest {
            merged: &[],
            weight: *weight,
            due_tokens: 0.0,
            tree: f,
            head: head.map(|(depth, gain)| HeadOption { depth, slots: depth as f32, slots_max: depth, gain: gain.min(depth as f32), own_seconds: 0.0 }),
        }).collect();
        let without: Vec<BudgetRequest<'_>> = with_heads.iter().map(|request| BudgetRequest { head: None, ..*request }).collect();
        let limits = BudgetStep { tokens: trees.len() as u32, slots_max: slots_max.min(20 - trees.len() as u32), rate };
        let plain = worth(&without) / seconds(limits.tokens);
        let merit = |worth: f64, seconds: f64| match rate {
            Some(rate) => worth - rate.max(plain) * seconds,
            None => worth / seconds,
        };
        let worth_of = |requests: &[BudgetRequest<'_>], budgeted: &Budgeted| -> f64 {
            let drafted: f64 = requests.iter().zip(&budgeted.shares).map(|(request, share)| f64::from(request.weight) * match share {
                Share::Plain => 0.0,
                Share::Tree(nodes) => nodes.iter().map(|node| f64::from(request.tree[*node as usize])).sum(),
                Share::Head | Share::Merged(_) => f64::from(request.head.unwrap().gain),
            }).sum();
            worth(requests) + drafted
        };

        // Exhaustively: every subtree of every request, or its head.
        let mut choices = vec![(0usize, worth(&without), 0u32, 0u32)];
        let mut best_of_trees = merit(worth(&without), seconds(limits.tokens));
        for ((tree, weight, _), request) in trees.iter().zip(&with_heads) {
            let mut grown = Vec::new();
            for (nodes, value, heads, depth) in choices {
                for (more, f) in subtrees(tree) {
                    grown.push((nodes + more, value + f64::from(*weight) * f, heads, depth));
                }
                if let Some(head) = request.head {
                    grown.push((nodes + head.slots as usize, value + f64::from(weight * head.gain), heads + 1, depth.max(head.depth)));
                }
            }
            choices = grown;
        }
        let mut best_of_all = f64::NEG_INFINITY;
        for (nodes, value, heads, depth) in choices {
            if nodes as u32 > limits.slots_max {
                continue;
            }
            let drafting = if heads > 0 { head_seconds(heads, depth) } else { 0.0 };
            let merit = merit(value, seconds(limits.tokens + nodes as u32) + drafting);
            best_of_all = best_of_all.max(merit);
            if heads == 0 {
                best_of_trees = best_of_trees.max(merit);
            }
        }

        let trees_only = divide(&without, &limits, seconds, no_head);
        let reached = merit(worth_of(&without, &trees_only), trees_only.expected_seconds);
        prop_assert!((reached - best_of_trees).abs() < 1e-5, "{reached} of {best_of_trees}");
        for ((tree, _, _), share) in trees.iter().zip(&trees_only.shares) {
            if let Share::Tree(nodes) = share {
                for node in nodes {
                    let parent = tree[*node as usize].0;
                    prop_assert!(parent.is_none_or(|parent| nodes.contains(&(parent as u32))));
                }
            }
        }
        // Heads are chosen by price: never worse than trees, and not far from the best.
        let mixed = divide(&with_heads, &limits, seconds, head_seconds);
        let value = worth_of(&with_heads, &mixed);
        let with_heads = merit(value, mixed.expected_seconds);
        prop_assert!(with_heads >= best_of_trees - 1e-5 && with_heads <= best_of_all + 1e-5);
        if rate.is_none() {
            prop_assert!(with_heads > 0.75 * best_of_all, "{with_heads} of {best_of_all}");
        }
        // Whatever the rate that goes: never below plain decoding.
        prop_assert!(value / mixed.expected_seconds >= plain - 1e-5);
    }
}

/// Eight requests with the same chain, of which every fourth is of another priority.
fn of_two_classes(chain: &[f32], of_class: Priority) -> Vec<BudgetRequest<'_>> {
    (0..8)
        .map(|at| BudgetRequest {
            weight: match at % 4 {
                0 => of_class.weight(),
                _ => Priority::Normal.weight(),
            },
            ..request(chain)
        })
        .collect()
}

#[test]
fn high_priority_drafts_longer_and_low_priority_shorter() {
    // Seer's split: where room is short, those that count more have the longer drafts.
    let chain = chain(0.8, 10);
    let short = BudgetStep {
        slots_max: 24,
        ..step(8)
    };
    let sizes_of = |class| {
        sizes(&divide(
            &of_two_classes(&chain, class),
            &short,
            |_| 0.01,
            no_head,
        ))
    };
    let same = sizes_of(Priority::Normal);
    assert_eq!(same, [3; 8]);
    let high = sizes_of(Priority::High);
    assert_eq!(high.iter().sum::<usize>(), 24);
    assert!(high[0] >= 5 && high[4] >= 5 && high[1] <= 3, "{high:?}");
    let low = sizes_of(Priority::Low);
    assert!(low[0] <= 1 && low[1] >= 3, "{low:?}");
}

#[test]
fn who_is_behind_its_pace_goes_first_for_what_it_needs() {
    // AdaServe: of two requests the one with the poorer draft is behind, and needs two tokens and a half of the step.
    let (good, poor) = (chain(0.9, 6), chain(0.6, 6));
    let short = BudgetStep {
        slots_max: 4,
        ..step(2)
    };
    let shares = |due_tokens| {
        let requests = [
            request(&good),
            BudgetRequest {
                due_tokens,
                ..request(&poor)
            },
        ];
        sizes(&divide(&requests, &short, |_| 0.01, no_head))
    };
    assert_eq!(shares(0.0), [4, 0]);
    assert_eq!(shares(1.0), [4, 0]);
    // Half a token is missing, which the likeliest brings: the rest is the other's.
    assert_eq!(shares(1.5), [3, 1]);
    // 1.2 are missing: of those that bring them the last is too unlikely all the same.
    assert_eq!(shares(2.2), [1, 3]);
    // Dear tokens are not bought at any price.
    let requests = [BudgetRequest {
        due_tokens: 100.0,
        ..request(&poor)
    }];
    let dear = divide(
        &requests,
        &step(1),
        |tokens| f64::from(tokens).powi(3),
        no_head,
    );
    assert_eq!(sizes(&dear), [0]);
    // A request that is behind also gets tokens that cost more than they bring, within reason.
    let wanted = |due_tokens| {
        let requests = [BudgetRequest {
            due_tokens,
            ..request(&poor)
        }];
        let step = BudgetStep {
            rate: Some(100.0),
            ..step(1)
        };
        sizes(&divide(
            &requests,
            &step,
            |tokens| 0.01 * f64::from(tokens),
            no_head,
        ))[0]
    };
    assert_eq!((wanted(0.0), wanted(3.0)), (0, 2));
}

#[test]
fn a_head_is_worth_more_to_who_is_behind() {
    let head = HeadOption {
        depth: 4,
        slots: 4.0,
        slots_max: 4,
        gain: 1.0,
        own_seconds: 0.0,
    };
    let wanted = |due_tokens| {
        let requests = [BudgetRequest {
            due_tokens,
            head: Some(head),
            ..request(&[])
        }];
        let step = BudgetStep {
            rate: Some(100.0),
            ..step(1)
        };
        divide(&requests, &step, |_| 0.01, |_, _| 0.02).shares[0].clone()
    };
    assert_eq!(wanted(1.0), Share::Plain);
    assert_eq!(wanted(2.0), Share::Head);
}

#[test]
fn what_the_head_leaves_due_raises_what_stands_beside_it() {
    let head = HeadOption {
        depth: 1,
        slots: 1.0,
        slots_max: 1,
        gain: 0.9,
        own_seconds: 0.0,
    };
    let wanted = |due_tokens| {
        let requests = [BudgetRequest {
            due_tokens,
            head: Some(head),
            merged: &[0.3],
            ..request(&[0.3])
        }];
        let step = BudgetStep {
            rate: Some(100.0),
            ..step(1)
        };
        let seconds = |tokens: u32| 0.004 + 0.006 * f64::from(tokens);
        divide(&requests, &step, seconds, |_, _| 0.0).shares[0].clone()
    };
    assert_eq!(wanted(0.0), Share::Head);
    assert_eq!(wanted(1.8), Share::Head);
    assert_eq!(wanted(2.5), Share::Merged(vec![0]));
}
