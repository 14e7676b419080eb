//! Random histories, compared with the naive index after every step.

use proptest::prelude::*;

use super::*;
use crate::oracle::Oracle;
use crate::{Cursor, Match, Rebuilt};

const COUNT_CAP: u16 = 5;
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
    BeginRebuild,
    FinishRebuild,
    /// A context that is not in the index goes on.
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
        1 => Just(Op::BeginRebuild),
        1 => Just(Op::FinishRebuild),
    ]
    .boxed()
}

struct World {
    index: Index,
    oracle: Oracle,
    /// A rebuild under way.
    rebuilt: Option<Rebuilt>,
    context: Vec<Token>,
    cursor: Cursor,
    /// Whether the index was changed while the cursor followed.
    cursor_exact: bool,
}

impl World {
    fn new() -> Self {
        let config = IndexConfig {
            count_cap: COUNT_CAP,
            pattern_tokens_max: PATTERN_MAX,
            ..IndexConfig::default()
        };
        let index = Index::new(config);
        let cursor = index.start(&[]);
        World {
            index,
            oracle: Oracle::default(),
            rebuilt: None,
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
            Op::BeginRebuild => {
                self.rebuilt = Some(self.index.begin_rebuild().run().expect("room"))
            }
            Op::FinishRebuild => {
                if let Some(rebuilt) = self.rebuilt.take() {
                    // Refused after another rebuild, and then nothing changes.
                    let _ = self.index.finish_rebuild(rebuilt);
                }
            }
        }
        self.cursor_exact = false;
    }

    fn check(&self) {
        assert_eq!(self.index.tokens(), self.oracle.tokens());
        let clean = self.index.dead_tokens() == 0;
        let mut contexts = vec![self.context.clone()];
        for key in self.oracle.keys() {
            let (left, output) = self.oracle.text(key);
            assert_eq!(self.index.len_of(key), Some(output.len() as u32));
            let text = [left, output].concat();
            self.check_cursor(&text, self.index.tip(key).expect("there"), clean);
            // A context of somebody else that says something similar.
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

    /// Every match of the cursor is true. `exact`: the match is the longest there is, too.
    fn check_cursor(&self, context: &[Token], cursor: Cursor, exact: bool) {
        let clean = self.index.dead_tokens() == 0;
        let longest = self.oracle.longest(context, PATTERN_MAX as usize);
        assert!(cursor.len() as usize <= longest || !clean);
        assert!(
            cursor.len() as usize == longest || !exact,
            "{cursor:?} of {context:?}, longest {longest}"
        );
        let matches: Vec<Match<'_>> = self.index.matches(cursor).collect();
        assert!(matches.windows(2).all(|pair| pair[0].len > pair[1].len));
        for found in &matches {
            self.check_node(
                &context[context.len() - found.len as usize..],
                &found.node,
                3,
                clean,
            );
        }
        if clean {
            // Every pattern that something follows has its match: the shortest one that is as long.
            for len in 1..=cursor.len() {
                let expected = self.expected(&context[context.len() - len as usize..]);
                let found = matches.iter().rev().find(|found| found.len >= len);
                assert_eq!(
                    found.map_or(vec![], |found| continuations(&found.node).0),
                    expected
                );
            }
        }
    }

    /// What the index offers after `pattern` is what the oracle counts, some levels deep. With dead text
    /// in the index: it is a part of it, never anything else.
    fn check_node(&self, pattern: &[Token], node: &Node<'_>, levels: usize, clean: bool) {
        let (pairs, found) = continuations(node);
        let expected = self.expected(pattern);
        if clean {
            assert_eq!(pairs, expected, "after {pattern:?}");
        }
        for next in found {
            let truth = expected.iter().find(|&&(token, _)| token == next.token);
            assert!(
                truth.is_some_and(|&(_, count)| count <= next.count),
                "{} after {pattern:?}",
                next.token
            );
            let path = [pattern, &[next.token]].concat();
            let origin = next.node.origin().expect("offered, so alive");
            let (left, output) = self.oracle.text(origin.document);
            let text = [left, &output[..=origin.position as usize]].concat();
            assert!(
                text.ends_with(&path),
                "{path:?} does not end at {origin:?} of {text:?}"
            );
            if levels > 0 {
                self.check_node(&path, &next.node, levels - 1, clean);
            }
        }
    }

    fn expected(&self, pattern: &[Token]) -> Vec<(Token, u32)> {
        let counts = self.oracle.continuations(pattern);
        let mut pairs: Vec<_> = counts
            .into_iter()
            .map(|(token, count)| (token, count.min(u32::from(COUNT_CAP))))
            .collect();
        pairs.sort_by_key(|&(token, count)| (std::cmp::Reverse(count), token));
        pairs
    }
}

fn replay(ops: &[Op]) {
    let mut world = World::new();
    for op in ops {
        world.apply(op);
        world.check();
    }
    world.index.rebuild().expect("room");
    world.check();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn growing_index_answers_as_the_oracle(ops in prop::collection::vec(growth(), 1..40)) {
        replay(&ops);
    }

    #[test]
    fn removal_and_rebuild_answer_as_the_oracle(ops in prop::collection::vec(any_op(), 1..40)) {
        replay(&ops);
    }
}
