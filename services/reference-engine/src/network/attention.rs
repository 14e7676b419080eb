//! Attention of a sequence's new rows over its committed positions and its draft tree.

use super::branch::{Branch, TreePaths};
use super::draft_kv::DraftKv;
use super::kv_cache::{BLOCK_TOKENS, KvCache};
use crate::kernels::{Columns, PANEL_ROWS, PanelElements, Panels, multiply, softmax_weights};
use crate::model::Architecture;

/// Inputs of one layer's attention.
struct AttentionInputs<'a> {
    layer: usize,
    kv: &'a KvCache,
    /// Position of the first row.
    start: usize,
    /// Number of rows that belong to the sequence.
    chain: usize,
    /// Number of draft nodes. All but the first `computed_nodes` are rows.
    nodes: usize,
    computed_nodes: usize,
    paths: &'a TreePaths,
    draft: &'a DraftKv,
}

impl AttentionInputs<'_> {
    /// Returns the number of committed positions, those of this pass included.
    fn end(&self) -> usize {
        self.start + self.chain
    }

    /// Returns the index at which a column's scores of draft nodes begin.
    fn draft_at(&self) -> usize {
        self.end().next_multiple_of(BLOCK_TOKENS)
    }

    /// Returns how many positions a row sees of the block that begins at `at`.
    fn visible(&self, row: usize, at: usize) -> usize {
        let end = if row < self.chain {
            self.start + row + 1
        } else {
            self.end()
        };
        (end - at).min(BLOCK_TOKENS)
    }
}

