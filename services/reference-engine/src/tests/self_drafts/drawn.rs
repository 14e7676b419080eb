//! Drafts that are drawn: the output's law is the target's, and more of them is kept than of fixed ones.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Instant;

use refrain_protocol::engine::{CloseRequest, Sampling, SelfDraft, StepOutput};
use refrain_protocol::{EngineSessionId, TokenId};

use super::{drafting, opening_for_drafts, wanted};
use crate::config::{EngineConfig, WeightFormat};
use crate::drafter::Network;
use crate::engine::Core;
use crate::tests::draft_model::{shipped_layers, stranger};
use crate::tests::eagle3::golden::shipped;
use crate::tests::eagle3::tiny_head;
use crate::tests::support::{Bench, Random, bench_drafting, bench_with, by_head, item, opening};

const TRIALS: u64 = 800;
const OUTPUT: usize = 4;

/// The shipped model and a drafter whose distribution has something in common with its.
fn bench(drafter: fn() -> Box<dyn Network>) -> Bench {
    let (model, _) = shipped(WeightFormat::F32);
    Bench {
        core: Core::new(model, Some(drafter()), &EngineConfig::default()),
        now: Instant::now(),
    }
}

fn head() -> Box<dyn Network> {
    by_head(shipped(WeightFormat::F32).1)
}

fn model() -> Box<dyn Network> {
    shipped_layers(4)
}

/// No text that the model knows: what follows is open.
fn prompt() -> Vec<TokenId> {
    Random(5).tokens(12)
}

fn drawn(depth: u32) -> SelfDraft {
    SelfDraft {
        sampled: true,
        ..wanted(depth, 1, depth)
    }
}

fn sampling(seed: u64) -> Sampling {
    Sampling {
        temperature: 1.3,
        top_k: 12,
        seed,
        ..Sampling::default()
    }
}

/// The first tokens of an answer, and of its drafts how many tokens were made and kept.
fn answer(
    bench: &mut Bench,
    prompt: &[TokenId],
    seed: u64,
    wanted: Option<SelfDraft>,
) -> (Vec<TokenId>, [u32; 2]) {
    let session = 1;
    let sampling = sampling(seed);
    let first = match wanted {
        Some(_) => opening_for_drafts(session, &sampling, prompt),
        None => opening(session, &sampling, prompt),
    };
    let mut output = bench.step(first).emitted;
    let mut counts = [0, 0];
    while output.len() < OUTPUT {
        let len = prompt.len() + output.len();
        let StepOutput {
            emitted,
            accepted_nodes,
            self_drafted,
            ..
        } = bench.step(match wanted {
            Some(wanted) => drafting(session, len, wanted),
            None => item(session, len, &[]),
        });
        counts[0] += self_drafted;
        counts[1] += accepted_nodes.len() as u32;
        output.extend(emitted);
    }
    bench.core.close(&CloseRequest {
        sessions: vec![EngineSessionId(session)],
        keep_kv: true,
    });
    output.truncate(OUTPUT);
    (output, counts)
}

/// Pearson's statistic of two samples of the same size, and its degrees of freedom; rare cells are one.
fn chi_square<T: Ord>(one: &[T], other: &[T]) -> (f64, f64) {
    let mut cells: BTreeMap<&T, [f64; 2]> = BTreeMap::new();
    for (at, sample) in [one, other].into_iter().enumerate() {
        for value in sample {
            cells.entry(value).or_default()[at] += 1.0;
        }
    }
    let mut rare = [0.0; 2];
    let mut statistic = 0.0;
    let mut freedom: f64 = -1.0;
    let mut add = |[a, b]: [f64; 2]| {
        if a + b > 0.0 {
            statistic += (a - b) * (a - b) / (a + b);
            freedom += 1.0;
        }
    };
    for counts in cells.into_values() {
        match counts.iter().sum::<f64>() < 12.0 {
            true => rare = [rare[0] + counts[0], rare[1] + counts[1]],
            false => add(counts),
        }
    }
    add(rare);
    (statistic, freedom)
}

fn check_law(drafter: fn() -> Box<dyn Network>) {
    static PLAIN: OnceLock<Vec<Vec<TokenId>>> = OnceLock::new();
    let mut bench = bench(drafter);
    let prompt = prompt();
    let plain = PLAIN.get_or_init(|| {
        let seeds = 0..TRIALS;
        seeds
            .map(|seed| answer(&mut bench, &prompt, seed, None).0)
            .collect()
    });
    let mut speculative = Vec::new();
    let mut counts = [0, 0];
    for seed in 0..TRIALS {
        let (output, drafted) = answer(&mut bench, &prompt, TRIALS + seed, Some(drawn(3)));
        speculative.push(output);
        counts = [counts[0] + drafted[0], counts[1] + drafted[1]];
    }
    // Of enough drafts something is kept and something is not, or nothing was tested.
    assert!(counts[1] > 100 && counts[1] + 100 < counts[0], "{counts:?}");
    let (mut statistic, mut freedom) = (0.0, 0.0);
    for len in 2..=OUTPUT {
        // Each token, and each with the one before it.
        for from in [len - 1, len - 2] {
            let parts = |outputs: &[Vec<TokenId>]| -> Vec<Vec<TokenId>> {
                let part = |output: &Vec<TokenId>| output[from..len].to_vec();
                outputs.iter().map(part).collect()
            };
            let (more, cells) = chi_square(&parts(plain), &parts(&speculative));
            statistic += more;
            freedom += cells;
        }
    }
    assert!(freedom > 100.0, "{freedom}");
    assert!(
        statistic < freedom + 3.0 * (2.0 * freedom).sqrt(),
        "{statistic} with {freedom} degrees of freedom"
    );
}

#[test]
fn the_output_has_the_law_of_the_target_where_a_head_draws() {
    check_law(head);
}

#[test]
fn the_output_has_the_law_of_the_target_where_a_model_draws() {
    check_law(model);
}

/// The theorem's other half, on the same prompts and seeds.
#[test]
fn more_is_kept_of_drawn_drafts_than_of_the_likeliest() {
    let mut bench = bench(head);
    let prompt = prompt();
    let mut kept = |wanted: SelfDraft| {
        let mut counts = [0, 0];
        for seed in 0..300 {
            let (_, drafted) = answer(&mut bench, &prompt, seed, Some(wanted));
            counts = [counts[0] + drafted[0], counts[1] + drafted[1]];
        }
        f64::from(counts[1]) / f64::from(counts[0])
    };
    let (drawn, likeliest) = (kept(drawn(1)), kept(wanted(1, 1, 1)));
    assert!(
        drawn > likeliest,
        "{drawn} of drawn, {likeliest} of likeliest"
    );
}

#[test]
fn at_temperature_0_nothing_is_drawn() {
    let prompt = Random(9).tokens(20);
    let greedy = Sampling::default();
    let truth = bench_with(tiny_head(), EngineConfig::default()).decode(1, &greedy, &prompt, 30);
    for mut bench in [
        bench_with(tiny_head(), EngineConfig::default()),
        bench_drafting(stranger(), EngineConfig::default()),
    ] {
        let mut output = bench.step(opening_for_drafts(1, &greedy, &prompt)).emitted;
        while output.len() < 30 {
            let len = prompt.len() + output.len();
            output.extend(bench.step(drafting(1, len, drawn(4))).emitted);
        }
        assert_eq!(output[..30], truth[..30]);
    }
}
