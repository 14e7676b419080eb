//! What deciding a step of a batch takes: 64 proposals over an index of millions of tokens, the chances of what was
//! found, the division of the step, and learning from what came of it.
//!
//! ```text
//! cargo bench -p refrain-speculation --bench step
//! ```
//!
//! Every request looks into its own text and into its namespace, three segments and a live part, with the settings that
//! a worker has by default, and may have the head's draft instead. A round is one step of a batch that was not met before.
//! Proposals are made one after the other, and on more threads, which wait for the step as those of a worker do.

mod text;

use std::collections::BTreeSet;
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rayon::{ThreadPool, ThreadPoolBuilder};
use refrain_speculation::{
    BudgetRequest, BudgetStep, Calibration, Candidate, Expansion, HeadOffer, Lookup, ProposeParams,
    Scope, Source, StepCost, divide, propose,
};
use refrain_suffix_index::{DocumentKey, Index, IndexConfig, SegmentBuilder, Token};
use text::{Corpus, Random};

const SEALED_TOKENS: usize = 4_000_000;
const SEGMENTS: usize = 3;
const BATCH: usize = 64;
const ROUNDS: usize = 64;
/// Of which so many come first, to fill caches and to learn chances from.
const ROUNDS_BEFORE: usize = 8;
/// Text of a request that a search may read.
const CONTEXT_TOKENS: usize = 64;
const STEP_MS: f64 = 11.0;
/// What all of it may take of that, percent.
const SHARE_MAX: f64 = 3.0;
/// Requests that a thread takes at a time.
const PART: usize = 4;

const OWN: DocumentKey = DocumentKey(0);

/// A request in the middle of its output.
struct Request {
    own: Index,
    key: DocumentKey,
    context: Vec<Token>,
    /// What it goes on with.
    next: Vec<Token>,
}

impl Request {
    /// Its output is a live document of the namespace.
    fn begin(corpus: &mut Corpus, random: &mut Random, key: u128, namespace: &mut Index) -> Self {
        let (prompt, mut output) = (corpus.document(), corpus.document());
        let next = output.split_off(1 + random.below(output.len() as u64 - 1) as usize);
        let mut own = Index::new(IndexConfig::default());
        own.open(OWN, &[]).expect("a new key");
        own.append(OWN, &prompt).expect("room");
        own.append(OWN, &output).expect("room");
        let key = DocumentKey(key);
        let left = &prompt[prompt.len().saturating_sub(16)..];
        namespace.open(key, left).expect("a new key");
        namespace.append(key, &output).expect("room");
        let mut context = [prompt, output].concat();
        Request {
            own,
            key,
            context: context.split_off(context.len().saturating_sub(CONTEXT_TOKENS)),
            next,
        }
    }

    /// From both, or from one of them alone.
    fn propose_from(
        &self,
        scopes: &[Scope],
        namespace: &Index,
        params: &ProposeParams,
    ) -> Option<Candidate> {
        let lookup = |scope, index, cursor| Lookup {
            source: Source::Suffix,
            scope,
            index,
            cursor,
            context: &self.context,
        };
        let lookups = [
            lookup(Scope::Request, &self.own, self.own.tip(OWN)?),
            lookup(Scope::Tenant, namespace, namespace.tip(self.key)?),
        ];
        let lookups = lookups.map(|lookup| scopes.contains(&lookup.scope).then_some(lookup));
        let lookups: Vec<Lookup<'_>> = lookups.into_iter().flatten().collect();
        propose(&lookups, params, params.max_spec_tokens)
    }

    fn propose(&self, namespace: &Index, params: &ProposeParams) -> Option<Candidate> {
        self.propose_from(&Scope::ALL, namespace, params)
    }
}

fn main() {
    let (mut corpus, mut random) = (Corpus::new(), Random(7));
    let mut namespace = Index::new(IndexConfig::default());
    let mut segments: Vec<SegmentBuilder> = (0..SEGMENTS).map(|_| SegmentBuilder::new()).collect();
    let documents = corpus.documents(SEALED_TOKENS);
    for (key, document) in (0u128..).zip(&documents) {
        segments[key as usize % SEGMENTS].add(DocumentKey(key), [], document.iter().copied());
    }
    for segment in segments {
        namespace.mount(Arc::new(segment.build().expect("distinct keys")), []);
    }
    let keys = documents.len() as u128..;
    let requests: Vec<Request> = keys
        .take(BATCH * ROUNDS)
        .map(|key| Request::begin(&mut corpus, &mut random, key, &mut namespace))
        .collect();
    let batches: Vec<&[Request]> = requests.chunks(BATCH).collect();
    println!(
        "{BATCH} requests a step, {} tokens in {SEGMENTS} segments and {} live ones; median of {} steps, us, and its share of {STEP_MS} ms; all of it may take {SHARE_MAX} %",
        namespace.tokens() - namespace.live_tokens(),
        namespace.live_tokens(),
        ROUNDS - ROUNDS_BEFORE
    );
    let rest_us = decide(&batches, &namespace);
    let params = params();
    for (name, scope) in [("own text", Scope::Request), ("namespace", Scope::Tenant)] {
        let times = batches.iter().map(|batch| {
            let propose = |request: &Request| request.propose_from(&[scope], &namespace, &params);
            timed(|| batch.iter().map(propose).collect::<Vec<_>>()).1
        });
        row(&format!("proposals, {name} alone"), times.collect());
    }
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let threads: BTreeSet<usize> = [2, 4, cores]
        .into_iter()
        .filter(|&threads| threads <= cores)
        .collect();
    for threads in threads.into_iter().filter(|&threads| threads > 1) {
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads - 1)
            .build()
            .expect("threads");
        let found = |batch| on_threads(&pool, batch, &namespace, &params);
        let times = batches.iter().map(|batch| timed(|| found(batch)).1);
        let us = row(&format!("proposals on {threads} threads"), times.collect());
        summary(&format!("all of it on {threads}"), us + rest_us);
    }
}

