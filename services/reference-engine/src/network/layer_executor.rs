//! Runs rows through decoder layers and the output head. Models and EAGLE-3 heads share it.
//!
//! A *row* is one token at one position. Rows meet only in attention, where a row reads exactly its own ancestors
//! in order of position: first the committed positions, then the path from the root of the draft tree to the row.
//! Every sum runs in that order, so a row has the same bits in a prompt, in plain decoding and in a draft tree.

use std::ops::Range;

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
    /// Rows of exactly `vocab` logits, for each branch as many as it wanted.
    pub(crate) fn of_branches(values: Vec<f32>, vocab: usize, branches: &[Branch<'_>]) -> Self {
        let mut rows = 0;
        let first = logit_rows(branches).map(|wanted| {
            rows += wanted.len();
            rows - wanted.len()
        });
        Logits {
            first: first.collect(),
            values,
            stride: vocab,
            vocab,
        }
    }

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
    architecture: Architecture,
    rope: RopeTable,
    attention: Attention,
    /// The paths of each branch's draft tree.
    paths: Vec<TreePaths>,
    positions: Vec<usize>,
    /// The residual stream. Layout: `[row][hidden]`.
    pub(crate) residual: Vec<f32>,
    /// Input of the next product. Layout: `[row][depth of the product]`.
    pub(crate) normed: Vec<f32>,
    projected: Vec<f32>,
    /// A head before its norm.
    head: Vec<f32>,
    attended: Vec<f32>,
    activated: Vec<f32>,
}

impl LayerExecutor {
    /// Creates an executor for networks of one shape, which splits products over `threads` threads.
    pub(crate) fn new(architecture: &Architecture, threads: usize) -> Self {
        LayerExecutor {
            threads,
            architecture: architecture.clone(),
            rope: RopeTable::new(architecture.rope_frequencies.clone()),
            attention: Attention::new(architecture),
            paths: Vec::new(),
            positions: Vec::new(),
            residual: Vec::new(),
            normed: Vec::new(),
            projected: Vec::new(),
            head: Vec::new(),
            attended: Vec::new(),
            activated: Vec::new(),
        }
    }

    /// Begins a pass: sets the position of every row, branch by branch, the chain before the nodes.
    pub(crate) fn begin(&mut self, branches: &[Branch<'_>]) {
        self.paths.clear();
        self.positions.clear();
        for branch in branches {
            let paths = TreePaths::new(branch.parents);
            let end = branch.start + branch.chain.len();
            self.positions.extend(branch.start..end);
            let nodes = branch.computed_nodes..branch.nodes.len();
            self.positions
                .extend(nodes.map(|node| end + paths.of(node).len() - 1));
            self.paths.push(paths);
        }
        let reached = self.positions.iter().max().map_or(0, |last| last + 1);
        self.rope.reach(reached);
    }

    /// Sets `normed` to the norm of every row of `residual`.
    pub(crate) fn norm(&mut self, weight: &[f32]) {
        self.normed.clear();
        self.norm_rows(0..self.positions.len(), weight);
    }

    /// Appends the norm of some rows of `residual` to `normed`.
    fn norm_rows(&mut self, rows: Range<usize>, weight: &[f32]) {
        let (hidden, eps) = (self.architecture.hidden_size, self.architecture.norm_eps);
        let at = self.normed.len();
        self.normed.resize(at + rows.len() * hidden, 0.0);
        let x = self.residual[rows.start * hidden..rows.end * hidden].chunks_exact(hidden);
        for (x, out) in x.zip(self.normed[at..].chunks_exact_mut(hidden)) {
            rms_norm(x, weight, eps, out);
        }
    }

    /// Computes one layer: attention over `normed`, then the feed-forward layer. Both are added to `residual`.
    pub(crate) fn layer(
        &mut self,
        index: usize,
        block: &BlockWeights,
        branches: &mut [Branch<'_>],
        drafts: &mut [DraftKv],
    ) {
        let rows = self.positions.len();
        let (heads, head_dim) = (self.architecture.heads, self.architecture.head_dim);
        block
            .query_key_value
            .product(&self.normed, rows, &mut self.projected, self.threads);
        let width = block.query_key_value.padded_rows();
        let eps = self.architecture.norm_eps;
        for (row, position) in self.projected.chunks_exact_mut(width).zip(&self.positions) {
            if let Some(bias) = &block.query_key_value_bias {
                add(&mut row[..bias.len()], bias);
            }
            let (cos, sin) = self.rope.row(*position);
            let turned = (heads + self.architecture.kv_heads) * head_dim;
            for (number, head) in row[..turned].chunks_exact_mut(head_dim).enumerate() {
                if let Some(norms) = &block.head_norms {
                    self.head.clear();
                    self.head.extend_from_slice(head);
                    rms_norm(&self.head, &norms[usize::from(number >= heads)], eps, head);
                }
                rotate(head, cos, sin);
            }
        }
        let read = heads * head_dim;
        self.attended.resize(rows * read, 0.0);
        let mut projected = self.projected.as_slice();
        let mut attended = self.attended.as_mut_slice();
        for ((branch, paths), draft) in branches.iter_mut().zip(&self.paths).zip(drafts) {
            let count = branch.rows();
            let (queries, rest) = projected.split_at(count * width);
            let (out, out_rest) = attended.split_at_mut(count * read);
            (projected, attended) = (rest, out_rest);
            let queries = queries.chunks_exact(width);
            self.attention
                .run(index, branch, paths, draft, queries, out);
        }
        block
            .attention_out
            .product(&self.attended, rows, &mut self.projected, self.threads);
        self.add_rows(block.attention_out.padded_rows());
        self.norm(&block.mlp_norm);
        block
            .gate_up
            .product(&self.normed, rows, &mut self.projected, self.threads);
        let inner = self.architecture.intermediate_size;
        self.activated.resize(rows * inner, 0.0);
        let width = block.gate_up.padded_rows();
        for (row, out) in self
            .projected
            .chunks_exact(width)
            .zip(self.activated.chunks_exact_mut(inner))
        {
            silu_product(&row[..inner], &row[inner..2 * inner], out);
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
            self.norm_rows(rows, norm);
        }
        if wanted > 0 {
            head.product(&self.normed, wanted, &mut logits.values, self.threads);
        }
        logits
    }

    /// Adds the last product, whose rows are `width` apart, to the residual stream.
    fn add_rows(&mut self, width: usize) {
        let hidden = self.architecture.hidden_size;
        let rows = self.residual.chunks_exact_mut(hidden);
        for (x, y) in rows.zip(self.projected.chunks_exact(width)) {
            add(x, &y[..hidden]);
        }
    }
}
