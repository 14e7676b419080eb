//! The costs of an index of a given size: memory, building, sealing, merging, appending, proposing.
//!
//! ```text
//! cargo run --release -p refrain-speculation --example scale [-- TOKENS...]
//! ```
//!
//! TOKENS are corpus sizes; 1, 10 and 50 million without any. The text is made from a seed (`benches/text`).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a measurement that cannot run should stop"
)]

#[path = "../benches/text/mod.rs"]
mod text;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_speculation::draft::{Expansion, Lookup, ProposeParams, Scope, Source, propose};
use refrain_speculation::verify::walk;
use refrain_suffix_index::{DocumentKey, Index, IndexConfig, Segment, SegmentBuilder, Token};
use text::{Corpus, Random};

/// Documents that are decoded, one after the other, against the corpus.
const DECODED_DOCUMENTS: usize = 400;

/// Maximum number of tokens in the live part before it is sealed.
const LIVE_TOKENS_MAX: u64 = 1 << 19;

/// Documents that run at any time, and are therefore not sealed.
const RUNNING_DOCUMENTS: u128 = 200;

fn main() {
    let sizes: Vec<usize> = std::env::args()
        .skip(1)
        .map(|size| size.parse().expect("a number of tokens"))
        .collect();
    let sizes = if sizes.is_empty() {
        vec![1_000_000, 10_000_000, 50_000_000]
    } else {
        sizes
    };
    for size in sizes {
        println!("== {size} tokens");
        let mut corpus = Corpus::new();
        let documents = corpus.documents(size);
        measure_segment(&documents);
        let mut index = measure_growth(&documents);
        drop(documents);
        measure_memory(index.bytes());
        let decoded: Vec<Vec<Token>> = (0..DECODED_DOCUMENTS).map(|_| corpus.document()).collect();
        measure_decoding(&mut index, &decoded);
    }
}

/// The whole corpus as one segment, and from its bytes again.
fn measure_segment(documents: &[Vec<Token>]) {
    let mut builder = SegmentBuilder::new();
    let start = Instant::now();
    for (key, document) in documents.iter().enumerate() {
        builder.add(DocumentKey(key as u128), [], document.iter().copied());
    }
    let segment = builder.build().expect("distinct keys");
    let taken = start.elapsed();
    println!(
        "segment: {} documents, {:.2} bytes/token, built {:.1} M tokens/s",
        segment.documents(),
        (segment.len_bytes() as f64 + segment.overhead_bytes() as f64) / segment.tokens() as f64,
        rate(segment.tokens(), taken),
    );
    let bytes = segment.to_bytes();
    drop(segment);
    let start = Instant::now();
    let segment = Segment::open(bytes).expect("its own bytes");
    println!(
        "segment: opened and checked {:.0} M tokens/s",
        rate(segment.tokens(), start.elapsed())
    );
    black_box(Arc::new(segment));
}

/// The corpus as it arrives: appended to the live part, sealed when that is full, merged by the policy.
fn measure_growth(documents: &[Vec<Token>]) -> Index {
    let mut index = Index::new(IndexConfig::default());
    let (mut appending, mut sealing, mut merging) =
        (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    let (mut locked_max, mut merged_tokens, mut tokens) = (Duration::ZERO, 0, 0);
    for (key, document) in (0u128..).zip(documents) {
        let start = Instant::now();
        index.open(DocumentKey(key), &[]).expect("a new key");
        index.append(DocumentKey(key), document).expect("room");
        appending += start.elapsed();
        tokens += document.len() as u64;
        if index.live_tokens() < LIVE_TOKENS_MAX {
            continue;
        }
        let start = Instant::now();
        let rebuild = index.begin_seal(|other| other.0 + RUNNING_DOCUMENTS <= key);
        let begun = start.elapsed();
        let rebuilt = rebuild.run().expect("room");
        let built = start.elapsed();
        let retired = index.finish_rebuild(rebuilt).expect("nobody else");
        locked_max = locked_max.max(begun + (start.elapsed() - built));
        sealing += start.elapsed();
        drop(retired);
        while let Some(plan) = index.plan_merge() {
            let start = Instant::now();
            let merged = index.begin_merge(&plan).run().expect("room");
            merged_tokens += merged.segment().map_or(0, |segment| segment.tokens());
            let built = start.elapsed();
            let retired = index.finish_merge(merged).expect("nobody else");
            locked_max = locked_max.max(start.elapsed() - built);
            merging += start.elapsed();
            drop(retired);
        }
    }
    let per_token = |time: Duration| time.as_nanos() as f64 / tokens.max(1) as f64;
    println!(
        "growth, ns per token of the corpus: append {:.0}, seal {:.0}, merge {:.0} ({:.1} times rewritten); \
         longest under the lock {locked_max:.2?}",
        per_token(appending),
        per_token(sealing),
        per_token(merging),
        merged_tokens as f64 / tokens.max(1) as f64,
    );
    let sizes = index.sizes();
    println!(
        "whole: {:.2} bytes/token; live {} tokens at {:.0} bytes, {} segments {:?} at {:.2} bytes",
        index.bytes() as f64 / index.tokens() as f64,
        sizes.live_tokens,
        sizes.live_bytes as f64 / sizes.live_tokens.max(1) as f64,
        sizes.segments,
        index
            .segments()
            .map(|(_, stats)| stats.tokens)
            .collect::<Vec<_>>(),
        sizes.segment_bytes as f64 / sizes.segment_tokens.max(1) as f64,
    );
    index
}

/// Measures a memory read that depends on the one before, in as much memory as the index has. A proposal makes some
/// dozens of them. On a machine with neighbours this time varies more than all others here.
fn measure_memory(bytes: usize) {
    const LINE_WORDS: usize = 16;
    let lines = bytes / (4 * LINE_WORDS);
    let mut random = Random(1);
    let mut order: Vec<u32> = (0..lines as u32).collect();
    for at in (1..lines).rev() {
        order.swap(at, random.below(at as u64 + 1) as usize);
    }
    let mut memory = vec![[0u32; LINE_WORDS]; lines];
    for (at, &line) in order.iter().enumerate() {
        memory[line as usize][0] = order[(at + 1) % lines];
    }
    const LOOKS: u32 = 200_000;
    let mut line = 0;
    let mut times: Vec<Duration> = (0..21)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..LOOKS {
                line = memory[line as usize][0];
            }
            start.elapsed() / LOOKS
        })
        .collect();
    black_box(line);
    times.sort_unstable();
    println!("one look at memory: {:?}", times[times.len() / 2]);
}

