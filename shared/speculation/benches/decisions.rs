//! The measurements that decide the defaults: each group varies one setting and leaves all others at their defaults.
//!
//! ```text
//! cargo bench -p refrain-speculation --bench decisions
//! ```
//!
//! A proposal is one call with one source, at the places of documents that the corpus does not hold. Compare only
//! medians, and only within a group: the machine's memory is part of the measurement.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a measurement that cannot run should stop"
)]

mod text;

use std::hint::black_box;
use std::sync::{Arc, LazyLock};

use divan::counter::ItemsCount;
use divan::{Bencher, Divan};
use refrain_speculation::draft::{Expansion, Lookup, ProposeParams, Scope, Source, propose};
use refrain_suffix_index::{Cursor, DocumentKey, Index, IndexConfig, SegmentBuilder, Token};
use text::{Corpus, Random};

const CORPUS_TOKENS: usize = 2_000_000;
/// Places of other documents that are looked up, in turn.
const CONTEXTS: usize = 4_000;
/// Text of a context that a search may read.
const CONTEXT_TOKENS: usize = 256;

struct Fixture {
    documents: Vec<Vec<Token>>,
    contexts: Vec<Vec<Token>>,
}

static FIXTURE: LazyLock<Fixture> = LazyLock::new(|| {
    let mut corpus = Corpus::new();
    let documents = corpus.documents(CORPUS_TOKENS);
    let mut random = Random(7);
    let contexts = (0..CONTEXTS).map(|_| {
        let mut document = corpus.document();
        document.truncate(1 + random.below(document.len() as u64) as usize);
        document.split_off(document.len().saturating_sub(CONTEXT_TOKENS))
    });
    Fixture {
        contexts: contexts.collect(),
        documents,
    }
});

fn main() {
    LazyLock::force(&FIXTURE);
    Divan::from_args().main();
}

/// The corpus in so many segments of one size; 0 is the live part.
fn index(segments: usize, config: IndexConfig) -> Index {
    let mut index = Index::new(config);
    let documents = (0u128..).map(DocumentKey).zip(&FIXTURE.documents);
    if segments == 0 {
        for (key, document) in documents {
            index.open(key, &[]).expect("a new key");
            index.append(key, document).expect("room");
        }
        return index;
    }
    let mut builders: Vec<SegmentBuilder> = (0..segments).map(|_| SegmentBuilder::new()).collect();
    for (key, document) in documents {
        let builder = &mut builders[key.0 as usize % segments];
        builder.add(key, [], document.iter().copied());
    }
    for builder in builders {
        index.mount(Arc::new(builder.build().expect("distinct keys")), []);
    }
    index
}

fn bench_propose(bencher: Bencher<'_, '_>, index: &Index, params: &ProposeParams) {
    // A request follows its context as it grows; finding the place is not part of a proposal.
    let cursors: Vec<Cursor> = FIXTURE
        .contexts
        .iter()
        .map(|context| index.start(context))
        .collect();
    let mut turn = (0..CONTEXTS).cycle();
    bencher
        .with_inputs(|| turn.next().unwrap_or_default())
        .bench_local_values(|at| {
            let lookup = Lookup {
                source: Source::Suffix,
                scope: Scope::Tenant,
                index,
                cursor: cursors[at],
                context: &FIXTURE.contexts[at],
            };
            black_box(propose(&[lookup], params, usize::MAX))
        });
}

/// Occurrences read of a sealed pattern (`samples_max`, 24): enough to tell a distribution, few enough to wait for.
#[divan::bench(args = [8, 16, 24, 64, 128], sample_count = 4000, sample_size = 1)]
fn samples_max(bencher: Bencher<'_, '_>, samples_max: usize) {
    let params = ProposeParams {
        samples_max,
        ..ProposeParams::default()
    };
    bench_propose(bencher, &index(1, IndexConfig::default()), &params);
}

/// Segments that are put up with before merging (`segments_max`, 3); 0 is what the live part takes for the same text.
#[divan::bench(args = [0, 1, 3, 6], sample_count = 4000, sample_size = 1)]
fn segments_max(bencher: Bencher<'_, '_>, segments: usize) {
    let index = index(segments, IndexConfig::default());
    bench_propose(bencher, &index, &ProposeParams::default());
}

/// Longest pattern (`max_pattern`, 64): flat, so nothing is won by a shorter one.
#[divan::bench(args = [16, 64, 256], sample_count = 4000, sample_size = 1)]
fn max_pattern(bencher: Bencher<'_, '_>, max_pattern: u32) {
    let config = IndexConfig {
        pattern_tokens_max: max_pattern,
        ..IndexConfig::default()
    };
    let params = ProposeParams {
        max_pattern,
        ..ProposeParams::default()
    };
    bench_propose(bencher, &index(1, config), &params);
}

/// The shape of drafts (`expansion`, a tree): 0 is the tree, else so many paths; one path is a chain.
#[divan::bench(args = [0, 1, 2, 4], sample_count = 4000, sample_size = 1)]
fn expansion(bencher: Bencher<'_, '_>, paths: usize) {
    let params = ProposeParams {
        expansion: match paths {
            0 => Expansion::Tree,
            paths => Expansion::Paths(paths),
        },
        ..ProposeParams::default()
    };
    bench_propose(bencher, &index(1, IndexConfig::default()), &params);
}

/// Where counts saturate (`count_cap`, 1024). On ordinary text a cap neither costs nor saves anything; what it is
/// for, text that repeats one token, has a test of its own that counts the work.
#[divan::bench(args = [16, 1024, u16::MAX], sample_count = 5, sample_size = 1)]
fn count_cap(bencher: Bencher<'_, '_>, count_cap: u16) {
    let config = IndexConfig {
        count_cap,
        ..IndexConfig::default()
    };
    bencher
        .counter(ItemsCount::new(CORPUS_TOKENS))
        .bench_local(|| index(0, config.clone()));
}

/// Sealing instead of growing on: what a token costs to be sorted once more.
#[divan::bench(sample_count = 5, sample_size = 1)]
fn seal(bencher: Bencher<'_, '_>) {
    bencher
        .counter(ItemsCount::new(CORPUS_TOKENS))
        .bench_local(|| index(1, IndexConfig::default()));
}
