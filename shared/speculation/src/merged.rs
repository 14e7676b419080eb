//! What a suffix draft is worth beside a draft of the engine's head, when both are verified as one tree.
//!
//! Whatever both draft stands there once, and of two first tokens one is wrong at best: the tree brings as many tokens as
//! the longer of the two would, never the sum. So a node of the suffix draft only counts where the head's draft has ended
//! above it. How often it is right then is not what it is in general: where the head fails, the text is hard, and where a
//! text is copied both are right. How much less (or more) is counted, from every step that the head drafted for a request
//! which had a suffix draft too, verified or not: [`Rescue`].

use refrain_suffix_index::Token;

use crate::{Candidate, DecayedRatio, DraftNode};

/// Until it was seen, a suffix draft is taken to be right half as often where the head has failed as elsewhere.
const RESCUE_PRIOR: f64 = 0.5;
/// Expected tokens that the prior counts for.
const PRIOR_WEIGHT: f64 = 4.0;

/// How often suffix drafts are right where the head's have ended, over how often they are expected to be right there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rescue {
    ratio: DecayedRatio,
}

impl Default for Rescue {
    fn default() -> Self {
        let mut ratio = DecayedRatio::default();
        ratio.add(RESCUE_PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT);
        Rescue { ratio }
    }
}

impl Rescue {
    /// The ratio.
    pub(crate) fn factor(&self) -> f32 {
        self.ratio.value().unwrap_or(RESCUE_PRIOR) as f32
    }

    /// The head's draft brought `by_head` tokens where `found` was there too, with chances `f`, and the target said `said`.
    pub(crate) fn observe(&mut self, found: &Candidate, f: &[f32], said: &[Token], by_head: u32) {
        let nodes = found.tree.nodes();
        let depth = by_head as usize + 1;
        let Some(path) = said.get(..depth) else {
            // What would have come next is not known.
            return;
        };
        let expected: f32 = depths(nodes)
            .zip(f)
            .filter(|(at, _)| *at == by_head + 1)
            .map(|(_, f)| f)
            .sum();
        if expected <= 0.0 {
            return;
        }
        let mut at = None;
        let is_right = path.iter().all(|token| {
            at = found.tree.child(at, *token);
            at.is_some()
        });
        self.ratio
            .add(f64::from(u8::from(is_right)), f64::from(expected));
    }

    /// What each node of a suffix draft with chances `f` adds to a head's draft that gets to depth d with chance
    /// `head_paths[d - 1]`. Their sum is what the whole draft adds.
    pub(crate) fn beside(&self, found: &Candidate, f: &[f32], head_paths: &[f32]) -> Vec<f32> {
        let factor = self.factor();
        let worth = |(depth, f): (u32, &f32)| {
            let reached = head_paths.get(depth as usize - 1).copied();
            (factor * f).min(1.0) * (1.0 - reached.unwrap_or(0.0)).max(0.0)
        };
        depths(found.tree.nodes()).zip(f).map(worth).collect()
    }
}

/// Of each node, 1 for a child of the root.
fn depths(nodes: &[DraftNode]) -> impl Iterator<Item = u32> + '_ {
    let mut depths: Vec<u32> = Vec::with_capacity(nodes.len());
    nodes.iter().map(move |node| {
        let above = node.parent.map_or(0, |parent| depths[parent as usize]);
        depths.push(above + 1);
        above + 1
    })
}

/// Values in whose order nodes can be admitted, parents before children: a node that is worth less than those that it is the
/// way to is worth the mean of them all. (Horn's order for trees; sums stay the same.)
pub(crate) fn pooled(nodes: &[DraftNode], worth: &[f32]) -> Vec<f32> {
    struct Block {
        sum: f32,
        members: Vec<usize>,
        /// First nodes of the blocks below.
        below: Vec<usize>,
    }
    let mean = |block: &Block| block.sum / block.members.len() as f32;
    let mut blocks: Vec<Option<Block>> = (0..nodes.len())
        .map(|at| {
            Some(Block {
                sum: worth[at],
                members: vec![at],
                below: Vec::new(),
            })
        })
        .collect();
    for at in (0..nodes.len()).rev() {
        let Some(mut block) = blocks[at].take() else {
            continue;
        };
        loop {
            let best = block
                .below
                .iter()
                .enumerate()
                .filter_map(|(place, first)| Some((place, mean(blocks[*first].as_ref()?))))
                .max_by(|a, b| a.1.total_cmp(&b.1));
            let Some((place, _)) = best.filter(|(_, value)| *value > mean(&block)) else {
                break;
            };
            let first = block.below.swap_remove(place);
            if let Some(taken) = blocks[first].take() {
                block.sum += taken.sum;
                block.members.extend(taken.members);
                block.below.extend(taken.below);
            }
        }
        if let Some(Some(parent)) = nodes[at].parent.map(|parent| &mut blocks[parent as usize]) {
            parent.below.push(at);
        }
        blocks[at] = Some(block);
    }
    let mut values = vec![0.0; nodes.len()];
    for block in blocks.into_iter().flatten() {
        let value = mean(&block);
        for member in block.members {
            values[member] = value;
        }
    }
    values
}

#[cfg(test)]
mod tests;
