//! The time that it takes to decide a step of a batch: 64 proposals over an index of millions of tokens, their
//! acceptance probabilities, and the division of the step. The router learns from a step while the engine makes the
//! next one, so that time is printed apart.
//!
//! ```text
//! cargo bench -p refrain-speculation --bench step
//! ```
//!
//! Every request searches its own text and its namespace, which has three segments and a live part. The settings are
//! the defaults of a worker, and the request may have the head's draft instead. Every step has a new batch. The
//! threads wait for the step as those of a worker do; with one thread, none has to be woken.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a measurement that cannot run should stop"
)]

mod text;

use std::collections::BTreeSet;
use std::hint::black_box;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rayon::{ThreadPool, ThreadPoolBuilder};
use refrain_speculation::draft::{
    Candidate, Expansion, Lookup, ProposeParams, Scope, Source, propose,
};
use refrain_speculation::router::{
    Asked, Frame, HeadDraft, HeadParams, HeadState, Offer, Outcome, Policy, Priority, Prospect,
    Route, Router, RouterParams, Step, StepPart, Threshold, TrialParams,
};
use refrain_suffix_index::{DocumentKey, Index, IndexConfig, SegmentBuilder, Token};
use text::{Corpus, Random};

const SEALED_TOKENS: usize = 4_000_000;
const SEGMENTS: usize = 3;
const BATCH: usize = 64;
/// Steps for each number of threads.
const ROUNDS: usize = 48;
/// Steps before the measured ones, to fill caches and to learn acceptance probabilities.
const ROUNDS_BEFORE: usize = 8;
/// Text of a request that a search may read.
const CONTEXT_TOKENS: usize = 64;
const STEP_MS: f64 = 11.0;
/// Largest share of that time that the decision may take, in percent.
const SHARE_MAX: f64 = 3.0;
/// Most threads, as in a worker with the default configuration.
const THREADS_MAX: usize = 16;
/// Requests that a thread takes at a time.
const TAKEN_MAX: usize = 4;
/// Tokens of all texts of a batch.
const KV_TOKENS: u64 = 50_000;
/// The namespace of the requests.
const NAMESPACE: u8 = 0;

const OWN: DocumentKey = DocumentKey(0);

/// A request in the middle of its output.
struct Request {
    own: Index,
    key: DocumentKey,
    context: Vec<Token>,
    /// The next tokens of its output.
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
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads: BTreeSet<usize> = [1, 2, 4, 8, cores.min(THREADS_MAX)]
        .into_iter()
        .filter(|&threads| threads <= cores)
        .collect();
    let keys = documents.len() as u128..;
    let requests: Vec<Request> = keys
        .take(BATCH * ROUNDS * threads.len())
        .map(|key| Request::begin(&mut corpus, &mut random, key, &mut namespace))
        .collect();
    let batches: Vec<&[Request]> = requests.chunks(BATCH).collect();
    println!(
        "{BATCH} requests a step, {} tokens in {SEGMENTS} segments and {} live ones; median of {} steps, us, and its share of {STEP_MS} ms; all of it may take {SHARE_MAX} %",
        namespace.tokens() - namespace.live_tokens(),
        namespace.live_tokens(),
        ROUNDS - ROUNDS_BEFORE
    );
    let params = params();
    let mut desks: Vec<Desk<'_>> = threads
        .into_iter()
        .map(|threads| Desk::new(&namespace, &params, threads))
        .collect();
    // In turns, each with batches of its own: none finds in the caches what another has looked at.
    for round in batches.chunks(desks.len()) {
        for (desk, batch) in desks.iter_mut().zip(round) {
            desk.decide(batch);
        }
    }
    for desk in desks {
        desk.tell();
    }
    for (name, scope) in [("own text", Scope::Request), ("namespace", Scope::Tenant)] {
        let times = batches.iter().map(|batch| {
            let propose = |request: &Request| request.propose_from(&[scope], &namespace, &params);
            timed(|| batch.iter().map(propose).collect::<Vec<_>>()).1
        });
        row(&format!("{name} alone, on 1 thread"), times.collect());
    }
}

/// Where steps are decided, on so many threads.
struct Desk<'a> {
    namespace: &'a Index,
    params: &'a ProposeParams,
    threads: usize,
    helpers: Option<ThreadPool>,
    router: Router<u8>,
    /// Microseconds of each step: proposals, division, both, learning.
    times: [Vec<f64>; 4],
    drafted: usize,
}

impl<'a> Desk<'a> {
    fn new(namespace: &'a Index, params: &'a ProposeParams, threads: usize) -> Self {
        let helpers = ThreadPoolBuilder::new().num_threads(threads - 1).build();
        Desk {
            namespace,
            params,
            threads,
            helpers: helpers.ok().filter(|_| threads > 1),
            router: router(),
            times: Default::default(),
            drafted: 0,
        }
    }

    fn decide(&mut self, batch: &[Request]) {
        let (prospects, proposing) = timed(|| self.find(batch, &self.router));
        let drafts = prospects.iter().filter_map(|of| of.candidate.as_ref());
        self.drafted += drafts.map(|draft| draft.tree.len()).sum::<usize>();
        let (offers, dividing) = timed(|| divide(prospects, &mut self.router));
        // While the engine computes.
        let ((), learning) = timed(|| learn(batch, &offers, &mut self.router));
        let spent = [proposing, dividing, proposing + dividing, learning];
        for (times, time) in self.times.iter_mut().zip(spent) {
            times.push(time);
        }
    }

