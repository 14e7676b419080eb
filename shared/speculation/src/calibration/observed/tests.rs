use super::*;
use crate::{NodeFeatures, Scope, Source};

/// Nodes as they come in a workload, each with whether it was accepted.
fn nodes(seed: u32, count: u32) -> impl Iterator<Item = (NodeFeatures, bool)> {
    (0..count).map(move |at| {
        let mixed = (at ^ seed.rotate_left(16)).wrapping_mul(0x9e37_79b1);
        let mixed = (mixed ^ (mixed >> 15)).wrapping_mul(0x85eb_ca77) >> 8;
        let node = NodeFeatures {
            source: Source::Suffix,
            scope: Scope::Tenant,
            match_len: 1 << (mixed % 5),
            position: 1 + mixed / 8 % 6,
            count: 1 + mixed / 64 % 3,
            share: 0.5,
        };
        // Long matches are right, short ones are not.
        (node, mixed / 256 % 100 < 15 + 18 * (mixed % 5))
    })
}

fn learn(calibration: &mut Calibration, seed: u32, count: u32) {
    for (node, accepted) in nodes(seed, count) {
        calibration.learn(&node, accepted);
    }
}

/// The mean difference of chances, over nodes as they come.
fn apart(a: &Calibration, b: &Calibration) -> f32 {
    let difference = |(node, _)| (a.chance(&node) - b.chance(&node)).abs();
    nodes(77, 500).map(difference).sum::<f32>() / 500.0
}

/// What one keeps for all, as the draft store does.
#[derive(Default)]
struct Store(Calibration);

impl Store {
    fn exchange(&mut self, with: &mut Calibration) {
        self.0.add(&with.take_observed());
        with.rebase(self.0.clone());
    }
}

#[test]
fn a_new_worker_predicts_as_a_warm_one_does() {
    let (mut warm, mut store) = (Calibration::new(), Store::default());
    for turn in 0..20 {
        learn(&mut warm, turn, 200);
        store.exchange(&mut warm);
    }
    let mut new = Calibration::new();
    assert!(apart(&new, &warm) > 0.15);
    store.exchange(&mut new);
    assert_eq!(apart(&new, &warm), 0.0);
    assert!(!new.has_observed());
}

#[test]
fn observations_that_come_at_once_are_those_that_came_one_by_one() {
    let mut one_by_one = Calibration::new();
    learn(&mut one_by_one, 1, 3000);
    let mut at_once = Calibration::new();
    at_once.add(&one_by_one.take_observed());
    let off = apart(&one_by_one, &at_once);
    assert!(off < 0.03, "{off}");
}

#[test]
fn workers_beside_each_other_count_once() {
    // Four that learn beside each other, and one that sees all that they do.
    let mut store = Store::default();
    let mut four = vec![Calibration::new(); 4];
    let mut alone = Calibration::new();
    for turn in 0..10 {
        for (at, worker) in four.iter_mut().enumerate() {
            learn(worker, turn * 4 + at as u32, 50);
            learn(&mut alone, turn * 4 + at as u32, 50);
            store.exchange(worker);
        }
    }
    let off = apart(&store.0, &alone);
    assert!(off < 0.03, "{off}");
    let seen = |of: &Calibration| -> f32 { of.tables.iter().flatten().map(|cell| cell.seen).sum() };
    let ratio = seen(&store.0) / seen(&alone);
    assert!((ratio - 1.0).abs() < 1e-3, "{ratio}");
}

#[test]
fn what_did_not_arrive_is_sent_again_and_what_came_meanwhile_is_kept() {
    let (mut worker, mut store) = (Calibration::new(), Store::default());
    learn(&mut worker, 1, 300);
    let lost = worker.take_observed();
    learn(&mut worker, 2, 300);
    worker.put_back(&lost);
    store.0.add(&worker.take_observed());
    // The answer is under way while the worker goes on.
    learn(&mut worker, 3, 300);
    let before = worker.clone();
    worker.rebase(store.0.clone());
    assert!(worker.has_observed());
    let off = apart(&worker, &before);
    assert!(off < 0.03, "{off}");
    store.exchange(&mut worker);
    let mut all = Calibration::new();
    for seed in 1..4 {
        learn(&mut all, seed, 300);
    }
    let off = apart(&store.0, &all);
    assert!(off < 0.03, "{off}");
}
