//! Random histories, compared with the naive index after every step.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::oracle::Oracle;
use crate::{Match, Merged, Rebuilt, Segment};

const PATTERN_MAX: u32 = 6;

#[derive(Clone, Debug)]
enum Op {
    Open {
        document: usize,
        left: Vec<Token>,
    },
    Append {
        document: usize,
        tokens: Vec<Token>,
    },
    Shorten {
        document: usize,
        cut: u32,
    },
    Remove {
        document: usize,
    },
    Rebuild,
    /// Seals some documents.
    Seal {
        documents: u32,
    },
    BeginSeal {
        documents: u32,
    },
    FinishRebuild,
    BeginMerge {
        segments: u32,
    },
    FinishMerge,
    /// Opens sealed documents from their bytes, and inserts live ones again.
    Reopen,
    /// Adds a token to a context that is not in the index.
    Advance {
        token: Token,
    },
}

fn some_tokens(len: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Token>> {
    prop::collection::vec(0u32..3, len)
}

fn growth() -> BoxedStrategy<Op> {
    let document = 0..4usize;
    prop_oneof![
        1 => (document.clone(), some_tokens(0..4)).prop_map(|(document, left)| Op::Open { document, left }),
        4 => (document, some_tokens(1..5)).prop_map(|(document, tokens)| Op::Append { document, tokens }),
        2 => (0u32..3).prop_map(|token| Op::Advance { token }),
    ]
    .boxed()
}

fn any_op() -> BoxedStrategy<Op> {
    let document = 0..4usize;
    prop_oneof![
        14 => growth(),
        2 => (document.clone(), 0..6u32).prop_map(|(document, cut)| Op::Shorten { document, cut }),
        1 => document.prop_map(|document| Op::Remove { document }),
        1 => Just(Op::Rebuild),
        2 => (0..16u32).prop_map(|documents| Op::Seal { documents }),
        1 => (0..16u32).prop_map(|documents| Op::BeginSeal { documents }),
        1 => Just(Op::FinishRebuild),
        2 => (0..8u32).prop_map(|segments| Op::BeginMerge { segments }),
        2 => Just(Op::FinishMerge),
        1 => Just(Op::Reopen),
    ]
    .boxed()
}

struct World {
    index: Index,
    oracle: Oracle,
    /// The rebuild in progress.
    rebuilt: Option<Rebuilt>,
    /// The merge in progress.
    merged: Option<Merged>,
    context: Vec<Token>,
    cursor: Cursor,
    /// Whether the index has not changed since the cursor began to follow the context.
    cursor_exact: bool,
}

impl World {
    fn new(count_cap: u16) -> Self {
        let config = IndexConfig {
            count_cap,
            pattern_tokens_max: PATTERN_MAX,
            ..IndexConfig::default()
        };
        let index = Index::new(config);
        let cursor = index.start(&[]);
        World {
            index,
            oracle: Oracle::default(),
            rebuilt: None,
            merged: None,
            context: Vec::new(),
            cursor,
            cursor_exact: true,
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Advance { token } => {
                if !self.index.is_current(&self.cursor) {
                    self.cursor = self.index.start(&self.context);
                    self.cursor_exact = true;
                }
                self.context.push(*token);
                self.index.advance(&mut self.cursor, *token);
                return;
            }
            Op::Open { document, left } => {
                if self.index.open(key(*document), left).is_ok() {
                    self.oracle.open(key(*document), left);
                }
            }
            Op::Append { document, tokens } => {
                if self.index.append(key(*document), tokens).is_ok() {
                    self.oracle.append(key(*document), tokens);
                }
            }
            Op::Shorten { document, cut } => {
                if let Some(len) = self.index.len_of(key(*document)) {
                    let len = len.saturating_sub(*cut);
                    self.index
                        .shorten(key(*document), len)
                        .expect("not beyond the end");
                    self.oracle.shorten(key(*document), len);
                }
            }
            Op::Remove { document } => {
                self.index.remove(&[key(*document)]);
                self.oracle.remove(key(*document));
            }
            Op::Rebuild => self.index.rebuild().expect("room"),
            Op::Seal { documents } => self.index.seal(in_set(*documents)).expect("room"),
            Op::BeginSeal { documents } => {
                let rebuild = self.index.begin_seal(in_set(*documents));
                self.rebuilt = Some(rebuild.run().expect("room"));
            }
            Op::BeginMerge { segments } => {
                let chosen: Vec<usize> = (0..8).filter(|at| segments >> at & 1 == 1).collect();
                let merge = self.index.begin_merge(&chosen);
                self.merged = Some(merge.run().expect("room"));
            }
            Op::FinishMerge => {
                if let Some(merged) = self.merged.take() {
                    // It is refused if another merge replaced one of the segments.
                    let _ = self.index.finish_merge(merged);
                }
            }
            Op::Reopen => self.reopen(),
            Op::FinishRebuild => {
                if let Some(rebuilt) = self.rebuilt.take() {
                    // It is refused after another rebuild, and then nothing changes.
                    let _ = self.index.finish_rebuild(rebuilt);
                }
            }
        }
        self.cursor_exact = false;
    }

    fn reopen(&mut self) {
        let mut index = Index::new(self.index.config.clone());
        for (at, (segment, _)) in self.index.segments().enumerate() {
            let opened = Segment::open(segment.to_bytes()).expect("its own bytes");
            index.mount(Arc::new(opened), self.index.sealed[at].keys(true));
        }
        for key in self.oracle.keys() {
            if !self.index.is_sealed(key) {
                let (left, output) = self.oracle.text(key);
                index.open(key, left).expect("free");
                index.append(key, output).expect("open");
            }
        }
        self.index = index;
    }

    fn check(&mut self) {
        for key in self.oracle.keys() {
            self.oracle.set_sealed(key, self.index.is_sealed(key));
        }
        assert_eq!(self.index.tokens(), self.oracle.tokens());
        let clean = self.index.sizes().dead_tokens == 0;
        let mut contexts = vec![self.context.clone()];
        for key in self.oracle.keys() {
            let (left, output) = self.oracle.text(key);
            let output_len = output.len() as u32;
            assert_eq!(self.index.len_of(key), Some(output_len));
            let text = [left, output].concat();
            let tip = self.index.tip(key);
            assert_eq!(self.index.tip_at(key, output_len), tip);
            assert_eq!(self.index.tip_at(key, output_len + 1), None);
            match tip {
                Some(tip) => self.check_cursor(&text, tip, clean),
                None => assert!(self.index.is_sealed(key)),
            }
            // A context that is not in the index, with a similar text.
            contexts.push([&text[text.len() / 2..], &self.context].concat());
            contexts.push(text);
        }
        for context in &contexts {
            self.check_cursor(context, self.index.start(context), clean);
        }
        if self.index.is_current(&self.cursor) {
            self.check_cursor(&self.context, self.cursor, clean && self.cursor_exact);
        }
    }

    /// Checks that every match of the cursor is true. If `exact` is set, the first one must also be the longest.
    fn check_cursor(&self, context: &[Token], cursor: Cursor, exact: bool) {
        let clean = self.index.sizes().dead_tokens == 0;
        let longest = self.oracle.longest(context, PATTERN_MAX as usize);
        assert!(cursor.len() as usize <= longest || !clean);
        assert!(
            cursor.len() as usize == longest || !exact || self.index.segments().len() > 0,
            "{cursor:?} of {context:?}, longest {longest}"
        );
        let mut search = self.index.search(cursor, context, SearchLimits::EXACT);
        let mut matches: Vec<(Match, Vec<(Token, u32)>)> = Vec::new();
        while let Some(found) = search.next_match() {
            assert!(
                matches
                    .last()
                    .is_none_or(|(last, _)| last.next_len == found.len)
            );
            let pattern = &context[context.len() - found.len as usize..];
            // A cursor that is out of date may miss occurrences in the live part.
            let complete = clean && (exact || found.len <= cursor.len());
            self.check_node(&mut search, pattern, &[], &found.node, 3, complete);
            let pairs = continuations(&mut search, &found.node).0;
            matches.push((found, pairs));
        }
        if clean {
            // Every pattern with continuations has a match: the shortest match that is at least as long.
            let known = if exact { longest as u32 } else { cursor.len() };
            for len in 1..=known {
                let expected = self.expected(&context[context.len() - len as usize..], &[]);
                let found = matches.iter().rev().find(|(found, _)| found.len >= len);
                assert_eq!(found.map_or(&[][..], |(_, pairs)| pairs), expected);
            }
        }
    }

    /// Checks that the index offers the continuations that the oracle counts, some levels deep. With dead text in the
    /// index, it must offer a subset of them.
    fn check_node(
        &self,
        search: &mut Search<'_>,
        pattern: &[Token],
        draft: &[Token],
        node: &Node,
        levels: usize,
        clean: bool,
    ) {
        let (pairs, found) = continuations(search, node);
        let expected = self.expected(pattern, draft);
        if clean {
            assert_eq!(pairs, expected, "{draft:?} after {pattern:?}");
        }
        for next in found {
            let truth = expected.iter().find(|&&(token, _)| token == next.token);
            // A newer removed occurrence may hide the live ones, while those in segments are still counted.
            let is_mixed = self.index.segments().len() > 0;
            assert!(
                truth.is_some_and(|&(_, count)| count <= next.count || is_mixed),
                "{} after {pattern:?} {draft:?}",
                next.token
            );
            let draft = [draft, &[next.token]].concat();
            let path = [pattern, &draft].concat();
            let origin = self.index.origin(next.sighting);
            let origin = origin.expect("offered, so alive");
            let (left, output) = self.oracle.text(origin.document);
            let text = [left, &output[..=origin.position as usize]].concat();
            assert!(
                text.ends_with(&path),
                "{path:?} does not end at {origin:?} of {text:?}"
            );
            if levels > 0 {
                self.check_node(search, pattern, &draft, &next.node, levels - 1, clean);
            }
        }
    }

    fn expected(&self, pattern: &[Token], draft: &[Token]) -> Vec<(Token, u32)> {
        let counts = self.oracle.continuations_of(pattern, draft);
        let mut pairs: Vec<_> = counts
            .into_iter()
            .map(|(token, count)| (token, count.min(self.index.config.count_cap.into())))
            .collect();
        pairs.sort_by_key(|&(token, count)| (std::cmp::Reverse(count), token));
        pairs
    }
}

/// A set of documents, by the bits of a number.
fn in_set(bits: u32) -> impl Fn(DocumentKey) -> bool {
    move |key| bits >> key.0 & 1 == 1
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4 * ProptestConfig::default().cases))]

    #[test]
    fn growing_index_answers_as_the_oracle(ops in prop::collection::vec(growth(), 1..40)) {
        // The cap is low, so that counts reach it.
        let mut world = World::new(5);
        for op in &ops {
            world.apply(op);
            world.check();
        }
        world.index.rebuild().expect("room");
        world.check();
    }

    #[test]
    fn removal_sealing_and_merging_answer_as_the_oracle(ops in prop::collection::vec(any_op(), 1..40)) {
        let mut world = World::new(u16::MAX);
        for op in &ops {
            world.apply(op);
            world.check();
        }
        world.index.seal(|_| true).expect("room");
        world.check();
        world.index.merge().expect("room");
        world.check();
    }
}
