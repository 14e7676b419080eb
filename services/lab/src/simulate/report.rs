//! The report of a simulation, for people and for programs.

use serde::Serialize;

use super::course::{Moment, course};
use super::mesh::Mesh;
use super::options::{
    DraftRule, SimulateOptions, SimulatedDrafts, SimulatedPlacement, SimulatedPolicy, name,
};
use super::plot::Plot;
use super::shape::Shape;
use super::workload::Workload;
use crate::text_table::{number, text_table};

/// The tail begins when this share of the requests is done.
const TAIL_SHARE: f64 = 0.9;

/// The report.
#[derive(Clone, Debug, Serialize)]
pub struct SimulateReport {
    /// The workloads, in the order of the options.
    pub workloads: Vec<WorkloadReport>,
    /// The options.
    pub settings: SimulateOptions,
    #[serde(skip)]
    pub(super) plots: Vec<Plot>,
}

/// One workload.
#[derive(Clone, Debug, Serialize)]
pub struct WorkloadReport {
    /// The preset or the trace.
    pub name: String,
    /// Requests that were served.
    pub requests: usize,
    /// Their groups.
    pub groups: usize,
    /// Their output tokens.
    pub output_tokens: u64,
    /// The limit of an output.
    pub output_max: u32,
    /// The instances.
    pub shape: Shape,
    /// For conversations: what the size of the KV caches allows.
    pub bounds: Option<KvBounds>,
    /// The runs that were compared.
    pub runs: Vec<RunReport>,
}

/// Tokens that conversations have to read at least, by the size of the KV caches. The order of turns is that of the
/// first placement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KvBounds {
    /// KV tokens of all instances together.
    pub kv_tokens: u64,
    /// Tokens of all conversations at their ends.
    pub text_tokens: u64,
    /// The same, each prefix once.
    pub distinct_tokens: u64,
    /// Tokens to read if all KV were one cache that drops what was not used for longest.
    pub read_with_one_cache: u64,
    /// Tokens to read if the caches had no limit.
    pub read_without_limit: u64,
}

/// How requests were scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Scheduled {
    pub(super) policy: SimulatedPolicy,
    pub(super) placement: Option<SimulatedPlacement>,
    pub(super) drafts: SimulatedDrafts,
    pub(super) rule: Option<DraftRule>,
}

/// The smallest and the largest value over all seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Seeds.
    pub seeds: usize,
    /// Those of [`RunReport::ratio`].
    pub ratio: [f64; 2],
    /// The standard error of its mean.
    pub ratio_error: f64,
    /// Those of [`RunReport::tail_ratio`].
    pub tail_ratio: [f64; 2],
}

/// One simulation, or the means of those of several seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunReport {
    /// The order of requests.
    pub policy: SimulatedPolicy,
    /// The placement that was compared; `null` for groups.
    pub placement: Option<SimulatedPlacement>,
    /// The source of drafts.
    pub drafts: SimulatedDrafts,
    /// How long drafts were; `null` without drafts.
    pub draft_rule: Option<DraftRule>,
    /// Output tokens divided by the makespan.
    pub throughput_tokens_per_s: f64,
    /// Throughput divided by that of the first row. With several seeds, the mean of the ratios of each seed.
    pub ratio: f64,
    /// Time until the last request is done.
    pub makespan_s: f64,
    /// The part of it after 90 % of the requests are done.
    pub tail_s: f64,
    /// The tail divided by that of the first row.
    pub tail_ratio: f64,
    /// How far seeds are apart; `null` for a single seed.
    pub spread: Option<Spread>,
    /// Requests that lost their KV because the cache was full.
    pub preemptions: u64,
    /// Context tokens that were read.
    pub prefilled_tokens: u64,
    /// Those of them that an instance had read or written before.
    pub refilled_tokens: u64,
    /// Context tokens that came from the pool.
    pub moved_tokens: u64,
    /// Chunks that were granted, or requests without a scheduler.
    pub chunks: u64,
    /// Accepted draft tokens of a request in a step.
    pub accepted_per_step: f64,
    /// Mean time to the first token.
    pub ttft_s: f64,
    /// 99th percentile of it.
    pub ttft_p99_s: f64,
    /// The busiest instance's load divided by the mean; the load is requests in the batch over time.
    pub load_max_over_mean: f64,
    /// Most of a KV cache that was in use at once, as a share.
    pub kv_peak: f64,
    /// Output tokens that were decoded.
    pub output_tokens: u64,
    /// The run over time.
    pub course: Vec<Moment>,
}

