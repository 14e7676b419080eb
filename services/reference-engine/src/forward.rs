//! One forward pass over a batch of sequences.
//!
//! A *row* is one token at one position. Rows meet only in attention, and there a row reads exactly its own
//! ancestors in order of position: the committed positions first, then, for a node of a draft, the path from
//! the root of the tree to it. Every sum runs in that order, whether the row was part of a prompt, decoded
//! alone or guessed in a tree; hence a token's logits have the same bits wherever it was computed.

use crate::attention::{Attention, DraftKv};
use crate::kv::{KvCache, KvShape};
use crate::math::{RopeTable, add, rms_norm, rotate, silu_product};
use crate::weights::Model;

/// One sequence's part of a pass.
pub(crate) struct Branch<'a> {
    /// Holds the positions before `chain`; has been grown to hold those of `chain` too.
    pub(crate) kv: &'a mut KvCache,
    /// Position of `chain[0]`.
    pub(crate) start: usize,
    /// Tokens that become part of the sequence.
    pub(crate) chain: &'a [u32],
    /// Tokens of the draft tree under the chain's last one.
    pub(crate) nodes: &'a [u32],
    /// Parent of each node, an earlier one; `None` is the chain's last token. As long as `nodes`.
    pub(crate) parents: &'a [Option<u32>],
    /// Whether logits are wanted: of the chain's last token (which there must be) and of every node.
    pub(crate) logits: bool,
}

/// The draft of one branch, resolved: each node's path from the root, itself included.
#[derive(Clone, Debug, Default)]
pub(crate) struct Paths {
    nodes: Vec<u32>,
    starts: Vec<usize>,
}

impl Paths {
    fn new(parents: &[Option<u32>]) -> Self {
        let mut paths = Paths {
            nodes: Vec::new(),
            starts: vec![0],
        };
        for (node, parent) in parents.iter().enumerate() {
            if let Some(parent) = parent {
                let parent = *parent as usize;
                paths
                    .nodes
                    .extend_from_within(paths.starts[parent]..paths.starts[parent + 1]);
            }
            paths.nodes.push(node as u32);
            paths.starts.push(paths.nodes.len());
        }
        paths
    }

    /// Nodes from the root to `node`, both included.
    pub(crate) fn of(&self, node: usize) -> &[u32] {
        &self.nodes[self.starts[node]..self.starts[node + 1]]
    }
}

/// What a pass left behind: logits and the draft nodes' keys and values.
#[derive(Debug)]
pub(crate) struct Pass {
    logits: Vec<f32>,
    stride: usize,
    vocab: usize,
    /// First row of logits of each branch.
    first: Vec<usize>,
    drafts: Vec<DraftKv>,
}

impl Pass {
    /// Logits after a branch's chain (`None`) or after one of its nodes.
    pub(crate) fn logits(&self, branch: usize, node: Option<usize>) -> &[f32] {
        let row = self.first[branch] + node.map_or(0, |node| node + 1);
        &self.logits[row * self.stride..][..self.vocab]
    }

    /// Makes a branch's draft node the next position of its sequence.
    pub(crate) fn accept(&self, branch: usize, node: usize, kv: &mut KvCache) {
        self.drafts[branch].accept(node, kv);
    }
}

/// Runs passes; keeps the buffers between them.
#[derive(Debug)]
pub(crate) struct Forward {
    threads: usize,
    rope: RopeTable,
    attention: Attention,
    x: Vec<f32>,
    normed: Vec<f32>,
    projected: Vec<f32>,
    attended: Vec<f32>,
    activated: Vec<f32>,
}

impl Forward {
    /// For `model`, with products spread over `threads` threads.
    pub(crate) fn new(model: &Model, threads: usize) -> Self {
        Forward {
            threads,
            rope: RopeTable::new(model.architecture.rope_frequencies.clone()),
            attention: Attention::new(&model.architecture),
            x: Vec::new(),
            normed: Vec::new(),
            projected: Vec::new(),
            attended: Vec::new(),
            activated: Vec::new(),
        }
    }

