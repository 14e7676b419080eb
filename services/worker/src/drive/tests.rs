//! Requests in front of an engine that is made up: what it says is a script, and every second of it is counted.

use std::time::{Duration, Instant};

use refrain_protocol::chunk::{ChunkBudget, ChunkRequest, Speculation, Urgency};
use refrain_protocol::engine::Sampling;
use refrain_protocol::{LeaseId, Namespace, RequestId, SignedNamespace};
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;
use refrain_speculation::{DraftNode, DraftTree, Origin, Scope, Source};

use super::*;
use crate::engine::{Verified, VerifyAbilities};

/// What things take, seconds.
#[derive(Clone, Copy)]
struct Prices {
    token: f64,
    /// Of a stream before its first token.
    silence: f64,
    call: f64,
    per_node: f64,
    /// What others that stream beside say per second. While a call is made they say nothing.
    others_per_s: f64,
}

const QUICK: Prices = Prices {
    token: 0.010,
    silence: 0.015,
    call: 0.020,
    per_node: 0.001,
    others_per_s: 0.0,
};

struct World {
    drive: SharedDrive,
    prices: Prices,
    now: Instant,
    began: Instant,
    /// Fractions of tokens that others said.
    others: f64,
    calls: Vec<(VerifyWay, usize)>,
    /// Leaves all places of chains open.
    is_blind: bool,
    able: VerifyAbilities,
}

impl World {
    fn new(prices: Prices, change: impl FnOnce(&mut WorkerConfig)) -> Self {
        let mut config = WorkerConfig::default();
        change(&mut config);
        let metrics = WorkerMetrics::new(&Metrics::new().unwrap(), "fake").unwrap();
        let now = Instant::now();
        World {
            drive: SharedDrive::new(&config, metrics),
            prices,
            now,
            began: now,
            others: 0.0,
            calls: Vec::new(),
            is_blind: false,
            able: VerifyAbilities {
                chain: false,
                fan_out: true,
            },
        }
    }

    fn passes(&mut self, seconds: f64, others_speak: bool) {
        self.now += Duration::from_secs_f64(seconds);
        if others_speak {
            self.others += seconds * self.prices.others_per_s;
            self.drive.lock().said(self.others as usize);
            self.others = self.others.fract();
        }
    }

    fn seconds(&self) -> f64 {
        (self.now - self.began).as_secs_f64()
    }

    /// Has the engine say `script`, of which `memory` is what is remembered, place by place. Returns what was said.
    fn request(&mut self, asks: &ChunkRequest, script: &[u32], memory: &[u32]) -> Vec<u32> {
        let namespace = refrain_protocol::NamespaceId(7);
        let mut driving = Driving::new(self.drive.clone(), &self.able, namespace, asks);
        let mut said: Vec<u32> = Vec::new();
        let mut is_restart = false;
        'streams: while said.len() < script.len() {
            driving.stream_began(is_restart, self.now);
            self.passes(self.prices.silence, true);
            while said.len() < script.len() {
                self.passes(self.prices.token, true);
                let token = script[said.len()];
                said.push(token);
                driving.heard(&[token], self.now);
                let mut next = self.call(&mut driving, &said, memory, true);
                let drives = next.is_some();
                while let Some(call) = next {
                    self.carry_out(&mut driving, call, script, &mut said);
                    next = self.call(&mut driving, &said, memory, false);
                }
                if drives {
                    is_restart = true;
                    continue 'streams;
                }
                driving.listens(self.now);
            }
        }
        driving.end(self.now);
        said
    }

    fn call(
        &self,
        driving: &mut Driving,
        said: &[u32],
        memory: &[u32],
        is_streaming: bool,
    ) -> Option<Box<Call>> {
        let params = driving.params()?;
        let draft = memory.get(said.len()..).filter(|draft| !draft.is_empty())?;
        let draft = &draft[..draft.len().min(params.max_spec_tokens)];
        let ends_with = (said.len() + draft.len() == memory.len()).then(|| draft.len() as u32 - 1);
        let found = (chain(draft, said.len() as u32), ends_with);
        driving.call(found, 100 + said.len() as u32, is_streaming, self.now)
    }

    fn carry_out(
        &mut self,
        driving: &mut Driving,
        call: Box<Call>,
        script: &[u32],
        said: &mut Vec<u32>,
    ) {
        let nodes = call.verified.tree.len();
        assert_eq!(call.draft().tokens.len(), nodes);
        self.calls.push((call.way, nodes));
        let seconds = self.prices.call + self.prices.per_node * nodes as f64;
        self.passes(seconds, false);
        let drawn = (0..=nodes).map(|at| script.get(said.len() + at).copied());
        let verified = match call.way == VerifyWay::Chain && self.is_blind {
            true => Verified::default(),
            false => Verified {
                drawn: drawn.collect(),
            },
        };
        let answer = Some(&verified);
        if let Some(judged) = driving.answered(call, answer, seconds) {
            said.extend(&judged.walk.emitted);
            driving.said(&judged.walk.emitted);
        }
    }
}

