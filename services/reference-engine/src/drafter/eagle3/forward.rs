//! Forward passes of a head through its one layer.
//!
//! Row i of a text reads the states that the target captured at position i and the token at i + 1, and guesses the
//! token at i + 2. A row of a draft reads its parent's output instead of captured states:
//!
//! ```text
//! h = fc(captured states)                     or the parent's output
//! x = h + attention(norm(embedding(token)), norm(h))
//! x = x + mlp(norm(x))                        the output
//! logits = lm_head(norm(x))
//! ```

use std::borrow::BorrowMut;

use super::weights::Eagle3Head;
use crate::drafter::draft_network::DraftOutputs;
use crate::kernels::rms_norm;
use crate::model::Model;
use crate::network::{Branch, DraftKv, LayerExecutor, TreePaths, logit_rows};

/// Runs forward passes of a head. It keeps its buffers between passes.
#[derive(Debug)]
pub(crate) struct HeadForward {
    threads: usize,
    layers: LayerExecutor,
    fused: Vec<f32>,
}

impl HeadForward {
    pub(crate) fn new(head: &Eagle3Head, threads: usize) -> Self {
        HeadForward {
            threads,
            layers: LayerExecutor::new(&head.shape.architecture, threads),
            fused: Vec::new(),
        }
    }

    /// Computes rows of texts. Branches are chains of the tokens *after* each position. `captured` holds the states
    /// of every row.
    pub(crate) fn read_text(
        &mut self,
        head: &Eagle3Head,
        target: &Model,
        branches: &mut [Branch<'_>],
        captured: &[f32],
    ) -> DraftOutputs {
        let rows = branches.iter().map(|branch| branch.rows()).sum();
        head.fc
            .product(captured, rows, &mut self.fused, self.threads);
        let hidden = head.shape.architecture.hidden_size;
        let residual = &mut self.layers.residual;
        residual.clear();
        for row in self.fused.chunks_exact(head.fc.padded_rows()) {
            residual.extend_from_slice(&row[..hidden]);
        }
        let mut no_drafts: Vec<DraftKv> = branches
            .iter()
            .map(|branch| DraftKv::new(branch.kv.shape(), 0))
            .collect();
        self.run(head, target, branches, &mut no_drafts)
    }

    /// Computes nodes of draft trees, so branches have no chains. `hidden` holds the output of every row's parent.
    pub(crate) fn extend_drafts(
        &mut self,
        head: &Eagle3Head,
        target: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [&mut DraftKv],
        hidden: &[f32],
    ) -> DraftOutputs {
        self.layers.residual.clear();
        self.layers.residual.extend_from_slice(hidden);
        self.run(head, target, branches, drafts)
    }

    /// Computes all rows. The residual stream holds the hidden state that each row reads.
    fn run<D: BorrowMut<DraftKv>>(
        &mut self,
        head: &Eagle3Head,
        target: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [D],
    ) -> DraftOutputs {
        let paths: Vec<TreePaths> = branches
            .iter()
            .map(|branch| TreePaths::new(branch.parents))
            .collect();
        self.layers.begin(branches, &paths);
        self.join(head, target, branches);
        self.layers.layer(0, &head.block, branches, &paths, drafts);
        let hidden = head.shape.architecture.hidden_size;
        let mut outputs = DraftOutputs {
            width: hidden,
            ..DraftOutputs::default()
        };
        for rows in logit_rows(branches) {
            let x = &self.layers.residual[rows.start * hidden..rows.end * hidden];
            outputs.hidden.extend_from_slice(x);
        }
        outputs.logits = self.layers.logits(
            branches,
            &head.norm,
            head.lm_head(target),
            head.shape.draft_vocab,
        );
        outputs
    }

    /// Joins the inputs of attention: the normed embedding and, after it, the normed hidden state of each row.
    fn join(&mut self, head: &Eagle3Head, target: &Model, branches: &[Branch<'_>]) {
        let a = &head.shape.architecture;
        let (hidden, eps) = (a.hidden_size, a.norm_eps);
        let embedding = head.embedding(target);
        let tokens = branches.iter().flat_map(|branch| {
            branch
                .chain
                .iter()
                .chain(&branch.nodes[branch.computed_nodes..])
        });
        let LayerExecutor {
            residual, normed, ..
        } = &mut self.layers;
        normed.resize(2 * residual.len(), 0.0);
        for ((x, joined), token) in residual
            .chunks_exact_mut(hidden)
            .zip(normed.chunks_exact_mut(2 * hidden))
            .zip(tokens)
        {
            let (embedded, normed) = joined.split_at_mut(hidden);
            let row = &embedding[*token as usize * hidden..][..hidden];
            rms_norm(row, &head.embedding_norm, eps, embedded);
            rms_norm(x, &head.hidden_norm, eps, normed);
            if head.shape.norm_before_residual {
                x.copy_from_slice(normed);
            }
        }
    }
}
