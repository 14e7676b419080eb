//! An EAGLE-3 head: a network of one layer that continues from the target's hidden states.

mod forward;
mod shape;
mod weights;

use std::sync::Arc;

use refrain_protocol::TokenId;
use refrain_protocol::engine::DrafterKind;

use super::captured_states::CapturedStatesShape;
use super::draft_network::{DraftNetwork, DraftOutputs};
use super::session_state::DrafterStateShape;
use crate::model::Model;
use crate::network::{Branch, DraftKv, KvShape};

pub(crate) use forward::HeadForward;
#[cfg(test)]
pub(crate) use shape::HeadShape;
pub(crate) use weights::Eagle3Head;

/// A head, as a network that drafts.
#[derive(Debug)]
pub(crate) struct Eagle3Network {
    head: Arc<Eagle3Head>,
    forward: HeadForward,
}

impl Eagle3Network {
    /// Creates a network that splits products over `threads` threads.
    pub(crate) fn new(head: Arc<Eagle3Head>, threads: usize) -> Self {
        Eagle3Network {
            forward: HeadForward::new(&head, threads),
            head,
        }
    }
}

impl DraftNetwork for Eagle3Network {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Eagle3
    }

    fn tokens(&self) -> &[TokenId] {
        &self.head.tokens
    }

    fn captured_layers(&self) -> &[usize] {
        &self.head.shape.captured_layers
    }

    fn hidden_width(&self) -> usize {
        self.head.shape.architecture.hidden_size
    }

    fn state_shape(&self, target: &Model, window: usize) -> DrafterStateShape {
        let kv = KvShape::of(&self.head.shape.architecture);
        let width = self.head.captured_width(target);
        DrafterStateShape::reading_states(kv, CapturedStatesShape::new(width, window))
    }

    fn read_text(
        &mut self,
        target: &Model,
        branches: &mut [Branch<'_>],
        captured: &[f32],
    ) -> DraftOutputs {
        self.forward
            .read_text(&self.head, target, branches, captured)
    }

    fn extend_drafts(
        &mut self,
        target: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [&mut DraftKv],
        hidden: &[f32],
    ) -> DraftOutputs {
        self.forward
            .extend_drafts(&self.head, target, branches, drafts, hidden)
    }
}
