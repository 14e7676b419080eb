//! Tenants that always have more to do than there are slots, on simulated workers. Each test counts what tenants were
//! served, by the cost of the Virtual Token Counter, which is reckoned here once more.
//!
//! A worker decodes a token of each of its chunks in a millisecond, and reads ten tokens of context in one.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use refrain_protocol::scheduling::TenantWeight;

use super::property_tests::{ask, beat};
use super::*;

const SLOTS: u32 = 16;
const RUN_MS: u64 = 100_000;

#[derive(Clone)]
struct Tenant {
    weight: f64,
    class: RequestClass,
    /// Requests that wait or run while it has work.
    in_flight: usize,
    prompt_tokens: u32,
    /// Tokens of the prompt that the worker holds.
    cached_tokens: u32,
    output_tokens: u32,
    /// Draft tokens that are rejected for each output token.
    rejected_per_token: u32,
    /// Whether it has work at this time.
    works: fn(u64) -> bool,
}

impl Default for Tenant {
    fn default() -> Self {
        Tenant {
            weight: 1.0,
            class: RequestClass::Interactive,
            in_flight: 2 * SLOTS as usize,
            prompt_tokens: 200,
            cached_tokens: 0,
            output_tokens: 100,
            rejected_per_token: 0,
            works: |_| true,
        }
    }
}

/// The work that a tenant was served.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Served {
    cost: u64,
    output_tokens: u64,
    requests: u64,
}

impl Served {
    fn cost_of(served: &[Served]) -> Vec<f64> {
        served.iter().map(|served| served.cost as f64).collect()
    }
}

/// Jain's index of fairness: 1 where all are equal, and one divided by their number where one has all.
fn jain(values: &[f64]) -> f64 {
    let sum: f64 = values.iter().sum();
    let squares: f64 = values.iter().map(|value| value * value).sum();
    sum * sum / (values.len() as f64 * squares)
}

struct Market {
    dispatch: Dispatch,
    tenants: Vec<Tenant>,
    now_ms: u64,
    calls: u64,
    asked: HashMap<LeaseCallId, usize>,
    in_flight: Vec<usize>,
    /// The ends of running chunks: time, lease, tenant.
    ends: BinaryHeap<Reverse<(u64, LeaseId, usize)>>,
    /// The output of running chunks, and the drafts that are rejected in them.
    outputs: HashMap<LeaseId, (u32, u32)>,
    served: Vec<Served>,
    random: u64,
}

impl Market {
    fn new(config: SchedulerConfig, tenants: Vec<Tenant>) -> Self {
        let config = SchedulerConfig {
            worker_ttl_ms: u64::MAX / 4,
            lease_ttl_ms: u64::MAX / 4,
            queue_wait_ms_max: u64::MAX / 4,
            ..config
        };
        let mut dispatch = Dispatch::new(config, 0, 0);
        let heartbeat = Heartbeat {
            max_context: 100_000,
            ..beat("w", 1, SLOTS, Vec::new())
        };
        dispatch.apply(DispatchEvent::Heartbeat(heartbeat), 0);
        Market {
            dispatch,
            now_ms: 0,
            calls: 0,
            asked: HashMap::new(),
            in_flight: vec![0; tenants.len()],
            ends: BinaryHeap::new(),
            outputs: HashMap::new(),
            served: vec![Served::default(); tenants.len()],
            tenants,
            random: 7,
        }
    }

    /// A length of up to half more or less than usual, so that chunks do not end in step.
    fn about(&mut self, tokens: u32) -> u32 {
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let percent = 50 + (self.random >> 33) % 101;
        (u64::from(tokens) * percent / 100).max(1) as u32
    }

    fn ask(&mut self, of: usize) {
        self.calls += 1;
        let tenant = &self.tenants[of];
        let name = format!("tenant {of}");
        let request = LeaseRequest {
            class: tenant.class,
            weight: TenantWeight::try_from(tenant.weight).unwrap(),
            max_new_tokens: 10_000,
            ..ask(self.calls.into(), &name, tenant.prompt_tokens)
        };
        self.in_flight[of] += 1;
        let call = LeaseCallId(self.calls);
        self.asked.insert(call, of);
        self.apply(DispatchEvent::Submit { call, request });
    }

