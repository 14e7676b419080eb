//! Properties that hold under any sequence of events.

use std::collections::HashSet;

use proptest::prelude::*;
use refrain_protocol::prefix::PrefixHash;
use refrain_protocol::scheduling::{KvReport, SessionHash, TenantWeight};
use refrain_protocol::{Namespace, SignedNamespace, WorkerId};

use super::*;
use crate::config::{OrderPolicy, PlacementPolicy};

const START_MS: u64 = 1_700_000_000_000;
const WORKERS: [&str; 3] = ["a", "b", "c"];
const TENANTS: [&str; 3] = ["acme", "busy", "calm"];

#[derive(Clone, Debug)]
enum Op {
    Ask {
        request: u128,
        tenant: usize,
        context_tokens: u32,
        prefer: Option<usize>,
        exclude: Vec<usize>,
        /// The group of a rollout. The first one means a rollout without a group.
        rollout: Option<u64>,
        /// Output so far, and the age.
        so_far: u32,
        /// The newest lease of the request ends in the same call.
        ends: bool,
    },
    Withdraw {
        nth: usize,
    },
    Finish {
        nth: usize,
        outcome: LeaseOutcome,
        emitted_tokens: u32,
    },
    FinishUnknown,
    Undelivered {
        nth: usize,
    },
    Beat {
        worker: usize,
        slots: u32,
        draining: bool,
        restarts: bool,
        forgets: bool,
        kv_tokens: Option<u64>,
    },
    Wait {
        ms: u64,
    },
    RestartScheduler {
        /// The process goes on, and only the core is new.
        in_place: bool,
    },
}

fn ops() -> impl Strategy<Value = Op> {
    let outcome = prop_oneof![
        3 => Just(LeaseOutcome::Finished),
        3 => Just(LeaseOutcome::Continues),
        1 => Just(LeaseOutcome::WorkerFailed),
        1 => Just(LeaseOutcome::Aborted),
        1 => Just(LeaseOutcome::GivenUp),
    ];
    prop_oneof![
        8 => (
            // Few ids, so that requests often ask again while they wait or run.
            0..40u128,
            0..TENANTS.len(),
            0..1_200u32,
            proptest::option::of(0..WORKERS.len()),
            proptest::collection::vec(0..WORKERS.len(), 0..2),
            (proptest::option::of(0..4u64), prop_oneof![2 => Just(0), 1 => 0..900u32], any::<bool>()),
        )
            .prop_map(|(request, tenant, context_tokens, prefer, exclude, (rollout, so_far, ends))| Op::Ask {
                request, tenant, context_tokens, prefer, exclude, rollout, so_far, ends
            }),
        1 => any::<usize>().prop_map(|nth| Op::Withdraw { nth }),
        5 => (any::<usize>(), outcome, 0..500u32)
            .prop_map(|(nth, outcome, emitted_tokens)| Op::Finish { nth, outcome, emitted_tokens }),
        1 => Just(Op::FinishUnknown),
        1 => any::<usize>().prop_map(|nth| Op::Undelivered { nth }),
        6 => (0..WORKERS.len(), 1..4u32, prop::bool::weighted(0.1), prop::bool::weighted(0.1), any::<bool>(), proptest::option::of(0..5_000u64))
            .prop_map(|(worker, slots, draining, restarts, forgets, kv_tokens)| Op::Beat {
                worker, slots, draining, restarts, forgets, kv_tokens
            }),
        4 => prop_oneof![1..200u64, 500..4_000u64].prop_map(|ms| Op::Wait { ms }),
        1 => any::<bool>().prop_map(|in_place| Op::RestartScheduler { in_place }),
    ]
}

fn policies() -> impl Strategy<Value = (OrderPolicy, PlacementPolicy)> {
    use {OrderPolicy as O, PlacementPolicy as P};
    let orders =
        proptest::sample::select(vec![O::Arrival, O::Context, O::History, O::Auto, O::Oracle]);
    let placements = vec![P::Kv, P::LeastLoaded, P::RoundRobin, P::CacheAware];
    (orders, proptest::sample::select(placements))
}

fn config() -> SchedulerConfig {
    SchedulerConfig {
        queue_max: 8,
        tenant_queue_max: 4,
        rollout_queue_max: 8,
        tenant_rollout_queue_max: 6,
        chunk_tokens: 300,
        groups_tracked_max: 2,
        prefixes_tracked_max: 20,
        overtake_ms_max: 500,
        ended_leases_max: 16,
        tenants_tracked_max: 2,
        ..SchedulerConfig::default()
    }
}

