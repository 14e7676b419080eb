//! Whole rollouts on simulated workers: everything finishes, and the order by lengths pays or does no harm.
//!
//! A worker decodes a token of each of its chunks in a millisecond, and reads ten tokens of context in one. That is
//! enough to compare orders; `refrain simulate` has the whole model.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fmt::Write as _;

use proptest::prelude::*;
use refrain_protocol::scheduling::{KvReport, TenantWeight};
use refrain_protocol::{Namespace, SignedNamespace};

use super::*;
use crate::config::{OrderPolicy, PlacementPolicy};

const CHUNK_TOKENS: u32 = 200;

#[derive(Clone, Copy, Debug)]
struct Sample {
    group: usize,
    tokens: u32,
    class: RequestClass,
}

struct Rollout {
    dispatch: Dispatch,
    samples: Vec<Sample>,
    workers: usize,
    slots: u32,
    kv_tokens: Option<u64>,
    tells_lengths: bool,
    now_ms: u64,
    calls: u64,
    /// Output so far and requests of the calls that wait.
    generated: Vec<u32>,
    asked: HashMap<LeaseCallId, usize>,
    /// The ends of running chunks: time, sample, lease, and tokens.
    ends: BinaryHeap<Reverse<(u64, usize, LeaseId, u32)>>,
    finished: usize,
    most_running: usize,
    /// Samples that come later, in order of time. All others are there from the start.
    later: VecDeque<(u64, usize)>,
    interactive_waited_ms: u64,
}

impl Rollout {
    fn new(config: SchedulerConfig, samples: Vec<Sample>, workers: usize, slots: u32) -> Self {
        let config = SchedulerConfig {
            chunk_tokens: CHUNK_TOKENS,
            worker_ttl_ms: u64::MAX / 4,
            lease_ttl_ms: u64::MAX / 4,
            ..config
        };
        Rollout {
            tells_lengths: config.order == OrderPolicy::Oracle,
            dispatch: Dispatch::new(config, 0, 0),
            generated: vec![0; samples.len()],
            samples,
            workers,
            slots,
            kv_tokens: None,
            now_ms: 0,
            calls: 0,
            asked: HashMap::new(),
            ends: BinaryHeap::new(),
            finished: 0,
            most_running: 0,
            later: VecDeque::new(),
            interactive_waited_ms: 0,
        }
    }

    fn ask(&mut self, nth: usize, ended: Option<LeaseFinish>) {
        self.calls += 1;
        let call = LeaseCallId(self.calls);
        self.asked.insert(call, nth);
        let sample = self.samples[nth];
        let request = LeaseRequest {
            request: RequestId(nth as u128),
            namespace: SignedNamespace::unsigned(Namespace {
                tenant: "acme".into(),
                model: "m".into(),
                tokenizer: "t".into(),
            }),
            group: Some(sample.group.to_string()),
            session: None,
            class: sample.class,
            weight: TenantWeight::default(),
            age_ms: self.now_ms,
            epoch_seen: 0,
            ended,
            expected_tokens: self.tells_lengths.then_some(sample.tokens),
            prefixes: Vec::new(),
            chunk_tokens: Some(CHUNK_TOKENS),
            context_tokens: 50 + self.generated[nth],
            generated_tokens: self.generated[nth],
            max_new_tokens: 4_000,
            prefer: None,
            transferred: false,
            exclude: Vec::new(),
        };
        let effects = self
            .dispatch
            .apply(DispatchEvent::Submit { call, request }, self.now_ms);
        self.note(effects);
    }

