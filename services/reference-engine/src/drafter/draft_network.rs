//! The interface of networks that draft: EAGLE-3 heads and draft models.

use std::fmt::Debug;

use refrain_protocol::TokenId;
use refrain_protocol::engine::DrafterKind;

use super::session_state::DrafterStateShape;
use crate::model::Model;
use crate::network::{Branch, DraftKv, Logits};

/// A network that guesses the next token after a text or after a node of a draft tree.
pub(crate) trait DraftNetwork: Debug + Send {
    /// Returns the kind that is reported to callers.
    fn kind(&self) -> DrafterKind;

    /// Returns the tokens that it can guess, as ids of the target. They are distinct.
    fn tokens(&self) -> &[TokenId];

    /// Returns the indices of the target's layers whose outputs it reads.
    fn captured_layers(&self) -> &[usize];

    /// Returns the width of the hidden state that a row passes to its children. It is 0 if they read only keys and
    /// values.
    fn hidden_width(&self) -> usize;

    /// Returns the shape of its per-session state. If it reads captured states, a session holds at most `window` of
    /// them.
    fn state_shape(&self, target: &Model, window: usize) -> DrafterStateShape;

    /// Computes rows of texts, so branches are chains. `captured` holds the target's states of every row.
    fn read_text(
        &mut self,
        target: &Model,
        branches: &mut [Branch<'_>],
        captured: &[f32],
    ) -> DraftOutputs;

    /// Computes nodes of draft trees, so branches have no chains. `hidden` holds the output of every row's parent.
    fn extend_drafts(
        &mut self,
        target: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [&mut DraftKv],
        hidden: &[f32],
    ) -> DraftOutputs;
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