pub(super) fn ask(request: u128, tenant: &str, context_tokens: u32) -> LeaseRequest {
    LeaseRequest {
        request: RequestId(request),
        namespace: SignedNamespace::unsigned(Namespace {
            tenant: tenant.into(),
            model: "m".into(),
            tokenizer: "t".into(),
        }),
        group: None,
        session: Some(SessionHash(request as u64 % 7)).filter(|_| request.is_multiple_of(2)),
        class: Default::default(),
        weight: TenantWeight::default(),
        age_ms: 0,
        epoch_seen: 0,
        ended: None,
        expected_tokens: None,
        prefixes: Vec::new(),
        chunk_tokens: None,
        context_tokens,
        generated_tokens: 0,
        max_new_tokens: 1_000,
        prefer: None,
        transferred: false,
        exclude: Vec::new(),
    }
}

pub(super) fn beat(
    worker: &str,
    incarnation: u64,
    max_running: u32,
    running: Vec<LeaseId>,
) -> Heartbeat {
    Heartbeat {
        eagle3: None,
        fallback: None,
        state: None,
        kv: None,
        worker: WorkerId(worker.into()),
        incarnation,
        url: "http://w".into(),
        model: "m".into(),
        tokenizer: "t".into(),
        max_context: 1_000,
        max_running,
        running,
        epoch_seen: 0,
        draining: false,
        trouble: None,
        leaves: false,
        compiles_forms: false,
    }
}

/// The state as an observer of events and effects knows it.
struct World {
    dispatch: Dispatch,
    config: SchedulerConfig,
    now_ms: u64,
    calls: u64,
    waiting: HashSet<LeaseCallId>,
    /// Request and worker of each lease.
    running: HashMap<LeaseId, (RequestId, WorkerId)>,
    /// Slots of each worker and whether it drains, by its last accepted heartbeat.
    slots: HashMap<WorkerId, (u32, bool)>,
    incarnations: [u64; WORKERS.len()],
    epoch_last: u64,
}

impl World {
    fn new((order, placement): (OrderPolicy, PlacementPolicy)) -> Self {
        let config = SchedulerConfig {
            order,
            placement,
            ..config()
        };
        World {
            dispatch: Dispatch::new(config.clone(), START_MS, 0),
            config,
            now_ms: START_MS,
            calls: 0,
            waiting: HashSet::new(),
            running: HashMap::new(),
            slots: HashMap::new(),
            incarnations: [1; WORKERS.len()],
            epoch_last: 0,
        }
    }

    fn nth_lease(&self, nth: usize) -> Option<LeaseId> {
        let mut leases: Vec<LeaseId> = self.running.keys().copied().collect();
        leases.sort_unstable();
        (!leases.is_empty()).then(|| leases[nth % leases.len()])
    }

