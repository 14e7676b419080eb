//! Drive mode against a simulated engine: it follows a script, and its time is simulated.

use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_protocol::chunk::{ChunkBudget, ChunkRequest, DraftRules, Speculation, Urgency};
use refrain_protocol::engine::Sampling;
use refrain_protocol::{LeaseId, Namespace, RequestId, SignedNamespace};
use refrain_service_kit::mesh::{MeshConfig, NamespaceSigner};
use refrain_service_kit::telemetry::Metrics;
use refrain_speculation::draft::{
    Candidate, DraftNode, Expansion, Origin, ProposeParams, Scope, Setting, Source,
};

use super::call::nodes_that_fit;
use super::*;
use crate::config::{ExpansionChoice, WorkerConfig};
use crate::engine::{DraftVerdict, VerifyAbilities, VerifyMethod};
use crate::metrics::WorkerMetrics;

/// Times of the simulated engine, seconds.
#[derive(Clone, Copy)]
struct Prices {
    token: f64,
    /// Silence of a stream before its first token.
    silence: f64,
    call: f64,
    per_node: f64,
    /// Tokens per second of all other streams. They stop during a call.
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
    /// Fraction of the next token of the other streams.
    others: f64,
    calls: Vec<(VerifyMethod, usize)>,
    /// The engine leaves all positions of chains open.
    is_blind: bool,
}

impl World {
    fn new(prices: Prices, change: impl FnOnce(&mut WorkerConfig)) -> Self {
        let able = VerifyAbilities {
            chain: false,
            fan_out: true,
        };
        World::of_abilities(prices, able, change)
    }

    fn of_abilities(
        prices: Prices,
        able: VerifyAbilities,
        change: impl FnOnce(&mut WorkerConfig),
    ) -> Self {
        let mut config = WorkerConfig::default();
        change(&mut config);
        let metrics = Metrics::new().unwrap();
        let metrics = WorkerMetrics::new(&metrics, "fake", config.speculation.gain).unwrap();
        let now = Instant::now();
        World {
            drive: SharedDrive::new(&config, able, Arc::new(metrics)),
            prices,
            now,
            began: now,
            others: 0.0,
            calls: Vec::new(),
            is_blind: false,
        }
    }

    fn passes(&mut self, seconds: f64, others_speak: bool) {
        self.now += Duration::from_secs_f64(seconds);
        if others_speak {
            self.others += seconds * self.prices.others_per_s;
            self.drive.lock().record_tokens(self.others as usize);
            self.others = self.others.fract();
        }
    }

    fn seconds(&self) -> f64 {
        (self.now - self.began).as_secs_f64()
    }

    /// Lets the engine generate `script`; `memory` is the text that drafts come from. Returns the output.
    fn request(&mut self, asks: &ChunkRequest, script: &[u32], memory: &[u32]) -> Vec<u32> {
        let namespace = refrain_protocol::NamespaceId(7);
        let mut chunk = ChunkDrive::new(self.drive.clone(), namespace, asks);
        let mut output: Vec<u32> = Vec::new();
        let mut is_restart = false;
        'streams: while output.len() < script.len() {
            chunk.stream_opened(is_restart, self.now);
            self.passes(self.prices.silence, true);
            while output.len() < script.len() {
                self.passes(self.prices.token, true);
                let token = script[output.len()];
                output.push(token);
                chunk.stream_sent(&[token], self.now);
                let mut next = self.call(&mut chunk, &output, memory, true);
                let drives = next.is_some();
                while let Some(call) = next {
                    self.carry_out(&mut chunk, call, script, &mut output);
                    next = self.call(&mut chunk, &output, memory, false);
                }
                if drives {
                    is_restart = true;
                    continue 'streams;
                }
                chunk.waits_for_stream(self.now);
            }
        }
        chunk.end(self.now);
        output
    }

    fn call(
        &self,
        chunk: &mut ChunkDrive,
        output: &[u32],
        memory: &[u32],
        is_streaming: bool,
    ) -> Option<Box<VerifyCall>> {
        let params = chunk.params(&self.drive.rules)?;
        let draft = memory
            .get(output.len()..)
            .filter(|draft| !draft.is_empty())?;
        let draft = &draft[..draft.len().min(params.max_spec_tokens)];
        let ends_with =
            (output.len() + draft.len() == memory.len()).then(|| draft.len() as u32 - 1);
        let found = (chain(draft, output.len() as u32), ends_with);
        chunk.decide(found, 100 + output.len() as u32, is_streaming, self.now)
    }

    fn carry_out(
        &mut self,
        chunk: &mut ChunkDrive,
        call: Box<VerifyCall>,
        script: &[u32],
        output: &mut Vec<u32>,
    ) {
        let nodes = call.verified.tree.len();
        assert_eq!(call.draft().tokens.len(), nodes);
        self.calls.push((call.method, nodes));
        let seconds = self.prices.call + self.prices.per_node * nodes as f64;
        self.passes(seconds, false);
        let next_tokens = (0..=nodes).map(|at| script.get(output.len() + at).copied());
        let verdict = match call.method == VerifyMethod::Chain && self.is_blind {
            true => DraftVerdict::default(),
            false => DraftVerdict {
                next_tokens: next_tokens.collect(),
            },
        };
        let duration = Duration::from_secs_f64(seconds);
        if let Some((_, walk)) = chunk.call_ended(call, Some(&verdict), duration) {
            output.extend(&walk.emitted);
            chunk.call_emitted(&walk.emitted);
        }
    }
}