/// All decisions of the batches, and how long each kind takes; returns what those take that follow proposals, us.
fn decide(batches: &[&[Request]], namespace: &Index) -> f64 {
    let (params, mut calibration, cost) = (params(), Calibration::new(), step_cost());
    let mut times: [Vec<f64>; 5] = Default::default();
    let mut drafted = 0;
    for batch in batches {
        let (found, proposing) = timed(|| -> Vec<Option<Candidate>> {
            let each = batch.iter();
            each.map(|request| request.propose(namespace, &params))
                .collect()
        });
        let (chances, expecting) = timed(|| -> Vec<Vec<f32>> {
            let each = found.iter();
            each.map(|found| {
                found
                    .as_ref()
                    .map_or_else(Vec::new, |found| calibration.expect(found))
            })
            .collect()
        });
        let (_, dividing) = timed(|| {
            let requests: Vec<BudgetRequest<'_>> = chances
                .iter()
                .map(|tree| BudgetRequest {
                    beside: &[],
                    weight: 1.0,
                    due_tokens: 0.0,
                    tree,
                    head: Some(HEAD),
                })
                .collect();
            let step = BudgetStep {
                tokens: BATCH as u32,
                slots_max: 4096,
                rate: None,
            };
            black_box(divide(
                &requests,
                &step,
                cost.at_kv(50_000),
                |requests, depth| 1e-5 * f64::from(requests * depth),
            ))
        });
        let ((), learning) = timed(|| {
            for (found, request) in found.iter().zip(*batch) {
                if let Some(found) = found {
                    calibration.observe(found, &request.next);
                }
            }
        });
        drafted += found
            .iter()
            .flatten()
            .map(|found| found.tree.len())
            .sum::<usize>();
        let all = proposing + expecting + dividing + learning;
        for (times, time) in times
            .iter_mut()
            .zip([proposing, expecting, dividing, learning, all])
        {
            times.push(time);
        }
    }
    println!(
        "{:.1} tokens a draft",
        drafted as f64 / (batches.len() * BATCH) as f64
    );
    let names = ["proposals", "chances", "division", "learning", "all of it"];
    let us: Vec<f64> = names
        .iter()
        .zip(times)
        .map(|(name, times)| row(name, times))
        .collect();
    us[1..4].iter().sum()
}

/// As a worker's by default: trees of at most 32 tokens, none less likely than 0.1.
fn params() -> ProposeParams {
    ProposeParams {
        expansion: Expansion::Tree,
        max_spec_tokens: 32,
        min_token_prob: 0.1,
        ..ProposeParams::default()
    }
}

const HEAD: HeadOffer = HeadOffer {
    depth: 4,
    slots: 4.0,
    slots_max: 4,
    gain: 1.5,
    own_seconds: 0.0,
};

/// What was seen of an engine that takes 8 ms and more for each 64 tokens.
fn step_cost() -> StepCost {
    let mut cost = StepCost::new();
    for step in 0..2000u32 {
        let tokens = 1 + step * 31 % 2048;
        let seconds = 0.008 + 1e-6 * f64::from(tokens.next_multiple_of(64));
        cost.observe(tokens, 50_000, seconds);
    }
    cost
}

/// The caller's thread takes a part as well.
fn on_threads(
    pool: &ThreadPool,
    batch: &[Request],
    namespace: &Index,
    params: &ProposeParams,
) -> Vec<Option<Candidate>> {
    let parts = batch.chunks(PART);
    let found: Mutex<Vec<(usize, Vec<Option<Candidate>>)>> = Mutex::default();
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(part) = parts.clone().nth(at) else {
                break;
            };
            let part = part
                .iter()
                .map(|request| request.propose(namespace, params));
            let part = part.collect();
            found.lock().expect("no panic").push((at, part));
        }
    };
    pool.in_place_scope(|scope| {
        (0..pool.current_num_threads()).for_each(|_| scope.spawn(|_| work()));
        work();
    });
    let mut found = found.into_inner().expect("no panic");
    found.sort_unstable_by_key(|(at, _)| *at);
    found.into_iter().flat_map(|(_, part)| part).collect()
}

/// What was done, and microseconds.
fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let done = black_box(work());
    (done, start.elapsed().as_secs_f64() * 1e6)
}

/// Prints the median, and returns it.
fn row(name: &str, times: Vec<f64>) -> f64 {
    let mut times = times[ROUNDS_BEFORE..].to_vec();
    times.sort_by(f64::total_cmp);
    let us = times[times.len() / 2];
    summary(name, us);
    us
}

fn summary(name: &str, us: f64) {
    let share = us / STEP_MS / 10.0;
    println!("{name:<28} {us:8.1} {share:6.2} %");
}
