//! Keys and values of the nodes of one draft tree.

use super::branch::Branch;
use super::kv_cache::{KvCache, KvShape};
use crate::kernels::{PANEL_ROWS, PanelElements, Panels};

/// Keys and values of one branch's draft nodes, in all layers. Only those of accepted nodes outlive the draft.
#[derive(Debug)]
pub(crate) struct DraftKv {
    shape: KvShape,
    nodes: usize,
    /// Layout: `[layer][head][panel of nodes][element][32 nodes]`, so that draft keys are scored by the same product
    /// as committed keys.
    keys: Vec<f32>,
    /// Layout: `[layer][head][node][element]`.
    values: Vec<f32>,
}

impl DraftKv {
    /// Creates a cache with room for `nodes` nodes.
    pub(crate) fn new(shape: KvShape, nodes: usize) -> Self {
        let heads = shape.layers * shape.kv_heads;
        DraftKv {
            shape,
            nodes,
            keys: vec![0.0; heads * nodes.next_multiple_of(PANEL_ROWS) * shape.head_dim],
            values: vec![0.0; heads * nodes * shape.head_dim],
        }
    }

    /// Creates a cache with room for the nodes of each branch.
    pub(crate) fn of_branches(branches: &[Branch<'_>]) -> Vec<Self> {
        branches
            .iter()
            .map(|branch| DraftKv::new(branch.kv.shape(), branch.nodes.len()))
            .collect()
    }

    /// Returns the keys of the first `nodes` nodes.
    pub(super) fn head_keys(&self, layer: usize, head: usize, nodes: usize) -> Panels<'_> {
        let stride = self.shape.head_dim * PANEL_ROWS;
        Panels {
            elements: PanelElements::F32(&self.keys[self.key_at(layer, head, 0)..]),
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

    pub(super) fn value(&self, layer: usize, head: usize, node: usize) -> &[f32] {
        let at = (layer * self.shape.kv_heads + head) * self.nodes + node;
        &self.values[at * self.shape.head_dim..][..self.shape.head_dim]
    }

    pub(super) fn write(
        &mut self,
        layer: usize,
        head: usize,
        node: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let at = self.key_at(layer, head, node);
        for (k, key) in key.iter().enumerate() {
            self.keys[at + k * PANEL_ROWS] = *key;
        }
        let at = (layer * self.shape.kv_heads + head) * self.nodes + node;
        self.values[at * self.shape.head_dim..][..self.shape.head_dim].copy_from_slice(value);
    }

    /// Appends a node's keys and values to its sequence's cache.
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
