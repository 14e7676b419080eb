//! How does the duration of a step depend on the number of tokens that it computes?
//!
//! Prints a row for each number of tokens, with the median of many steps. The numbers take turns, so that a noisy
//! neighbour hits all alike.
//!
//! `cargo bench -p refrain-reference-engine --bench step_cost -- [context tokens] [rounds] [threads] [model]`

use refrain_protocol::engine::{Draft, SessionSpec, StepItem, StepRequest};
use refrain_protocol::{EngineSessionId, NamespaceId};
use refrain_reference_engine::{EngineConfig, EngineHandle, WeightFormat};
use refrain_service_kit::telemetry::Metrics;

const COUNTS: [usize; 14] = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32];

/// Duration of a step, in seconds.
struct Cost {
    median: f64,
    /// Duration of the fastest step, which is closest to that of an idle machine.
    fastest: f64,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    // `cargo bench` passes the argument `--bench`.
    let mut arguments = std::env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with("--"));
    let context: usize = arguments.next().map_or(Ok(256), |text| text.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(200), |text| text.parse())?;
    let threads: usize = arguments.next().map_or(Ok(1), |text| text.parse())?;
    let model = arguments.next();
    for weights in [WeightFormat::F32, WeightFormat::Bf16] {
        let mut config = EngineConfig {
            weights,
            threads,
            ..EngineConfig::default()
        };
        config.model = model.clone().unwrap_or(config.model);
        let engine = EngineHandle::start(&config, &Metrics::new()?)?;
        println!("{weights:?} weights, one sequence, context {context}, {rounds} steps each");
        println!("        |        median      |        fastest     |");
        println!(" tokens | step ms     ratio  | step ms     ratio  | tokens/s (median)");
        let costs = measure(&engine, context, rounds).await?;
        for (count, cost) in COUNTS.iter().zip(&costs) {
            println!(
                "{count:>7} | {:>7.3} {:>9.2}  | {:>7.3} {:>9.2}  | {:>8.0}",
                cost.median * 1e3,
                cost.median / costs[0].median,
                cost.fastest * 1e3,
                cost.fastest / costs[0].fastest,
                *count as f64 / cost.median
            );
        }
        println!();
    }
    Ok(())
}

async fn measure(
    engine: &EngineHandle,
    context: usize,
    rounds: usize,
) -> anyhow::Result<Vec<Cost>> {
    let session = EngineSessionId(1);
    let vocab_size = engine.capabilities().vocab_size;
    let token = |at: usize| (at as u32).wrapping_mul(2_654_435_761) % vocab_size;
    let mut item = StepItem {
        self_draft: None,
        session,
        open: Some(SessionSpec {
            namespace: NamespaceId(1),
            ..SessionSpec::default()
        }),
        keep_len: 0,
        tokens: (0..context).map(token).collect(),
        sample: false,
        draft: None,
        max_emit: 0,
    };
    // Long contexts are sent in pieces.
    let piece = engine.capabilities().max_step_tokens as usize;
    let text = std::mem::take(&mut item.tokens);
    for tokens in text.chunks(piece) {
        item.tokens = tokens.to_vec();
        let response = engine
            .step(StepRequest {
                items: vec![item.clone()],
            })
            .await?;
        item.keep_len = response.results[0]
            .as_ref()
            .map_err(|error| anyhow::anyhow!("{error}"))?
            .text_len;
        item.open = None;
    }
    item.tokens.clear();
    item.sample = true;
    item.max_emit = 64;
    let mut seconds = vec![Vec::with_capacity(rounds); COUNTS.len()];
    for round in 0..rounds + 3 {
        for (count, seconds) in COUNTS.iter().zip(&mut seconds) {
            let nodes = count - 1;
            item.draft = Some(Draft {
                tokens: (0..nodes).map(|node| token(node + 7)).collect(),
                parents: (0..nodes as u32).map(|node| node.checked_sub(1)).collect(),
            });
            // `keep_len` is always the same, so the step computes the last token and the draft again.
            let response = engine
                .step(StepRequest {
                    items: vec![item.clone()],
                })
                .await?;
            response.results[0]
                .as_ref()
                .map_err(|error| anyhow::anyhow!("{error}"))?;
            if round >= 3 {
                seconds.push(response.step_s);
            }
        }
    }
    Ok(seconds
        .iter_mut()
        .map(|seconds| {
            seconds.sort_by(f64::total_cmp);
            Cost {
                median: seconds[seconds.len() / 2],
                fastest: seconds[0],
            }
        })
        .collect())
}