    /// Computes all branches. Tokens are below the vocabulary's size.
    pub(crate) fn run(&mut self, model: &Model, branches: &mut [Branch<'_>]) -> Pass {
        let a = &model.architecture;
        let hidden = a.hidden_size;
        let shape = KvShape::of(a);
        let paths: Vec<Paths> = branches
            .iter()
            .map(|branch| Paths::new(branch.parents))
            .collect();
        let mut drafts: Vec<DraftKv> = branches
            .iter()
            .map(|branch| DraftKv::new(shape, branch.nodes.len()))
            .collect();
        let positions = row_positions(branches, &paths);
        let rows = positions.len();
        self.rope
            .reach(positions.iter().max().map_or(0, |last| last + 1));
        self.embed(model, branches);
        for (index, layer) in model.layers.iter().enumerate() {
            self.norm_rows(rows, hidden, &layer.attention_norm, a.norm_eps);
            layer
                .query_key_value
                .product(&self.normed, rows, &mut self.projected, self.threads);
            let width = layer.query_key_value.padded_rows();
            for (row, position) in self.projected.chunks_exact_mut(width).zip(&positions) {
                let (cos, sin) = self.rope.row(*position);
                let turned = (a.heads + a.kv_heads) * a.head_dim;
                for head in row[..turned].chunks_exact_mut(a.head_dim) {
                    rotate(head, cos, sin);
                }
            }
            self.attended.resize(rows * a.heads * a.head_dim, 0.0);
            let mut projected = self.projected.as_slice();
            let mut attended = self.attended.as_mut_slice();
            for ((branch, paths), draft) in branches.iter_mut().zip(&paths).zip(&mut drafts) {
                let count = branch.chain.len() + branch.nodes.len();
                let (queries, rest) = projected.split_at(count * width);
                let (out, out_rest) = attended.split_at_mut(count * a.heads * a.head_dim);
                (projected, attended) = (rest, out_rest);
                self.attention
                    .run(index, branch, paths, draft, queries, width, out);
            }
            layer
                .attention_out
                .product(&self.attended, rows, &mut self.projected, self.threads);
            self.add_rows(hidden, layer.attention_out.padded_rows());
            self.norm_rows(rows, hidden, &layer.mlp_norm, a.norm_eps);
            layer
                .gate_up
                .product(&self.normed, rows, &mut self.projected, self.threads);
            let inner = a.intermediate_size;
            self.activated.resize(rows * inner, 0.0);
            let width = layer.gate_up.padded_rows();
            for (row, out) in self
                .projected
                .chunks_exact(width)
                .zip(self.activated.chunks_exact_mut(inner))
            {
                silu_product(&row[..inner], &row[inner..2 * inner], out);
            }
            layer
                .down
                .product(&self.activated, rows, &mut self.projected, self.threads);
            self.add_rows(hidden, layer.down.padded_rows());
        }
        let mut pass = Pass {
            logits: Vec::new(),
            stride: model.head.padded_rows(),
            vocab: a.vocab_size,
            first: Vec::with_capacity(branches.len()),
            drafts,
        };
        self.head(model, branches, &mut pass);
        pass
    }

    fn embed(&mut self, model: &Model, branches: &[Branch<'_>]) {
        let hidden = model.architecture.hidden_size;
        self.x.clear();
        for token in branches
            .iter()
            .flat_map(|branch| branch.chain.iter().chain(branch.nodes))
        {
            self.x
                .extend_from_slice(&model.embedding[*token as usize * hidden..][..hidden]);
        }
    }

    fn norm_rows(&mut self, rows: usize, hidden: usize, weight: &[f32], eps: f32) {
        self.normed.resize(rows * hidden, 0.0);
        for (x, out) in self
            .x
            .chunks_exact(hidden)
            .zip(self.normed.chunks_exact_mut(hidden))
        {
            rms_norm(x, weight, eps, out);
        }
    }

    /// Adds the last product to the residual stream.
    fn add_rows(&mut self, hidden: usize, width: usize) {
        for (x, y) in self
            .x
            .chunks_exact_mut(hidden)
            .zip(self.projected.chunks_exact(width))
        {
            add(x, &y[..hidden]);
        }
    }

    /// Logits of the rows that want them, and no others: the head is the largest matrix of a small model.
    fn head(&mut self, model: &Model, branches: &[Branch<'_>], pass: &mut Pass) {
        let hidden = model.architecture.hidden_size;
        self.normed.clear();
        let (mut row, mut wanted) = (0, 0);
        for branch in branches {
            pass.first.push(wanted);
            let end = row + branch.chain.len() + branch.nodes.len();
            if branch.logits {
                let count = 1 + branch.nodes.len();
                for x in self.x[(end - count) * hidden..end * hidden].chunks_exact(hidden) {
                    let at = self.normed.len();
                    self.normed.resize(at + hidden, 0.0);
                    rms_norm(
                        x,
                        &model.norm,
                        model.architecture.norm_eps,
                        &mut self.normed[at..],
                    );
                }
                wanted += count;
            }
            row = end;
        }
        if wanted > 0 {
            model
                .head
                .product(&self.normed, wanted, &mut pass.logits, self.threads);
        }
    }
}

/// Position of every row, branch by branch, chain before nodes.
fn row_positions(branches: &[Branch<'_>], paths: &[Paths]) -> Vec<usize> {
    let mut positions = Vec::new();
    for (branch, paths) in branches.iter().zip(paths) {
        let end = branch.start + branch.chain.len();
        positions.extend(branch.start..end);
        positions.extend((0..branch.nodes.len()).map(|node| end + paths.of(node).len() - 1));
    }
    positions
}
