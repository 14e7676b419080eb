//! An EAGLE-3 head: a network of one layer that continues from the target's hidden states.
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

mod shape;
mod weights;

use std::sync::Arc;

use refrain_protocol::engine::DrafterKind;

use super::draft_network::{DraftNetwork, DraftOutputs, NetworkProfile, RowStates, TOP_K_MAX};
use crate::kernels::rms_norm;
use crate::model::Model;
use crate::network::{Branch, DraftKv, KvShape, LayerExecutor, logit_rows};

#[cfg(test)]
pub(crate) use shape::HeadShape;
pub(crate) use weights::Eagle3Head;

/// A head, as a network that drafts. It keeps its buffers between passes.
#[derive(Debug)]
pub(crate) struct Eagle3Network {
    head: Arc<Eagle3Head>,
    threads: usize,
    layers: LayerExecutor,
    fused: Vec<f32>,
}

impl Eagle3Network {
    /// Creates a network that splits products over `threads` threads.
    pub(crate) fn new(head: Arc<Eagle3Head>, threads: usize) -> Self {
        Eagle3Network {
            layers: LayerExecutor::new(&head.shape.architecture, threads),
            head,
            threads,
            fused: Vec::new(),
        }
    }

    /// Joins the inputs of attention: the normed embedding and, after it, the normed hidden state of each row.
    fn join(&mut self, target: &Model, branches: &[Branch<'_>]) {
        let head = &self.head;
        let (hidden, eps) = (
            head.shape.architecture.hidden_size,
            head.shape.architecture.norm_eps,
        );
        let embedding = head.embedding(target);
        let (residual, normed) = (&mut self.layers.residual, &mut self.layers.normed);
        normed.resize(2 * residual.len(), 0.0);
        for ((x, joined), token) in residual
            .chunks_exact_mut(hidden)
            .zip(normed.chunks_exact_mut(2 * hidden))
            .zip(branches.iter().flat_map(Branch::row_tokens))
        {
            let (embedded, normed) = joined.split_at_mut(hidden);
            let row = &embedding[token * hidden..][..hidden];
            rms_norm(row, &head.embedding_norm, eps, embedded);
            rms_norm(x, &head.hidden_norm, eps, normed);
            if head.shape.norm_before_residual {
                x.copy_from_slice(normed);
            }
        }
    }
}

impl DraftNetwork for Eagle3Network {
    fn profile(&self) -> NetworkProfile {
        let shape = &self.head.shape;
        NetworkProfile {
            kind: DrafterKind::Eagle3,
            tokens: self.head.tokens.clone(),
            captured_layers: shape.captured_layers.clone(),
            hidden_width: shape.architecture.hidden_size,
            top_k_max: TOP_K_MAX,
            kv: KvShape::of(&shape.architecture),
            backend: None,
            context_max: usize::MAX,
        }
    }

    fn compute(
        &mut self,
        target: Option<&Model>,
        branches: &mut [Branch<'_>],
        drafts: &mut [DraftKv],
        states: RowStates<'_>,
    ) -> Result<DraftOutputs, String> {
        let target = target.ok_or("an EAGLE-3 head needs the weights of its model")?;
        let hidden = self.head.shape.architecture.hidden_size;
        let residual = &mut self.layers.residual;
        residual.clear();
        match states {
            RowStates::Captured(captured) => {
                let rows = branches.iter().map(|branch| branch.rows()).sum();
                self.head
                    .fc
                    .product(captured, rows, &mut self.fused, self.threads);
                for row in self.fused.chunks_exact(self.head.fc.padded_rows()) {
                    residual.extend_from_slice(&row[..hidden]);
                }
            }
            RowStates::OfParents(hidden) => residual.extend_from_slice(hidden),
        }
        self.layers.begin(branches);
        self.join(target, branches);
        let head = &self.head;
        self.layers.layer(0, &head.block, branches, drafts);
        let mut outputs = Vec::new();
        for rows in logit_rows(branches) {
            let x = &self.layers.residual[rows.start * hidden..rows.end * hidden];
            outputs.extend_from_slice(x);
        }
        let vocab = head.shape.draft_vocab;
        Ok(DraftOutputs {
            logits: self
                .layers
                .logits(branches, &head.norm, head.lm_head(target), vocab),
            hidden: outputs,
            width: hidden,
        })
    }
}
