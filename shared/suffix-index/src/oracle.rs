//! The naive index, with which tests compare. It scans every document for every query.

#![expect(
    clippy::expect_used,
    reason = "the oracle is for tests, where a panic is a failure"
)]

use std::collections::BTreeMap;

use crate::{DocumentKey, Token};

/// Holds the same documents as an [`Index`](crate::Index) and gives the same answers, in time proportional to all
/// tokens. Unlike in an index, counts do not saturate, and removal is exact at once. It panics on unknown keys.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    documents: BTreeMap<DocumentKey, OracleDocument>,
}

#[derive(Clone, Debug)]
struct OracleDocument {
    left_len: usize,
    tokens: Vec<Token>,
    sealed: bool,
}

impl Oracle {
    /// See [`Index::open`](crate::Index::open).
    pub fn open(&mut self, key: DocumentKey, left_context: &[Token]) {
        self.documents.insert(
            key,
            OracleDocument {
                left_len: left_context.len(),
                tokens: left_context.to_vec(),
                sealed: false,
            },
        );
    }

    /// See [`Index::append`](crate::Index::append).
    pub fn append(&mut self, key: DocumentKey, tokens: &[Token]) {
        self.text_mut(key).tokens.extend_from_slice(tokens);
    }

    /// See [`Index::shorten`](crate::Index::shorten).
    pub fn shorten(&mut self, key: DocumentKey, output_len: u32) {
        let text = self.text_mut(key);
        text.tokens.truncate(text.left_len + output_len as usize);
    }

    /// See [`Index::is_sealed`](crate::Index::is_sealed).
    pub fn set_sealed(&mut self, key: DocumentKey, is_sealed: bool) {
        self.text_mut(key).sealed = is_sealed;
    }

    /// See [`Index::remove`](crate::Index::remove).
    pub fn remove(&mut self, key: DocumentKey) {
        self.documents.remove(&key);
    }

    /// The keys of all documents.
    pub fn keys(&self) -> Vec<DocumentKey> {
        self.documents.keys().copied().collect()
    }

    /// The left context and the output of a document.
    pub fn text(&self, key: DocumentKey) -> (&[Token], &[Token]) {
        let text = &self.documents[&key];
        text.tokens.split_at(text.left_len)
    }

    /// Tokens of all documents, left contexts included.
    pub fn tokens(&self) -> u64 {
        self.documents
            .values()
            .map(|text| text.tokens.len() as u64)
            .sum()
    }

    /// Whether the pattern occurs anywhere, left contexts included.
    pub fn occurs(&self, pattern: &[Token]) -> bool {
        pattern.is_empty()
            || self
                .documents
                .values()
                .any(|text| text.tokens.windows(pattern.len()).any(|w| w == pattern))
    }

    /// Length of the longest suffix of the context that occurs, up to `len_max`.
    pub fn longest(&self, context: &[Token], len_max: usize) -> usize {
        (1..=context.len().min(len_max))
            .rev()
            .find(|len| self.occurs(&context[context.len() - len..]))
            .unwrap_or(0)
    }

    /// How often each token follows the pattern as part of an output.
    pub fn continuations(&self, pattern: &[Token]) -> BTreeMap<Token, u32> {
        self.continuations_of(pattern, &[])
    }

    /// How often each token follows the pattern and a draft as part of an output.
    ///
    /// Patterns may lie in left contexts. In the live part, drafts may as well, because strings are found by their
    /// tokens. In segments they may not, because drafts are read on from an occurrence of the pattern that output
    /// follows.
    pub fn continuations_of(&self, pattern: &[Token], draft: &[Token]) -> BTreeMap<Token, u32> {
        let path = [pattern, draft].concat();
        let mut counts = BTreeMap::new();
        for text in self.documents.values() {
            let within = if text.sealed {
                pattern.len()
            } else {
                path.len()
            };
            for (start, window) in text.tokens.windows(path.len() + 1).enumerate() {
                if window.starts_with(&path) && start + within >= text.left_len {
                    *counts.entry(window[path.len()]).or_default() += 1;
                }
            }
        }
        counts
    }

    fn text_mut(&mut self, key: DocumentKey) -> &mut OracleDocument {
        self.documents
            .get_mut(&key)
            .expect("a document that was opened")
    }
}