    fn note(&mut self, effects: Vec<DispatchEffect>) {
        for effect in effects {
            match effect {
                DispatchEffect::Grant {
                    call,
                    lease,
                    placed,
                    waited_ms,
                } => {
                    if placed.class == RequestClass::Interactive {
                        self.interactive_waited_ms = self.interactive_waited_ms.max(waited_ms);
                    }
                    let nth = self.asked.remove(&call).unwrap();
                    let left = self.samples[nth].tokens - self.generated[nth];
                    let tokens = lease.chunk_tokens.unwrap().min(left);
                    let takes_ms = u64::from(tokens) + u64::from(placed.missing_tokens) / 10;
                    let end = (self.now_ms + takes_ms, nth, lease.lease, tokens);
                    self.ends.push(Reverse(end));
                    self.most_running = self.most_running.max(self.ends.len());
                }
                DispatchEffect::Reject { error, .. } => panic!("{error}"),
                _ => {}
            }
        }
    }

    /// Runs to the end. Returns when the last sample finished.
    fn run(&mut self) -> u64 {
        for nth in 0..self.workers {
            let heartbeat = Heartbeat {
                worker: WorkerId(format!("w{nth}")),
                incarnation: 1,
                url: "http://w".into(),
                model: "m".into(),
                tokenizer: "t".into(),
                max_context: 100_000,
                max_running: self.slots,
                running: Vec::new(),
                epoch_seen: 0,
                draining: false,
                trouble: None,
                leaves: false,
                compiles_forms: false,
                eagle3: None,
                fallback: None,
                state: None,
                kv: self.kv_tokens.map(|capacity_tokens| KvReport {
                    capacity_tokens,
                    ..KvReport::default()
                }),
            };
            self.dispatch.apply(DispatchEvent::Heartbeat(heartbeat), 0);
        }
        for nth in 0..self.samples.len() - self.later.len() {
            self.ask(nth, None);
        }
        while let Some(Reverse((at_ms, nth, lease, tokens))) = self.ends.pop() {
            while let Some((asks_ms, later)) = self.later.pop_front_if(|(ms, _)| *ms <= at_ms) {
                self.now_ms = asks_ms;
                self.ask(later, None);
            }
            self.now_ms = at_ms;
            self.generated[nth] += tokens;
            let is_finished = self.generated[nth] == self.samples[nth].tokens;
            let finish = LeaseFinish {
                lease,
                outcome: match is_finished {
                    true => LeaseOutcome::Finished,
                    false => LeaseOutcome::Continues,
                },
                emitted_tokens: tokens,
                worker_ended_ms_ago: Some(0),
                cached_tokens: None,
                rejected_tokens: 0,
                accepted_tokens: 0,
            };
            if is_finished {
                self.finished += 1;
                let effects = self
                    .dispatch
                    .apply(DispatchEvent::Finish(finish), self.now_ms);
                self.note(effects);
            } else {
                self.ask(nth, Some(finish));
            }
        }
        assert_eq!(
            self.finished,
            self.samples.len(),
            "{:#?}",
            self.dispatch.observe(self.now_ms)
        );
        self.now_ms
    }
}

/// A generator of numbers, so that workloads are the same everywhere.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        ((self.0 >> 11) as f64 / (1u64 << 53) as f64).clamp(1e-9, 1.0 - 1e-9)
    }

    fn normal(&mut self) -> f64 {
        let (angle, radius) = (self.unit() * std::f64::consts::TAU, self.unit());
        (-2.0 * radius.ln()).sqrt() * angle.cos()
    }
}

/// Groups of eight with log-normal lengths. `between` and `within` are the spreads of groups and of their members.
fn workload(seed: u64, groups: usize, between: f64, within: f64) -> Vec<Sample> {
    let mut random = Random(seed.wrapping_add(17));
    let mut samples = Vec::new();
    for group in 0..groups {
        let mean = 5.5 + between * random.normal();
        for _ in 0..8 {
            let tokens = (mean + within * random.normal()).exp();
            samples.push(Sample {
                group,
                tokens: tokens.clamp(5.0, 4_000.0) as u32,
                class: RequestClass::Rollout,
            });
        }
    }
    samples
}

