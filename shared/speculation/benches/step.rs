//! The time that it takes to decide the steps of a batch: the proposals of all requests over an index of ten million
//! tokens, their acceptance probabilities, and the division of the step. The router learns from a step while the
//! engine makes the next one, so that time is printed apart.
//!
//! ```text
//! cargo bench -p refrain-speculation --bench step
//! ```
//!
//! Every request searches its own text and its namespace, which has three segments and a live part. The settings are
//! the defaults of a worker (alpha auto), and the request may have the head's draft instead. A step emits the tokens
//! that the request's text has where the draft agrees, and one more. A request that ends makes room for a new one, so
//! some requests of every step find nothing in a cache. The threads wait for the step as those of a worker do; with
//! one thread, none has to be woken.

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
    Candidate, Lookup, ProposeParams, ProposeRules, Scope, Source, propose_valued,
};
use refrain_speculation::router::{
    Asked, Frame, HeadDraft, HeadParams, HeadState, Offer, Outcome, Policy, Priority, Prospect,
    Route, Router, RouterParams, Step, StepPart, Threshold, TrialParams,
};
use refrain_speculation::statistics::AcceptanceStatistics;
use refrain_suffix_index::{DocumentKey, Index, IndexConfig, SegmentBuilder, Token};
use text::{Corpus, Random};

const SEALED_TOKENS: usize = 10_000_000;
const SEGMENTS: usize = 3;
/// Requests of a step.
const BATCHES: [usize; 2] = [64, 256];
/// Steps for each batch and number of threads.
const ROUNDS: usize = 96;
/// Steps before the measured ones, to fill caches and to learn acceptance probabilities.
const ROUNDS_BEFORE: usize = 32;
/// Length of a context, for the head.
const CONTEXT_TOKENS: usize = 512;
/// The most that a step may wait for its drafts, in microseconds.
const WAIT_MAX_US: f64 = 500.0;
/// Maximum number of threads, as in a worker with the default configuration.
const THREADS_MAX: usize = 16;
/// Requests that a thread takes at a time.
const TAKEN_MAX: usize = 4;
/// Tokens of the text of a request, for the router.
const KV_TOKENS: u64 = 800;
/// The namespace of the requests.
const NAMESPACE: u8 = 0;

const OWN: DocumentKey = DocumentKey(0);

/// A request in the middle of its output.
struct Request {
    own: Index,
    key: DocumentKey,
    text: Vec<Token>,
    /// The next tokens of its output, the last one first.
    next: Vec<Token>,
}

/// The requests, and the texts that they are made of.
struct Texts {
    corpus: Corpus,
    random: Random,
    /// The next key of a document.
    key: u128,
    namespace: Index,
}

impl Texts {
    fn new() -> Self {
        let mut corpus = Corpus::new();
        let mut namespace = Index::new(IndexConfig::default());
        let mut segments: Vec<SegmentBuilder> =
            (0..SEGMENTS).map(|_| SegmentBuilder::new()).collect();
        let documents = corpus.documents(SEALED_TOKENS);
        for (key, document) in (0u128..).zip(&documents) {
            segments[key as usize % SEGMENTS].add(DocumentKey(key), [], document.iter().copied());
        }
        for segment in segments {
            namespace.mount(Arc::new(segment.build().expect("distinct keys")), []);
        }
        Texts {
            corpus,
            random: Random(7),
            key: documents.len() as u128,
            namespace,
        }
    }

    /// A request whose output is a live document of the namespace.
    fn begin(&mut self) -> Request {
        let (prompt, mut output) = (self.corpus.document(), self.corpus.document());
        let known = 1 + self.random.below(output.len() as u64 - 1) as usize;
        let mut next = output.split_off(known);
        next.reverse();
        let mut own = Index::new(IndexConfig::default());
        own.open(OWN, &[]).expect("a new key");
        own.append(OWN, &prompt).expect("room");
        own.append(OWN, &output).expect("room");
        let key = DocumentKey(self.key);
        self.key += 1;
        let left = &prompt[prompt.len().saturating_sub(16)..];
        self.namespace.open(key, left).expect("a new key");
        self.namespace.append(key, &output).expect("room");
        Request {
            own,
            key,
            text: [prompt, output].concat(),
            next,
        }
    }

