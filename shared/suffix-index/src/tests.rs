//! Behaviour, through the public interface: tables of cases, comparison with the naive index, work done.

mod cases;
mod model;
mod rebuilds;
mod work;

use crate::{
    Continuation, Cursor, DocumentKey, Index, IndexConfig, Node, Origin, Search, SearchLimits,
    Token,
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

/// Continuations as "token count" pairs.
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

/// The same for a document that is its own context.
fn show_tip(index: &Index, number: usize) -> String {
    show_at(index, index.tip(key(number)).expect("open"), &[])
}

/// Matches with nothing to offer, and those that offer the same as a longer one, are left out: the live part has them
/// for left contexts and ends of documents, segments do not.
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

/// What the longest match offers, with the origins.
fn offered(index: &Index, context: &str) -> Vec<(char, Option<Origin>)> {
    let context = tokens(context);
    let mut search = index.search(index.start(&context), &context, SearchLimits::EXACT);
    let found = search.next_match().expect("a match");
    let next = continuations(&mut search, &found.node).1;
    next.iter()
        .map(|next| (next.token as u8 as char, index.origin(next.sighting)))
        .collect()
}
