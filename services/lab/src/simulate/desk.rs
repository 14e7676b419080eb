//! The scheduler's core in the simulated mesh: requests become its events, and its effects become grants.

use anyhow::{Context, bail};
use refrain_protocol::prefix::PrefixHash;
use refrain_protocol::scheduling::{
    Heartbeat, KvReport, LeaseFinish, LeaseOutcome, LeaseRequest, RequestClass, TenantWeight,
};
use refrain_protocol::{LeaseId, Namespace, RequestId, SignedNamespace, WorkerId};
use refrain_scheduler::core::{
    Dispatch, DispatchEffect, DispatchEvent, LeaseCallId, OrderPolicy, PlacementPolicy,
    SchedulerConfig,
};

use super::job_progress::Progress;
use super::options::SimulatedPolicy;
use super::shape::Shape;
use super::workload::{Job, Workload};
use crate::replay::{EngineModel, StepLoad};

/// The core's clock when the simulation begins, milliseconds.
const START_MS: u64 = 1_000_000_000_000;
/// Longer than any simulation, milliseconds: nothing falls silent here.
const NEVER_MS: u64 = 1 << 50;
/// The scheduler waits for so long after the first report, until all instances have reported.
const OPENING_MS: u64 = 1_001;
/// Tokens of the step by which the price of reading is measured.
const READ_TOKENS: usize = 2_048;
/// Tokens by which blocks may exceed the tokens of a request.
const BLOCK_SLACK_TOKENS: u64 = 16;

/// A request that got a lease.
#[derive(Clone, Copy, Debug)]
pub(super) struct Granted {
    pub(super) job: usize,
    pub(super) lease: LeaseId,
    pub(super) instance: usize,
    pub(super) chunk_tokens: Option<u32>,
}

/// The state of an instance, as far as it reports it.
#[derive(Debug, Default)]
pub(super) struct InstanceReport {
    pub(super) running: Vec<LeaseId>,
    pub(super) running_tokens: u64,
    pub(super) kept_tokens: u64,
    /// The longest prefix of each context that it holds.
    pub(super) held: Option<Vec<PrefixHash>>,
}

/// The core, and the names by which it knows requests and instances.
pub(super) struct Desk {
    core: Dispatch,
    namespace: SignedNamespace,
    policy: SimulatedPolicy,
    /// The request of each call.
    calls: Vec<usize>,
    jobs: usize,
    /// The report of an instance, without its state.
    report: KvReport,
    slots: u32,
    /// The scheduler's time at the start of the simulation. Requests may come before that, and then all instances.
    began_ms: u64,
    output_max: u32,
}

fn worker(instance: usize) -> WorkerId {
    WorkerId(format!("{instance:04}"))
}

impl Desk {
    /// `None` if the policy has no scheduler.
    pub(super) fn new(
        workload: &Workload,
        shape: &Shape,
        engine: &EngineModel,
        policy: SimulatedPolicy,
        placement: PlacementPolicy,
    ) -> Option<Self> {
        let order: OrderPolicy = policy.order()?;
        let mut config = SchedulerConfig::default();
        for queue in [
            &mut config.queue_max,
            &mut config.tenant_queue_max,
            &mut config.rollout_queue_max,
            &mut config.tenant_rollout_queue_max,
        ] {
            *queue = usize::MAX / 2;
        }
        for time_ms in [
            &mut config.queue_wait_ms_max,
            &mut config.worker_ttl_ms,
            &mut config.lease_ttl_ms,
        ] {
            *time_ms = NEVER_MS;
        }
        config.groups_tracked_max = workload.groups + 1;
        config.chunk_tokens = shape.chunk_tokens;
        config.order = order;
        config.placement = placement;
        let read_seconds = engine.step_seconds(StepLoad {
            requests: 1,
            tokens: READ_TOKENS,
            ..StepLoad::default()
        });
        let slack = shape.slots as u64 * BLOCK_SLACK_TOKENS;
        Some(Desk {
            core: Dispatch::new(config, START_MS, 0),
            namespace: SignedNamespace::unsigned(Namespace {
                tenant: "simulated".to_owned(),
                model: "simulated".to_owned(),
                tokenizer: "simulated".to_owned(),
            }),
            policy,
            calls: Vec::new(),
            jobs: workload.jobs.len(),
            report: KvReport {
                capacity_tokens: shape.kv_tokens.saturating_sub(slack).max(1),
                prefill_ms_per_1k: Some((read_seconds * 1e6 / READ_TOKENS as f64) as f32),
                ..KvReport::default()
            },
            slots: u32::try_from(shape.slots).unwrap_or(u32::MAX),
            began_ms: START_MS,
            output_max: workload.output_max,
        })
    }

    /// Registers the instances, and lets the scheduler begin. Requests that were submitted before are known by then,
    /// as those of a rollout are.
    pub(super) fn open(&mut self, instances: usize) -> anyhow::Result<Vec<Granted>> {
        self.began_ms = START_MS + 1;
        let mut granted = Vec::new();
        for instance in 0..instances {
            let (of_report, _) = self.report(instance, InstanceReport::default(), 0.0)?;
            granted.extend(of_report);
        }
        self.began_ms = START_MS + OPENING_MS;
        granted.extend(self.apply(DispatchEvent::Tick, 0.0)?);
        Ok(granted)
    }

