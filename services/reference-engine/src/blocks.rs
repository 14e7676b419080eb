//! What every network here does to its rows: attention, the gated layer, and the last product.
//!
//! A *row* is one token at one position. Rows meet only in attention, and there a row reads exactly its own
//! ancestors in order of position: the committed positions first, then, for a node of a draft, the path from
//! the root of the tree to it. Every sum runs in that order, whether the row was part of a prompt, decoded
//! alone or guessed in a tree; hence what comes out has the same bits wherever it was computed.

use std::borrow::BorrowMut;
use std::ops::Range;

use crate::architecture::Architecture;
use crate::attention::{Attention, DraftKv};
use crate::kv::KvCache;
use crate::math::{RopeTable, add, rms_norm, rotate, silu_product};
use crate::matrix::Matrix;
use crate::weights::Body;

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
    /// So many of the nodes were computed by earlier passes with the same [`DraftKv`]; they are no rows of
    /// this one.
    pub(crate) known: usize,
    /// Whether outputs are wanted: of the chain's last token, if there is a chain, and of every new node.
    pub(crate) logits: bool,
    /// Whether the states that [`crate::forward::Forward`] captures are wanted.
    pub(crate) capture: bool,
}

impl<'a> Branch<'a> {
    /// A chain without draft, of which nothing is wanted.
    pub(crate) fn new(kv: &'a mut KvCache, start: usize, chain: &'a [u32]) -> Self {
        Branch {
            kv,
            start,
            chain,
            nodes: &[],
            parents: &[],
            known: 0,
            logits: false,
            capture: false,
        }
    }

    /// Rows of this pass: the chain, and the nodes that are new.
    pub(crate) fn rows(&self) -> usize {
        self.chain.len() + self.nodes.len() - self.known
    }

    /// Rows whose outputs are wanted; they are the last ones.
    pub(crate) fn wanted(&self) -> usize {
        if self.logits {
            usize::from(!self.chain.is_empty()) + self.nodes.len() - self.known
        } else {
            0
        }
    }
}

/// The draft of one branch, resolved: each node's path from the root, itself included.
#[derive(Clone, Debug, Default)]
pub(crate) struct Paths {
    nodes: Vec<u32>,
    starts: Vec<usize>,
}