    fn step(&mut self, op: Op) {
        let event = match op {
            Op::Ask {
                request,
                tenant,
                context_tokens,
                prefer,
                exclude,
                rollout,
                so_far,
                ends,
            } => {
                self.calls += 1;
                self.waiting.insert(LeaseCallId(self.calls));
                let mut leases = self.running.iter();
                let lease = leases.find(|(_, (holder, _))| *holder == RequestId(request));
                let ended = lease.filter(|_| ends).map(|(lease, _)| LeaseFinish {
                    lease: *lease,
                    outcome: LeaseOutcome::Continues,
                    emitted_tokens: so_far,
                    worker_ended_ms_ago: Some(0),
                    cached_tokens: Some(context_tokens / 2),
                    rejected_tokens: context_tokens,
                    accepted_tokens: context_tokens % 7,
                });
                let named = |worker: usize| WorkerId(WORKERS[worker].into());
                DispatchEvent::Submit {
                    call: LeaseCallId(self.calls),
                    request: LeaseRequest {
                        prefer: prefer.map(named),
                        transferred: false,
                        exclude: exclude.into_iter().map(named).collect(),
                        class: match rollout {
                            Some(_) => RequestClass::Rollout,
                            None => RequestClass::Interactive,
                        },
                        group: rollout.filter(|nth| *nth > 0).map(|nth| nth.to_string()),
                        weight: TenantWeight::try_from([0.01, 1.0, 100.0][request as usize % 3])
                            .unwrap(),
                        expected_tokens: (request % 3 == 0).then_some(request as u32 * 10),
                        age_ms: u64::from(so_far),
                        epoch_seen: 0,
                        generated_tokens: so_far,
                        ended,
                        prefixes: (0..u64::from(context_tokens / 64))
                            .map(|nth| PrefixHash(tenant as u64 * 1_000 + nth))
                            .collect(),
                        ..ask(request, TENANTS[tenant], context_tokens)
                    },
                }
            }
            Op::Withdraw { nth } => {
                let mut waiting: Vec<LeaseCallId> = self.waiting.iter().copied().collect();
                waiting.sort_unstable();
                let Some(call) = (!waiting.is_empty()).then(|| waiting[nth % waiting.len()]) else {
                    return;
                };
                self.waiting.remove(&call);
                DispatchEvent::Withdraw { call }
            }
            Op::Finish {
                nth,
                outcome,
                emitted_tokens,
            } => match self.nth_lease(nth) {
                Some(lease) => DispatchEvent::Finish(LeaseFinish {
                    lease,
                    outcome,
                    emitted_tokens,
                    worker_ended_ms_ago: (emitted_tokens % 2 == 0).then_some(emitted_tokens.into()),
                    cached_tokens: None,
                    rejected_tokens: 0,
                    accepted_tokens: emitted_tokens / 2,
                }),
                None => return,
            },
            Op::FinishUnknown => DispatchEvent::Finish(LeaseFinish {
                lease: LeaseId(1),
                outcome: LeaseOutcome::Finished,
                emitted_tokens: u32::MAX,
                worker_ended_ms_ago: Some(u64::MAX),
                cached_tokens: None,
                rejected_tokens: 0,
                accepted_tokens: u32::MAX,
            }),
            Op::Undelivered { nth } => match self.nth_lease(nth) {
                Some(lease) => DispatchEvent::Undelivered { lease },
                None => return,
            },
            Op::Beat {
                worker,
                slots,
                draining,
                restarts,
                forgets,
                kv_tokens,
            } => {
                let name = WorkerId(WORKERS[worker].into());
                self.incarnations[worker] += u64::from(restarts);
                let mut running: Vec<LeaseId> = self
                    .running
                    .iter()
                    .filter(|(_, (_, on))| *on == name && !restarts)
                    .map(|(lease, _)| *lease)
                    .collect();
                if forgets {
                    running.sort_unstable();
                    running.pop();
                }
                self.slots.insert(name, (slots, draining));
                let heartbeat = beat(WORKERS[worker], self.incarnations[worker], slots, running);
                let kv = kv_tokens.map(|capacity_tokens| KvReport {
                    capacity_tokens,
                    running_tokens: capacity_tokens / 3,
                    held: (slots == 2).then(|| vec![PrefixHash(capacity_tokens % 30)]),
                    ..KvReport::default()
                });
                DispatchEvent::Heartbeat(Heartbeat {
                    draining,
                    state: None,
                    kv,
                    ..heartbeat
                })
            }
            Op::Wait { ms } => {
                self.now_ms += ms;
                DispatchEvent::Tick
            }
            Op::RestartScheduler { in_place } => {
                self.now_ms += u64::from(!in_place);
                let epoch_last = if in_place { self.epoch_last } else { 0 };
                self.dispatch = Dispatch::new(self.config.clone(), self.now_ms, epoch_last);
                self.waiting.clear();
                self.running.clear();
                return;
            }
        };
        self.apply(event);
    }