    fn apply(&mut self, event: DispatchEvent) {
        for effect in self.dispatch.apply(event, self.now_ms) {
            match effect {
                DispatchEffect::Grant { call, lease, .. } => {
                    let of = self.asked.remove(&call).unwrap();
                    let output_tokens = self.about(self.tenants[of].output_tokens);
                    let tenant = &self.tenants[of];
                    let read_tokens = tenant.prompt_tokens - tenant.cached_tokens;
                    let rejected_tokens = tenant.rejected_per_token * output_tokens;
                    let takes_ms = u64::from(output_tokens + read_tokens / 10).max(1);
                    let end = (self.now_ms + takes_ms, lease.lease, of);
                    self.ends.push(Reverse(end));
                    let served = &mut self.served[of];
                    served.cost += u64::from(8 + read_tokens + 2 * output_tokens + rejected_tokens);
                    served.output_tokens += u64::from(output_tokens);
                    served.requests += 1;
                    let output = (output_tokens, rejected_tokens);
                    self.outputs.insert(lease.lease, output);
                }
                DispatchEffect::Reject { error, .. } => panic!("{error}"),
                _ => {}
            }
        }
    }

    /// Runs until a time. Returns what each tenant was served since the last call.
    fn run(&mut self, until_ms: u64) -> Vec<Served> {
        self.served.fill(Served::default());
        loop {
            for of in 0..self.tenants.len() {
                let tenant = self.tenants[of].clone();
                while (tenant.works)(self.now_ms) && self.in_flight[of] < tenant.in_flight {
                    self.ask(of);
                }
            }
            let Some(Reverse((at_ms, lease, of))) = self.ends.pop() else {
                break;
            };
            self.now_ms = at_ms;
            self.in_flight[of] -= 1;
            let (emitted_tokens, rejected_tokens) = self.outputs.remove(&lease).unwrap();
            self.apply(DispatchEvent::Finish(LeaseFinish {
                lease,
                outcome: LeaseOutcome::Finished,
                emitted_tokens,
                worker_ended_ms_ago: Some(0),
                cached_tokens: Some(self.tenants[of].cached_tokens),
                rejected_tokens,
                accepted_tokens: 0,
            }));
            if at_ms >= until_ms {
                break;
            }
        }
        self.served.clone()
    }
}

/// Runs tenants. The beginning does not count: the first one that asks finds all slots free.
fn run(tenants: Vec<Tenant>) -> Vec<Served> {
    let mut market = Market::new(SchedulerConfig::default(), tenants);
    market.run(RUN_MS / 10);
    market.run(RUN_MS)
}

#[test]
fn equal_tenants_are_served_alike_though_one_sends_ten_times_as_much() {
    let mut tenants = vec![Tenant::default(); 5];
    tenants[0].in_flight *= 10;
    let index = jain(&Served::cost_of(&run(tenants.clone())));
    println!("equal requests: Jain's index {index:.5}");
    assert!(index >= 0.98, "{index}");
    // Tenants with other lengths have other numbers of requests, and the same share.
    (tenants[1].prompt_tokens, tenants[1].output_tokens) = (4_000, 20);
    (tenants[2].prompt_tokens, tenants[2].output_tokens) = (50, 600);
    (tenants[3].prompt_tokens, tenants[3].cached_tokens) = (3_000, 2_900);
    tenants[4].rejected_per_token = 4;
    let index = jain(&Served::cost_of(&run(tenants)));
    println!("unequal requests: Jain's index {index:.5}");
    assert!(index >= 0.98, "{index}");
}

#[test]
fn tenants_are_served_by_their_weights() {
    let weights = [0.5, 1.0, 2.0, 5.0];
    let tenant = |weight| Tenant {
        weight,
        ..Tenant::default()
    };
    let costs = Served::cost_of(&run(weights.map(tenant).to_vec()));
    let (sum, of_weights) = (costs.iter().sum::<f64>(), weights.iter().sum::<f64>());
    for (cost, weight) in costs.iter().zip(weights) {
        let error = cost / sum / (weight / of_weights) - 1.0;
        println!("weight {weight}: {:+.2} % of its share", error * 100.0);
        assert!(error.abs() < 0.03, "{costs:?}");
    }
}

