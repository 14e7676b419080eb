//! What appending, following and proposing cost, in time and memory, on generated or given text.
//!
//! ```text
//! cargo run --release -p refrain-speculation --example measure [-- FILE]
//! ```
//!
//! FILE holds a document per line, as token ids with spaces between them. Without it, text is generated from
//! templates with gaps: some of it repeats, some of it is new.

use std::hint::black_box;
use std::time::{Duration, Instant};

use refrain_speculation::{AcceptanceTable, Lookup, ProposeParams, Scope, Source, propose, walk};
use refrain_suffix_index::{DocumentKey, Index, IndexConfig, Token};

fn main() {
    let documents = match std::env::args().nth(1) {
        Some(path) => read(&path),
        None => generate(2_000, 1_000),
    };
    let tokens: usize = documents.iter().map(Vec::len).sum();
    println!("{} documents, {tokens} tokens", documents.len());
    measure_index(&documents, tokens);
    measure_rebuild(&documents, tokens);
    measure_decoding(&documents);
}

/// Whole documents, one after the other; then a context that is not in the index follows it.
fn measure_index(documents: &[Vec<Token>], tokens: usize) {
    let mut index = Index::new(IndexConfig::default());
    let start = Instant::now();
    for (key, document) in documents.iter().enumerate() {
        index
            .open(DocumentKey(key as u128), &[])
            .expect("a new key");
        index
            .append(DocumentKey(key as u128), document)
            .expect("room");
    }
    per_token("append", start.elapsed(), tokens);
    let work = index.work();
    println!(
        "  per token: {:.2} climbs, {:.2} links, {:.3} clones, {:.2} states, {:.1} bytes",
        work.climbs as f64 / tokens as f64,
        work.links as f64 / tokens as f64,
        work.clones as f64 / tokens as f64,
        index.states() as f64 / tokens as f64,
        index.bytes() as f64 / tokens as f64,
    );
    let start = Instant::now();
    let mut cursor = index.start(&[]);
    let mut matched = 0;
    for document in documents.iter().rev() {
        for &token in document.iter().rev().step_by(2).chain(document) {
            index.advance(&mut cursor, token);
            matched += u64::from(cursor.len());
        }
    }
    black_box(matched);
    per_token("advance", start.elapsed(), tokens + tokens / 2);
}

fn measure_rebuild(documents: &[Vec<Token>], tokens: usize) {
    let mut index = Index::new(IndexConfig::default());
    for (key, document) in documents.iter().enumerate() {
        index
            .open(DocumentKey(key as u128), &[])
            .expect("a new key");
        index
            .append(DocumentKey(key as u128), document)
            .expect("room");
    }
    let start = Instant::now();
    let rebuild = index.begin_rebuild();
    per_token("rebuild: copy", start.elapsed(), tokens);
    let start = Instant::now();
    let rebuilt = rebuild.run().expect("room");
    per_token("rebuild: run", start.elapsed(), tokens);
    let start = Instant::now();
    index.finish_rebuild(rebuilt).expect("nothing happened");
    per_token("rebuild: finish", start.elapsed(), tokens);
}

/// Each document is decoded as it was recorded, with drafts from itself and from those before it.
fn measure_decoding(documents: &[Vec<Token>]) {
    let params = ProposeParams::default();
    let mut tenant = Index::new(IndexConfig::default());
    let mut table = AcceptanceTable::default();
    let (mut proposing, mut appending) = (Vec::new(), Duration::ZERO);
    for (number, document) in documents.iter().enumerate() {
        let key = DocumentKey(number as u128);
        let mut request = Index::new(IndexConfig::default());
        request.open(key, &[]).expect("a new key");
        tenant.open(key, &[]).expect("a new key");
        let mut at = 0;
        while at < document.len() {
            let start = Instant::now();
            let lookups =
                [(Scope::Request, &request), (Scope::Tenant, &tenant)].map(|(scope, index)| {
                    Lookup {
                        source: Source::Suffix,
                        scope,
                        index,
                        cursor: index.tip(key).expect("open"),
                        context: &document[..at],
                    }
                });
            let candidate = propose(&lookups, &params, document.len() - at - 1);
            proposing.push(start.elapsed());
            let emitted = match &candidate {
                Some(found) => {
                    let walk = walk(&found.tree, |path| document[at + path.len()]);
                    let counts = table.get_mut(found.source, found.scope);
                    counts.record(found.tree.len(), walk.accepted.len(), walk.emitted.len());
                    walk.emitted.len()
                }
                None => {
                    table.get_mut(Source::None, Scope::Request).record(0, 0, 1);
                    1
                }
            };
            let start = Instant::now();
            request
                .append(key, &document[at..at + emitted])
                .expect("room");
            tenant
                .append(key, &document[at..at + emitted])
                .expect("room");
            appending += start.elapsed();
            at += emitted;
        }
    }
    let total = table.total();
    per_token(
        "append online, two indexes",
        appending,
        total.emitted as usize,
    );
    proposing.sort_unstable();
    let mean = proposing.iter().sum::<Duration>() / proposing.len().max(1) as u32;
    let at = |share: f64| {
        proposing
            .get((proposing.len() as f64 * share) as usize)
            .copied()
            .unwrap_or_default()
    };
    println!(
        "propose, two indexes: mean {mean:?}, p50 {:?}, p99 {:?}, p99.9 {:?}",
        at(0.5),
        at(0.99),
        at(0.999)
    );
    println!(
        "tokens per step {:.3}, drafted per step {:.3}, accepted {:.3} of drafted",
        total.accepted_length().unwrap_or_default(),
        total.drafted as f64 / total.steps.max(1) as f64,
        total.acceptance_rate().unwrap_or_default(),
    );
    for (source, scope, counts) in table.iter() {
        println!("  {} {}: {counts:?}", source.as_str(), scope.as_str());
    }
}

fn per_token(what: &str, time: Duration, tokens: usize) {
    println!(
        "{what}: {:.0} ns/token",
        time.as_nanos() as f64 / tokens.max(1) as f64
    );
}

fn read(path: &str) -> Vec<Vec<Token>> {
    let text = std::fs::read_to_string(path).expect("a readable file");
    text.lines()
        .map(|line| {
            line.split_whitespace()
                .map(|id| id.parse().expect("a token id"))
                .collect()
        })
        .collect()
}

/// Documents made of phrases: three of four from a common stock, the others new; tokens skewed as in text.
fn generate(documents: usize, len: usize) -> Vec<Vec<Token>> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) % below
    };
    let phrase = |random: &mut dyn FnMut(u64) -> u64| -> Vec<Token> {
        (0..8 + random(24))
            .map(|_| (random(1 << 16) * random(1 << 16) / (1 << 17)) as Token)
            .collect()
    };
    let stock: Vec<Vec<Token>> = (0..2_000).map(|_| phrase(&mut random)).collect();
    (0..documents)
        .map(|_| {
            let mut document = Vec::new();
            while document.len() < len {
                match random(4) {
                    0 => document.extend(phrase(&mut random)),
                    _ => document.extend(&stock[random(stock.len() as u64) as usize]),
                }
            }
            document
        })
        .collect()
}
