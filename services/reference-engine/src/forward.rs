//! One forward pass of a model over a batch of sequences.

use std::borrow::BorrowMut;

use crate::attention::DraftKv;
use crate::blocks::{Blocks, Branch, Outputs, Paths};
use crate::kv::{KvCache, KvShape};
use crate::weights::Model;

/// What a pass left behind: logits, the draft nodes' keys and values, and captured states.
#[derive(Debug)]
pub(crate) struct Pass {
    outputs: Outputs,
    drafts: Vec<DraftKv>,
    captured: Captured,
}

/// The residual stream after some layers, of the branches that asked for it.
#[derive(Debug, Default)]
struct Captured {
    /// `[row][layer][hidden]`.
    values: Vec<f32>,
    /// First row of each branch.
    first: Vec<usize>,
    width: usize,
}

impl Pass {
    /// Logits after a branch's chain (`None`) or after one of its nodes.
    pub(crate) fn logits(&self, branch: usize, node: Option<usize>) -> &[f32] {
        self.outputs.logits(branch, node.map_or(0, |node| node + 1))
    }

    /// Makes a branch's draft node the next position of its sequence.
    pub(crate) fn accept(&self, branch: usize, node: usize, kv: &mut KvCache) {
        self.drafts[branch].accept(node, kv);
    }

    /// The captured states of a branch's row, chain before nodes; the branch asked for them.
    pub(crate) fn captured(&self, branch: usize, row: usize) -> &[f32] {
        let width = self.captured.width;
        &self.captured.values[(self.captured.first[branch] + row) * width..][..width]
    }
}

/// Runs passes; keeps the buffers between them.
#[derive(Debug)]
pub(crate) struct Forward {
    blocks: Blocks,
    /// Layers whose outputs are captured, counted from 0.
    capture: Vec<usize>,
}

impl Forward {
    /// For `model`, with products spread over `threads` threads.
    pub(crate) fn new(model: &Model, capture: &[usize], threads: usize) -> Self {
        Forward {
            blocks: Blocks::new(&model.architecture, threads),
            capture: capture.to_vec(),
        }
    }

    /// Computes all branches. Tokens are below the vocabulary's size.
    pub(crate) fn run(&mut self, model: &Model, branches: &mut [Branch<'_>]) -> Pass {
        let shape = KvShape::of(&model.architecture);
        let mut drafts: Vec<DraftKv> = branches
            .iter()
            .map(|branch| DraftKv::new(shape, branch.nodes.len()))
            .collect();
        let (outputs, captured) = self.go_on(model, branches, &mut drafts);
        Pass {
            outputs,
            drafts,
            captured,
        }
    }

    /// The same where earlier passes left keys and values of the branches' known nodes in `drafts`.
    pub(crate) fn guess(
        &mut self,
        model: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [&mut DraftKv],
    ) -> Outputs {
        self.go_on(model, branches, drafts).0
    }

    fn go_on<D: BorrowMut<DraftKv>>(
        &mut self,
        model: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [D],
    ) -> (Outputs, Captured) {
        let a = &model.architecture;
        let paths: Vec<Paths> = branches
            .iter()
            .map(|branch| Paths::new(branch.parents))
            .collect();
        let mut captured = Captured::new(branches, self.capture.len() * a.hidden_size);
        self.blocks.place(branches, &paths);
        self.embed(model, branches);
        for (index, layer) in model.layers.iter().enumerate() {
            self.blocks.norm(&layer.attention_norm);
            self.blocks
                .layer(index, &layer.body, branches, &paths, drafts);
            for (slot, _) in self
                .capture
                .iter()
                .enumerate()
                .filter(|(_, captured)| **captured == index)
            {
                captured.copy(branches, &self.blocks.x, a.hidden_size, slot);
            }
        }
        let outputs = self
            .blocks
            .outputs(branches, &model.norm, &model.head, a.vocab_size);
        (outputs, captured)
    }

    fn embed(&mut self, model: &Model, branches: &[Branch<'_>]) {
        let hidden = model.architecture.hidden_size;
        let x = &mut self.blocks.x;
        x.clear();
        for token in branches
            .iter()
            .flat_map(|branch| branch.chain.iter().chain(&branch.nodes[branch.known..]))
        {
            x.extend_from_slice(&model.embedding[*token as usize * hidden..][..hidden]);
        }
    }
}

impl Captured {
    fn new(branches: &[Branch<'_>], width: usize) -> Self {
        let mut captured = Captured {
            width,
            ..Captured::default()
        };
        let mut rows = 0;
        for branch in branches {
            captured.first.push(rows);
            rows += if branch.capture { branch.rows() } else { 0 };
        }
        captured.values.resize(rows * width, 0.0);
        captured
    }

    fn copy(&mut self, branches: &[Branch<'_>], x: &[f32], hidden: usize, slot: usize) {
        let (mut to, mut from) = (0, 0);
        for branch in branches {
            let rows = branch.rows();
            if branch.capture {
                let x = x[from * hidden..][..rows * hidden].chunks_exact(hidden);
                let kept = self.values[to * self.width..][..rows * self.width]
                    .chunks_exact_mut(self.width);
                for (kept, x) in kept.zip(x) {
                    kept[slot * hidden..][..hidden].copy_from_slice(x);
                }
                to += rows;
            }
            from += rows;
        }
    }
}