#[test]
fn who_idles_saves_nothing_up() {
    let late = Tenant {
        works: |now_ms| now_ms >= RUN_MS / 2,
        ..Tenant::default()
    };
    let tenants = vec![late, Tenant::default(), Tenant::default()];
    let mut market = Market::new(SchedulerConfig::default(), tenants);
    let before = market.run(RUN_MS / 2);
    assert_eq!(before[0].requests, 0);
    let after = Served::cost_of(&market.run(RUN_MS));
    assert!(jain(&after) >= 0.98, "{after:?}");
    assert!(after[0] <= after[1] * 1.03, "{after:?}");
}

#[test]
fn who_comes_and_goes_gains_nothing() {
    let now_and_then = Tenant {
        works: |now_ms| (now_ms / 2_000).is_multiple_of(2),
        ..Tenant::default()
    };
    let served = run(vec![now_and_then, Tenant::default(), Tenant::default()]);
    let costs = Served::cost_of(&served);
    assert!(costs[0] <= costs[1], "{costs:?}");
}

#[test]
fn many_small_requests_get_no_more_than_few_large_ones() {
    let small = Tenant {
        in_flight: 40 * SLOTS as usize,
        prompt_tokens: 8,
        output_tokens: 4,
        ..Tenant::default()
    };
    let nearly_free = Tenant {
        cached_tokens: 199,
        output_tokens: 1,
        ..Tenant::default()
    };
    let served = run(vec![small, nearly_free, Tenant::default()]);
    let costs = Served::cost_of(&served);
    assert!(costs[0] <= costs[2] * 1.03, "{served:?}");
    assert!(costs[1] <= costs[2] * 1.03, "{served:?}");
    // A request that costs next to nothing does not take all slots either.
    assert!(served[2].requests * 60 > served[1].requests, "{served:?}");
}

#[test]
fn drafts_that_were_verified_in_vain_count_and_those_that_held_do_not() {
    let nonsense = Tenant {
        rejected_per_token: 6,
        ..Tenant::default()
    };
    let served = run(vec![nonsense, Tenant::default()]);
    // A token with its part of the prompt costs 4.08, and 10.08 with six rejected drafts.
    let ratio = served[1].output_tokens as f64 / served[0].output_tokens as f64;
    assert!((ratio / (10.08 / 4.08) - 1.0).abs() < 0.05, "{served:?}");
}

#[test]
fn who_calls_everything_interactive_is_first_until_its_lead_is_used_up() {
    let rollouts = Tenant {
        class: RequestClass::Rollout,
        ..Tenant::default()
    };
    let run = |interactive_lead_tokens| {
        let config = SchedulerConfig {
            interactive_lead_tokens,
            rollout_share: 0.0,
            ..SchedulerConfig::default()
        };
        let tenants = vec![Tenant::default(), rollouts.clone()];
        Served::cost_of(&Market::new(config, tenants).run(RUN_MS))
    };
    // Without a bound rollouts would not run at all.
    let costs = run(u64::MAX);
    assert!(costs[1] < costs[0] * 0.01, "{costs:?}");
    let lead = 100_000.0;
    let costs = run(lead as u64);
    let ahead = costs[0] - costs[1];
    assert!((ahead / lead - 1.0).abs() < 0.2, "{costs:?}");
    let costs = run(0);
    assert!(jain(&costs) > 0.999, "{costs:?}");
    // Below its share, an interactive tenant waits for nobody's rollouts.
    let calm = Tenant {
        in_flight: 2,
        ..Tenant::default()
    };
    let config = SchedulerConfig {
        interactive_lead_tokens: 0,
        ..SchedulerConfig::default()
    };
    let mut market = Market::new(config, vec![calm, rollouts]);
    let served = market.run(RUN_MS);
    let alone =
        Market::new(SchedulerConfig::default(), vec![market.tenants[0].clone()]).run(RUN_MS);
    let [with, without] = [served[0].requests, alone[0].requests];
    assert!(with as f64 > without as f64 * 0.9, "{with} of {without}");
}
