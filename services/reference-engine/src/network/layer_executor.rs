//! Runs rows through decoder layers and the output head. Models and EAGLE-3 heads share it.
//!
//! A *row* is one token at one position. Rows meet only in attention, where a row reads exactly its own ancestors
//! in order of position: first the committed positions, then the path from the root of the draft tree to the row.
//! Every sum runs in that order, so a row has the same bits in a prompt, in plain decoding and in a draft tree.

use std::borrow::BorrowMut;

use super::attention::Attention;
use super::branch::{Branch, TreePaths, logit_rows};
use super::draft_kv::DraftKv;
use crate::kernels::{Matrix, RopeTable, add, rms_norm, rotate, silu_product};
use crate::model::{Architecture, BlockWeights};

/// Logits of the rows that wanted them.
#[derive(Debug, Default)]
pub(crate) struct Logits {
    values: Vec<f32>,
    stride: usize,
    vocab: usize,
    /// Index of each branch's first row.
    first: Vec<usize>,
}

impl Logits {
    /// Returns the index of a branch's `row`-th row among all rows that wanted logits.
    pub(crate) fn index(&self, branch: usize, row: usize) -> usize {
        self.first[branch] + row
    }

    /// Returns the logits of a branch's `row`-th row among those that wanted logits.
    pub(crate) fn row(&self, branch: usize, row: usize) -> &[f32] {
        &self.values[self.index(branch, row) * self.stride..][..self.vocab]
    }
}

/// Computes decoder layers over the rows of a pass. It keeps its buffers between passes.
#[derive(Debug)]
pub(crate) struct LayerExecutor {
    threads: usize,
    hidden: usize,
    inner: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    norm_eps: f32,
    rope: RopeTable,
    attention: Attention,
    positions: Vec<usize>,
    /// The residual stream. Layout: `[row][hidden]`.
    pub(crate) residual: Vec<f32>,
    /// Input of the next product. Layout: `[row][depth of the product]`.
    pub(crate) normed: Vec<f32>,
    projected: Vec<f32>,
    attended: Vec<f32>,
    activated: Vec<f32>,
}

impl LayerExecutor {
    /// Creates an executor for networks of shape `a`, which splits products over `threads` threads.
    pub(crate) fn new(a: &Architecture, threads: usize) -> Self {
        LayerExecutor {
            threads,
            hidden: a.hidden_size,
            inner: a.intermediate_size,
            heads: a.heads,
            kv_heads: a.kv_heads,
            head_dim: a.head_dim,
            norm_eps: a.norm_eps,
            rope: RopeTable::new(a.rope_frequencies.clone()),
            attention: Attention::new(a),
            positions: Vec::new(),
            residual: Vec::new(),
            normed: Vec::new(),
            projected: Vec::new(),
            attended: Vec::new(),
            activated: Vec::new(),
        }
    }

    /// Begins a pass: sets the position of every row, branch by branch, the chain before the nodes.
    pub(crate) fn begin(&mut self, branches: &[Branch<'_>], paths: &[TreePaths]) {
        self.positions.clear();
        for (branch, paths) in branches.iter().zip(paths) {
            let end = branch.start + branch.chain.len();
            self.positions.extend(branch.start..end);
            let nodes = branch.computed_nodes..branch.nodes.len();
            self.positions
                .extend(nodes.map(|node| end + paths.of(node).len() - 1));
        }
        let reached = self.positions.iter().max().map_or(0, |last| last + 1);
        self.rope.reach(reached);
    }

    /// Sets `normed` to the norm of every row of `residual`.
    pub(crate) fn norm(&mut self, weight: &[f32]) {
        self.normed.resize(self.positions.len() * self.hidden, 0.0);
        for (x, out) in self
            .residual
            .chunks_exact(self.hidden)
            .zip(self.normed.chunks_exact_mut(self.hidden))
        {
            rms_norm(x, weight, self.norm_eps, out);
        }
    }

    /// Computes one layer: attention over `normed`, then the feed-forward layer. Both are added to `residual`.
    pub(crate) fn layer<D: BorrowMut<DraftKv>>(
        &mut self,
        index: usize,
        block: &BlockWeights,
        branches: &mut [Branch<'_>],
        paths: &[TreePaths],
        drafts: &mut [D],
    ) {
        let rows = self.positions.len();
        block
            .query_key_value
            .product(&self.normed, rows, &mut self.projected, self.threads);
        let width = block.query_key_value.padded_rows();
        for (row, position) in self.projected.chunks_exact_mut(width).zip(&self.positions) {
            let (cos, sin) = self.rope.row(*position);
            let turned = (self.heads + self.kv_heads) * self.head_dim;
            for head in row[..turned].chunks_exact_mut(self.head_dim) {
                rotate(head, cos, sin);
            }
        }
        let read = self.heads * self.head_dim;
        self.attended.resize(rows * read, 0.0);
        let mut projected = self.projected.as_slice();
        let mut attended = self.attended.as_mut_slice();
        for ((branch, paths), draft) in branches.iter_mut().zip(paths).zip(drafts) {
            let count = branch.rows();
            let (queries, rest) = projected.split_at(count * width);
            let (out, out_rest) = attended.split_at_mut(count * read);
            (projected, attended) = (rest, out_rest);
            self.attention.run(
                index,
                branch,
                paths,
                draft.borrow_mut(),
                queries,
                width,
                out,
            );
        }
        block
            .attention_out
            .product(&self.attended, rows, &mut self.projected, self.threads);
        self.add_rows(block.attention_out.padded_rows());
        self.norm(&block.mlp_norm);
        block
            .gate_up
            .product(&self.normed, rows, &mut self.projected, self.threads);
        self.activated.resize(rows * self.inner, 0.0);
        let width = block.gate_up.padded_rows();
        for (row, out) in self
            .projected
            .chunks_exact(width)
            .zip(self.activated.chunks_exact_mut(self.inner))
        {
            silu_product(&row[..self.inner], &row[self.inner..2 * self.inner], out);
        }
        block
            .down
            .product(&self.activated, rows, &mut self.projected, self.threads);
        self.add_rows(block.down.padded_rows());
    }

    /// Returns the logits of the rows that want them. Other rows are skipped, because the head is the largest matrix
    /// of a small model.
    pub(crate) fn logits(
        &mut self,
        branches: &[Branch<'_>],
        norm: &[f32],
        head: &Matrix,
        vocab: usize,
    ) -> Logits {
        let mut logits = Logits {
            values: Vec::new(),
            stride: head.padded_rows(),
            vocab,
            first: Vec::with_capacity(branches.len()),
        };
        self.normed.clear();
        let mut wanted = 0;
        for rows in logit_rows(branches) {
            logits.first.push(wanted);
            wanted += rows.len();
            for x in self.residual[rows.start * self.hidden..rows.end * self.hidden]
                .chunks_exact(self.hidden)
            {
                let at = self.normed.len();
                self.normed.resize(at + self.hidden, 0.0);
                rms_norm(x, norm, self.norm_eps, &mut self.normed[at..]);
            }
        }
        if wanted > 0 {
            head.product(&self.normed, wanted, &mut logits.values, self.threads);
        }
        logits
    }

    /// Adds the last product, whose rows are `width` apart, to the residual stream.
    fn add_rows(&mut self, width: usize) {
        for (x, y) in self
            .residual
            .chunks_exact_mut(self.hidden)
            .zip(self.projected.chunks_exact(width))
        {
            add(x, &y[..self.hidden]);
        }
    }
}
