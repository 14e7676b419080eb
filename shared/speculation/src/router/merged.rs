//! The worth of a suffix draft beside a draft of the engine's head, when both are verified as one tree.
//!
//! A token that both draft stands in the tree once, and of two different first tokens one is wrong at best. The tree
//! brings as many tokens as the longer of the two drafts would, never the sum. So a node of the suffix draft only
//! counts where the head's draft has ended above it. There it is right less often than in general, since the text is
//! hard where the head fails, or more often. [`AcceptanceAfterHead`] counts how often, from every step in which the
//! head drafted for a request that had a suffix draft too, verified or not.

use refrain_suffix_index::Token;

use crate::DecayedRatio;
use crate::candidate::{Candidate, DraftNode};

/// Assumed ratio before any observation: where the head has failed, a suffix draft is right half as often as
/// elsewhere.
const AFTER_HEAD_PRIOR: f64 = 0.5;
/// Expected tokens that the assumed ratio counts for.
const PRIOR_WEIGHT: f64 = 4.0;

/// The ratio of accepted to expected tokens of suffix drafts at the depth where the head's draft ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct AcceptanceAfterHead {
    ratio: DecayedRatio,
}

impl Default for AcceptanceAfterHead {
    fn default() -> Self {
        AcceptanceAfterHead {
            ratio: DecayedRatio::starting_at(AFTER_HEAD_PRIOR, PRIOR_WEIGHT),
        }
    }
}

impl AcceptanceAfterHead {
    /// The ratio.
    pub(super) fn factor(&self) -> f32 {
        self.ratio.value().unwrap_or(AFTER_HEAD_PRIOR) as f32
    }

    /// Learns from a step in which the head's draft brought `by_head` tokens beside the candidate `found`, which has
    /// path probabilities `f`, and in which the target emitted `emitted`.
    pub(super) fn observe(
        &mut self,
        found: &Candidate,
        f: &[f32],
        emitted: &[Token],
        by_head: u32,
    ) {
        let depth = by_head as usize + 1;
        let Some(path) = emitted.get(..depth) else {
            // The next token is not known.
            return;
        };
        let expected: f32 = found
            .tree
            .depths()
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

    /// Expected accepted tokens that each node of a suffix draft with path probabilities `f` adds to a head's draft.
    /// The head's draft reaches depth d with probability `head_paths[d - 1]`. The whole draft adds the sum.
    pub(super) fn merged_gains(
        &self,
        found: &Candidate,
        f: &[f32],
        head_paths: &[f32],
    ) -> Vec<f32> {
        let factor = self.factor();
        let worth = |(depth, f): (u32, &f32)| {
            let reached = head_paths.get(depth as usize - 1).copied();
            (factor * f).min(1.0) * (1.0 - reached.unwrap_or(0.0)).max(0.0)
        };
        found.tree.depths().zip(f).map(worth).collect()
    }
}

/// Values by whose order nodes can be admitted, parents before children. A node that is worth less than the nodes
/// below it gets the mean of them all. (This is Horn's order for trees; sums stay the same.)
pub(super) fn pooled(nodes: &[DraftNode], worth: &[f32]) -> Vec<f32> {
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
