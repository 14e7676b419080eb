//! The simulations of a command, one for each workload and thing to compare.

use anyhow::ensure;

use super::conversations::Conversations;
use super::desk::Desk;
use super::drafting::{Drafting, ModelDrafts};
use super::mesh::Mesh;
use super::options::{
    DraftRule, SimulateOptions, SimulatedDrafts, SimulatedPlacement, SimulatedPolicy, name,
};
use super::plot::Plot;
use super::report::{KvBounds, RunReport, Scheduled, SimulateReport, WorkloadReport};
use super::shape::Shape;
use super::token_drafts::{DraftSettings, TokenDrafts};
use super::workload::Workload;
use crate::logs::{Logs, RecordedCall};
use crate::replay::{EngineModel, ReplayProgress, once, run_in_parallel};

/// Simulates everything that the options compare, with one seed.
///
/// # Errors
/// As [`run`](super::run).
pub(super) fn run_seed(
    options: &SimulateOptions,
    mut progress: impl FnMut(f64, String) + Send,
) -> anyhow::Result<SimulateReport> {
    let mut plots = Vec::new();
    let mut workloads = Vec::new();
    let inputs = Inputs::of(options)?;
    let count = inputs.len();
    for (nth, input) in inputs.into_iter().enumerate() {
        let cases = input.cases(options);
        let input = &input;
        let simulate = |case: usize, progress: &dyn Fn(ReplayProgress)| {
            input.simulate(cases[case], options, &|docs, share| {
                progress(ReplayProgress {
                    docs,
                    share,
                    ..ReplayProgress::default()
                });
            })
        };
        let outcomes = run_in_parallel((0..cases.len()).collect(), simulate, |of_cases| {
            let share = (nth as f64 + of_cases.share) / count as f64;
            progress(
                share,
                format!("{}: {} requests", input.workload.name, of_cases.docs),
            );
        })?;
        let mut runs = Vec::new();
        for (run, plot, order) in outcomes {
            if runs.is_empty() {
                workloads.push(input.report(&order));
            }
            runs.push(run);
            plots.push(plot);
        }
        if let Some(of_workload) = workloads.last_mut() {
            of_workload.runs = RunReport::relative(runs);
        }
    }
    Ok(SimulateReport {
        workloads,
        settings: options.clone(),
        plots,
    })
}

/// One thing to simulate.
#[derive(Clone, Copy, Debug)]
struct Case {
    policy: SimulatedPolicy,
    placement: SimulatedPlacement,
    drafts: SimulatedDrafts,
    rule: DraftRule,
}

/// A workload and the instances that serve it.
struct Input {
    shape: Shape,
    engine: EngineModel,
    workload: Workload,
    conversations: Option<Conversations>,
}

struct Inputs;

impl Inputs {
    fn of(options: &SimulateOptions) -> anyhow::Result<Vec<Input>> {
        let mut inputs = Vec::new();
        for preset in once(&options.presets) {
            let shape = options.shape(Some(preset));
            let workload = Workload::drawn(preset.name(), &shape, options);
            inputs.push(Input::new(shape, workload, None)?);
        }
        if !inputs.is_empty() {
            return Ok(inputs);
        }
        let mut shape = options.shape(None);
        if options.traces.is_empty() {
            let workload = Workload::drawn("drawn".to_owned(), &shape, options);
            return Ok(vec![Input::new(shape, workload, None)?]);
        }
        let tokenizer = options.tokenizer.load()?;
        for path in &options.traces {
            let name = path.file_name().unwrap_or(path.as_os_str());
            let name = name.to_string_lossy().into_owned();
            let traces = Logs::open(std::slice::from_ref(path), tokenizer.clone())?;
            let calls = traces.take(options.docs.unwrap_or(usize::MAX));
            inputs.push(if options.placements.is_empty() {
                let workload = Workload::recorded(name, calls, options)?;
                Input::new(shape.clone(), workload, None)?
            } else {
                Input::conversations(&mut shape, name, calls, options)?
            });
        }
        Ok(inputs)
    }
}

impl Input {
    fn new(
        shape: Shape,
        workload: Workload,
        conversations: Option<Conversations>,
    ) -> anyhow::Result<Self> {
        let longest = workload
            .jobs
            .iter()
            .map(|job| u64::from(job.prompt_tokens) + u64::from(job.output_tokens));
        // The last token needs a block, and blocks are not shared.
        let needed = longest.max().unwrap_or(0) + 32;
        ensure!(
            shape.kv_tokens >= needed,
            "{}: the KV cache of an instance holds {} tokens, but the longest request needs {needed}; raise --kv-tokens",
            workload.name,
            shape.kv_tokens
        );
        Ok(Input {
            engine: EngineModel::load(&shape.engine_model)?,
            shape,
            workload,
            conversations,
        })
    }

