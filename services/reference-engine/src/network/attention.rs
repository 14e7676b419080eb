//! Attention of a sequence's new rows over its committed positions and its draft tree.

use std::slice::ChunksExact;

use super::branch::{Branch, TreePaths};
use super::draft_kv::DraftKv;
use super::kv_cache::BLOCK_TOKENS;
use crate::kernels::{Columns, PANEL_ROWS, PanelElements, Panels, multiply, softmax_weights};
use crate::model::Architecture;

/// Inputs of one layer's attention.
struct AttentionInputs<'a> {
    layer: usize,
    branch: &'a Branch<'a>,
    paths: &'a TreePaths,
    draft: &'a DraftKv,
}

impl AttentionInputs<'_> {
    /// Returns the number of committed positions, those of this pass included.
    fn end(&self) -> usize {
        self.branch.start + self.chain()
    }

    /// Returns the number of rows that belong to the sequence. The others are draft nodes.
    fn chain(&self) -> usize {
        self.branch.chain.len()
    }

    /// Returns the nodes from the root to that of a row, which must be a draft node.
    fn path(&self, row: usize) -> &[u32] {
        self.paths
            .of(self.branch.computed_nodes + row - self.chain())
    }

    /// Returns the index at which a column's scores of draft nodes begin.
    fn draft_at(&self) -> usize {
        self.end().next_multiple_of(BLOCK_TOKENS)
    }

    /// Returns the first position of each block of committed positions, with the first row that sees the block.
    fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        let seen_from = |at: usize| at.saturating_sub(self.branch.start).min(self.chain());
        (0..self.end())
            .step_by(BLOCK_TOKENS)
            .map(move |at| (at, seen_from(at)))
    }

    /// Returns how many positions a row sees of the block that begins at `at`.
    fn visible(&self, row: usize, at: usize) -> usize {
        let end = self.end().min(self.branch.start + row + 1);
        (end - at).min(BLOCK_TOKENS)
    }
}

/// Computes attention. It keeps its buffers between calls.
#[derive(Debug)]
pub(crate) struct Attention {
    kv_heads: usize,
    /// Number of query heads that share a key-value head.
    group: usize,
    head_dim: usize,
    scale: f32,
    queries: Vec<f32>,
    scores: Vec<f32>,
    sums: Vec<f32>,
    out: Vec<f32>,
    path: Vec<f32>,
}

impl Attention {
    pub(crate) fn new(architecture: &Architecture) -> Self {
        Attention {
            kv_heads: architecture.kv_heads,
            group: architecture.heads / architecture.kv_heads,
            head_dim: architecture.head_dim,
            scale: 1.0 / (architecture.head_dim as f32).sqrt(),
            queries: Vec::new(),
            scores: Vec::new(),
            sums: Vec::new(),
            out: Vec::new(),
            path: Vec::new(),
        }
    }

    /// Stores the new keys and values, and computes attention. `projected` holds the queries, keys and values of each
    /// row. `out` gets the elements of all heads of each row.
    pub(crate) fn run(
        &mut self,
        layer: usize,
        branch: &mut Branch<'_>,
        paths: &TreePaths,
        draft: &mut DraftKv,
        projected: ChunksExact<'_, f32>,
        out: &mut [f32],
    ) {
        let (dim, chain) = (self.head_dim, branch.chain.len());
        let query_len = self.kv_heads * self.group * dim;
        for (row, projected) in projected.clone().enumerate() {
            for head in 0..self.kv_heads {
                let at = query_len + head * dim;
                let key = &projected[at..][..dim];
                let value = &projected[at + self.kv_heads * dim..][..dim];
                if row < chain {
                    branch.kv.write(layer, head, branch.start + row, key, value);
                } else {
                    draft.write(layer, head, branch.computed_nodes + row - chain, key, value);
                }
            }
        }
        if projected.len() == 0 {
            return;
        }
        let inputs = AttentionInputs {
            layer,
            branch,
            paths,
            draft,
        };
        for head in 0..self.kv_heads {
            self.head(&inputs, head, projected.clone(), out);
        }
    }

