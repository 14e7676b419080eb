//! Behaviour, through the public interface: tables of cases, comparison with the naive index, work done.

mod cases;
mod model;
mod rebuilds;
mod work;

use crate::{Continuation, DocumentKey, Index, IndexConfig, Node, Token};

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
fn continuations<'a>(node: &Node<'a>) -> (Vec<(Token, u32)>, Vec<Continuation<'a>>) {
    let mut found = Vec::new();
    let total = node.continuations(&mut found);
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
    show_matches(index, index.start(&tokens(context)))
}

fn show_matches(index: &Index, cursor: crate::Cursor) -> String {
    let matches = index.matches(cursor).map(|found| {
        let next: Vec<_> = continuations(&found.node)
            .0
            .iter()
            .map(|&(token, count)| format!("{}{count}", token as u8 as char))
            .collect();
        format!("{}:{}", found.len, next.join(","))
    });
    matches.collect::<Vec<_>>().join(" ")
}

/// The tokens of the most frequent path from the longest match.
fn longest_chain(index: &Index, cursor: crate::Cursor) -> String {
    let mut chain = Vec::new();
    let mut at = index.matches(cursor).next().map(|found| found.node);
    while let Some(node) = at {
        let next = continuations(&node).1.first().copied();
        chain.extend(next.map(|next| next.token));
        at = next.map(|next| next.node);
    }
    text(&chain)
}
