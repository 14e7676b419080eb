//! Synthetic streams of known acceptance probabilities that differ from the shares.

mod plain;

use super::*;
use crate::candidate::Witnesses;
use crate::testing::{draft, drafted_once};

/// A few random numbers; the same in every run.
struct Dice(u64);

impl Dice {
    fn chance(&mut self) -> f32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1u64 << 24) as f32
    }

    fn below(&mut self, end: u32) -> u32 {
        (self.chance() * end as f32) as u32
    }
}

/// A chain of `len` tokens of one earlier copy: D = 1/2 all along.
fn chain(scope: Scope, match_len: u32, len: u32) -> Candidate {
    let nodes: Vec<_> = (0..len).map(|at| (at, at.checked_sub(1))).collect();
    drafted_once(scope, match_len, &nodes)
}

/// The target's tokens for a chain whose tokens are each right with `chance`.
fn answer(dice: &mut Dice, chance: f32, len: u32) -> Vec<Token> {
    let right = (0..len).take_while(|_| dice.chance() < chance).count() as u32;
    (0..right).chain([1000]).collect()
}

/// The features of a node of [`chain`].
fn node(scope: Scope, match_len: u32, depth: u32) -> NodeFeatures {
    let share = if depth == 1 { 0.5 } else { 1.0 };
    NodeFeatures {
        source: Source::Suffix,
        scope,
        match_len,
        depth,
        count: 1,
        share,
        witnesses: None,
        after: depth.checked_sub(2),
        token: Some(depth - 1),
    }
}

fn assert_close(is: &[f32], should: &[f32]) {
    let near = |(is, should): (&f32, &f32)| (is - should).abs() < 1e-6;
    assert!(is.iter().zip(should).all(near), "{is:?} for {should:?}");
    assert_eq!(is.len(), should.len());
}

#[test]
fn an_unobserved_node_is_worth_its_share() {
    let statistics = AcceptanceStatistics::default();
    let tree = draft(
        Scope::Tenant,
        3,
        &[(None, 1, 0.6, 6), (None, 2, 0.3, 3), (Some(0), 3, 0.3, 3)],
    );
    assert_close(&statistics.path_probabilities(&tree), &[0.6, 0.3, 0.3]);
    let mut node = node(Scope::Tenant, 3, 1);
    for (share, chance) in [
        (f32::NAN, 0.004),
        (-1.0, 0.004),
        (0.25, 0.25),
        (7.0, 0.996),
        (f32::INFINITY, 0.996),
    ] {
        node.share = share;
        assert_close(&[statistics.node_probability(&node)], &[chance]);
    }
    node.source = Source::None;
    let mut learnt = statistics.clone();
    learnt.observe_node(&node, true);
    assert_eq!(learnt, statistics);
}

#[test]
fn estimates_converge_to_the_observed_rate_whatever_the_shares_say() {
    let mut statistics = AcceptanceStatistics::default();
    let mut dice = Dice(1);
    // The true probability depends on the match and on the scope; the shares, 1/2 and then 1, do not tell it.
    let truth = |scope: Scope, match_len: u32| match (scope, match_len) {
        (Scope::Request, 2) => 0.2,
        (Scope::Request, _) => 0.95,
        (Scope::Tenant, 2) => 0.6,
        (Scope::Tenant | Scope::Group, _) => 0.8,
    };
    let cases = [
        (Scope::Request, 2),
        (Scope::Request, 20),
        (Scope::Tenant, 2),
        (Scope::Tenant, 20),
    ];
    for _ in 0..4000 {
        for (scope, match_len) in cases {
            let said = answer(&mut dice, truth(scope, match_len), 6);
            statistics.observe(&chain(scope, match_len, 6), &said);
        }
    }
    for (scope, match_len) in cases {
        for depth in 1..=3 {
            let (is, should) = (
                statistics.node_probability(&node(scope, match_len, depth)),
                truth(scope, match_len),
            );
            assert!(
                (is - should).abs() < 0.12,
                "{scope:?} {match_len} {depth}: {is} for {should}"
            );
        }
    }
    // A scope that was never seen is judged by what is known of the others.
    for (match_len, among) in [(2, 0.2..0.6), (20, 0.6..0.95)] {
        let unseen = statistics.node_probability(&node(Scope::Group, match_len, 1));
        assert!(among.contains(&unseen), "{match_len}: {unseen}");
    }
}