/// The sum of the times that some rollouts take.
fn total_ms(order: OrderPolicy, between: f64, within: f64, kv_tokens: Option<u64>) -> u64 {
    let run = |seed| {
        let config = SchedulerConfig {
            order,
            ..SchedulerConfig::default()
        };
        let mut rollout = Rollout::new(config, workload(seed, 40, between, within), 4, 12);
        rollout.kv_tokens = kv_tokens;
        rollout.run()
    };
    (0..6).map(run).sum()
}

#[test]
fn auto_gains_where_groups_are_alike_and_loses_nowhere() {
    let mut report = String::new();
    let mut check = |name: &str, between: f64, within: f64, kv_tokens: Option<u64>, gain: f64| {
        use OrderPolicy as O;
        let totals = [O::Arrival, O::Context, O::Auto, O::Oracle]
            .map(|order| total_ms(order, between, within, kv_tokens));
        let gained = totals[0] as f64 / totals[2] as f64;
        writeln!(report, "{name}: arrival, context, auto, oracle {totals:?}").unwrap();
        if gained < gain {
            writeln!(report, "  auto gains {gained:.3} of {gain}").unwrap();
        }
    };
    check("alike", 1.2, 0.2, None, 1.05);
    check("somewhat alike", 0.9, 0.6, None, 1.0);
    // The first members of groups go first until chunks have shown no drafts. That is an order as good as another.
    check("not alike", 0.0, 1.0, None, 0.99);
    check("equal", 0.0, 0.05, None, 0.99);
    // Room decides more than the order there: `context` itself gains three per cent.
    check("alike, little KV", 1.2, 0.2, Some(9_000), 1.0);
    check("not alike, little KV", 0.0, 1.0, Some(9_000), 0.99);
    assert!(!report.contains("gains"), "{report}");
    println!("{report}");
}

#[test]
fn an_interactive_request_waits_for_one_chunk_while_rollouts_take_all_slots() {
    let mut samples = workload(3, 30, 0.5, 0.5);
    let rollouts = samples.len();
    let (slots, every_ms) = (4, 40);
    for _ in 0..100 {
        samples.push(Sample {
            group: usize::MAX,
            tokens: 30,
            class: RequestClass::Interactive,
        });
    }
    let mut rollout = Rollout::new(SchedulerConfig::default(), samples, 2, slots);
    rollout.later = (0..100)
        .map(|nth| (500 + nth as u64 * every_ms, rollouts + nth))
        .collect();
    rollout.run();
    // Eight chunks of at most 200 tokens run, and reading a context of 4,000 tokens takes 400 ms.
    assert!(rollout.interactive_waited_ms > 0);
    assert!(
        rollout.interactive_waited_ms <= 600,
        "{}",
        rollout.interactive_waited_ms
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases((ProptestConfig::default().cases / 4).max(1)))]

    /// Whatever the policies and the KV caches, every sample finishes, and no slot is left idle while one could run.
    #[test]
    fn every_rollout_ends(
        seed in any::<u64>(),
        order in proptest::sample::select(vec![OrderPolicy::Arrival, OrderPolicy::Context, OrderPolicy::Auto, OrderPolicy::Oracle]),
        placement in proptest::sample::select(vec![PlacementPolicy::Kv, PlacementPolicy::RoundRobin, PlacementPolicy::CacheAware]),
        workers in 1..4usize,
        slots in 1..5u32,
        kv_tokens in proptest::option::of(100..6_000u64),
        interactive in 0..20usize,
    ) {
        let config = SchedulerConfig { order, placement, groups_tracked_max: 3, ..SchedulerConfig::default() };
        let mut samples = workload(seed, 8, 0.8, 0.8);
        for sample in samples.iter_mut().step_by(3).take(interactive) {
            sample.class = RequestClass::Interactive;
        }
        let count = samples.len();
        let mut rollout = Rollout::new(config, samples, workers, slots);
        rollout.kv_tokens = kv_tokens;
        rollout.run();
        let all = workers * slots as usize;
        prop_assert!(kv_tokens.is_some() || rollout.most_running == all.min(count));
    }
}