impl RunReport {
    pub(super) fn of(workload: &Workload, mesh: &Mesh<'_>, scheduled: Scheduled) -> Self {
        let mut finished: Vec<f64> = mesh.jobs.iter().filter_map(|job| job.finished_s).collect();
        finished.sort_by(f64::total_cmp);
        let makespan_s = finished.last().copied().unwrap_or(0.0);
        let at_share = ((finished.len() as f64 * TAIL_SHARE).ceil() as usize).max(1);
        let tail_from = finished.get(at_share - 1).copied().unwrap_or(makespan_s);
        let mut ttft: Vec<f64> = mesh
            .jobs
            .iter()
            .filter_map(|job| Some(job.first_s? - job.submitted_s))
            .collect();
        ttft.sort_by(f64::total_cmp);
        let counts = || mesh.instances.iter().map(|instance| &instance.counts);
        let request_steps: f64 = counts().map(|counts| counts.request_steps).sum();
        let decoded: f64 = counts().map(|counts| counts.decoded_tokens).sum();
        let busy: f64 = counts().map(|counts| counts.busy_s).sum();
        let busiest = counts().map(|counts| counts.busy_s).fold(0.0, f64::max);
        let read: u64 = counts().map(|counts| counts.read_tokens).sum();
        let output_tokens = mesh.jobs.iter().map(|job| u64::from(job.generated)).sum();
        let kv_peaks = mesh
            .instances
            .iter()
            .map(|instance| instance.counts.blocks_max as f64 / instance.blocks().max(1) as f64);
        debug_assert_eq!(output_tokens, workload.output_tokens());
        RunReport {
            policy: scheduled.policy,
            placement: scheduled.placement,
            drafts: scheduled.drafts,
            draft_rule: scheduled.rule,
            throughput_tokens_per_s: output_tokens as f64 / makespan_s.max(1e-9),
            ratio: 1.0,
            makespan_s,
            tail_s: makespan_s - tail_from,
            tail_ratio: 1.0,
            spread: None,
            preemptions: counts().map(|counts| counts.preemptions).sum(),
            prefilled_tokens: read,
            refilled_tokens: read.saturating_sub(mesh.counts.prompt_tokens),
            moved_tokens: mesh.counts.moved_tokens,
            chunks: mesh.counts.chunks,
            accepted_per_step: (decoded / request_steps.max(1.0) - 1.0).max(0.0),
            ttft_s: ttft.iter().sum::<f64>() / ttft.len().max(1) as f64,
            ttft_p99_s: ttft.get(ttft.len() * 99 / 100).copied().unwrap_or(0.0),
            load_max_over_mean: busiest * mesh.instances.len() as f64 / busy.max(1e-9),
            kv_peak: kv_peaks.fold(0.0, f64::max),
            output_tokens,
            course: course(&mesh.instances, makespan_s),
        }
    }

    /// Throughputs and tails as ratios to the first.
    pub(super) fn relative(mut runs: Vec<RunReport>) -> Vec<RunReport> {
        let first = runs.first();
        let (throughput, tail_s) = first.map_or((1.0, 1.0), |run| {
            (run.throughput_tokens_per_s.max(1e-9), run.tail_s.max(1e-9))
        });
        for run in &mut runs {
            run.ratio = run.throughput_tokens_per_s / throughput;
            run.tail_ratio = run.tail_s / tail_s;
        }
        runs
    }

    fn line(&self) -> Vec<String> {
        let rule = self
            .draft_rule
            .map_or_else(|| "-".to_owned(), |rule| name(&rule));
        let scheduled = match self.placement {
            Some(placement) => name(&placement),
            None => name(&self.policy),
        };
        let mut line = vec![scheduled, name(&self.drafts), rule];
        for (value, digits) in [
            (self.throughput_tokens_per_s, 0),
            (self.ratio, 3),
            (self.makespan_s, 1),
            (self.tail_s, 1),
            (self.tail_ratio, 2),
            (self.preemptions as f64, 0),
            (self.prefilled_tokens as f64, 0),
            (self.refilled_tokens as f64, 0),
            (self.moved_tokens as f64, 0),
            (self.accepted_per_step, 2),
            (self.ttft_s, 2),
            (self.ttft_p99_s, 2),
            (self.load_max_over_mean, 2),
        ] {
            line.push(number(Some(value), digits));
        }
        if let Some(spread) = &self.spread {
            for (at, digits, [least, most]) in [
                (RATIO_AT, 3, spread.ratio),
                (TAIL_RATIO_AT, 2, spread.tail_ratio),
            ] {
                line[at] += &format!(" ({least:.digits$} to {most:.digits$})");
            }
        }
        line
    }
}

impl SimulateReport {
    /// The tables, one for each workload.
    pub fn table(&self) -> String {
        let mut text = String::new();
        for workload in &self.workloads {
            text += &format!(
                "{}: {} requests in {} groups, {} output tokens, on {} instances of {}\n",
                workload.name,
                workload.requests,
                workload.groups,
                workload.output_tokens,
                workload.shape.instances,
                workload.shape.engine_model
            );
            if let Some(bounds) = &workload.bounds {
                text += &format!(
                    "KV for {} of {} tokens ({} distinct); to read at least: {} with all KV in one cache, {} without a limit\n",
                    bounds.kv_tokens,
                    bounds.text_tokens,
                    bounds.distinct_tokens,
                    bounds.read_with_one_cache,
                    bounds.read_without_limit
                );
            }
            let head = HEAD;
            text += &text_table(3, &head, workload.runs.iter().map(RunReport::line));
            text.push('\n');
        }
        text
    }

    /// The cells of a workload's table, the head first.
    pub(super) fn lines(workload: &WorkloadReport) -> Vec<Vec<String>> {
        let head = HEAD.map(|cell| cell.replace('\n', " ")).to_vec();
        let rows = workload.runs.iter().map(RunReport::line);
        std::iter::once(head).chain(rows).collect()
    }
}

/// The columns that show a range where there are several seeds.
const RATIO_AT: usize = 4;
const TAIL_RATIO_AT: usize = 7;

const HEAD: [&str; 16] = [
    "",
    "drafts",
    "rule",
    "tokens\nper s",
    "ratio",
    "makespan\ns",
    "tail\ns",
    "tail\nratio",
    "preempted",
    "prefilled",
    "refilled",
    "moved",
    "accepted\nper step",
    "ttft\ns",
    "ttft p99\ns",
    "load\nmax/mean",
];