    fn apply(&mut self, event: DispatchEvent) {
        // While a request waits, the next tick is near and no other deadline matters.
        let is_idle = self.dispatch.queue_length() == 0;
        let due_before_ms = self.dispatch.due_ms().filter(|_| is_idle);
        let is_withdrawal = matches!(event, DispatchEvent::Withdraw { .. });
        let effects = self.dispatch.apply(event, self.now_ms);
        let mut granted_on = HashSet::new();
        if let Some(due_ms) = self.dispatch.due_ms()
            && is_idle
            && due_before_ms.is_none_or(|before_ms| due_ms < before_ms)
        {
            assert!(
                due_ms >= self.dispatch.due_ms_min(),
                "due before the lower bound"
            );
        }
        for effect in effects {
            match effect {
                DispatchEffect::Grant { call, lease, .. } => {
                    assert!(self.waiting.remove(&call), "answered twice: {call:?}");
                    assert!(
                        lease.epoch > self.epoch_last,
                        "epoch {} is not new",
                        lease.epoch
                    );
                    self.epoch_last = lease.epoch;
                    let (slots, draining) = self.slots[&lease.worker];
                    assert!(!draining, "granted on a draining worker");
                    let request = RequestId(lease.lease.0 & u128::from(u64::MAX));
                    assert!(
                        self.running.values().all(|(other, _)| *other != request),
                        "two leases of one request"
                    );
                    let on_worker = |(_, on): &&(RequestId, WorkerId)| *on == lease.worker;
                    let running = self.running.values().filter(on_worker).count();
                    assert!(
                        running < slots as usize,
                        "{running} of {slots} slots were taken before the grant"
                    );
                    granted_on.insert(lease.worker.clone());
                    self.running.insert(lease.lease, (request, lease.worker));
                }
                DispatchEffect::Reject { call, error, .. } => {
                    assert!(self.waiting.remove(&call), "answered twice: {call:?}");
                    let hinted = error
                        .retry_after_ms
                        .is_none_or(|ms| (1..=30_000).contains(&ms));
                    assert!(hinted, "{error}");
                }
                DispatchEffect::LeaseEnded { lease, .. } => {
                    assert!(
                        self.running.remove(&lease).is_some(),
                        "ended twice: {lease:?}"
                    );
                }
                DispatchEffect::HeartbeatAnswer(Ok(reply)) => {
                    for lease in reply.give_way {
                        assert!(self.running.contains_key(&lease), "{lease:?} has ended");
                    }
                    assert!((1..=1_000).contains(&reply.next_in_ms));
                }
                DispatchEffect::HeartbeatAnswer(Err(error)) => panic!("{error}"),
                DispatchEffect::LengthLearned { .. }
                | DispatchEffect::WorkerJoined(_)
                | DispatchEffect::WorkerRestarted(_)
                | DispatchEffect::WorkerLost(_) => {}
            }
        }
        assert_eq!(self.dispatch.queue_length(), self.waiting.len());
        assert_eq!(self.dispatch.leases_running(), self.running.len());
        for worker in &granted_on {
            let worker = self.dispatch.workers.get(worker).unwrap();
            let is_alone = worker.leases().count() <= 1;
            assert!(is_alone || worker.has_room(0), "a KV cache is overfilled");
        }
        assert!(self.dispatch.waiting(RequestClass::Interactive) <= 8);
        assert!(self.dispatch.leases.ended_len() <= 16);
        for pool in self.dispatch.queue.pools_waiting() {
            let found = self.dispatch.next_grant(&pool);
            // Rollouts that waited for more workers to report go on at the next tick.
            let held = self.dispatch.queue.pool(&pool).unwrap().held;
            let was_held = found.zip(held).is_some_and(|((call, _), held)| {
                let waiting = self.dispatch.queue.get(call).unwrap();
                let is_rollout = waiting.request.class == RequestClass::Rollout;
                is_withdrawal && is_rollout && waiting.submitted_ms < held.before_ms
            });
            assert!(
                found.is_none() || was_held,
                "a request waits although a slot is free: {found:?}"
            );
        }
    }
}