    /// The request emits the tokens that its draft has right, and one more.
    fn advance(&mut self, request: &mut Request, offer: &Offer) {
        let tree = offer.suffix().map(|draft| &draft.tree);
        let mut at = None;
        let mut emitted = Vec::new();
        while let Some(token) = request.next.pop() {
            emitted.push(token);
            at = tree.and_then(|tree| tree.child(at, token));
            if at.is_none() {
                break;
            }
        }
        request.own.append(OWN, &emitted).expect("room");
        self.namespace.append(request.key, &emitted).expect("room");
        request.text.extend(emitted);
        if request.next.is_empty() {
            *request = self.begin();
        }
    }
}

impl Request {
    fn propose(
        &self,
        namespace: &Index,
        params: &ProposeParams,
        statistics: Option<&AcceptanceStatistics>,
    ) -> Option<Candidate> {
        let lookup = |scope, index, cursor| Lookup {
            source: Source::Suffix,
            scope,
            index,
            cursor,
            context: &self.text,
        };
        let lookups = [
            lookup(Scope::Request, &self.own, self.own.tip(OWN)?),
            lookup(Scope::Tenant, namespace, namespace.tip(self.key)?),
        ];
        propose_valued(&lookups, params, statistics, params.max_spec_tokens)
    }
}

fn main() {
    let mut source = Texts::new();
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads: BTreeSet<usize> = [1, 2, 4, 8, cores.min(THREADS_MAX)]
        .into_iter()
        .filter(|&threads| threads <= cores)
        .collect();
    println!(
        "{} tokens in {SEGMENTS} segments; medians of {} steps, us",
        source.namespace.tokens() - source.namespace.live_tokens(),
        ROUNDS - ROUNDS_BEFORE
    );
    for batch in BATCHES {
        let mut desks: Vec<Desk> = threads
            .iter()
            .map(|threads| Desk::new(&mut source, batch, *threads))
            .collect();
        // In turns, each with requests of its own: none finds in the caches what another has looked at.
        for _ in 0..ROUNDS {
            for desk in &mut desks {
                desk.step(&mut source);
            }
        }
        for desk in desks {
            desk.tell();
        }
    }
}

/// Where the steps of a batch are decided, on so many threads.
struct Desk {
    requests: Vec<Request>,
    threads: usize,
    helpers: Option<ThreadPool>,
    router: Router<u8>,
    /// Microseconds of each step: proposals, division, both, learning.
    times: [Vec<f64>; 4],
    found: usize,
    verified: u32,
}

impl Desk {
    fn new(source: &mut Texts, batch: usize, threads: usize) -> Self {
        let helpers = ThreadPoolBuilder::new().num_threads(threads - 1).build();
        Desk {
            requests: (0..batch).map(|_| source.begin()).collect(),
            threads,
            helpers: helpers.ok().filter(|_| threads > 1),
            router: router(batch as u32),
            times: Default::default(),
            found: 0,
            verified: 0,
        }
    }

    fn step(&mut self, source: &mut Texts) {
        let (prospects, proposing) = timed(|| self.find(&source.namespace));
        let drafts = prospects.iter().filter_map(|of| of.candidate.as_ref());
        self.found += drafts.map(|draft| draft.tree.len()).sum::<usize>();
        let (offers, dividing) = timed(|| self.divide(prospects));
        // While the engine computes.
        let ((), learning) = timed(|| self.learn(&offers, proposing));
        let spent = [proposing, dividing, proposing + dividing, learning];
        for (times, time) in self.times.iter_mut().zip(spent) {
            times.push(time);
        }
        for (number, offer) in &offers {
            source.advance(&mut self.requests[*number], offer);
        }
    }

    fn tell(self) {
        let drafts = (ROUNDS * self.requests.len()) as f64;
        println!(
            "{} requests, {} threads: {:.1} tokens found and {:.1} verified for each",
            self.requests.len(),
            self.threads,
            self.found as f64 / drafts,
            f64::from(self.verified) / drafts
        );
        let [proposing, dividing, path, learning] = self.times;
        row("  proposals and chances", proposing);
        row("  division", dividing);
        let us = row("  all that a step waits for", path);
        let holds = if us <= WAIT_MAX_US { "holds" } else { "missed" };
        println!("    at most {WAIT_MAX_US:.0} us: {holds}");
        row("  beside the step: learning", learning);
    }