#[test]
fn the_expected_number_of_tokens_is_accepted() {
    let mut statistics = AcceptanceStatistics::default();
    let mut dice = Dice(2);
    let (mut expected, mut observed) = (0.0, 0.0);
    for step in 0..6000 {
        // Matches of all lengths, right more often the longer they are, and trees of two branches.
        let match_len = 1 + dice.below(40);
        let first = 0.3 + 0.6 * match_len as f32 / 40.0;
        let tree = draft(
            Scope::Tenant,
            match_len,
            &[
                (None, 1, 0.7, 7),
                (None, 2, 0.2, 2),
                (Some(0), 3, 0.7, 7),
                (Some(2), 4, 0.35, 3),
                (Some(1), 5, 0.2, 2),
            ],
        );
        let drawn = dice.chance();
        let (accepted, said) = if drawn < first * 0.8 {
            if dice.chance() < 0.9 {
                if dice.chance() < 0.2 {
                    (3, vec![1, 3, 4, 99])
                } else {
                    (2, vec![1, 3, 99])
                }
            } else {
                (1, vec![1, 99])
            }
        } else if drawn < first {
            if dice.chance() < 0.5 {
                (2, vec![2, 5, 99])
            } else {
                (1, vec![2, 99])
            }
        } else {
            (0, vec![99])
        };
        if step >= 1000 {
            expected += statistics.path_probabilities(&tree).iter().sum::<f32>();
            observed += accepted as f32;
        }
        statistics.observe(&tree, &said);
    }
    assert!(
        (expected / observed - 1.0).abs() < 0.03,
        "{expected} expected, {observed} observed"
    );
}

#[test]
fn a_workload_that_changes_is_followed() {
    let mut statistics = AcceptanceStatistics::default();
    let mut dice = Dice(3);
    let mut serve = |statistics: &mut AcceptanceStatistics, chance: f32, steps: u32| {
        for _ in 0..steps {
            statistics.observe(&chain(Scope::Tenant, 9, 4), &answer(&mut dice, chance, 4));
        }
        statistics.node_probability(&node(Scope::Tenant, 9, 1))
    };
    let before = serve(&mut statistics, 0.9, 20_000);
    assert!((before - 0.9).abs() < 0.06, "{before}");
    let at_once = serve(&mut statistics, 0.2, 20);
    assert!(at_once > 0.7, "twenty steps are no trend: {at_once}");
    let after = serve(&mut statistics, 0.2, 1500);
    assert!((after - 0.2).abs() < 0.1, "{after}");
}

#[test]
fn a_node_that_was_not_reached_teaches_nothing() {
    let tree = draft(
        Scope::Tenant,
        4,
        &[
            (None, 1, 0.5, 1),
            (None, 2, 0.2, 1),
            (Some(0), 3, 0.5, 1),
            (Some(1), 4, 0.2, 1),
            (Some(2), 5, 0.5, 1),
        ],
    );
    let seen = |said: &[Token]| {
        let mut statistics = AcceptanceStatistics::default();
        statistics.observe(&tree, said);
        statistics.observations()
    };
    for (said, nodes) in [
        (&[][..], 0),
        // The root's children, and nothing below them.
        (&[9], 2),
        (&[1], 2),
        (&[1, 9], 3),
        (&[2, 4], 3),
        (&[1, 3], 3),
        (&[1, 3, 5, 9], 4),
    ] {
        assert_eq!(seen(said), nodes, "{said:?}");
    }
}

#[test]
fn children_never_add_up_to_more_than_their_parent() {
    let mut statistics = AcceptanceStatistics::default();
    // Both of two siblings are of a kind that is nearly always accepted.
    for _ in 0..500 {
        statistics.observe(&chain(Scope::Tenant, 3, 2), &[0, 1, 9]);
    }
    let tree = draft(
        Scope::Tenant,
        3,
        &[
            (None, 1, 0.5, 1),
            (None, 2, 0.5, 1),
            (Some(0), 3, 0.25, 1),
            (Some(0), 4, 0.25, 1),
        ],
    );
    let f = statistics.path_probabilities(&tree);
    assert!(f[0] + f[1] <= 1.0 && f[0] + f[1] > 0.99, "{f:?}");
    assert!(f[2] + f[3] <= f[0], "{f:?}");
    assert!(f[2] <= f[0] && f[3] <= f[0], "{f:?}");
}

#[test]
fn heads_are_judged_by_depth_and_by_length_of_the_context() {
    let mut statistics = AcceptanceStatistics::default();
    assert!(
        (statistics.head_path_probabilities(50, 6).sum::<f32>() - (1.0 - 0.5f32.powi(6))).abs()
            < 1e-6
    );
    let mut dice = Dice(4);
    let truth = |context: u32| {
        [0.8f32, 0.7, 0.6, 0.5].map(|chance| if context > 4000 { chance / 2.0 } else { chance })
    };
    let mut brought = [0u32; 2];
    for step in 0..6000 {
        for (at, context) in [300, 8000].into_iter().enumerate() {
            let accepted = truth(context)
                .into_iter()
                .take_while(|chance| dice.chance() < *chance)
                .count() as u32;
            statistics.observe_head(context, 4, accepted);
            if step >= 3000 {
                brought[at] += accepted;
            }
        }
    }
    for (brought, context) in brought.into_iter().zip([300, 8000]) {
        let (expected, observed) = (
            statistics.head_path_probabilities(context, 4).sum::<f32>(),
            brought as f32 / 3000.0,
        );
        assert!(
            (expected / observed - 1.0).abs() < 0.1,
            "{context}: {expected} for {observed}"
        );
    }
    // A draft that was cut short by its limit tells of no failure.
    let mut cut = AcceptanceStatistics::default();
    cut.observe_head(10, 3, 3);
    let third = |of: &AcceptanceStatistics| {
        let paths: Vec<f32> = of.head_path_probabilities(10, 3).collect();
        paths[2] / paths[1]
    };
    assert!(third(&cut) > third(&AcceptanceStatistics::default()));
    assert_eq!(cut.head_path_probabilities(10, 0).sum::<f32>(), 0.0);
}

