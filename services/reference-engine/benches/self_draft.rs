//! Do the engine's own drafts pay on this CPU?
//!
//! Answers the reference prompts of the compiled-in model, plainly and with drafts of several shapes, by its head or
//! by a draft model. The shapes take turns, so that a noisy neighbour hits all alike. A shape pays if its tokens per
//! second are above those of plain decoding.
//!
//! `cargo bench -p refrain-reference-engine --bench self_draft -- [rounds] [tokens of an answer] [draft model]`

use anyhow::Context;
use refrain_protocol::engine::{
    CloseRequest, Sampling, SelfDraft, SessionSpec, StepItem, StepOutput, StepRequest,
};
use refrain_protocol::{EngineSessionId, NamespaceId, TokenId};
use refrain_reference_engine::{EngineConfig, EngineHandle, WeightFormat};
use refrain_service_kit::telemetry::Metrics;

/// Shape of a draft.
#[derive(Clone, Copy)]
struct Shape {
    depth: u32,
    top_k: u32,
    nodes: u32,
    sampled: bool,
}

const fn shape(depth: u32, top_k: u32, nodes: u32) -> Shape {
    Shape {
        depth,
        top_k,
        nodes,
        sampled: false,
    }
}

/// A chain of tokens that the drafter draws at random.
const fn drawn(depth: u32) -> Shape {
    Shape {
        sampled: true,
        ..shape(depth, 1, depth)
    }
}

/// Shapes by temperature. The first shape of each is plain decoding.
const SHAPES: [(f32, &[Shape]); 2] = [
    (
        0.0,
        &[
            shape(0, 0, 0),
            shape(1, 1, 1),
            shape(2, 1, 2),
            shape(4, 1, 4),
            shape(6, 1, 6),
            shape(2, 3, 4),
            shape(4, 3, 8),
            shape(6, 4, 16),
        ],
    ),
    (
        1.0,
        &[
            shape(0, 0, 0),
            shape(2, 1, 2),
            drawn(2),
            shape(4, 1, 4),
            drawn(4),
            shape(6, 1, 6),
            drawn(6),
        ],
    ),
];

/// Measurements of one shape's steps.
#[derive(Default)]
struct Cost {
    step_s: Vec<f64>,
    draft_s: Vec<f64>,
    emitted: usize,
    drafted: u64,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    // `cargo bench` passes the argument `--bench`.
    let mut arguments = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with("--"));
    let rounds: usize = arguments.next().map_or(Ok(20), |text| text.parse())?;
    let tokens: usize = arguments.next().map_or(Ok(48), |text| text.parse())?;
    let draft_model = arguments.next();
    let prompts = prompts()?;
    for weights in [WeightFormat::F32, WeightFormat::Bf16] {
        let config = EngineConfig {
            weights,
            draft_model: draft_model.clone(),
            ..EngineConfig::default()
        };
        let engine = EngineHandle::start(&config, &Metrics::new()?)?;
        for (temperature, shapes) in SHAPES {
            let mut costs: Vec<Cost> = shapes.iter().map(|_| Cost::default()).collect();
            for round in 0..=rounds {
                let sampling = Sampling {
                    temperature,
                    seed: round as u64,
                    stop_token_ids: engine.capabilities().eos_token_ids,
                    ..Sampling::default()
                };
                for prompt in &prompts {
                    for (shape, cost) in shapes.iter().zip(&mut costs) {
                        // The first round only warms up.
                        let mut warm = Cost::default();
                        let cost = if round == 0 { &mut warm } else { cost };
                        answer(&engine, prompt, tokens, &sampling, *shape, cost).await?;
                    }
                }
            }
            println!(
                "{weights:?} weights, temperature {temperature}, one sequence, medians of steps"
            );
            print(shapes, &mut costs);
        }
    }
    Ok(())
}

/// Reads the reference prompts.
fn prompts() -> anyhow::Result<Vec<Vec<TokenId>>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/model/golden.json");
    let golden: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
    let cases = golden["cases"].as_array().context("no cases")?;
    cases
        .iter()
        .map(|case| Ok(serde_json::from_value(case["ids"].clone())?))
        .collect()
}

/// Decodes one answer. The first step, which computes the prompt, is not counted.
async fn answer(
    engine: &EngineHandle,
    prompt: &[TokenId],
    tokens: usize,
    sampling: &Sampling,
    shape: Shape,
    cost: &mut Cost,
) -> anyhow::Result<()> {
    let session = EngineSessionId(1);
    let mut item = StepItem {
        session,
        open: Some(SessionSpec {
            namespace: NamespaceId(1),
            sampling: sampling.clone(),
            prompt_len: prompt.len() as u32,
            self_drafts: shape.depth > 0,
            ..SessionSpec::default()
        }),
        keep_len: 0,
        tokens: prompt.to_vec(),
        sample: true,
        draft: None,
        self_draft: None,
        max_emit: 1,
    };
    let mut output = step(engine, &item).await?.0;
    (item.open, item.tokens) = (None, Vec::new());
    item.self_draft = (shape.depth > 0).then_some(SelfDraft {
        depth: shape.depth,
        top_k: shape.top_k,
        tokens_max: shape.nodes,
        path_prob_min: 0.0,
        sampled: shape.sampled,
    });
    let mut emitted = 0;
    while !output.stopped && emitted < tokens {
        item.keep_len = output.text_len;
        item.max_emit = (tokens - emitted) as u32;
        let (next, step_s, draft_s) = step(engine, &item).await?;
        emitted += next.emitted.len();
        cost.drafted += u64::from(next.self_drafted);
        cost.step_s.push(step_s);
        cost.draft_s.push(draft_s);
        output = next;
    }
    cost.emitted += emitted;
    engine
        .close(CloseRequest {
            sessions: vec![session],
            keep_kv: false,
            parks: false,
        })
        .await?;
    Ok(())
}

async fn step(engine: &EngineHandle, item: &StepItem) -> anyhow::Result<(StepOutput, f64, f64)> {
    let request = StepRequest {
        items: vec![item.clone()],
    };
    let mut response = engine.step(request).await?;
    let output = response.results.remove(0)?;
    Ok((output, response.step_s, response.draft_s))
}

fn print(shapes: &[Shape], costs: &mut [Cost]) {
    println!("           draft            |            |          | tokens per step |");
    println!(
        " depth children nodes drawn |  step ms   | draft ms | drafted emitted | tokens/s  to plain"
    );
    let mut plain = None;
    for (shape, cost) in shapes.iter().zip(costs) {
        let Shape {
            depth,
            top_k,
            nodes,
            sampled,
        } = shape;
        let steps = cost.step_s.len() as f64;
        // The median excludes noise, and the one step in which the head reads the prompt.
        let rate = cost.emitted as f64 / steps / median(&mut cost.step_s);
        let plain = *plain.get_or_insert(rate);
        println!(
            "{depth:>6} {top_k:>8} {nodes:>5} {:>5} | {:>9.3}  | {:>7.3}  | {:>7.2} {:>7.2} | {rate:>8.0} {:>9.2}",
            if *sampled { "yes" } else { "no" },
            median(&mut cost.step_s) * 1e3,
            median(&mut cost.draft_s) * 1e3,
            cost.drafted as f64 / steps,
            cost.emitted as f64 / steps,
            rate / plain,
        );
    }
    println!();
}

fn median(seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