    fn find(&self, namespace: &Index) -> Vec<Prospect<u8>> {
        let price = self.router.draft_price(self.requests.len() as u32);
        let params = ProposeRules::default().for_router(price);
        let statistics = self.router.known_statistics(NAMESPACE);
        let find = |request: &Request| {
            let mut prospect = Prospect {
                namespace: NAMESPACE,
                asked: Asked::Auto,
                context_tokens: request.text.len() as u32,
                draft_max: 4096,
                tree_max: 4096,
                candidate: request.propose(namespace, &params, statistics),
                path_probabilities: Vec::new(),
                price: None,
                withheld: false,
                head: HeadState::Ready { unread_tokens: 0 },
                priority: Priority::Normal,
                pace: None,
            };
            prospect.path_probabilities = self.router.estimate(&prospect);
            prospect
        };
        match &self.helpers {
            Some(helpers) => on_threads(helpers, &self.requests, find),
            None => self.requests.iter().map(find).collect(),
        }
    }

    fn divide(&mut self, prospects: Vec<Prospect<u8>>) -> Vec<(usize, Offer)> {
        let batch = self.requests.len() as u32;
        let frame = Frame {
            tokens: batch,
            kv_tokens: KV_TOKENS * u64::from(batch),
            slots_max: 4096,
            batch,
        };
        let prospects = prospects.into_iter().enumerate().collect();
        black_box(self.router.offer(prospects, frame))
    }

    fn learn(&mut self, offers: &[(usize, Offer)], proposing_us: f64) {
        for (number, offer) in offers {
            let next = &self.requests[*number].next;
            let emitted: Vec<Token> = next.iter().rev().take(64).copied().collect();
            let outcome = Outcome {
                emitted: &emitted,
                head_drafted: false,
                head_accepted: 0,
            };
            self.router.learn(NAMESPACE, offer, &outcome);
        }
        let sent: u32 = offers.iter().map(|(_, offer)| offer.sent_tokens()).sum();
        self.verified += sent;
        self.router.observe(Step {
            compose_seconds: proposing_us / 1e6,
            found_tokens: offers.iter().map(|(_, offer)| offer.found_tokens()).sum(),
            ..made(self.requests.len() as u32, sent)
        });
        self.router.learn_step();
    }
}

const HEAD_DEPTH: u32 = 4;

/// A step of a model of 8 billion parameters on an H100, by the roofline that `refrain replay` has. The head drafts
/// for all requests.
fn made(batch: u32, draft_tokens: u32) -> Step {
    let draft_seconds = 1e-5 * f64::from(batch * HEAD_DEPTH);
    let item = |at: u32| StepPart {
        route: Some(Route::Fallback),
        is_auto: true,
        may_use_head: true,
        predictability: 0.5,
        context_tokens: 1,
        text_tokens: KV_TOKENS as u32,
        draft_tokens: draft_tokens / batch + u32::from(at < draft_tokens % batch),
        head: Some(HeadDraft {
            depth: HEAD_DEPTH,
            tokens_max: HEAD_DEPTH,
        }),
        head_drafted: HEAD_DEPTH,
        read_tokens: 0,
        emitted: Some(2),
    };
    let tokens = batch + draft_tokens;
    let host_us = 1400 + 45 * batch + 5 * tokens;
    let arithmetic_us = 27 * tokens.next_multiple_of(64);
    let attention_us = batch * KV_TOKENS as u32 / 20;
    let us = host_us + arithmetic_us.max(5970) + attention_us;
    Step {
        items: (0..batch).map(item).collect(),
        seconds: f64::from(us) / 1e6 + draft_seconds,
        draft_seconds,
        ..Step::default()
    }
}

/// A router that knows the times of steps of all sizes, and a head that brings a token or two.
fn router(batch: u32) -> Router<u8> {
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
        router.observe(made(batch, step * 31 % 2048));
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
    println!("{name:<28} {us:8.1}");
    us
}