/// Computes attention. It keeps its buffers between calls.
#[derive(Debug)]
pub(crate) struct Attention {
    heads: usize,
    kv_heads: usize,
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
            heads: architecture.heads,
            kv_heads: architecture.kv_heads,
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
    /// row, `width` apart. `out` gets `heads * head_dim` values per row.
    #[allow(
        clippy::too_many_arguments,
        reason = "one call site; a struct would only rename the arguments"
    )]
    pub(crate) fn run(
        &mut self,
        layer: usize,
        branch: &mut Branch<'_>,
        paths: &TreePaths,
        draft: &mut DraftKv,
        projected: &[f32],
        width: usize,
        out: &mut [f32],
    ) {
        if projected.is_empty() {
            return;
        }
        let chain = branch.chain.len();
        let (query_len, key_len) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        for (row, projected) in projected.chunks_exact(width).enumerate() {
            for head in 0..self.kv_heads {
                let at = query_len + head * self.head_dim;
                let key = &projected[at..][..self.head_dim];
                let value = &projected[at + key_len..][..self.head_dim];
                if row < chain {
                    branch.kv.write(layer, head, branch.start + row, key, value);
                } else {
                    draft.write(layer, head, branch.computed_nodes + row - chain, key, value);
                }
            }
        }
        let inputs = AttentionInputs {
            layer,
            kv: branch.kv,
            start: branch.start,
            chain,
            nodes: branch.nodes.len(),
            computed_nodes: branch.computed_nodes,
            paths,
            draft,
        };
        for head in 0..self.kv_heads {
            self.head(&inputs, head, projected, width, out);
        }
    }

    /// Computes one key-value head and the query heads that share it. Column `row * group + g` is the group's query
    /// head g in that row.
    fn head(
        &mut self,
        inputs: &AttentionInputs<'_>,
        head: usize,
        projected: &[f32],
        width: usize,
        out: &mut [f32],
    ) {
        let (dim, group) = (self.head_dim, self.heads / self.kv_heads);
        let rows = inputs.chain + inputs.nodes - inputs.computed_nodes;
        self.queries.clear();
        for row in projected.chunks_exact(width) {
            self.queries
                .extend_from_slice(&row[head * group * dim..][..group * dim]);
        }
        let stride = self.score(inputs, head, rows, group);
        self.sums.clear();
        for (column, scores) in self.scores.chunks_exact_mut(stride).enumerate() {
            let row = column / group;
            let count = if row < inputs.chain {
                inputs.start + row + 1
            } else {
                let path = inputs.paths.of(inputs.computed_nodes + row - inputs.chain);
                self.path.clear();
                self.path.extend(
                    path.iter()
                        .map(|node| scores[inputs.draft_at() + *node as usize]),
                );
                scores[inputs.end()..][..path.len()].copy_from_slice(&self.path);
                inputs.end() + path.len()
            };
            self.sums
                .push(softmax_weights(&mut scores[..count], self.scale));
        }
        self.sum_values(inputs, head, rows, group, stride);
        let padded = self.out.len() / (rows * group);
        for (column, (sums, sum)) in self.out.chunks_exact(padded).zip(&self.sums).enumerate() {
            let (row, g) = (column / group, column % group);
            let inverse = 1.0 / sum;
            let out = &mut out[(row * self.heads + head * group + g) * dim..][..dim];
            for (out, value) in out.iter_mut().zip(sums) {
                *out = value * inverse;
            }
        }
    }

    /// Computes the scores of every column, and returns the distance between columns. A column holds the committed
    /// positions in order and, from the next block border on, the draft nodes.
    fn score(
        &mut self,
        inputs: &AttentionInputs<'_>,
        head: usize,
        rows: usize,
        group: usize,
    ) -> usize {
        let stride = inputs.draft_at() + inputs.nodes.next_multiple_of(PANEL_ROWS);
        self.scores.resize(rows * group * stride, 0.0);
        let mut product = |panels: Panels<'_>, first_row: usize, at: usize| {
            let first = first_row * group;
            let columns = Columns {
                values: &self.queries[first * self.head_dim..],
                stride: self.head_dim,
                count: rows * group - first,
            };
            multiply(
                panels,
                columns,
                &mut self.scores[first * stride + at..],
                stride,
                false,
            );
        };
        for block in 0..inputs.end().div_ceil(BLOCK_TOKENS) {
            let at = block * BLOCK_TOKENS;
            // Rows before the block do not see it.
            product(
                inputs.kv.keys(inputs.layer, head, block),
                at.saturating_sub(inputs.start).min(inputs.chain),
                at,
            );
        }
        if inputs.nodes > 0 {
            product(
                inputs.draft.head_keys(inputs.layer, head, inputs.nodes),
                inputs.chain,
                inputs.draft_at(),
            );
        }
        stride
    }

    /// Computes the weighted sums of values, in order of position.
    fn sum_values(
        &mut self,
        inputs: &AttentionInputs<'_>,
        head: usize,
        rows: usize,
        group: usize,
        stride: usize,
    ) {
        let padded = inputs.kv.shape().value_panels() * PANEL_ROWS;
        self.out.clear();
        self.out.resize(rows * group * padded, 0.0);
        for block in 0..inputs.end().div_ceil(BLOCK_TOKENS) {
            let at = block * BLOCK_TOKENS;
            let mut row = at.saturating_sub(inputs.start).min(inputs.chain);
            while row < rows {
                let depth = inputs.visible(row, at);
                let mut end = row + 1;
                while end < rows && inputs.visible(end, at) == depth {
                    end += 1;
                }
                let first = row * group;
                let columns = Columns {
                    values: &self.scores[first * stride + at..],
                    stride,
                    count: (end - row) * group,
                };
                let values = inputs.kv.values(inputs.layer, head, block, depth);
                multiply(
                    values,
                    columns,
                    &mut self.out[first * padded..],
                    padded,
                    true,
                );
                row = end;
            }
        }
        for node in inputs.computed_nodes..inputs.nodes {
            let path = inputs.paths.of(node);
            self.path.clear();
            self.path.resize(path.len() * padded, 0.0);
            for (depth, node) in path.iter().enumerate() {
                let value = inputs.draft.value(inputs.layer, head, *node as usize);
                for (panel, value) in value.chunks(PANEL_ROWS).enumerate() {
                    self.path[(panel * path.len() + depth) * PANEL_ROWS..][..value.len()]
                        .copy_from_slice(value);
                }
            }
            let first = (inputs.chain + node - inputs.computed_nodes) * group;
            let values = Panels {
                elements: PanelElements::F32(&self.path),
                stride: path.len() * PANEL_ROWS,
                count: padded / PANEL_ROWS,
                depth: path.len(),
            };
            let columns = Columns {
                values: &self.scores[first * stride + inputs.end()..],
                stride,
                count: group,
            };
            multiply(
                values,
                columns,
                &mut self.out[first * padded..],
                padded,
                true,
            );
        }
    }
}