proptest! {
    #[test]
    fn invariants_hold_under_any_events(policies in policies(), ops in proptest::collection::vec(ops(), 1..200)) {
        let mut world = World::new(policies);
        for op in ops {
            world.step(op);
        }
        // In the end every call gets an answer: none is forgotten in a queue.
        let deadline_ms = world.now_ms + config().queue_wait_ms_max + TICK_MS;
        while world.now_ms < deadline_ms && !world.waiting.is_empty() {
            world.step(Op::Wait { ms: 1_000 });
        }
        prop_assert!(world.waiting.is_empty(), "{:#?}", world.dispatch.observe(world.now_ms));
        // Without heartbeats no lease and no worker stays.
        world.step(Op::Wait { ms: config().worker_ttl_ms });
        prop_assert_eq!((world.dispatch.leases_running(), world.dispatch.workers()), (0, 0));
    }

    /// Tenants that always wait are served equally, whatever the number and size of their requests.
    #[test]
    fn backlogged_tenants_get_equal_shares(
        asks in proptest::collection::vec((0..TENANTS.len(), 1..400u32), 30..120),
        outputs in proptest::collection::vec(0..400u32, 300),
    ) {
        let config = SchedulerConfig { queue_wait_ms_max: u64::MAX, ..SchedulerConfig::default() };
        let mut dispatch = Dispatch::new(config, START_MS, 0);
        dispatch.apply(DispatchEvent::Heartbeat(beat("a", 1, 1, Vec::new())), START_MS);
        let mut outputs = outputs.into_iter().cycle();
        let mut tenant_of = HashMap::new();
        let mut left = [0usize; TENANTS.len()];
        let mut granted = Vec::new();
        for (request, (tenant, context_tokens)) in (0u64..).zip(&asks) {
            tenant_of.insert(LeaseCallId(request), (*tenant, *context_tokens));
            left[*tenant] += 1;
            let request_ = ask(request.into(), TENANTS[*tenant], *context_tokens);
            granted.extend(dispatch.apply(DispatchEvent::Submit { call: LeaseCallId(request), request: request_ }, START_MS));
        }
        let mut served = [0i64; TENANTS.len()];
        let mut grants = 0;
        while let Some(effect) = granted.pop() {
            let DispatchEffect::Grant { call, lease, .. } = effect else { continue };
            grants += 1;
            let (tenant, context_tokens) = tenant_of[&call];
            let emitted_tokens = outputs.next().unwrap();
            left[tenant] -= 1;
            served[tenant] += i64::from(context_tokens) + 2 * i64::from(emitted_tokens);
            let finish = LeaseFinish { lease: lease.lease, outcome: LeaseOutcome::Finished, emitted_tokens, worker_ended_ms_ago: None, cached_tokens: None, rejected_tokens: 0, accepted_tokens: emitted_tokens / 2 };
            granted.extend(dispatch.apply(DispatchEvent::Finish(finish), START_MS));
            if left.iter().all(|left| *left > 0) {
                let spread = served.iter().max().unwrap() - served.iter().min().unwrap();
                // Two of the largest chunks: the one that ran first, and the one that runs now.
                prop_assert!(spread <= 2 * (400 + 2 * 400), "{served:?}");
            }
        }
        prop_assert_eq!(grants, asks.len());
    }

    /// Every newcomer gets a slot even if no output ever ends, and no chunk is preempted once all shares are equal.
    #[test]
    fn tenants_get_equal_slots_although_outputs_never_end(
        workers in 1..4usize,
        slots in 1..6u32,
        wants in proptest::collection::vec(0..30u32, TENANTS.len()),
    ) {
        let mut dispatch = Dispatch::new(SchedulerConfig::default(), START_MS, 0);
        let mut now_ms = START_MS;
        let mut running: HashMap<LeaseId, (WorkerId, usize, u128)> = HashMap::new();
        let mut calls = HashMap::new();
        let mut asked = 0;
        let total = workers as u32 * slots;
        // The first tenant has all slots before the second one comes, and so on.
        let mut preempted_late = 0;
        for tenant in 0..TENANTS.len() {
            let mut asks: Vec<(usize, u128)> = (0..wants[tenant]).map(|nth| (tenant, (tenant as u128) << 32 | u128::from(nth))).collect();
            for round in 0..60 {
                let mut effects = Vec::new();
                for (tenant, request) in asks.drain(..) {
                    asked += 1;
                    calls.insert(LeaseCallId(asked), (tenant, request));
                    let request = ask(request, TENANTS[tenant], 10);
                    effects.extend(dispatch.apply(DispatchEvent::Submit { call: LeaseCallId(asked), request }, now_ms));
                }
                now_ms += 100;
                for worker in &WORKERS[..workers] {
                    let on_it = running.iter().filter(|(_, (on, ..))| on.0 == *worker);
                    let named = on_it.map(|(lease, _)| *lease).collect();
                    effects.extend(dispatch.apply(DispatchEvent::Heartbeat(beat(worker, 1, slots, named)), now_ms));
                }
                while let Some(effect) = effects.pop() {
                    match effect {
                        DispatchEffect::Grant { call, lease, .. } => {
                            let (tenant, request) = calls[&call];
                            running.insert(lease.lease, (lease.worker, tenant, request));
                        }
                        DispatchEffect::HeartbeatAnswer(Ok(reply)) => for lease in reply.give_way {
                            let (_, tenant, request) = running.remove(&lease).unwrap();
                            preempted_late += u32::from(round > 40);
                            asks.push((tenant, request));
                            let finish = LeaseFinish { lease, outcome: LeaseOutcome::Continues, emitted_tokens: 20, worker_ended_ms_ago: None, cached_tokens: None, rejected_tokens: 0, accepted_tokens: 10 };
                            effects.extend(dispatch.apply(DispatchEvent::Finish(finish), now_ms));
                        },
                        _ => {}
                    }
                }
            }
            let here = &wants[..=tenant];
            let active = here.iter().filter(|wants| **wants > 0).count() as u32;
            for (nth, wants) in here.iter().enumerate() {
                let has = running.values().filter(|(_, owner, _)| *owner == nth).count() as u32;
                // With fewer slots than tenants, some tenants have none yet.
                let share = total.checked_div(active).unwrap_or(0);
                prop_assert!(has >= share.min(*wants), "tenant {nth} of {here:?} wants {wants} of {total} slots and has {has}");
            }
            let wanted: u32 = here.iter().sum();
            prop_assert_eq!(running.len() as u32, wanted.min(total));
        }
        prop_assert_eq!(preempted_late, 0);
    }
}
