//! Tests of randomly drawn drafts: the output has the target's distribution, and more tokens are accepted than of
//! deterministic drafts.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Instant;

use refrain_protocol::engine::{CloseRequest, Sampling, SelfDraft, StepOutput};
use refrain_protocol::{EngineSessionId, TokenId};

use super::{drafting, opening_for_drafts, wanted};
use crate::config::EngineConfig;
use crate::drafter::DraftNetwork;
use crate::engine::EngineCore;
use crate::kernels::WeightFormat;
use crate::tests::draft_model::{shipped_layers, stranger};
use crate::tests::eagle3::golden::shipped;
use crate::tests::eagle3::tiny_head;
use crate::tests::support::{
    Random, TestEngine, by_head, engine_with_drafter, engine_with_head, item, opening,
};

const TRIALS: u64 = 800;
const OUTPUT: usize = 4;

/// The compiled-in model, and a drafter whose distribution resembles the model's.
fn engine(drafter: fn() -> Box<dyn DraftNetwork>) -> TestEngine {
    let (model, _) = shipped(WeightFormat::F32);
    TestEngine {
        core: EngineCore::new(model, Some(drafter()), &EngineConfig::default()),
        now: Instant::now(),
    }
}

fn head() -> Box<dyn DraftNetwork> {
    by_head(shipped(WeightFormat::F32).1)
}

fn model() -> Box<dyn DraftNetwork> {
    shipped_layers(4)
}

/// Returns a text unlike the training text, so that the distribution of the next token is wide.
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

/// Returns the first tokens of an answer, and the numbers of drafted and of accepted tokens.
fn answer(
    engine: &mut TestEngine,
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
    let mut output = engine.step(first).emitted;
    let mut counts = [0, 0];
    while output.len() < OUTPUT {
        let len = prompt.len() + output.len();
        let StepOutput {
            emitted,
            accepted_nodes,
            self_drafted,
            ..
        } = engine.step(match wanted {
            Some(wanted) => drafting(session, len, wanted),
            None => item(session, len, &[]),
        });
        counts[0] += self_drafted;
        counts[1] += accepted_nodes.len() as u32;
        output.extend(emitted);
    }
    engine.core.close(&CloseRequest {
        sessions: vec![EngineSessionId(session)],
        keep_kv: true,
        parks: false,
    });
    output.truncate(OUTPUT);
    (output, counts)
}

/// Returns Pearson's statistic of two samples of equal size, and its degrees of freedom. Rare cells are merged.
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

fn check_law(drafter: fn() -> Box<dyn DraftNetwork>) {
    static PLAIN: OnceLock<Vec<Vec<TokenId>>> = OnceLock::new();
    let mut engine = engine(drafter);
    let prompt = prompt();
    let plain = PLAIN.get_or_init(|| {
        let seeds = 0..TRIALS;
        seeds
            .map(|seed| answer(&mut engine, &prompt, seed, None).0)
            .collect()
    });
    let mut speculative = Vec::new();
    let mut counts = [0, 0];
    for seed in 0..TRIALS {
        let (output, drafted) = answer(&mut engine, &prompt, TRIALS + seed, Some(drawn(3)));
        speculative.push(output);
        counts = [counts[0] + drafted[0], counts[1] + drafted[1]];
    }
    // The test is meaningless unless enough tokens are accepted and enough are rejected.
    assert!(counts[1] > 100 && counts[1] + 100 < counts[0], "{counts:?}");
    let (mut statistic, mut freedom) = (0.0, 0.0);
    for len in 2..=OUTPUT {
        // The cells are single tokens, and pairs of neighbours.
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
fn the_output_has_the_targets_distribution_if_a_head_draws() {
    check_law(head);
}

#[test]
fn the_output_has_the_targets_distribution_if_a_model_draws() {
    check_law(model);
}

/// Compares both kinds of drafts on the same prompts and seeds.
#[test]
fn more_tokens_are_accepted_of_drawn_drafts_than_of_the_likeliest() {
    let mut engine = engine(head);
    let prompt = prompt();
    let mut kept = |wanted: SelfDraft| {
        let mut counts = [0, 0];
        for seed in 0..300 {
            let (_, drafted) = answer(&mut engine, &prompt, seed, Some(wanted));
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
    let truth =
        engine_with_head(tiny_head(), EngineConfig::default()).decode(1, &greedy, &prompt, 30);
    for mut engine in [
        engine_with_head(tiny_head(), EngineConfig::default()),
        engine_with_drafter(stranger(), EngineConfig::default()),
    ] {
        let mut output = engine.step(opening_for_drafts(1, &greedy, &prompt)).emitted;
        while output.len() < 30 {
            let len = prompt.len() + output.len();
            output.extend(engine.step(drafting(1, len, drawn(4))).emitted);
        }
        assert_eq!(output[..30], truth[..30]);
    }
}