/// Long copies: all of them are accepted, or none. The product over their nodes is far too low for the long ones, and
/// the second stage finds that out.
#[test]
fn texts_that_differ_in_how_predictable_they_are_are_told_apart_by_the_length_of_their_drafts() {
    let mut statistics = AcceptanceStatistics::default();
    let mut dice = Dice(5);
    // The two texts have the same node features within the draft. Drafts of the first are long and always right.
    let long = chain(Scope::Tenant, 30, 40);
    let short = chain(Scope::Tenant, 30, 12);
    for _ in 0..3000 {
        statistics.observe(&long, &(0..41).collect::<Vec<Token>>());
        statistics.observe(&short, &answer(&mut dice, 0.8, 12));
    }
    let expected = |of: &AcceptanceStatistics, draft: &Candidate| -> f32 {
        of.path_probabilities(draft).iter().sum()
    };
    let mut first_stage = statistics.clone();
    first_stage.drafts = Default::default();
    assert!(
        expected(&first_stage, &long) < 0.85 * 40.0,
        "{}",
        expected(&first_stage, &long)
    );
    let corrected = expected(&statistics, &long);
    assert!(corrected > 0.95 * 40.0 && corrected < 40.0, "{corrected}");
    let truth: f32 = (1..=12).map(|depth| 0.8f32.powi(depth)).sum();
    let short = expected(&statistics, &short);
    assert!((short / truth - 1.0).abs() < 0.15, "{short} for {truth}");
}

/// Two kinds of tokens have the same shares. Some are always right, others never.
#[test]
fn tokens_are_told_apart() {
    let mut statistics = AcceptanceStatistics::default();
    let one = |token| draft(Scope::Tenant, 5, &[(None, token, 0.5, 2)]);
    for token in (1..=40).cycle().take(4_000) {
        let said = if token % 2 == 0 { token } else { 1000 };
        statistics.observe(&one(token), &[said]);
    }
    for token in 1..=40 {
        let is = statistics.path_probabilities(&one(token))[0];
        assert_eq!(is > 0.5, token % 2 == 0, "{token}: {is}");
    }
    // A token that was not seen lies between them.
    let [never, other, always] =
        [1, 77, 2].map(|token| statistics.path_probabilities(&one(token))[0]);
    assert!(
        never < other && other < always,
        "{never}, {other}, {always}"
    );
}

/// A match may agree with the best one or go on otherwise, and only one of both is right.
#[test]
fn witnesses_for_and_against_a_token_count() {
    let mut statistics = AcceptanceStatistics::default();
    let seen = |agreeing: u8| {
        let candidate = draft(Scope::Tenant, 5, &[(None, 7, 0.5, 2)]);
        let witnesses = Witnesses {
            agreeing,
            dissenting: 2 - agreeing,
            dissenting_len: 3 * u32::from(2 - agreeing),
            ..Witnesses::of_one(5, 4)
        };
        let node = crate::candidate::DraftNode {
            witnesses: Some(witnesses),
            ..candidate.tree.nodes()[0]
        };
        Candidate::new(vec![node], 5, Source::Suffix, Scope::Tenant).unwrap()
    };
    for _ in 0..400 {
        statistics.observe(&seen(2), &[7]);
        statistics.observe(&seen(1), &[8]);
    }
    let agreed = statistics.path_probabilities(&seen(2))[0];
    let disputed = statistics.path_probabilities(&seen(1))[0];
    assert!(agreed > 0.9 && disputed < 0.1, "{agreed}, {disputed}");
}

/// A proposal asks by match, and gets what the whole estimate has for nodes under one match.
#[test]
fn estimates_by_match_are_those_of_its_nodes() {
    let mut statistics = AcceptanceStatistics::default();
    let mut dice = Dice(6);
    for _ in 0..500 {
        let (match_len, len) = (1 + dice.below(40), 1 + dice.below(20));
        let said = answer(&mut dice, 0.7, len);
        statistics.observe(&chain(Scope::Tenant, match_len, len), &said);
    }
    for of in [AcceptanceStatistics::default(), statistics] {
        for scope in [Scope::Tenant, Scope::Group] {
            let by_match = of.under_match(Source::Suffix, scope, 9);
            for (depth, count, share) in [(1, 1, 0.5), (3, 4, 0.2), (40, 9, 1.0), (2, 0, f32::NAN)]
            {
                let node = NodeFeatures {
                    depth,
                    count,
                    share,
                    ..NodeFeatures::under_match(Source::Suffix, scope, 9)
                };
                let is = by_match.probability(depth, count, share);
                assert_close(&[is], &[of.node_probability(&node)]);
            }
        }
    }
}