/// New documents are decoded as they stand, with drafts from themselves and from the corpus, which they become part
/// of.
fn measure_decoding(index: &mut Index, documents: &[Vec<Token>]) {
    let settings = [
        ("linear", Expansion::Linear, 24),
        ("tree", Expansion::Tree, 24),
        ("tree, 16 samples", Expansion::Tree, 16),
        ("tree, 128 samples", Expansion::Tree, 128),
    ];
    for (number, (name, expansion, samples_max)) in (1u128..).zip(settings) {
        let params = ProposeParams {
            expansion,
            samples_max,
            ..ProposeParams::default()
        };
        let mut decoded = Decoded::default();
        let first = number << 64;
        let keys: Vec<DocumentKey> = (first..).take(documents.len()).map(DocumentKey).collect();
        for (&key, document) in keys.iter().zip(documents) {
            decoded.decode(index, key, document, &params);
        }
        decoded.print(name);
        // The next setting starts from the same corpus.
        index.remove(&keys);
        index.rebuild().expect("room");
    }
}

#[derive(Default)]
struct Decoded {
    proposing: Vec<Duration>,
    appending: Duration,
    opening: Duration,
    opened_tokens: usize,
    steps: usize,
    drafted: usize,
    emitted: usize,
}

impl Decoded {
    fn decode(
        &mut self,
        index: &mut Index,
        key: DocumentKey,
        document: &[Token],
        params: &ProposeParams,
    ) {
        // A third of it is the prompt, which only the request's own index holds.
        let prompt_len = document.len() / 3;
        let (prompt, output) = document.split_at(prompt_len);
        let start = Instant::now();
        let mut request = Index::new(IndexConfig::default());
        request.open(key, &[]).expect("a new key");
        request.append(key, prompt).expect("room");
        self.opening += start.elapsed();
        self.opened_tokens += prompt.len();
        let left = &prompt[prompt.len().saturating_sub(16)..];
        index.open(key, left).expect("a new key");
        let mut at = 0;
        while at < output.len() {
            let context = &document[..prompt_len + at];
            let start = Instant::now();
            let lookups =
                [(Scope::Request, &request), (Scope::Tenant, &*index)].map(|(scope, index)| {
                    Lookup {
                        source: Source::Suffix,
                        scope,
                        index,
                        cursor: index.tip(key).expect("open"),
                        context,
                    }
                });
            let candidate = propose(&lookups, params, output.len() - at - 1);
            self.proposing.push(start.elapsed());
            let emitted = candidate.map_or(1, |found| {
                self.drafted += found.tree.len();
                let target = |_, path: &[Token]| Some(output[at + path.len()]);
                walk(&found.tree, target).emitted.len()
            });
            self.steps += 1;
            self.emitted += emitted;
            let start = Instant::now();
            let emitted = &output[at..at + emitted];
            request.append(key, emitted).expect("room");
            index.append(key, emitted).expect("room");
            self.appending += start.elapsed();
            at += emitted.len();
        }
        let start = Instant::now();
        drop(request);
        self.opening += start.elapsed();
    }

    fn print(&mut self, name: &str) {
        self.proposing.sort_unstable();
        let mean = self.proposing.iter().sum::<Duration>() / self.proposing.len().max(1) as u32;
        let at = |share: f64| self.proposing[(self.proposing.len() as f64 * share) as usize];
        println!(
            "{name}: propose mean {mean:.2?}, p50 {:.2?}, p99 {:.2?}, p99.9 {:.2?}; append, two indexes, {:.0} \
             ns/token; request index made and dropped {:.0} ns/token; {:.3} tokens per step, {:.2} drafted",
            at(0.5),
            at(0.99),
            at(0.999),
            self.appending.as_nanos() as f64 / self.emitted.max(1) as f64,
            self.opening.as_nanos() as f64 / self.opened_tokens.max(1) as f64,
            self.emitted as f64 / self.steps.max(1) as f64,
            self.drafted as f64 / self.steps.max(1) as f64,
        );
    }
}

fn rate(tokens: u64, time: Duration) -> f64 {
    tokens as f64 / time.as_secs_f64() / 1e6
}