pub(super) fn chain(tokens: &[u32], match_len: u32) -> Candidate {
    let nodes = tokens.iter().enumerate().map(|(at, token)| DraftNode {
        token: *token,
        parent: at.checked_sub(1).map(|parent| parent as u32),
        probability: 0.5,
        count: 1,
        origin: Origin {
            source: Source::Suffix,
            scope: Scope::Tenant,
            place: None,
        },
    });
    let mut tree = DraftTree::new();
    for node in nodes {
        tree.push(node).unwrap();
    }
    Candidate {
        score: tree.score(),
        tree,
        match_len,
        source: Source::Suffix,
        scope: Scope::Tenant,
    }
}

fn asks() -> ChunkRequest {
    let namespace = Namespace {
        tenant: "acme".into(),
        model: "fake".into(),
        tokenizer: "fake".into(),
    };
    let namespace: SignedNamespace = NamespaceSigner::new(&MeshConfig::generate().unwrap())
        .unwrap()
        .sign(namespace);
    ChunkRequest {
        alive_within_ms: None,
        prediction: Vec::new(),
        transferred: false,
        lease: LeaseId(1),
        epoch: 1,
        request: RequestId(1),
        namespace,
        session: None,
        group: None,
        tokens: vec![1],
        prompt_len: 1,
        sampling: Sampling::default(),
        max_new_tokens: 1000,
        chunk_tokens: None,
        speculation: Speculation::Auto,
        urgency: Urgency::default(),
        budget: ChunkBudget::default(),
    }
}

/// A text of so many tokens.
fn script(len: u32) -> Vec<u32> {
    (0..len).collect()
}

/// What is remembered of it: every `period`th token is another one there.
fn slipping(len: u32, period: u32) -> Vec<u32> {
    let slips = |at: u32| at % period == period - 1;
    (0..len)
        .map(|at| if slips(at) { 5000 + at } else { at })
        .collect()
}

const REQUESTS: usize = 20;
const LEN: u32 = 200;

/// Seconds of so many requests without drive mode.
fn plainly(prices: Prices) -> f64 {
    REQUESTS as f64 * (prices.silence + f64::from(LEN) * prices.token)
}

fn run(world: &mut World, memory: &[u32]) {
    for _ in 0..REQUESTS {
        let said = world.request(&asks(), &script(LEN), memory);
        assert_eq!(said, script(LEN));
    }
}

#[test]
fn what_is_remembered_is_said_in_a_few_calls() {
    let mut world = World::new(QUICK, |_| {});
    run(&mut world, &script(LEN));
    assert!(
        world.seconds() < 0.4 * plainly(QUICK),
        "{}",
        world.seconds()
    );
    // Calls with all that they may carry, once their price is known.
    let (_, nodes) = world.calls[world.calls.len() / 2];
    assert_eq!(nodes, 64);
}

