//! What deciding costs: chances of all nodes and the division of a step among 64 requests with 32 nodes each, and
//! learning from what came of it.
//!
//! `cargo run --release -p refrain-speculation --example budget`

use std::hint::black_box;
use std::time::Instant;

use refrain_speculation::{
    BudgetRequest, BudgetStep, Calibration, Candidate, DraftNode, DraftTree, HeadOffer, Origin,
    Scope, Source, StepCost, divide,
};

const BATCH: u32 = 64;
const NODES: u32 = 32;
const ROUNDS: usize = 400;

/// Two branches, as a match of `match_len` tokens would give.
fn draft(match_len: u32) -> Candidate {
    let origin = Origin {
        source: Source::Suffix,
        scope: Scope::Tenant,
        place: None,
    };
    let mut tree = DraftTree::new();
    for at in 0..NODES {
        let parent = if at == NODES / 2 {
            None
        } else {
            at.checked_sub(1)
        };
        let first = if at < NODES / 2 { 0.6 } else { 0.3 };
        let node = DraftNode {
            token: at,
            parent,
            probability: first * 0.98f32.powi((at % (NODES / 2)) as i32),
            count: 1 + match_len % 7,
            origin,
        };
        tree.push(node)
            .expect("parents stand before their children");
    }
    Candidate {
        score: tree.score(),
        tree,
        match_len,
        source: Source::Suffix,
        scope: Scope::Tenant,
    }
}

fn median_us(mut round: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            round();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2]
}

fn main() {
    let drafts: Vec<Candidate> = (1..=BATCH).map(draft).collect();
    let mut calibration = Calibration::new();
    let mut cost = StepCost::new();
    for step in 0..2000u32 {
        let said: Vec<u32> = (0..step % 20).chain([1000]).collect();
        calibration.observe(&drafts[step as usize % drafts.len()], &said);
        let tokens = 1 + step * 31 % 2048;
        cost.observe(
            tokens,
            50_000,
            0.008 + 1e-6 * f64::from(tokens.next_multiple_of(64)),
        );
    }
    let expect = || -> Vec<Vec<f32>> {
        drafts
            .iter()
            .map(|draft| calibration.expect(draft))
            .collect()
    };
    let chances = expect();
    let head = Some(HeadOffer {
        depth: 4,
        slots: 4.0,
        slots_max: 4,
        gain: 1.5,
        own_seconds: 0.0,
    });
    let step = BudgetStep {
        tokens: BATCH,
        slots_max: 4096,
        rate: None,
    };
    let requests = |head| -> Vec<BudgetRequest<'_>> {
        chances
            .iter()
            .map(|tree| BudgetRequest {
                weight: 1.0,
                tree,
                head,
            })
            .collect()
    };
    let (trees, mixed) = (requests(None), requests(head));
    let budget = |requests: &[BudgetRequest<'_>]| {
        divide(requests, &step, cost.at_kv(50_000), |requests, depth| {
            1e-5 * f64::from(requests * depth)
        })
    };
    let rows = [
        (
            "chances of all nodes",
            median_us(|| {
                black_box(expect());
            }),
        ),
        (
            "division, trees",
            median_us(|| {
                black_box(budget(&trees));
            }),
        ),
        (
            "division, trees or head",
            median_us(|| {
                black_box(budget(&mixed));
            }),
        ),
        ("learning from a step", {
            let mut calibration = calibration.clone();
            let mut cost = cost.clone();
            median_us(|| {
                for draft in &drafts {
                    calibration.observe(draft, black_box(&[0, 1, 2, 1000]));
                }
                cost.observe(500, 50_000, 0.0085);
            })
        }),
    ];
    println!("{BATCH} requests, {NODES} nodes each, median of {ROUNDS}");
    for (what, us) in rows {
        println!("{what:<24} {us:8.1} us");
    }
    let all: f64 = [0, 2, 3].iter().map(|row| rows[*row].1).sum();
    println!(
        "all of it, with a head   {all:8.1} us: {:.2} % of a step of 11 ms",
        all / 11_000.0 * 100.0
    );
}
