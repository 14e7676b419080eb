use std::collections::{BTreeMap, BTreeSet};

use super::*;

const SEQUENCES: u32 = 24;

/// The memory of llama.cpp as it is described: cells, each of some sequences.
#[derive(Default)]
struct Cells(Vec<Cell>);

struct Cell {
    token: TokenId,
    position: usize,
    sequences: BTreeSet<SequenceId>,
}

impl Memory for Cells {
    fn share(&mut self, of: SequenceId, with: SequenceId, from: usize, end: usize) {
        for cell in &mut self.0 {
            if cell.sequences.contains(&of) && (from..end).contains(&cell.position) {
                cell.sequences.insert(with);
            }
        }
    }

    fn drop_from(&mut self, sequence: SequenceId, from: usize) {
        for cell in self.0.iter_mut().filter(|cell| cell.position >= from) {
            cell.sequences.remove(&sequence);
        }
        self.0.retain(|cell| !cell.sequences.is_empty());
    }
}

impl Cells {
    /// The tokens of a sequence up to a position, in order.
    fn read(&self, sequence: SequenceId, until: usize) -> Vec<TokenId> {
        let cells = self
            .0
            .iter()
            .filter(|cell| cell.sequences.contains(&sequence));
        let mut cells: Vec<&Cell> = cells.filter(|cell| cell.position <= until).collect();
        cells.sort_by_key(|cell| cell.position);
        let places: Vec<usize> = cells.iter().map(|cell| cell.position).collect();
        assert_eq!(
            places,
            (0..places.len()).collect::<Vec<_>>(),
            "a position is there twice or not at all"
        );
        cells.iter().map(|cell| cell.token).collect()
    }

    /// Adds the rows of a pass, after the checks that llama.cpp makes of a batch.
    fn compute(&mut self, rows: &[Row]) {
        let mut sets: BTreeMap<SequenceId, BTreeSet<SequenceId>> = BTreeMap::new();
        let mut ends: BTreeMap<SequenceId, usize> = BTreeMap::new();
        let held = |id: SequenceId| {
            let cells = self.0.iter();
            cells.filter(|cell| cell.sequences.contains(&id)).count()
        };
        for row in rows {
            let set: BTreeSet<SequenceId> = row.sequences.iter().copied().collect();
            assert_eq!(set.len(), row.sequences.len());
            // Sequences with a common token must have been equally long.
            let lengths: BTreeSet<usize> = set.iter().map(|id| held(*id)).collect();
            assert_eq!(lengths.len(), 1);
            for id in &set {
                let end = ends.entry(*id).or_insert_with(|| held(*id));
                assert_eq!(
                    row.position, *end,
                    "the positions of a sequence are not consecutive"
                );
                *end += 1;
                let kept = sets.entry(*id).or_insert_with(|| set.clone());
                kept.retain(|other| set.contains(other));
                assert!(!kept.is_empty());
            }
        }
        self.0.extend(rows.iter().map(|row| Cell {
            token: row.token,
            position: row.position,
            sequences: row.sequences.iter().copied().collect(),
        }));
    }
}

/// Pseudo-random numbers that are the same on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) as usize % end
    }
}

/// A text, and what is computed after it.
struct Text {
    id: SequenceId,
    tokens: Vec<TokenId>,
}

fn part<'a>(
    id: SequenceId,
    start: usize,
    chain: &'a [TokenId],
    nodes: &'a [TokenId],
    parents: &'a [Option<u32>],
) -> BackendPart<'a> {
    BackendPart {
        sequence: id,
        start,
        chain,
        nodes,
        parents,
        computed_nodes: 0,
        wants_logits: true,
    }
}

/// The text that a node stands for: the text before it, and its path.
fn path(parents: &[Option<u32>], node: usize) -> Vec<usize> {
    let mut path = vec![node];
    while let Some(parent) = parents[*path.last().unwrap()] {
        path.push(parent as usize);
    }
    path.reverse();
    path
}

