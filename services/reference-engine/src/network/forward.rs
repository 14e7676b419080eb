//! Forward passes of a model over a batch of sequences.

use super::branch::Branch;
use super::draft_kv::DraftKv;
use super::kv_cache::KvCache;
use super::layer_executor::{LayerExecutor, Logits};
use crate::backend::{Backend, BackendPart, BackendSequence};
use crate::model::Model;

/// The results of a pass: logits, the draft nodes' keys and values, and captured states.
#[derive(Debug)]
pub(crate) struct ForwardPass {
    logits: Logits,
    /// Empty if a backend has the keys and values.
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

    /// Appends draft nodes of a branch, which are a path from the root, to its sequence.
    pub(crate) fn accept(&self, branch: usize, nodes: &[usize], kv: &mut KvCache) {
        if let Some(sequence) = kv.sequence() {
            sequence.accept(nodes);
            let len = kv.len() + nodes.len();
            kv.grow(len);
            kv.truncate(len);
        } else {
            for node in nodes {
                self.drafts[branch].accept(*node, kv);
            }
        }
    }

    /// Returns the captured states of a row, counted over the chain and then the nodes. The branch must have wanted
    /// states.
    pub(crate) fn captured(&self, branch: usize, row: usize) -> &[f32] {
        let width = self.captured.width;
        &self.captured.values[(self.captured.first[branch] + row) * width..][..width]
    }
}

/// Has a backend compute all branches. It returns the logits, of `vocab` tokens each.
///
/// # Errors
/// The backend's, or all its sequences are in use.
pub(crate) fn backend_logits(
    backend: &dyn Backend,
    vocab: usize,
    branches: &[Branch<'_>],
) -> Result<Logits, String> {
    let mut parts = Vec::with_capacity(branches.len());
    for branch in branches {
        let sequence = branch.kv.sequence().and_then(BackendSequence::id);
        parts.push(BackendPart {
            sequence: sequence.ok_or("all sequences of the backend are in use")?,
            start: branch.start,
            chain: branch.chain,
            nodes: branch.nodes,
            parents: branch.parents,
            computed_nodes: branch.computed_nodes,
            wants_logits: branch.wants_logits,
        });
    }
    let values = backend.compute(&parts)?;
    Ok(Logits::of_branches(values, vocab, branches))
}

/// Has a backend compute all branches.
///
/// # Errors
/// As [`backend_logits`].
pub(crate) fn backend_pass(
    backend: &dyn Backend,
    vocab: usize,
    branches: &[Branch<'_>],
) -> Result<ForwardPass, String> {
    Ok(ForwardPass {
        logits: backend_logits(backend, vocab, branches)?,
        drafts: Vec::new(),
        captured: CapturedRows::new(branches, 0),
    })
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
        let mut drafts = DraftKv::of_branches(branches);
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
        drafts: &mut [DraftKv],
    ) -> Logits {
        self.compute(model, branches, drafts).0
    }

    fn compute(
        &mut self,
        model: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [DraftKv],
    ) -> (Logits, CapturedRows) {
        let (hidden, vocab) = (
            model.architecture.hidden_size,
            model.architecture.vocab_size,
        );
        let mut captured = CapturedRows::new(branches, self.captured_layers.len() * hidden);
        self.layers.begin(branches);
        let x = &mut self.layers.residual;
        x.clear();
        for token in branches.iter().flat_map(Branch::row_tokens) {
            x.extend_from_slice(&model.embedding[token * hidden..][..hidden]);
        }
        for (index, layer) in model.layers.iter().enumerate() {
            self.layers.norm(&layer.attention_norm);
            self.layers.layer(index, &layer.block, branches, drafts);
            for (slot, layer) in self.captured_layers.iter().enumerate() {
                if *layer == index {
                    captured.copy(branches, &self.layers.residual, hidden, slot);
                }
            }
        }
        let logits = self
            .layers
            .logits(branches, &model.norm, &model.head, vocab);
        (logits, captured)
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
            rows += usize::from(branch.wants_states) * branch.rows();
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
