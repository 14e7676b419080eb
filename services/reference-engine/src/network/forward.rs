//! Forward passes of a model over a batch of sequences.

use std::borrow::BorrowMut;

use super::branch::{Branch, TreePaths};
use super::draft_kv::DraftKv;
use super::kv_cache::{KvCache, KvShape};
use super::layer_executor::{LayerExecutor, Logits};
use crate::model::Model;

/// The results of a pass: logits, the draft nodes' keys and values, and captured states.
#[derive(Debug)]
pub(crate) struct ForwardPass {
    logits: Logits,
    drafts: Vec<DraftKv>,
    captured: CapturedRows,
}

/// The residual stream after some layers, for the branches that want it.
#[derive(Debug, Default)]
struct CapturedRows {
    /// Layout: `[row][layer][hidden]`.
    values: Vec<f32>,
    /// Index of each branch's first row.
    first: Vec<usize>,
    width: usize,
}

impl ForwardPass {
    /// Returns the logits after a branch's chain (`None`) or after one of its nodes.
    pub(crate) fn logits(&self, branch: usize, node: Option<usize>) -> &[f32] {
        self.logits.row(branch, node.map_or(0, |node| node + 1))
    }

    /// Appends a draft node of a branch to its sequence.
    pub(crate) fn accept(&self, branch: usize, node: usize, kv: &mut KvCache) {
        self.drafts[branch].accept(node, kv);
    }

    /// Returns the captured states of a row, counted over the chain and then the nodes. The branch must have wanted
    /// states.
    pub(crate) fn captured(&self, branch: usize, row: usize) -> &[f32] {
        let width = self.captured.width;
        &self.captured.values[(self.captured.first[branch] + row) * width..][..width]
    }
}

/// Runs forward passes of a model. It keeps its buffers between passes.
#[derive(Debug)]
pub(crate) struct ModelForward {
    layers: LayerExecutor,
    /// Indices of the layers whose outputs are captured.
    captured_layers: Vec<usize>,
}

impl ModelForward {
    /// Creates a runner for `model` that captures the outputs of `captured_layers` and splits products over `threads`
    /// threads.
    pub(crate) fn new(model: &Model, captured_layers: &[usize], threads: usize) -> Self {
        ModelForward {
            layers: LayerExecutor::new(&model.architecture, threads),
            captured_layers: captured_layers.to_vec(),
        }
    }

    /// Computes all branches. Every token must be below the vocabulary's size.
    pub(crate) fn run(&mut self, model: &Model, branches: &mut [Branch<'_>]) -> ForwardPass {
        let shape = KvShape::of(&model.architecture);
        let mut drafts: Vec<DraftKv> = branches
            .iter()
            .map(|branch| DraftKv::new(shape, branch.nodes.len()))
            .collect();
        let (logits, captured) = self.compute(model, branches, &mut drafts);
        ForwardPass {
            logits,
            drafts,
            captured,
        }
    }

    /// Computes all branches, where `drafts` holds the keys and values of the nodes that earlier passes computed.
    pub(crate) fn extend_drafts(
        &mut self,
        model: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [&mut DraftKv],
    ) -> Logits {
        self.compute(model, branches, drafts).0
    }

    fn compute<D: BorrowMut<DraftKv>>(
        &mut self,
        model: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [D],
    ) -> (Logits, CapturedRows) {
        let a = &model.architecture;
        let paths: Vec<TreePaths> = branches
            .iter()
            .map(|branch| TreePaths::new(branch.parents))
            .collect();
        let mut captured = CapturedRows::new(branches, self.captured_layers.len() * a.hidden_size);
        self.layers.begin(branches, &paths);
        self.embed(model, branches);
        for (index, layer) in model.layers.iter().enumerate() {
            self.layers.norm(&layer.attention_norm);
            self.layers
                .layer(index, &layer.block, branches, &paths, drafts);
            for (slot, _) in self
                .captured_layers
                .iter()
                .enumerate()
                .filter(|(_, captured)| **captured == index)
            {
                captured.copy(branches, &self.layers.residual, a.hidden_size, slot);
            }
        }
        let logits = self
            .layers
            .logits(branches, &model.norm, &model.head, a.vocab_size);
        (logits, captured)
    }

    fn embed(&mut self, model: &Model, branches: &[Branch<'_>]) {
        let hidden = model.architecture.hidden_size;
        let x = &mut self.layers.residual;
        x.clear();
        for token in branches.iter().flat_map(|branch| {
            branch
                .chain
                .iter()
                .chain(&branch.nodes[branch.computed_nodes..])
        }) {
            x.extend_from_slice(&model.embedding[*token as usize * hidden..][..hidden]);
        }
    }
}

impl CapturedRows {
    fn new(branches: &[Branch<'_>], width: usize) -> Self {
        let mut captured = CapturedRows {
            width,
            ..CapturedRows::default()
        };
        let mut rows = 0;
        for branch in branches {
            captured.first.push(rows);
            rows += if branch.wants_states {
                branch.rows()
            } else {
                0
            };
        }
        captured.values.resize(rows * width, 0.0);
        captured
    }

    fn copy(&mut self, branches: &[Branch<'_>], x: &[f32], hidden: usize, slot: usize) {
        let (mut to, mut from) = (0, 0);
        for branch in branches {
            let rows = branch.rows();
            if branch.wants_states {
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
