//! Rows of the head through its one block.
//!
//! Row i of a text reads what the target captured at position i and the token at i + 1, and guesses the token
//! at i + 2. A row of a draft reads its parent's output instead of captured states:
//!
//! ```text
//! h = fc(captured states)                     or the parent's output
//! x = h + attention(norm(embedding(token)), norm(h))
//! x = x + mlp(norm(x))                        the output
//! logits = lm_head(norm(x))
//! ```

use std::borrow::BorrowMut;

use super::weights::Head;
use crate::attention::DraftKv;
use crate::blocks::{Blocks, Branch, Paths, wanted_rows};
use crate::drafter::DraftOutputs;
use crate::math::rms_norm;
use crate::weights::Model;

/// Runs passes; keeps the buffers between them.
#[derive(Debug)]
pub(crate) struct HeadForward {
    threads: usize,
    blocks: Blocks,
    fused: Vec<f32>,
}

impl HeadForward {
    pub(crate) fn new(head: &Head, threads: usize) -> Self {
        HeadForward {
            threads,
            blocks: Blocks::new(&head.shape.architecture, threads),
            fused: Vec::new(),
        }
    }

    /// Rows of texts: branches are chains, of the tokens *after* each position. `captured` holds the states of
    /// every row.
    pub(crate) fn follow(
        &mut self,
        head: &Head,
        target: &Model,
        branches: &mut [Branch<'_>],
        captured: &[f32],
    ) -> DraftOutputs {
        let rows = branches.iter().map(|branch| branch.rows()).sum();
        head.fc
            .product(captured, rows, &mut self.fused, self.threads);
        let hidden = head.shape.architecture.hidden_size;
        let mut x = std::mem::take(&mut self.blocks.x);
        x.clear();
        for row in self.fused.chunks_exact(head.fc.padded_rows()) {
            x.extend_from_slice(&row[..hidden]);
        }
        self.blocks.x = x;
        let mut no_drafts: Vec<DraftKv> = branches
            .iter()
            .map(|branch| DraftKv::new(branch.kv.shape(), 0))
            .collect();
        self.run(head, target, branches, &mut no_drafts)
    }

    /// Rows of drafts: branches are the nodes of each tree under the end of its text. `hidden` holds the
    /// output of every row's parent.
    pub(crate) fn guess(
        &mut self,
        head: &Head,
        target: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [&mut DraftKv],
        hidden: &[f32],
    ) -> DraftOutputs {
        self.blocks.x.clear();
        self.blocks.x.extend_from_slice(hidden);
        self.run(head, target, branches, drafts)
    }

    /// `x` holds the hidden state that each row reads.
    fn run<D: BorrowMut<DraftKv>>(
        &mut self,
        head: &Head,
        target: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [D],
    ) -> DraftOutputs {
        let paths: Vec<Paths> = branches
            .iter()
            .map(|branch| Paths::new(branch.parents))
            .collect();
        self.blocks.place(branches, &paths);
        self.join(head, target, branches);
        self.blocks.layer(0, &head.body, branches, &paths, drafts);
        let hidden = head.shape.architecture.hidden_size;
        let mut outputs = DraftOutputs {
            width: hidden,
            ..DraftOutputs::default()
        };
        for rows in wanted_rows(branches) {
            let x = &self.blocks.x[rows.start * hidden..rows.end * hidden];
            outputs.hidden.extend_from_slice(x);
        }
        outputs.outputs = self.blocks.outputs(
            branches,
            &head.norm,
            head.lm_head(target),
            head.shape.draft_vocab,
        );
        outputs
    }

    /// What attention reads: the normed embedding beside the normed hidden state.
    fn join(&mut self, head: &Head, target: &Model, branches: &[Branch<'_>]) {
        let a = &head.shape.architecture;
        let (hidden, eps) = (a.hidden_size, a.norm_eps);
        let embedding = head.embedding(target);
        let tokens = branches
            .iter()
            .flat_map(|branch| branch.chain.iter().chain(&branch.nodes[branch.known..]));
        let Blocks { x, normed, .. } = &mut self.blocks;
        normed.resize(2 * x.len(), 0.0);
        for ((x, joined), token) in x
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