    /// Computes one key-value head and the query heads that share it. Column `row * group + g` is the group's query
    /// head g in that row.
    fn head(
        &mut self,
        inputs: &AttentionInputs<'_>,
        head: usize,
        projected: ChunksExact<'_, f32>,
        out: &mut [f32],
    ) {
        let (dim, group) = (self.head_dim, self.group);
        self.queries.clear();
        for row in projected {
            self.queries
                .extend_from_slice(&row[head * group * dim..][..group * dim]);
        }
        let stride = self.score(inputs, head);
        self.sums.clear();
        for (column, scores) in self.scores.chunks_exact_mut(stride).enumerate() {
            let row = column / group;
            let count = if row < inputs.chain() {
                inputs.branch.start + row + 1
            } else {
                let nodes = inputs.path(row).iter();
                self.path.clear();
                self.path
                    .extend(nodes.map(|node| scores[inputs.draft_at() + *node as usize]));
                scores[inputs.end()..][..self.path.len()].copy_from_slice(&self.path);
                inputs.end() + self.path.len()
            };
            self.sums
                .push(softmax_weights(&mut scores[..count], self.scale));
        }
        let padded = self.sum_values(inputs, head, stride);
        for (column, (sums, sum)) in self.out.chunks_exact(padded).zip(&self.sums).enumerate() {
            let (row, g) = (column / group, column % group);
            let inverse = 1.0 / sum;
            let out = &mut out[((row * self.kv_heads + head) * group + g) * dim..][..dim];
            for (out, value) in out.iter_mut().zip(sums) {
                *out = value * inverse;
            }
        }
    }

    /// Computes the scores of every column, and returns the distance between columns. A column holds the committed
    /// positions in order and, from the next block border on, the draft nodes.
    fn score(&mut self, inputs: &AttentionInputs<'_>, head: usize) -> usize {
        let nodes = inputs.branch.nodes.len();
        let stride = inputs.draft_at() + nodes.next_multiple_of(PANEL_ROWS);
        let columns = inputs.branch.rows() * self.group;
        self.scores.resize(columns * stride, 0.0);
        let mut product = |panels: Panels<'_>, first_row: usize, at: usize| {
            let first = first_row * self.group;
            let columns = Columns {
                values: &self.queries[first * self.head_dim..],
                stride: self.head_dim,
                count: columns - first,
            };
            let scores = &mut self.scores[first * stride + at..];
            multiply(panels, columns, scores, stride, false);
        };
        for (at, first_row) in inputs.blocks() {
            let keys = inputs.branch.kv.keys(inputs.layer, head, at / BLOCK_TOKENS);
            product(keys, first_row, at);
        }
        if nodes > 0 {
            let keys = inputs.draft.head_keys(inputs.layer, head, nodes);
            product(keys, inputs.chain(), inputs.draft_at());
        }
        stride
    }

    /// Computes the weighted sums of values, in order of position. Returns the distance between columns of `out`.
    fn sum_values(&mut self, inputs: &AttentionInputs<'_>, head: usize, stride: usize) -> usize {
        let (branch, group) = (inputs.branch, self.group);
        let rows = branch.rows();
        let padded = branch.kv.shape().value_panels() * PANEL_ROWS;
        self.out.clear();
        self.out.resize(rows * group * padded, 0.0);
        let mut add = |values: Panels<'_>, row: usize, end: usize, at: usize| {
            let first = row * group;
            let columns = Columns {
                values: &self.scores[first * stride + at..],
                stride,
                count: (end - row) * group,
            };
            let out = &mut self.out[first * padded..];
            multiply(values, columns, out, padded, true);
        };
        for (at, mut row) in inputs.blocks() {
            while row < rows {
                let depth = inputs.visible(row, at);
                let mut end = row + 1;
                while end < rows && inputs.visible(end, at) == depth {
                    end += 1;
                }
                let values = branch
                    .kv
                    .values(inputs.layer, head, at / BLOCK_TOKENS, depth);
                add(values, row, end, at);
                row = end;
            }
        }
        for row in inputs.chain()..rows {
            let path = inputs.path(row);
            self.path.clear();
            self.path.resize(path.len() * padded, 0.0);
            for (depth, node) in path.iter().enumerate() {
                let value = inputs.draft.value(inputs.layer, head, *node as usize);
                for (panel, value) in value.chunks(PANEL_ROWS).enumerate() {
                    self.path[(panel * path.len() + depth) * PANEL_ROWS..][..value.len()]
                        .copy_from_slice(value);
                }
            }
            let values = Panels {
                elements: PanelElements::F32(&self.path),
                stride: path.len() * PANEL_ROWS,
                count: padded / PANEL_ROWS,
                depth: path.len(),
            };
            add(values, row, row + 1, inputs.end());
        }
        padded
    }
}
