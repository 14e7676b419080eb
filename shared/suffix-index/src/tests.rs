//! Tests of the behaviour through the public interface: tables of cases, comparison with the naive index, and work
//! done.

mod bytes;
mod cases;
mod merges;
mod model;
mod rebuilds;
mod sampling;
mod seals;
mod work;

use std::sync::Arc;

use crate::{
    Continuation, Cursor, DocumentKey, Index, IndexConfig, Node, Origin, Search, SearchLimits,
    Segment, Token,
};

/// Letters as tokens.
fn tokens(text: &str) -> Vec<Token> {
    text.bytes().map(Token::from).collect()
}

/// Tokens as letters.
fn text(tokens: &[Token]) -> String {
    tokens.iter().map(|&token| token as u8 as char).collect()
}

fn key(number: usize) -> DocumentKey {
    DocumentKey(number as u128)
}

/// An index of documents written "left|output" or "output".
fn index_of(documents: &[&str]) -> Index {
    let mut index = Index::new(IndexConfig::default());
    for (number, document) in documents.iter().enumerate() {
        let (left, output) = document.split_once('|').unwrap_or(("", document));
        index.open(key(number), &tokens(left)).expect("a new key");
        index
            .append(key(number), &tokens(output))
            .expect("an open document");
    }
    index
}

/// Indexes of the same documents in every form that an index can have. The answers must not depend on the form.
fn forms_of(documents: &[&str]) -> Vec<(&'static str, Index)> {
    let form = |name, shape: &dyn Fn(&mut Index)| {
        let mut index = index_of(documents);
        shape(&mut index);
        (name, index)
    };
    let seal_each = |index: &mut Index| {
        for number in 0..documents.len() {
            index.seal(|other| other == key(number)).expect("room");
        }
    };
    vec![
        form("live", &|_| {}),
        form("one segment", &|index| {
            index.seal(|_| true).expect("room");
        }),
        form("many segments", &seal_each),
        form("merged", &|index| {
            seal_each(index);
            let all: Vec<usize> = (0..documents.len()).collect();
            let merged = index.begin_merge(&all).run().expect("room");
            index.finish_merge(merged).expect("nobody else");
        }),
        form("reopened from bytes", &|index| {
            seal_each(index);
            *index = reopened(index);
        }),
        form("live and sealed", &|index| {
            index.seal(|other| other.0 % 2 == 0).expect("room");
        }),
        form("sealed twice", &|index| {
            index.seal(|_| true).expect("room");
            for number in 0..documents.len() {
                let len = index.len_of(key(number)).expect("there");
                index.append(key(number), &[0]).expect("there");
                index.shorten(key(number), len).expect("longer");
            }
            index.seal(|_| true).expect("room");
            index.merge().expect("room");
        }),
    ]
}

/// An index with the segments of another one, after a round trip through bytes.
fn reopened(index: &Index) -> Index {
    let mut opened = Index::new(index.config.clone());
    for (at, (segment, _)) in index.segments().enumerate() {
        let segment = Segment::open(segment.to_bytes()).expect("its own bytes");
        opened.mount(Arc::new(segment), index.sealed[at].keys(true));
    }
    opened
}

/// Pseudo-random tokens below `alphabet`, always the same ones for a seed.
pub(crate) fn random(len: usize, alphabet: u32, seed: u32) -> Vec<Token> {
    let mut state = 0x2545_f491_u32 ^ seed.wrapping_mul(0x9e37_79b9);
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state % alphabet
    };
    (0..len).map(|_| next()).collect()
}

/// The continuations of a node, as pairs of token and count and in full.
fn continuations(search: &mut Search<'_>, node: &Node) -> (Vec<(Token, u32)>, Vec<Continuation>) {
    let mut found = Vec::new();
    let total = search.continuations(node, &mut found);
    let pairs: Vec<_> = found.iter().map(|next| (next.token, next.count)).collect();
    assert_eq!(
        total,
        pairs
            .iter()
            .map(|&(_, count)| u64::from(count))
            .sum::<u64>()
    );
    (pairs, found)
}

/// All matches of a context, as "length:continuations with counts", longest first.
fn show(index: &Index, context: &str) -> String {
    let context = tokens(context);
    show_at(index, index.start(&context), &context)
}

/// All matches of a live document as its own context, in the same form.
fn show_tip(index: &Index, number: usize) -> String {
    show_at(index, index.tip(key(number)).expect("open"), &[])
}

/// All matches, except those that offer nothing and those that offer the same as a longer one. The live part has such
/// matches for left contexts and ends of documents, and segments do not.
fn show_at(index: &Index, cursor: Cursor, context: &[Token]) -> String {
    let mut search = index.search(cursor, context, SearchLimits::EXACT);
    let mut shown: Vec<(u32, Vec<(Token, u32)>)> = Vec::new();
    while let Some(found) = search.next_match() {
        let next = continuations(&mut search, &found.node).0;
        if !next.is_empty() && shown.last().is_none_or(|(_, last)| *last != next) {
            shown.push((found.len, next));
        }
    }
    let show = |(len, next): &(u32, Vec<(Token, u32)>)| {
        let next: Vec<_> = next
            .iter()
            .map(|&(token, count)| format!("{}{count}", token as u8 as char))
            .collect();
        format!("{len}:{}", next.join(","))
    };
    shown.iter().map(show).collect::<Vec<_>>().join(" ")
}

/// The tokens of the most frequent path from the longest match that offers something.
fn longest_chain(index: &Index, context: &str) -> String {
    let context = tokens(context);
    let mut search = index.search(index.start(&context), &context, SearchLimits::EXACT);
    let mut chain = Vec::new();
    while let Some(found) = search.next_match() {
        let mut at = Some(found.node);
        while let Some(node) = at {
            let next = continuations(&mut search, &node).1.first().copied();
            chain.extend(next.map(|next| next.token));
            at = next.map(|next| next.node);
        }
        if !chain.is_empty() {
            break;
        }
    }
    text(&chain)
}

/// The tokens that the longest match offers, with their origins.
fn offered(index: &Index, context: &str) -> Vec<(char, Option<Origin>)> {
    let context = tokens(context);
    let mut search = index.search(index.start(&context), &context, SearchLimits::EXACT);
    let found = search.next_match().expect("a match");
    let next = continuations(&mut search, &found.node).1;
    next.iter()
        .map(|next| (next.token as u8 as char, index.origin(next.sighting)))
        .collect()
}
