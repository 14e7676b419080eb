//! Tests that a token's logits have the same bits, whichever way it is computed.

use std::sync::Arc;

use crate::model::Model;
use crate::network::Branch;
use crate::network::ModelForward;
use crate::network::{BlockCount, KvCache, KvShape};

use super::support::{Random, tiny};

/// A sequence and its KV cache.
struct Sequence {
    model: Arc<Model>,
    forward: ModelForward,
    kv: KvCache,
}

impl Sequence {
    fn new(threads: usize) -> Self {
        let model = tiny();
        Sequence {
            forward: ModelForward::new(&model, &[], threads),
            kv: KvCache::new(KvShape::of(&model.architecture), BlockCount::default()),
            model,
        }
    }

    /// Returns the bits of the logits after the last token of `chain` and after each draft node.
    fn run(&mut self, chain: &[u32], nodes: &[u32], parents: &[Option<u32>]) -> Vec<Vec<u32>> {
        let start = self.kv.len();
        self.kv.grow(start + chain.len());
        let branch = Branch {
            nodes,
            parents,
            wants_logits: true,
            ..Branch::new(&mut self.kv, start, chain)
        };
        let pass = self.forward.run(&self.model, &mut [branch]);
        (0..=nodes.len())
            .map(|row| bits(pass.logits(0, row.checked_sub(1))))
            .collect()
    }

    fn last(&mut self, chain: &[u32]) -> Vec<u32> {
        self.run(chain, &[], &[]).remove(0)
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Returns the logits after every token of a text, computed one by one.
fn one_by_one(text: &[u32]) -> Vec<Vec<u32>> {
    let mut sequence = Sequence::new(1);
    text.iter().map(|token| sequence.last(&[*token])).collect()
}

#[test]
fn chunks_of_a_prompt() {
    let mut random = Random(1);
    let text = random.tokens(150);
    let truth = one_by_one(&text);
    assert_eq!(Sequence::new(1).last(&text), truth[149]);
    assert_eq!(Sequence::new(3).last(&text), truth[149]);
    for _ in 0..10 {
        let mut sequence = Sequence::new(1);
        let mut at = 0;
        while at < text.len() {
            let end = text.len().min(at + 1 + random.below(70));
            assert_eq!(
                sequence.last(&text[at..end]),
                truth[end - 1],
                "tokens {at}..{end}"
            );
            at = end;
        }
    }
}

#[test]
fn nodes_of_a_tree() {
    let mut random = Random(2);
    for round in 0..12 {
        // The lengths lie around block borders, and the trees are larger than one panel.
        let text = random.tokens(28 + round);
        let nodes = random.tokens(1 + 4 * round);
        let parents: Vec<Option<u32>> = (0..nodes.len())
            .map(|node| {
                random
                    .below(node + 1)
                    .checked_sub(1)
                    .map(|parent| parent as u32)
            })
            .collect();
        let mut sequence = Sequence::new(1);
        sequence.last(&text[..text.len() - 3]);
        let found = sequence.run(&text[text.len() - 3..], &nodes, &parents);
        for node in 0..nodes.len() {
            let mut path = vec![nodes[node]];
            let mut at = node;
            while let Some(parent) = parents[at] {
                at = parent as usize;
                path.insert(0, nodes[at]);
            }
            let mut alone = Sequence::new(1);
            let whole: Vec<u32> = text.iter().chain(&path).copied().collect();
            assert_eq!(
                found[node + 1],
                alone.last(&whole),
                "node {node} of {}",
                nodes.len()
            );
        }
    }
}

#[test]
fn an_accepted_path_and_a_cut() {
    let mut random = Random(3);
    let text = random.tokens(30);
    let nodes = random.tokens(6);
    // The path 0 - 2 - 5 is accepted. Nodes 1, 3 and 4 are rejected.
    let parents = [None, None, Some(0), Some(1), Some(2), Some(2)];
    let mut sequence = Sequence::new(1);
    sequence.kv.grow(30);
    let branch = Branch {
        nodes: &nodes,
        parents: &parents,
        wants_logits: true,
        ..Branch::new(&mut sequence.kv, 0, &text)
    };
    let pass = sequence.forward.run(&sequence.model, &mut [branch]);
    for node in [0, 2, 5] {
        pass.accept(0, &[node], &mut sequence.kv);
    }
    let mut whole = text.clone();
    whole.extend([nodes[0], nodes[2], nodes[5]]);
    assert_eq!(sequence.kv.len(), whole.len());
    let next = random.tokens(5);
    whole.extend(&next);
    let truth = one_by_one(&whole);
    assert_eq!(sequence.last(&next), truth[whole.len() - 1]);
    sequence.kv.truncate(31);
    assert_eq!(sequence.last(&whole[31..34]), truth[33]);
}

#[test]
fn batches_and_shared_prefixes() {
    let mut random = Random(4);
    let prefix = random.tokens(45);
    let mut first = Sequence::new(1);
    first.last(&prefix);
    let mut caches: Vec<KvCache> = [45, 40, 32, 3].map(|len| first.kv.prefix(len)).into();
    let tails: Vec<Vec<u32>> = (0..4).map(|_| random.tokens(9)).collect();
    let mut branches: Vec<Branch<'_>> = caches
        .iter_mut()
        .zip(&tails)
        .map(|(kv, tail)| {
            let start = kv.len();
            kv.grow(start + 7);
            Branch {
                nodes: &tail[7..],
                parents: &[None, Some(0)],
                wants_logits: true,
                ..Branch::new(kv, start, &tail[..7])
            }
        })
        .collect();
    let pass = first.forward.run(&first.model, &mut branches);
    for (index, (len, tail)) in [45, 40, 32, 3].into_iter().zip(&tails).enumerate() {
        let whole: Vec<u32> = prefix[..len].iter().chain(tail).copied().collect();
        let truth = one_by_one(&whole);
        assert_eq!(bits(pass.logits(index, None)), truth[len + 6]);
        assert_eq!(bits(pass.logits(index, Some(1))), truth[len + 8]);
    }
    // The sequence that shared its prefix was not written to.
    let next = random.tokens(2);
    let whole: Vec<u32> = prefix.iter().chain(&next).copied().collect();
    assert_eq!(first.last(&next), one_by_one(&whole)[46]);
}