#[test]
fn what_is_remembered_wrongly_costs_little_and_the_rest_still_gains() {
    // A call pays for some twenty tokens: every thirtieth is wrong, then every fourth.
    let mut world = World::new(QUICK, |_| {});
    run(&mut world, &slipping(LEN, 30));
    assert!(
        world.seconds() < 0.8 * plainly(QUICK),
        "{}",
        world.seconds()
    );
    let mut world = World::new(QUICK, |_| {});
    run(&mut world, &slipping(LEN, 4));
    assert!(
        world.seconds() < 1.05 * plainly(QUICK),
        "{}",
        world.seconds()
    );
}

#[test]
fn calls_that_cost_more_than_they_bring_are_left_out_but_for_rare_probes() {
    for prices in [
        Prices { call: 0.3, ..QUICK },
        Prices {
            per_node: 0.012,
            ..QUICK
        },
    ] {
        let mut world = World::new(prices, |config| config.engine.drive_tokens_max = 16);
        for _ in 0..4 {
            run(&mut world, &script(LEN));
        }
        let share = world.seconds() / (4.0 * plainly(prices));
        assert!(share < 1.03, "{share} with {} calls", world.calls.len());
        assert!((1..=8).contains(&world.calls.len()), "{:?}", world.calls);
        // It goes on asking.
        let before = world.calls.len();
        for _ in 0..10 {
            run(&mut world, &script(LEN));
        }
        assert!(world.calls.len() > before);
        world.prices = QUICK;
        for _ in 0..10 {
            run(&mut world, &script(LEN));
        }
        let from = world.now;
        run(&mut world, &script(LEN));
        let share = (world.now - from).as_secs_f64() / plainly(QUICK);
        assert!(
            share < 0.5,
            "{share} of plain decoding after calls became cheap"
        );
    }
}

#[test]
fn chains_that_say_nothing_are_left_for_fan_outs() {
    let mut world = World::new(QUICK, |_| {});
    world.able.chain = true;
    world.is_blind = true;
    run(&mut world, &script(LEN));
    let chains = world.calls.iter().filter(|call| call.0 == VerifyWay::Chain);
    let chains = chains.count();
    assert!(
        (1..=8).contains(&chains),
        "{chains} of {}",
        world.calls.len()
    );
    assert!(
        world.seconds() < 0.5 * plainly(QUICK),
        "{}",
        world.seconds()
    );
}

#[test]
fn the_guard_sees_what_calls_cost_others() {
    // Alone, the request gains a third. Ten others wait for its calls.
    let prices = Prices {
        call: 0.25,
        others_per_s: 1000.0,
        ..QUICK
    };
    let goes = |change: fn(&mut WorkerConfig)| {
        let mut world = World::new(prices, change);
        for _ in 0..10 {
            run(&mut world, &script(LEN));
        }
        let before = world.calls.len();
        for _ in 0..10 {
            run(&mut world, &script(LEN));
        }
        world.calls.len() - before
    };
    let unguarded = goes(|config| config.speculation.gain_min = 0.0);
    let guarded = goes(|_| {});
    assert!(unguarded > 10 * REQUESTS, "{unguarded}");
    assert!(guarded < unguarded / 10, "{guarded} of {unguarded}");
}

#[test]
fn requests_that_cannot_be_driven_are_only_listened_to() {
    type Change = fn(&mut ChunkRequest);
    let cases: [(Change, bool); 6] = [
        (|_| {}, true),
        (|asks| asks.speculation = Speculation::Suffix, true),
        (|asks| asks.speculation = Speculation::Off, false),
        (|asks| asks.sampling.temperature = 0.5, false),
        (|asks| asks.sampling.top_logprobs = Some(1), false),
        (|asks| asks.sampling.logit_bias = vec![(1, 1.0)], true),
    ];
    for (at, (change, drives)) in cases.into_iter().enumerate() {
        let mut asks = asks();
        change(&mut asks);
        let mut world = World::new(QUICK, |_| {});
        for _ in 0..4 {
            assert_eq!(
                world.request(&asks, &script(LEN), &script(LEN)),
                script(LEN)
            );
        }
        assert_eq!(!world.calls.is_empty(), drives, "case {at}");
    }
    let mut world = World::new(QUICK, |config| config.engine.drive_sampled = true);
    let mut sampled = asks();
    sampled.sampling.temperature = 0.5;
    for _ in 0..4 {
        world.request(&sampled, &script(LEN), &script(LEN));
    }
    assert!(!world.calls.is_empty());
}

