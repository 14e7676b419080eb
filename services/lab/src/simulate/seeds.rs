//! One report of the simulations of several seeds: means, and how far the seeds are apart.

use super::course::Moment;
use super::options::SimulateOptions;
use super::report::{RunReport, SimulateReport, Spread};
use super::runs::run_seed;

/// Simulates everything that the options compare, with each seed. `progress` gets the share that is done, and a
/// message.
///
/// # Errors
/// An invalid option, a trace that cannot be read, or KV caches that are too small for a single request.
pub fn run(
    options: &SimulateOptions,
    mut progress: impl FnMut(f64, String) + Send,
) -> anyhow::Result<SimulateReport> {
    options.check()?;
    let mut reports = Vec::new();
    for nth in 0..options.seeds {
        let of_seed = SimulateOptions {
            seed: options.seed.wrapping_add(nth),
            ..options.clone()
        };
        reports.push(run_seed(&of_seed, |share, message| {
            progress((nth as f64 + share) / options.seeds as f64, message);
        })?);
    }
    let mut report = means(reports);
    report.settings = options.clone();
    Ok(report)
}

/// The means over reports of the same options but for the seed. Pictures are those of the first seed.
fn means(mut reports: Vec<SimulateReport>) -> SimulateReport {
    let mut first = reports.remove(0);
    if reports.is_empty() {
        return first;
    }
    for (nth, workload) in first.workloads.iter_mut().enumerate() {
        let others = || reports.iter().map(|report| &report.workloads[nth]);
        let tokens = others().map(|other| other.output_tokens).sum::<u64>();
        workload.output_tokens = (workload.output_tokens + tokens) / (1 + reports.len() as u64);
        for (at, run) in workload.runs.iter_mut().enumerate() {
            let seeds: Vec<RunReport> = std::iter::once(run.clone())
                .chain(others().map(|other| other.runs[at].clone()))
                .collect();
            *run = mean(&seeds);
        }
    }
    first
}

/// The mean of the simulations of all seeds.
fn mean(seeds: &[RunReport]) -> RunReport {
    let count = seeds.len() as f64;
    let of = |value: fn(&RunReport) -> f64| seeds.iter().map(value).sum::<f64>() / count;
    let whole = |value: fn(&RunReport) -> u64| {
        (seeds.iter().map(value).sum::<u64>() as f64 / count).round() as u64
    };
    let range = |value: fn(&RunReport) -> f64| {
        let values = seeds.iter().map(value);
        [
            values.clone().fold(f64::INFINITY, f64::min),
            values.fold(f64::NEG_INFINITY, f64::max),
        ]
    };
    let ratio = of(|run| run.ratio);
    let variance = seeds.iter().map(|run| (run.ratio - ratio).powi(2));
    let variance = variance.sum::<f64>() / (count - 1.0).max(1.0);
    RunReport {
        throughput_tokens_per_s: of(|run| run.throughput_tokens_per_s),
        ratio,
        makespan_s: of(|run| run.makespan_s),
        tail_s: of(|run| run.tail_s),
        tail_ratio: of(|run| run.tail_ratio),
        spread: Some(Spread {
            seeds: seeds.len(),
            ratio: range(|run| run.ratio),
            ratio_error: (variance / count).sqrt(),
            tail_ratio: range(|run| run.tail_ratio),
        }),
        preemptions: whole(|run| run.preemptions),
        prefilled_tokens: whole(|run| run.prefilled_tokens),
        refilled_tokens: whole(|run| run.refilled_tokens),
        moved_tokens: whole(|run| run.moved_tokens),
        chunks: whole(|run| run.chunks),
        accepted_per_step: of(|run| run.accepted_per_step),
        ttft_s: of(|run| run.ttft_s),
        ttft_p99_s: of(|run| run.ttft_p99_s),
        load_max_over_mean: of(|run| run.load_max_over_mean),
        kv_peak: range(|run| run.kv_peak)[1],
        output_tokens: whole(|run| run.output_tokens),
        course: Moment::means(seeds.iter().map(|run| &run.course[..])),
        ..seeds[0].clone()
    }
}
