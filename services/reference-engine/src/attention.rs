//! Attention of one sequence's new rows over its committed positions and its draft tree.

use crate::architecture::Architecture;
use crate::blocks::{Branch, Paths};
use crate::kv::{BLOCK_TOKENS, KvCache, KvShape};
use crate::math::softmax_weights;
use crate::simd::{Columns, Elements, Isa, PANEL_ROWS, Panels, multiply};

/// Keys and values of the draft nodes of one branch, all layers. They live only as long as the draft, unless
/// they are accepted.
#[derive(Debug)]
pub(crate) struct DraftKv {
    shape: KvShape,
    nodes: usize,
    /// `[layer][head][panel of nodes][element][32 nodes]`: scored by the same product as committed keys.
    keys: Vec<f32>,
    /// `[layer][head][node][element]`.
    values: Vec<f32>,
}

impl DraftKv {
    /// With room for `nodes`.
    pub(crate) fn new(shape: KvShape, nodes: usize) -> Self {
        let heads = shape.layers * shape.kv_heads;
        DraftKv {
            shape,
            nodes,
            keys: vec![0.0; heads * nodes.next_multiple_of(PANEL_ROWS) * shape.head_dim],
            values: vec![0.0; heads * nodes * shape.head_dim],
        }
    }

    /// Keys of the first `nodes` nodes.
    fn head_keys(&self, layer: usize, head: usize, nodes: usize) -> Panels<'_> {
        let stride = self.shape.head_dim * PANEL_ROWS;
        Panels {
            elements: Elements::F32(&self.keys[self.key_at(layer, head, 0)..]),
            stride,
            count: nodes.div_ceil(PANEL_ROWS),
            depth: self.shape.head_dim,
        }
    }

    fn key_at(&self, layer: usize, head: usize, node: usize) -> usize {
        let panels = self.nodes.div_ceil(PANEL_ROWS);
        let panel = (layer * self.shape.kv_heads + head) * panels + node / PANEL_ROWS;
        panel * self.shape.head_dim * PANEL_ROWS + node % PANEL_ROWS
    }

    fn value(&self, layer: usize, head: usize, node: usize) -> &[f32] {
        let at = (layer * self.shape.kv_heads + head) * self.nodes + node;
        &self.values[at * self.shape.head_dim..][..self.shape.head_dim]
    }

    fn write(&mut self, layer: usize, head: usize, node: usize, key: &[f32], value: &[f32]) {
        let at = self.key_at(layer, head, node);
        for (k, key) in key.iter().enumerate() {
            self.keys[at + k * PANEL_ROWS] = *key;
        }
        let at = (layer * self.shape.kv_heads + head) * self.nodes + node;
        self.values[at * self.shape.head_dim..][..self.shape.head_dim].copy_from_slice(value);
    }

    /// Writes a node to the end of a sequence's cache.
    pub(crate) fn accept(&self, node: usize, kv: &mut KvCache) {
        let position = kv.len();
        kv.grow(position + 1);
        let mut key = vec![0.0; self.shape.head_dim];
        for layer in 0..self.shape.layers {
            for head in 0..self.shape.kv_heads {
                let at = self.key_at(layer, head, node);
                for (k, key) in key.iter_mut().enumerate() {
                    *key = self.keys[at + k * PANEL_ROWS];
                }
                kv.write(layer, head, position, &key, self.value(layer, head, node));
            }
        }
    }
}