#[test]
fn where_streams_end_by_themselves_no_draft_is_accepted() {
    let world = World::new(QUICK, |config| config.speculation.gain_min = 0.0);
    let both = [7, 8];
    let accepted = |stop_token_ids: &[u32]| {
        let mut asks = asks();
        asks.sampling.stop_token_ids = stop_token_ids.to_vec();
        let namespace = refrain_protocol::NamespaceId(7);
        let mut driving = Driving::new(world.drive.clone(), &world.able, namespace, &asks);
        let call = Call {
            way: VerifyWay::Chain,
            verified: chain(&both, 5),
            found: chain(&both, 5),
            expected: 1.0,
            batch: 1,
            text_tokens: 100,
            is_probe: false,
        };
        let verified = Verified {
            drawn: vec![Some(7), Some(8), Some(9)],
        };
        let judged = driving.answered(Box::new(call), Some(&verified), 0.02);
        judged.map_or(Vec::new(), |judged| judged.walk.emitted)
    };
    let ends_with = |last: u32| {
        let namespace = refrain_protocol::NamespaceId(7);
        let mut driving = Driving::new(world.drive.clone(), &world.able, namespace, &asks());
        driving.stream_began(false, world.now);
        driving.heard(&[1, last], world.now);
        driving.stream_ended();
        // A stream that says nothing ends at nothing.
        driving.stream_began(true, world.now);
        driving.stream_ended();
    };
    assert_eq!(accepted(&[]), [7, 8, 9]);
    ends_with(8);
    assert_eq!(accepted(&[]), [7]);
    assert_eq!(accepted(&[8]), [7, 8, 9]);
    ends_with(7);
    assert!(accepted(&[]).is_empty());
}

#[test]
fn no_call_carries_more_tokens_than_it_may() {
    type Case = (VerifyWay, u32, u64, Option<u32>);
    let cases: [Case; 7] = [
        (VerifyWay::FanOut, 100, 1_000_000, Some(64)),
        (VerifyWay::FanOut, 100, 1_000, Some(8)),
        (VerifyWay::FanOut, 499, 1_000, Some(1)),
        (VerifyWay::FanOut, 500, 1_000, None),
        (VerifyWay::Chain, 100, 1_000, Some(64)),
        (VerifyWay::Chain, 990, 1_000, Some(10)),
        (VerifyWay::Chain, u32::MAX, 1_000, None),
    ];
    for (way, text, most, fit) in cases {
        assert_eq!(nodes_that_fit(way, text, 64, most), fit, "{way:?} {text}");
    }
    // Texts of 102 to 300 tokens: the longer ones have room for fewer nodes.
    let mut world = World::new(QUICK, |config| {
        config.engine.drive_prompt_tokens_max = 6_000
    });
    run(&mut world, &script(LEN));
    assert!(!world.calls.is_empty());
    assert!(world.calls.iter().all(|(_, nodes)| *nodes <= 41));
    let mut world = World::new(QUICK, |config| config.engine.drive_prompt_tokens_max = 200);
    run(&mut world, &script(LEN));
    assert_eq!(world.calls, []);
}

#[test]
fn large_batches_are_left_alone() {
    let mut world = World::new(QUICK, |config| config.speculation.off_above_batch = 1);
    world.drive.lock().enter();
    run(&mut world, &script(LEN));
    assert_eq!(world.calls, []);
    world.drive.lock().leave();
    run(&mut world, &script(LEN));
    assert!(!world.calls.is_empty());
}
