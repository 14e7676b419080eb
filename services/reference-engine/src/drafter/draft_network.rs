//! The interface of networks that draft: EAGLE-3 heads and draft models.

use std::fmt::Debug;
use std::sync::Arc;

use refrain_protocol::TokenId;
use refrain_protocol::engine::DrafterKind;

use crate::backend::Backend;
use crate::model::Model;
use crate::network::{Branch, DraftKv, KvShape, Logits};

/// Maximum number of children per node that a caller may request of this crate's own networks.
pub(crate) const TOP_K_MAX: u32 = 16;

/// A network that guesses the next token after a text or after a node of a draft tree.
pub(crate) trait DraftNetwork: Debug + Send {
    /// Returns the facts about the network, which never change.
    fn profile(&self) -> NetworkProfile;

    /// Computes rows of texts, or nodes of draft trees. `drafts` holds the keys and values of the nodes. `target` is
    /// there unless a backend computes it.
    ///
    /// # Errors
    /// The reason why a backend did not compute them.
    fn compute(
        &mut self,
        target: Option<&Model>,
        branches: &mut [Branch<'_>],
        drafts: &mut [DraftKv],
        states: RowStates<'_>,
    ) -> Result<DraftOutputs, String>;
}

/// The facts about a network that its drafter needs.
#[derive(Debug)]
pub(crate) struct NetworkProfile {
    /// The kind that is reported to callers.
    pub(crate) kind: DrafterKind,
    /// The tokens that it can guess, as ids of the target. They are distinct.
    pub(crate) tokens: Vec<TokenId>,
    /// Indices of the target's layers whose outputs it reads.
    pub(crate) captured_layers: Vec<usize>,
    /// Width of the hidden state that a row passes to its children. It is 0 if they read only keys and values.
    pub(crate) hidden_width: usize,
    /// Maximum number of children per node.
    pub(crate) top_k_max: u32,
    /// Shape of its KV cache.
    pub(crate) kv: KvShape,
    /// The place of its keys and values, if a backend has them.
    pub(crate) backend: Option<Arc<dyn Backend>>,
    /// Longest text that it can continue, in tokens.
    pub(crate) context_max: usize,
}

/// The hidden states that rows read beside their tokens.
pub(crate) enum RowStates<'a> {
    /// The rows are those of texts, so branches are chains. These are the target's captured states of every row.
    Captured(&'a [f32]),
    /// The rows are nodes of draft trees, so branches have no chains. These are the outputs of every row's parent.
    OfParents(&'a [f32]),
}

/// Outputs of the rows that wanted logits.
#[derive(Debug, Default)]
pub(crate) struct DraftOutputs {
    pub(crate) logits: Logits,
    /// Hidden states. Layout: `[row][width]`.
    pub(crate) hidden: Vec<f32>,
    pub(crate) width: usize,
}

impl DraftOutputs {
    /// Returns the logits of a branch's `row`-th row, one for each token that the network can guess.
    pub(crate) fn logits(&self, branch: usize, row: usize) -> &[f32] {
        self.logits.row(branch, row)
    }

    /// Returns the hidden state that the row's children read.
    pub(crate) fn hidden(&self, branch: usize, row: usize) -> &[f32] {
        &self.hidden[self.logits.index(branch, row) * self.width..][..self.width]
    }
}