    fn tell(self) {
        println!(
            "{} threads, {:.1} tokens a draft",
            self.threads,
            self.drafted as f64 / (ROUNDS * BATCH) as f64
        );
        let [proposing, dividing, path, learning] = self.times;
        row("  proposals and chances", proposing);
        row("  division", dividing);
        let us = row("  all that a step waits for", path);
        let most_us = SHARE_MAX / 100.0 * STEP_MS * 1e3;
        let holds = if us <= most_us { "holds" } else { "missed" };
        println!("    {SHARE_MAX} % is {most_us:.0} us: {holds}");
        row("  beside the step: learning", learning);
    }

    fn find(&self, batch: &[Request], router: &Router<u8>) -> Vec<Prospect<u8>> {
        let find = |request: &Request| {
            let mut prospect = Prospect {
                namespace: NAMESPACE,
                asked: Asked::Auto,
                context_tokens: CONTEXT_TOKENS as u32,
                draft_max: 4096,
                tree_max: 4096,
                candidate: request.propose(self.namespace, self.params),
                path_probabilities: Vec::new(),
                withheld: false,
                head: HeadState::Ready { unread_tokens: 0 },
                priority: Priority::Normal,
                pace: None,
            };
            prospect.path_probabilities = router.estimate(&prospect);
            prospect
        };
        match &self.helpers {
            Some(helpers) => on_threads(helpers, batch, find),
            None => batch.iter().map(find).collect(),
        }
    }
}

fn divide(prospects: Vec<Prospect<u8>>, router: &mut Router<u8>) -> Vec<(usize, Offer)> {
    let frame = Frame {
        tokens: BATCH as u32,
        kv_tokens: KV_TOKENS,
        slots_max: 4096,
        batch: BATCH as u32,
    };
    let prospects = prospects.into_iter().enumerate().collect();
    black_box(router.offer(prospects, frame))
}

fn learn(batch: &[Request], offers: &[(usize, Offer)], router: &mut Router<u8>) {
    for (number, offer) in offers {
        let outcome = Outcome {
            emitted: &batch[*number].next,
            head_drafted: false,
            head_accepted: 0,
        };
        router.learn(NAMESPACE, offer, &outcome);
    }
    let sent: u32 = offers.iter().map(|(_, offer)| offer.sent_tokens()).sum();
    router.observe(made(sent));
    router.learn_step();
}

/// The default of a worker: trees, none of whose tokens is less likely than 0.1.
fn params() -> ProposeParams {
    ProposeParams {
        expansion: Expansion::Tree,
        min_token_prob: 0.1,
        ..ProposeParams::default()
    }
}

const HEAD_DEPTH: u32 = 4;

/// A step of an engine that takes 8 ms and more for each 64 tokens, and whose head drafts for all requests.
fn made(draft_tokens: u32) -> Step {
    let draft_seconds = 1e-5 * f64::from(BATCH as u32 * HEAD_DEPTH);
    let item = |at: u32| StepPart {
        route: Some(Route::Fallback),
        is_auto: true,
        may_use_head: true,
        predictability: 0.5,
        context_tokens: 1,
        text_tokens: KV_TOKENS as u32 / BATCH as u32,
        draft_tokens: draft_tokens / BATCH as u32 + u32::from(at < draft_tokens % BATCH as u32),
        head: Some(HeadDraft {
            depth: HEAD_DEPTH,
            tokens_max: HEAD_DEPTH,
        }),
        head_drafted: HEAD_DEPTH,
        read_tokens: 0,
        emitted: Some(2),
    };
    let tokens = BATCH as u32 + draft_tokens;
    Step {
        items: (0..BATCH as u32).map(item).collect(),
        seconds: 0.008 + 1e-6 * f64::from(tokens.next_multiple_of(64)) + draft_seconds,
        draft_seconds,
        ..Step::default()
    }
}

/// A router that knows the times of steps of all sizes, and a head that brings a token or two.
fn router() -> Router<u8> {
    let mut router = Router::new(RouterParams {
        policy: Policy::Goodput,
        threshold: Threshold::Auto,
        gain_min: 0.0,
        off_above_batch: None,
        namespaces_max: NonZeroUsize::MIN,
        head: Some(HeadParams {
            depth: HEAD_DEPTH,
            tokens_max: HEAD_DEPTH,
            merges: false,
        }),
        head_trials: TrialParams::default(),
    });
    for step in 0..2000u32 {
        router.observe(made(step * 31 % 2048));
        router.learn_step();
        let statistics = router.statistics(NAMESPACE);
        statistics.observe_head(CONTEXT_TOKENS as u32, HEAD_DEPTH, step % 4);
    }
    router
}

/// As a worker does it: the caller's thread takes its part as well, and the last ones are taken one by one.
fn on_threads<T: Sync, R: Send>(
    helpers: &ThreadPool,
    items: &[T],
    make: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    let threads = helpers.current_num_threads() + 1;
    let made: Mutex<Vec<(usize, Vec<R>)>> = Mutex::default();
    let next = AtomicUsize::new(0);
    let end = |from: usize| from + ((items.len() - from) / (2 * threads)).clamp(1, TAKEN_MAX);
    let take = |from: usize| (from < items.len()).then(|| end(from));
    let work = || {
        while let Ok(from) = next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            let part = items[from..end(from)].iter().map(&make).collect();
            made.lock().expect("no panic").push((from, part));
        }
    };
    helpers.in_place_scope(|scope| {
        (1..threads).for_each(|_| scope.spawn(|_| work()));
        work();
    });
    let mut made = made.into_inner().expect("no panic");
    made.sort_unstable_by_key(|(from, _)| *from);
    made.into_iter().flat_map(|(_, part)| part).collect()
}

/// The result of the work, and its microseconds.
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
