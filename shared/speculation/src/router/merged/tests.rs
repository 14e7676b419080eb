use super::*;
use crate::candidate::Scope;
use crate::testing::drafted_once;

fn candidate(nodes: &[(Token, Option<u32>)]) -> Candidate {
    drafted_once(Scope::Tenant, 4, nodes)
}

fn chain(len: u32) -> Candidate {
    let nodes: Vec<_> = (0..len).map(|at| (at, at.checked_sub(1))).collect();
    candidate(&nodes)
}

/// Expected accepted tokens of the better one of two independent drafts, by drawing both.
fn drawn(f: &[f32], head_paths: &[f32]) -> f32 {
    let reach = |paths: &[f32], uniform: f32| {
        let reached = paths.iter().take_while(|path| uniform < **path);
        reached.count()
    };
    const POINTS: u32 = 400;
    let grid = || (0..POINTS).map(|at| (at as f32 + 0.5) / POINTS as f32);
    let mut sum = 0.0;
    for one in grid() {
        for other in grid() {
            sum += reach(f, one).max(reach(head_paths, other)) as f32;
        }
    }
    sum / (POINTS * POINTS) as f32
}

#[test]
fn of_independent_drafts_the_longer_counts() {
    let mut after_head = AcceptanceAfterHead::default();
    for _ in 0..2000 {
        // As often as expected.
        after_head.observe(&chain(1), &[0.5], &[0], 0);
        after_head.observe(&chain(1), &[0.5], &[9], 0);
    }
    assert!(
        (after_head.factor() - 1.0).abs() < 0.02,
        "{}",
        after_head.factor()
    );
    for (f, head_paths) in [
        (vec![0.9, 0.8, 0.7, 0.6], vec![0.7, 0.4]),
        (vec![0.3, 0.1], vec![0.8, 0.7, 0.6]),
        (vec![0.5], vec![]),
    ] {
        let gain: f32 = after_head
            .merged_gains(&chain(f.len() as u32), &f, &head_paths)
            .iter()
            .sum();
        let whole = head_paths.iter().sum::<f32>() + gain;
        let wanted = drawn(&f, &head_paths);
        assert!((whole - wanted).abs() < 0.05, "{whole}, not {wanted}");
        // Never the sum, never less than either.
        let (tree, head): (f32, f32) = (f.iter().sum(), head_paths.iter().sum());
        assert!(whole <= tree + head + 1e-3 && whole >= tree.max(head) - 0.05);
    }
}

#[test]
fn what_fails_with_the_head_is_worth_nothing_beside_it() {
    let found = candidate(&[(1, None), (2, Some(0)), (3, Some(1))]);
    let f = [0.9, 0.8, 0.7];
    let after = |said: &[Token], by_head| {
        let mut after_head = AcceptanceAfterHead::default();
        for _ in 0..400 {
            after_head.observe(&found, &f, said, by_head);
        }
        after_head.factor()
    };
    // The head ended after one token, and the draft had something else, the right thing, or had left the way before.
    assert!(after(&[1, 7], 1) < 0.05);
    assert!((after(&[1, 2], 1) - 1.0 / 0.8).abs() < 0.05);
    assert!(after(&[4, 2], 1) < 0.05);
    // Nothing is learnt where the next token is not known, or the draft has no node.
    let untouched = AcceptanceAfterHead::default().factor();
    assert_eq!(
        (after(&[1], 1), after(&[1, 2, 3, 4], 3)),
        (untouched, untouched)
    );
}

#[test]
fn pooling_lets_children_lift_the_way_to_them_and_keeps_sums() {
    // A chain whose end is what matters, and a sibling.
    let found = candidate(&[
        (1, None),
        (2, Some(0)),
        (3, Some(1)),
        (4, Some(0)),
        (5, None),
    ]);
    let worth = [0.1, 0.2, 0.9, 0.05, 0.3];
    let values = pooled(found.tree.nodes(), &worth);
    assert!(
        values[..3].iter().all(|value| (value - 0.4).abs() < 1e-6),
        "{values:?}"
    );
    assert_eq!(values[3..], [0.05, 0.3]);
    // Whatever the values: never above the parent's, and the same sum.
    let mut state = 7u32;
    let mut random = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1u32 << 24) as f32
    };
    for _ in 0..200 {
        let parents: Vec<Option<u32>> = (0..12u32)
            .map(|at| ((random() * (at + 1) as f32) as u32).checked_sub(1))
            .collect();
        let nodes: Vec<_> = (0..12).zip(parents.iter().copied()).collect();
        let drafted = candidate(&nodes);
        let worth: Vec<f32> = (0..12).map(|_| random()).collect();
        let values = pooled(drafted.tree.nodes(), &worth);
        for (at, parent) in parents.iter().enumerate() {
            if let Some(parent) = parent {
                assert!(values[at] <= values[*parent as usize] + 1e-6);
            }
        }
        let sums: (f32, f32) = (worth.iter().sum(), values.iter().sum());
        assert!((sums.0 - sums.1).abs() < 1e-4);
    }
}