pub(super) fn chain(tokens: &[u32], match_len: u32) -> Candidate {
    let nodes = tokens.iter().enumerate().map(|(at, token)| DraftNode {
        token: *token,
        parent: at.checked_sub(1).map(|parent| parent as u32),
        probability: 0.5,
        count: 1,
        match_len,
        witnesses: None,
        origin: Origin {
            source: Source::Suffix,
            scope: Scope::Tenant,
            place: None,
        },
    });
    Candidate::new(nodes.collect(), match_len, Source::Suffix, Scope::Tenant).unwrap()
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
        resumes: None,
        alive_within_ms: None,
        expected_tokens: None,
        prediction: Vec::new(),
        transferred: false,
        drafts: DraftRules::default(),
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

/// A text of `len` tokens.
fn script(len: u32) -> Vec<u32> {
    (0..len).collect()
}

/// The remembered text: it differs from the script at every `period`th token.
fn slipping(len: u32, period: u32) -> Vec<u32> {
    let slips = |at: u32| at % period == period - 1;
    (0..len)
        .map(|at| if slips(at) { 5000 + at } else { at })
        .collect()
}

const REQUESTS: usize = 20;
const LEN: u32 = 200;

/// Duration of all requests without drive mode, seconds.
fn plainly(prices: Prices) -> f64 {
    REQUESTS as f64 * (prices.silence + f64::from(LEN) * prices.token)
}

fn run(world: &mut World, memory: &[u32]) {
    for _ in 0..REQUESTS {
        let output = world.request(&asks(), &script(LEN), memory);
        assert_eq!(output, script(LEN));
    }
}

#[test]
fn a_remembered_text_takes_a_few_calls() {
    let mut world = World::new(QUICK, |_| {});
    run(&mut world, &script(LEN));
    assert!(
        world.seconds() < 0.4 * plainly(QUICK),
        "{}",
        world.seconds()
    );
    // Once their price is known, calls carry as many tokens as they may.
    let (_, nodes) = world.calls[world.calls.len() / 2];
    assert_eq!(nodes, 64);
}

#[test]
fn drafts_follow_the_configured_rules_and_the_number_of_requests() {
    let params = |requests: usize, change: fn(&mut WorkerConfig)| {
        let world = World::new(QUICK, change);
        let namespace = refrain_protocol::NamespaceId(7);
        let chunk = || ChunkDrive::new(world.drive.clone(), namespace, &asks());
        let chunks: Vec<ChunkDrive> = (0..requests).map(|_| chunk()).collect();
        chunks[0]
            .params(&world.drive.rules)
            .expect("the request is driven")
    };
    let reach = |of: &ProposeParams| (of.alpha, of.min_token_prob, of.max_spec_tokens);
    // A match of one token allows as much as a call carries. Tokens cost more beside more requests.
    let alone = params(1, |_| {});
    assert_eq!((alone.expansion, alone.offset), (Expansion::Linear, 0.0));
    assert_eq!(reach(&alone), (64.0, 0.0, 64));
    let beside = params(16, |_| {});
    assert_eq!(reach(&beside), (64.0, 0.0, 64));
    assert_eq!(
        (alone.price, beside.price),
        (Some(1.0 / 257.0), Some(16.0 / 272.0))
    );
    let set = |config: &mut WorkerConfig| {
        let speculation = &mut config.speculation;
        speculation.alpha = Setting::Fixed(2.0);
        speculation.min_token_prob = Setting::Fixed(0.3);
        speculation.max_spec_tokens = 9;
        speculation.match_tokens_max = 20;
        speculation.expansion = ExpansionChoice::Paths(3);
    };
    for requests in [1, 16] {
        let params = params(requests, set);
        assert_eq!((reach(&params), params.price), ((2.0, 0.3, 9), None));
        assert_eq!(
            (params.expansion, params.max_pattern),
            (Expansion::Linear, 20)
        );
    }
}

#[test]
fn wrong_memories_cost_little_and_right_ones_still_gain() {
    // A call pays from about twenty tokens on: first every thirtieth is wrong, then every fourth.
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
fn calls_that_lose_are_made_only_as_rare_probes() {
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
        // Probes go on.
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
fn chains_that_stay_open_give_way_to_fan_outs() {
    let both = VerifyAbilities {
        chain: true,
        fan_out: true,
    };
    let mut world = World::of_abilities(QUICK, both, |_| {});
    world.is_blind = true;
    run(&mut world, &script(LEN));
    let chains = world
        .calls
        .iter()
        .filter(|call| call.0 == VerifyMethod::Chain);
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
    // The request alone gains a third, but ten others wait for its calls.
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
fn requests_that_cannot_be_driven_keep_their_stream() {
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
fn no_draft_is_accepted_past_an_end_token_of_the_engine() {
    let world = World::new(QUICK, |config| config.speculation.gain_min = 0.0);
    let both = [7, 8];
    let accepted = |stop_token_ids: &[u32]| {
        let mut asks = asks();
        asks.sampling.stop_token_ids = stop_token_ids.to_vec();
        let namespace = refrain_protocol::NamespaceId(7);
        let mut chunk = ChunkDrive::new(world.drive.clone(), namespace, &asks);
        let call = VerifyCall {
            method: VerifyMethod::Chain,
            verified: chain(&both, 5),
            found: chain(&both, 5),
            expected: 1.0,
            batch: 1,
            text_tokens: 100,
            is_probe: false,
        };
        let verdict = DraftVerdict {
            next_tokens: vec![Some(7), Some(8), Some(9)],
        };
        let duration = Duration::from_millis(20);
        let judged = chunk.call_ended(Box::new(call), Some(&verdict), duration);
        judged.map_or(Vec::new(), |(_, walk)| walk.emitted)
    };
    let ends_with = |last: u32| {
        let namespace = refrain_protocol::NamespaceId(7);
        let mut chunk = ChunkDrive::new(world.drive.clone(), namespace, &asks());
        chunk.stream_opened(false, world.now);
        chunk.stream_sent(&[1, last], world.now);
        chunk.stream_ended();
        // A stream without tokens teaches no end token.
        chunk.stream_opened(true, world.now);
        chunk.stream_ended();
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
    type Case = (VerifyMethod, u32, u64, Option<u32>);
    let cases: [Case; 7] = [
        (VerifyMethod::FanOut, 100, 1_000_000, Some(64)),
        (VerifyMethod::FanOut, 100, 1_000, Some(8)),
        (VerifyMethod::FanOut, 499, 1_000, Some(1)),
        (VerifyMethod::FanOut, 500, 1_000, None),
        (VerifyMethod::Chain, 100, 1_000, Some(64)),
        (VerifyMethod::Chain, 990, 1_000, Some(10)),
        (VerifyMethod::Chain, u32::MAX, 1_000, None),
    ];
    for (method, text, most, fit) in cases {
        let nodes = nodes_that_fit(method, text, 64, most);
        assert_eq!(nodes, fit, "{method:?} {text}");
    }
    // Texts of 102 to 300 tokens: longer texts have room for fewer nodes.
    let mut world = World::new(QUICK, |config| {
        config.engine.drive_prompt_tokens_max = 6_000;
    });
    run(&mut world, &script(LEN));
    assert!(!world.calls.is_empty());
    assert!(world.calls.iter().all(|(_, nodes)| *nodes <= 41));
    let mut world = World::new(QUICK, |config| config.engine.drive_prompt_tokens_max = 200);
    run(&mut world, &script(LEN));
    assert_eq!(world.calls, []);
}

#[test]
fn large_batches_keep_their_streams() {
    let mut world = World::new(QUICK, |config| config.speculation.off_above_batch = 1);
    world.drive.lock().chunk_began();
    run(&mut world, &script(LEN));
    assert_eq!(world.calls, []);
    world.drive.lock().chunk_ended();
    run(&mut world, &script(LEN));
    assert!(!world.calls.is_empty());
}