    fn conversations(
        shape: &mut Shape,
        name: String,
        calls: impl Iterator<Item = anyhow::Result<RecordedCall>>,
        options: &SimulateOptions,
    ) -> anyhow::Result<Self> {
        let of = Conversations::recorded(name, calls, options)?;
        if let Some(share) = options.kv_share {
            shape.kv_tokens = (of.text_tokens as f64 * share / shape.instances as f64) as u64;
        }
        Input::new(shape.clone(), of.workload.clone(), Some(of))
    }

    fn cases(&self, options: &SimulateOptions) -> Vec<Case> {
        if self.conversations.is_some() {
            let placements = once(&options.placements).into_iter();
            return placements
                .map(|placement| Case {
                    policy: SimulatedPolicy::Divided,
                    placement,
                    drafts: SimulatedDrafts::Off,
                    rule: DraftRule::Goodput,
                })
                .collect();
        }
        let mut cases = Vec::new();
        for policy in once(&options.policies) {
            for drafts in once(&options.drafts) {
                for rule in once(&options.draft_rules) {
                    let has_drafts = drafts != SimulatedDrafts::Off;
                    if has_drafts || rule == options.draft_rules[0] {
                        cases.push(Case {
                            policy,
                            placement: SimulatedPlacement::Kv,
                            drafts,
                            rule,
                        });
                    }
                }
            }
        }
        cases
    }

    fn drafting(&self, case: Case, options: &SimulateOptions) -> anyhow::Result<Drafting> {
        if case.drafts == SimulatedDrafts::Off {
            return Ok(Drafting::Off);
        }
        let settings = DraftSettings {
            drafts: case.drafts,
            rule: case.rule,
            draft_tokens: options.draft_tokens,
            off_above_batch: options.off_above_batch,
            paths: options.paths,
            lag_s: options.feed_lag_ms / 1e3,
            propose_s: options.propose_us / 1e6,
        };
        let tokens =
            TokenDrafts::new(&self.workload, self.shape.instances, &self.engine, settings)?;
        Ok(match tokens {
            Some(tokens) => Drafting::Tokens(Box::new(tokens)),
            None => Drafting::Model(ModelDrafts::new(&self.workload, settings)),
        })
    }

    /// Simulates one case. Returns also the requests in the order in which they were submitted.
    fn simulate(
        &self,
        case: Case,
        options: &SimulateOptions,
        progress: &dyn Fn(u64, f64),
    ) -> anyhow::Result<(RunReport, Plot, Vec<usize>)> {
        let (workload, shape) = (&self.workload, &self.shape);
        let desk = Desk::new(
            workload,
            shape,
            &self.engine,
            case.policy,
            case.placement.policy(),
        );
        let engine = (self.engine.clone(), options.prefill_tokens);
        let drafting = self.drafting(case, options)?;
        let mut mesh = Mesh::new(workload, shape, engine, desk, drafting);
        let jobs = workload.jobs.len().max(1) as f64;
        let done = |jobs_done: usize| progress(jobs_done as u64, jobs_done as f64 / jobs);
        match &self.conversations {
            Some(of) => mesh.serve_conversations(&of.first_turns, options.sessions, done)?,
            None => mesh.serve_groups(case.policy, done)?,
        }
        let scheduled = Scheduled {
            policy: case.policy,
            placement: self.conversations.is_some().then_some(case.placement),
            drafts: case.drafts,
            rule: (case.drafts != SimulatedDrafts::Off).then_some(case.rule),
        };
        let mut order: Vec<usize> = (0..workload.jobs.len()).collect();
        order.sort_by(|a, b| {
            let submitted = |job: &usize| mesh.jobs[*job].submitted_s;
            submitted(a).total_cmp(&submitted(b))
        });
        let run = RunReport::of(workload, &mesh, scheduled);
        let title = match (scheduled.placement, scheduled.rule) {
            (Some(placement), _) => name(&placement),
            (None, None) => name(&case.policy),
            (None, Some(rule)) => {
                format!(
                    "{}, drafts {} by {}",
                    name(&case.policy),
                    name(&case.drafts),
                    name(&rule)
                )
            }
        };
        let title = format!("{}: {title}", workload.name);
        let plot = Plot::of(title, &mesh, shape, &run.course);
        Ok((run, plot, order))
    }

    fn report(&self, order: &[usize]) -> WorkloadReport {
        let all_kv_tokens = self.shape.kv_tokens * self.shape.instances as u64;
        let bounds = self.conversations.as_ref().map(|of| KvBounds {
            kv_tokens: all_kv_tokens,
            text_tokens: of.text_tokens,
            distinct_tokens: of.distinct_tokens(),
            read_with_one_cache: of.tokens_to_read(order, Some(all_kv_tokens)),
            read_without_limit: of.tokens_to_read(order, None),
        });
        WorkloadReport {
            name: self.workload.name.clone(),
            requests: self.workload.jobs.len(),
            groups: self.workload.groups,
            output_tokens: self.workload.output_tokens(),
            output_max: self.workload.output_max,
            shape: self.shape.clone(),
            bounds,
            runs: Vec::new(),
        }
    }
}
