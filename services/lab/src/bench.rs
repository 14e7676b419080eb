//! `refrain bench`: what drafting brings on a running mesh.
//!
//! Every round sends the same calls in every mode. The order of the modes rotates from round to round, so that drift
//! of the machine affects all modes alike. Each mode has its own tenants, so no mode finds the outputs of another,
//! neither in the draft store nor in the engine's KV cache. Time per token is that of decoding alone, from the first
//! token to the last, as the worker measured it.

mod client;
mod options;
mod report;
mod step_cost;
mod workload;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use anyhow::bail;
use futures_util::StreamExt;

use crate::text_table::print_report;
use client::BenchClient;
use report::CallSums;
use step_cost::StepCostFit;
use workload::WorkloadCall;

pub use options::BenchOptions;
pub use report::{BenchReport, ModeFigures, Speedup};
pub use workload::WorkloadPart;

/// Runs `refrain bench`, and prints its report.
///
/// # Errors
/// The gateway cannot be reached, or refuses a call.
pub fn command(options: BenchOptions) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()?;
    let report = runtime.block_on(run(&options, |line| eprintln!("{line}")))?;
    Ok(print_report(&report, options.json, BenchReport::table)?)
}

/// Runs the workload in all modes. `progress` receives a line after each round.
///
/// # Errors
/// The gateway cannot be reached, or refuses a call.
pub async fn run(
    options: &BenchOptions,
    mut progress: impl FnMut(&str),
) -> anyhow::Result<BenchReport> {
    refrain_service_kit::telemetry::install_crypto_provider();
    let tenants = match options.api_keys.len().checked_div(options.modes.len()) {
        None => bail!("no mode to run: name some, such as --modes suffix,off"),
        Some(0) => bail!(
            "{} API keys for {} modes: each mode needs a tenant of its own, or it would draft from another mode's \
             outputs; give more keys or fewer modes",
            options.api_keys.len(),
            options.modes.len()
        ),
        Some(tenants) => tenants,
    };
    let client = Arc::new(BenchClient::connect(options).await?);
    let mut totals: BTreeMap<(&str, &str), CallSums> = BTreeMap::new();
    let mut speedups: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
    let mut step_costs: BTreeMap<&str, StepCostFit> = BTreeMap::new();
    let mut outputs_that_differ = 0;
    for &part in &options.parts {
        for round in 0..options.rounds {
            let calls = workload::calls(part, options.seed, round, options.calls, tenants);
            let mut s_per_token = BTreeMap::new();
            let mut first_texts: Option<Vec<String>> = None;
            for turn in 0..options.modes.len() {
                let number = (turn + round as usize) % options.modes.len();
                let mode = &options.modes[number];
                let keys = &options.api_keys[number * tenants..][..tenants];
                let answers = run_mode(&client, mode, keys, &calls, options.concurrency).await?;
                let ModeAnswers { sums, calls, texts } = answers;
                // Other calls and the head would share the time of steps.
                if options.concurrency == 1 && ["off", "suffix"].contains(&mode.as_str()) {
                    let fit = step_costs.entry(part.name()).or_default();
                    for call in calls {
                        fit.add(call.steps.saturating_sub(1), call.drafted, call.decode_s);
                    }
                }
                s_per_token.insert(mode.as_str(), sums.decode_s_per_token());
                totals.entry((part.name(), mode)).or_default().add(&sums);
                let first = first_texts.get_or_insert_with(|| texts.clone());
                outputs_that_differ +=
                    first.iter().zip(&texts).filter(|(a, b)| a != b).count() as u64;
            }
            if let Some(off) = s_per_token.get("off").copied() {
                for (mode, mode_s) in s_per_token {
                    // Where every output came whole with its first step, there is no decoding to compare.
                    if off > 0.0 && mode_s > 0.0 {
                        let speedups = speedups.entry((part.name(), mode)).or_default();
                        speedups.push(off / mode_s);
                    }
                }
            }
            progress(&format!(
                "{} round {} of {}",
                part.name(),
                round + 1,
                options.rounds
            ));
        }
    }
    Ok(BenchReport::new(
        totals,
        speedups,
        &step_costs,
        outputs_that_differ,
    ))
}

/// The answers to the calls of a round in one mode.
struct ModeAnswers {
    sums: CallSums,
    /// In the order of the calls.
    calls: Vec<CallSums>,
    /// In the same order.
    texts: Vec<String>,
}

/// Sends all calls in one mode.
async fn run_mode(
    client: &Arc<BenchClient>,
    mode: &str,
    api_keys: &[String],
    calls: &[WorkloadCall],
    concurrency: usize,
) -> anyhow::Result<ModeAnswers> {
    let started = Instant::now();
    let answers: Vec<anyhow::Result<(CallSums, String)>> =
        futures_util::stream::iter(calls.iter().cloned())
            .map(|call| {
                let client = client.clone();
                async move { client.call(&call, mode, &api_keys[call.tenant]).await }
            })
            .buffered(concurrency.max(1))
            .collect()
            .await;
    let wall_s = started.elapsed().as_secs_f64();
    let answers: Vec<(CallSums, String)> = answers.into_iter().collect::<Result<_, _>>()?;
    let (calls, texts): (Vec<CallSums>, Vec<String>) = answers.into_iter().unzip();
    let mut sums = CallSums {
        wall_s,
        ..CallSums::default()
    };
    calls.iter().for_each(|call| sums.add(call));
    Ok(ModeAnswers { sums, calls, texts })
}
