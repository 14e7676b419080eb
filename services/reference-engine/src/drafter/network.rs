//! What a drafter guesses with.

use std::fmt::Debug;

use refrain_protocol::TokenId;
use refrain_protocol::engine::DrafterKind;

use super::trail::TrailShape;
use crate::attention::DraftKv;
use crate::blocks::{Branch, Outputs};
use crate::weights::Model;

/// A network that guesses tokens after texts and after nodes of drafts. Everything else about drafting, which rows are
/// to be computed and what becomes of them, is [`super::Drafter`]'s.
pub(crate) trait Network: Debug + Send {
    /// What callers are told that it is.
    fn kind(&self) -> DrafterKind;

    /// The target's token of each token it can guess; all different.
    fn tokens(&self) -> &[TokenId];

    /// Layers of the target whose outputs it reads, counted from 0.
    fn captured(&self) -> &[usize];

    /// Numbers of a row's output that its children read; 0 if they read its keys and values alone.
    fn hidden_width(&self) -> usize;

    /// What it keeps of a session. Of states that it reads, the newest `window` wait for it.
    fn trail_shape(&self, target: &Model, window: usize) -> TrailShape;

    /// Rows of texts: branches are chains. `captured` holds what it reads of the target, row by row.
    fn follow(
        &mut self,
        target: &Model,
        branches: &mut [Branch<'_>],
        captured: &[f32],
    ) -> DraftOutputs;

    /// Rows of drafts: branches are the nodes of each tree under the end of its text. `hidden` holds the output of every
    /// row's parent.
    fn guess(
        &mut self,
        target: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [&mut DraftKv],
        hidden: &[f32],
    ) -> DraftOutputs;
}

/// What the rows that wanted it came to.
#[derive(Debug, Default)]
pub(crate) struct DraftOutputs {
    pub(crate) outputs: Outputs,
    /// `[wanted row][width]`.
    pub(crate) hidden: Vec<f32>,
    pub(crate) width: usize,
}

impl DraftOutputs {
    /// Logits over what it can guess of a branch's `row`-th wanted row.
    pub(crate) fn logits(&self, branch: usize, row: usize) -> &[f32] {
        self.outputs.logits(branch, row)
    }

    /// What the children of that row read.
    pub(crate) fn hidden(&self, branch: usize, row: usize) -> &[f32] {
        &self.hidden[self.outputs.index(branch, row) * self.width..][..self.width]
    }
}