impl Paths {
    pub(crate) fn new(parents: &[Option<u32>]) -> Self {
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

/// Outputs of the rows that wanted them.
#[derive(Debug, Default)]
pub(crate) struct Outputs {
    logits: Vec<f32>,
    stride: usize,
    vocab: usize,
    /// First row of each branch.
    first: Vec<usize>,
}

impl Outputs {
    /// Which of the wanted rows is a branch's `row`-th.
    pub(crate) fn index(&self, branch: usize, row: usize) -> usize {
        self.first[branch] + row
    }

    /// Logits of a branch's `row`-th wanted row.
    pub(crate) fn logits(&self, branch: usize, row: usize) -> &[f32] {
        &self.logits[self.index(branch, row) * self.stride..][..self.vocab]
    }
}

/// Rows on their way through a network; keeps the buffers between passes.
#[derive(Debug)]
pub(crate) struct Blocks {
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
    /// The residual stream: `[row][hidden]`.
    pub(crate) x: Vec<f32>,
    /// What the next product reads: `[row][its depth]`.
    pub(crate) normed: Vec<f32>,
    projected: Vec<f32>,
    attended: Vec<f32>,
    activated: Vec<f32>,
}

impl Blocks {
    /// For networks of shape `a`, with products spread over `threads` threads.
    pub(crate) fn new(a: &Architecture, threads: usize) -> Self {
        Blocks {
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
            x: Vec::new(),
            normed: Vec::new(),
            projected: Vec::new(),
            attended: Vec::new(),
            activated: Vec::new(),
        }
    }

    /// Begins a pass: the position of every row, branch by branch, chain before nodes.
    pub(crate) fn place(&mut self, branches: &[Branch<'_>], paths: &[Paths]) {
        self.positions.clear();
        for (branch, paths) in branches.iter().zip(paths) {
            let end = branch.start + branch.chain.len();
            self.positions.extend(branch.start..end);
            let nodes = branch.known..branch.nodes.len();
            self.positions
                .extend(nodes.map(|node| end + paths.of(node).len() - 1));
        }
        let reached = self.positions.iter().max().map_or(0, |last| last + 1);
        self.rope.reach(reached);
    }

    /// `normed` becomes the norm of every row of `x`.
    pub(crate) fn norm(&mut self, weight: &[f32]) {
        self.normed.resize(self.positions.len() * self.hidden, 0.0);
        for (x, out) in self
            .x
            .chunks_exact(self.hidden)
            .zip(self.normed.chunks_exact_mut(self.hidden))
        {
            rms_norm(x, weight, self.norm_eps, out);
        }
    }

    /// One layer: attention over `normed`, then the gated layer, both added to `x`.
    pub(crate) fn layer<D: BorrowMut<DraftKv>>(
        &mut self,
        index: usize,
        body: &Body,
        branches: &mut [Branch<'_>],
        paths: &[Paths],
        drafts: &mut [D],
    ) {
        let rows = self.positions.len();
        body.query_key_value
            .product(&self.normed, rows, &mut self.projected, self.threads);
        let width = body.query_key_value.padded_rows();
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
        body.attention_out
            .product(&self.attended, rows, &mut self.projected, self.threads);
        self.add_rows(body.attention_out.padded_rows());
        self.norm(&body.mlp_norm);
        body.gate_up
            .product(&self.normed, rows, &mut self.projected, self.threads);
        self.activated.resize(rows * self.inner, 0.0);
        let width = body.gate_up.padded_rows();
        for (row, out) in self
            .projected
            .chunks_exact(width)
            .zip(self.activated.chunks_exact_mut(self.inner))
        {
            silu_product(&row[..self.inner], &row[self.inner..2 * self.inner], out);
        }
        body.down
            .product(&self.activated, rows, &mut self.projected, self.threads);
        self.add_rows(body.down.padded_rows());
    }

    /// Logits of the rows that want them, and no others: the last matrix is the largest of a small model.
    pub(crate) fn outputs(
        &mut self,
        branches: &[Branch<'_>],
        norm: &[f32],
        head: &Matrix,
        vocab: usize,
    ) -> Outputs {
        let mut outputs = Outputs {
            logits: Vec::new(),
            stride: head.padded_rows(),
            vocab,
            first: Vec::with_capacity(branches.len()),
        };
        self.normed.clear();
        let mut wanted = 0;
        for rows in wanted_rows(branches) {
            outputs.first.push(wanted);
            wanted += rows.len();
            for x in
                self.x[rows.start * self.hidden..rows.end * self.hidden].chunks_exact(self.hidden)
            {
                let at = self.normed.len();
                self.normed.resize(at + self.hidden, 0.0);
                rms_norm(x, norm, self.norm_eps, &mut self.normed[at..]);
            }
        }
        if wanted > 0 {
            head.product(&self.normed, wanted, &mut outputs.logits, self.threads);
        }
        outputs
    }

    /// Adds the last product to the residual stream.
    fn add_rows(&mut self, width: usize) {
        for (x, y) in self
            .x
            .chunks_exact_mut(self.hidden)
            .zip(self.projected.chunks_exact(width))
        {
            add(x, &y[..self.hidden]);
        }
    }
}

/// Per branch, which rows of the pass want outputs.
pub(crate) fn wanted_rows(branches: &[Branch<'_>]) -> impl Iterator<Item = Range<usize>> {
    branches.iter().scan(0, |end, branch| {
        *end += branch.rows();
        Some(*end - branch.wanted()..*end)
    })
}