    /// An instance reports. Returns also the seconds until its next report.
    pub(super) fn report(
        &mut self,
        instance: usize,
        state: InstanceReport,
        now_s: f64,
    ) -> anyhow::Result<(Vec<Granted>, f64)> {
        let heartbeat = Heartbeat {
            worker: worker(instance),
            incarnation: 1,
            url: format!("http://{instance}"),
            model: self.namespace.namespace.model.clone(),
            tokenizer: self.namespace.namespace.tokenizer.clone(),
            max_context: u32::MAX,
            max_running: self.slots,
            running: state.running,
            epoch_seen: 0,
            draining: false,
            trouble: None,
            leaves: false,
            compiles_forms: false,
            eagle3: None,
            fallback: None,
            state: None,
            kv: Some(KvReport {
                running_tokens: state.running_tokens,
                kept_tokens: state.kept_tokens,
                held: state.held,
                ..self.report.clone()
            }),
        };
        let effects = self
            .core
            .apply(DispatchEvent::Heartbeat(heartbeat), self.now_ms(now_s));
        let mut answers = effects.iter().filter_map(|effect| match effect {
            DispatchEffect::HeartbeatAnswer(Ok(reply)) => Some(reply.next_in_ms as f64 / 1e3),
            _ => None,
        });
        let next_in_s = answers.next().unwrap_or(1.0);
        Ok((self.granted(effects)?, next_in_s))
    }

    fn now_ms(&self, now_s: f64) -> u64 {
        self.began_ms + (now_s * 1e3) as u64
    }

    /// A request asks for a lease, and gives back the one of the chunk that has `ended`.
    pub(super) fn submit(
        &mut self,
        job: usize,
        of: &Job,
        progress: &Progress,
        ended: Option<LeaseFinish>,
        now_s: f64,
    ) -> anyhow::Result<Vec<Granted>> {
        let call = LeaseCallId(self.calls.len() as u64);
        self.calls.push(job);
        let is_turn = of.turn.is_some();
        let age_ms = match is_turn {
            true => ((now_s - progress.submitted_s) * 1e3) as u64,
            // Samples arrived one after the other before the start, a millisecond apart, so that none has the time of
            // another and a request that continues keeps its place.
            false => self.now_ms(now_s) - (START_MS - (self.jobs - job) as u64),
        };
        let request = LeaseRequest {
            request: RequestId(job as u128 + 1),
            namespace: self.namespace.clone(),
            group: (!is_turn).then(|| of.group.to_string()),
            session: of.turn.as_ref().and_then(|turn| turn.session),
            class: match is_turn {
                true => RequestClass::Interactive,
                false => RequestClass::Rollout,
            },
            weight: TenantWeight::default(),
            age_ms,
            epoch_seen: 0,
            ended,
            expected_tokens: match self.policy {
                SimulatedPolicy::Oracle => Some(of.output_tokens),
                SimulatedPolicy::History | SimulatedPolicy::Auto => of.expected_tokens,
                _ => None,
            },
            prefixes: of
                .turn
                .as_ref()
                .map_or_else(Vec::new, |turn| turn.before.clone()),
            chunk_tokens: None,
            context_tokens: of.prompt_tokens + progress.generated,
            generated_tokens: progress.generated,
            max_new_tokens: self.output_max,
            prefer: None,
            transferred: false,
            exclude: Vec::new(),
        };
        self.apply(DispatchEvent::Submit { call, request }, now_s)
    }

    pub(super) fn finish(
        &mut self,
        ended: LeaseFinish,
        now_s: f64,
    ) -> anyhow::Result<Vec<Granted>> {
        self.apply(DispatchEvent::Finish(ended), now_s)
    }

    pub(super) fn tick(&mut self, now_s: f64) -> anyhow::Result<Vec<Granted>> {
        if self.core.queue_length() == 0 {
            return Ok(Vec::new());
        }
        self.apply(DispatchEvent::Tick, now_s)
    }

    fn apply(&mut self, event: DispatchEvent, now_s: f64) -> anyhow::Result<Vec<Granted>> {
        let effects = self.core.apply(event, self.now_ms(now_s));
        self.granted(effects)
    }

    fn granted(&self, effects: Vec<DispatchEffect>) -> anyhow::Result<Vec<Granted>> {
        let mut granted = Vec::new();
        for effect in effects {
            match effect {
                DispatchEffect::Grant { call, lease, .. } => granted.push(Granted {
                    job: *self
                        .calls
                        .get(call.0 as usize)
                        .context("an unknown call was granted")?,
                    lease: lease.lease,
                    instance: lease
                        .worker
                        .0
                        .parse()
                        .context("an unknown instance was granted")?,
                    chunk_tokens: lease.chunk_tokens,
                }),
                DispatchEffect::Reject { error, .. } => {
                    bail!(
                        "the scheduler refused a simulated request: {}",
                        error.message
                    )
                }
                DispatchEffect::HeartbeatAnswer(Err(error)) => {
                    bail!(
                        "the scheduler refused a simulated instance: {}",
                        error.message
                    )
                }
                _ => {}
            }
        }
        Ok(granted)
    }
}

/// The end of a chunk, with its output tokens and those of them that were drafted.
pub(super) fn chunk_end(
    lease: LeaseId,
    (emitted_tokens, accepted_tokens): (u32, u32),
    cached_tokens: u32,
    is_finished: bool,
) -> LeaseFinish {
    LeaseFinish {
        lease,
        outcome: match is_finished {
            true => LeaseOutcome::Finished,
            false => LeaseOutcome::Continues,
        },
        emitted_tokens,
        worker_ended_ms_ago: Some(0),
        cached_tokens: Some(cached_tokens),
        rejected_tokens: 0,
        accepted_tokens,
    }
}