/// Computes attention; keeps the buffers between calls.
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

    /// Stores the new keys and values and attends. `projected` holds queries, keys and values of each row,
    /// `width` apart; `out` gets `heads * head_dim` per row.
    #[allow(
        clippy::too_many_arguments,
        reason = "one call site; a struct would only rename the arguments"
    )]
    pub(crate) fn run(
        &mut self,
        layer: usize,
        branch: &mut Branch<'_>,
        paths: &Paths,
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
                    draft.write(layer, head, branch.known + row - chain, key, value);
                }
            }
        }
        let view = View {
            layer,
            kv: branch.kv,
            start: branch.start,
            chain,
            nodes: branch.nodes.len(),
            known: branch.known,
            paths,
            draft,
        };
        for head in 0..self.kv_heads {
            self.head(&view, head, projected, width, out);
        }
    }

    /// One key-value head and the query heads that share it. Column `row * group + g` is query head g of the
    /// group in that row.
    fn head(
        &mut self,
        view: &View<'_>,
        head: usize,
        projected: &[f32],
        width: usize,
        out: &mut [f32],
    ) {
        let (dim, group) = (self.head_dim, self.heads / self.kv_heads);
        let rows = view.chain + view.nodes - view.known;
        self.queries.clear();
        for row in projected.chunks_exact(width) {
            self.queries
                .extend_from_slice(&row[head * group * dim..][..group * dim]);
        }
        let stride = self.score(view, head, rows, group);
        self.sums.clear();
        for (column, scores) in self.scores.chunks_exact_mut(stride).enumerate() {
            let row = column / group;
            let count = if row < view.chain {
                view.start + row + 1
            } else {
                let path = view.paths.of(view.known + row - view.chain);
                self.path.clear();
                self.path.extend(
                    path.iter()
                        .map(|node| scores[view.draft_at() + *node as usize]),
                );
                scores[view.end()..][..path.len()].copy_from_slice(&self.path);
                view.end() + path.len()
            };
            self.sums
                .push(softmax_weights(&mut scores[..count], self.scale));
        }
        self.weigh(view, head, rows, group, stride);
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

    /// Scores of every column: committed positions in order, then, from the next block border on, the draft's
    /// nodes. Gives the distance between columns.
    fn score(&mut self, view: &View<'_>, head: usize, rows: usize, group: usize) -> usize {
        let stride = view.draft_at() + view.nodes.next_multiple_of(PANEL_ROWS);
        self.scores.resize(rows * group * stride, 0.0);
        let mut product = |panels: Panels<'_>, first_row: usize, at: usize| {
            let first = first_row * group;
            let columns = Columns {
                values: &self.queries[first * self.head_dim..],
                stride: self.head_dim,
                count: rows * group - first,
            };
            multiply(
                Isa::detect(),
                panels,
                columns,
                &mut self.scores[first * stride + at..],
                stride,
                false,
            );
        };
        for block in 0..view.end().div_ceil(BLOCK_TOKENS) {
            let at = block * BLOCK_TOKENS;
            // Rows before the block see nothing of it.
            product(
                view.kv.keys(view.layer, head, block),
                at.saturating_sub(view.start).min(view.chain),
                at,
            );
        }
        if view.nodes > 0 {
            product(
                view.draft.head_keys(view.layer, head, view.nodes),
                view.chain,
                view.draft_at(),
            );
        }
        stride
    }

    /// Weighted sums of values, position after position.
    fn weigh(&mut self, view: &View<'_>, head: usize, rows: usize, group: usize, stride: usize) {
        let padded = view.kv.shape().value_panels() * PANEL_ROWS;
        self.out.clear();
        self.out.resize(rows * group * padded, 0.0);
        for block in 0..view.end().div_ceil(BLOCK_TOKENS) {
            let at = block * BLOCK_TOKENS;
            let mut row = at.saturating_sub(view.start).min(view.chain);
            while row < rows {
                let depth = view.visible(row, at);
                let mut end = row + 1;
                while end < rows && view.visible(end, at) == depth {
                    end += 1;
                }
                let first = row * group;
                let columns = Columns {
                    values: &self.scores[first * stride + at..],
                    stride,
                    count: (end - row) * group,
                };
                let values = view.kv.values(view.layer, head, block, depth);
                multiply(
                    Isa::detect(),
                    values,
                    columns,
                    &mut self.out[first * padded..],
                    padded,
                    true,
                );
                row = end;
            }
        }
        for node in view.known..view.nodes {
            let path = view.paths.of(node);
            self.path.clear();
            self.path.resize(path.len() * padded, 0.0);
            for (depth, node) in path.iter().enumerate() {
                let value = view.draft.value(view.layer, head, *node as usize);
                for (panel, value) in value.chunks(PANEL_ROWS).enumerate() {
                    self.path[(panel * path.len() + depth) * PANEL_ROWS..][..value.len()]
                        .copy_from_slice(value);
                }
            }
            let first = (view.chain + node - view.known) * group;
            let values = Panels {
                elements: Elements::F32(&self.path),
                stride: path.len() * PANEL_ROWS,
                count: padded / PANEL_ROWS,
                depth: path.len(),
            };
            let columns = Columns {
                values: &self.scores[first * stride + view.end()..],
                stride,
                count: group,
            };
            multiply(
                Isa::detect(),
                values,
                columns,
                &mut self.out[first * padded..],
                padded,
                true,
            );
        }
    }
}

/// What attention of one layer reads.
struct View<'a> {
    layer: usize,
    kv: &'a KvCache,
    /// Position of the first row.
    start: usize,
    /// Rows that are committed.
    chain: usize,
    /// Draft nodes, of which all but the first `known` are rows.
    nodes: usize,
    known: usize,
    paths: &'a Paths,
    draft: &'a DraftKv,
}

impl View<'_> {
    /// Committed positions, those of this pass included.
    fn end(&self) -> usize {
        self.start + self.chain
    }

    /// Where the scores of draft nodes begin.
    fn draft_at(&self) -> usize {
        self.end().next_multiple_of(BLOCK_TOKENS)
    }

    /// How many positions of the block that begins at `at` a row sees.
    fn visible(&self, row: usize, at: usize) -> usize {
        let end = if row < self.chain {
            self.start + row + 1
        } else {
            self.end()
        };
        (end - at).min(BLOCK_TOKENS)
    }
}