#[test]
fn every_token_reads_its_own_text_and_path_only() {
    let mut random = Random(3);
    let (mut sequences, mut cells) = (Sequences::new(SEQUENCES), Cells::default());
    let mut texts: Vec<Text> = Vec::new();
    for round in 0..3000 {
        if texts.len() < 4 {
            let parent =
                (!texts.is_empty() && random.below(2) == 0).then(|| random.below(texts.len()));
            let text = match parent {
                Some(parent) => Text {
                    id: sequences
                        .fork(texts[parent].id, usize::MAX, &mut cells)
                        .unwrap(),
                    tokens: texts[parent].tokens.clone(),
                },
                None => Text {
                    id: sequences.open().unwrap(),
                    tokens: Vec::new(),
                },
            };
            texts.push(text);
        }
        let place = random.below(texts.len());
        let text = &mut texts[place];
        let start = text.tokens.len();
        let token = |random: &mut Random| (round * 100 + random.below(100)) as TokenId;
        let chain: Vec<TokenId> = (0..1 + random.below(5))
            .map(|_| token(&mut random))
            .collect();
        let count = random.below(9);
        let nodes: Vec<TokenId> = (0..count).map(|_| token(&mut random)).collect();
        let parents: Vec<Option<u32>> = (0..count)
            .map(|node| random.below(node + 1).checked_sub(1).map(|p| p as u32))
            .collect();
        let rows = sequences
            .place(&part(text.id, start, &chain, &nodes, &parents), &mut cells)
            .unwrap();
        cells.compute(&rows);
        text.tokens.extend(&chain);
        for (row, at) in rows.iter().zip(start..) {
            let mut wanted = text.tokens.clone();
            if let Some(node) = (at - start).checked_sub(chain.len()) {
                wanted.extend(path(&parents, node).into_iter().map(|node| nodes[node]));
            } else {
                wanted.truncate(at + 1);
            }
            assert_eq!(cells.read(row.sequences[0], row.position), wanted);
        }
        if count > 0 && random.below(4) > 0 {
            let accepted = path(&parents, random.below(count));
            sequences.accept(text.id, &accepted, &mut cells);
            text.tokens.extend(accepted.iter().map(|node| nodes[*node]));
        }
        let len = text.tokens.len() - random.below(3).min(text.tokens.len());
        sequences.truncate(text.id, len, &mut cells);
        text.tokens.truncate(len);
        for text in &texts {
            assert_eq!(cells.read(text.id, usize::MAX), text.tokens);
        }
        if random.below(6) == 0 {
            let text = texts.swap_remove(place);
            sequences.close(text.id, &mut cells);
        }
    }
    for text in texts {
        sequences.close(text.id, &mut cells);
    }
    assert!(cells.0.is_empty());
    assert_eq!(sequences.free.len(), SEQUENCES as usize);
}

#[test]
fn a_draft_grows_over_passes() {
    let (mut sequences, mut cells) = (Sequences::new(SEQUENCES), Cells::default());
    let id = sequences.open().unwrap();
    let nodes = [10, 11, 12, 13, 14];
    let parents = [None, None, Some(0), Some(0), Some(3)];
    for (computed, end) in [(0, 2), (2, 4), (4, 5)] {
        let chain: &[TokenId] = if computed == 0 { &[1, 2] } else { &[] };
        let start = if computed == 0 { 0 } else { 2 };
        let part = BackendPart {
            computed_nodes: computed,
            ..part(id, start, chain, &nodes[..end], &parents[..end])
        };
        let rows = sequences.place(&part, &mut cells).unwrap();
        cells.compute(&rows);
        for (row, node) in rows.iter().skip(chain.len()).zip(computed..) {
            let mut wanted = vec![1, 2];
            wanted.extend(path(&parents, node).into_iter().map(|node| nodes[node]));
            assert_eq!(cells.read(row.sequences[0], row.position), wanted);
        }
    }
    sequences.truncate(id, 2, &mut cells);
    assert_eq!(cells.read(id, usize::MAX), [1, 2]);
    assert_eq!(sequences.free.len(), SEQUENCES as usize - 1);
}

#[test]
fn a_chain_takes_no_sequence_and_a_wide_draft_is_refused() {
    let (mut sequences, mut cells) = (Sequences::new(3), Cells::default());
    let id = sequences.open().unwrap();
    let chain = part(id, 0, &[1], &[2, 3, 4], &[None, Some(0), Some(1)]);
    let rows = sequences.place(&chain, &mut cells).unwrap();
    assert!(rows.iter().all(|row| row.sequences == [id]));
    let wide = part(id, 0, &[1], &[2, 3, 4, 5], &[None; 4]);
    let fault = sequences.place(&wide, &mut cells).unwrap_err();
    assert!(fault.contains("more branches"), "{fault}");
    sequences.close(id, &mut cells);
    assert_eq!(sequences.free.len(), 3);
}
