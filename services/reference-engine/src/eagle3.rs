//! An EAGLE-3 head: a one-layer network that goes on from the target's hidden states.

mod pass;
mod shape;
mod weights;

use std::sync::Arc;

use refrain_protocol::TokenId;
use refrain_protocol::engine::DrafterKind;

use crate::attention::DraftKv;
use crate::blocks::Branch;
use crate::drafter::{DraftOutputs, Network, StatesShape, TrailShape};
use crate::kv::KvShape;
use crate::weights::Model;

pub(crate) use pass::HeadForward;
#[cfg(test)]
pub(crate) use shape::HeadShape;
pub(crate) use weights::Head;

/// A head that drafts.
#[derive(Debug)]
pub(crate) struct HeadNetwork {
    head: Arc<Head>,
    forward: HeadForward,
}

impl HeadNetwork {
    /// With products spread over `threads` threads.
    pub(crate) fn new(head: Arc<Head>, threads: usize) -> Self {
        HeadNetwork {
            forward: HeadForward::new(&head, threads),
            head,
        }
    }
}

impl Network for HeadNetwork {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Eagle3
    }

    fn tokens(&self) -> &[TokenId] {
        &self.head.tokens
    }

    fn captured(&self) -> &[usize] {
        &self.head.shape.captured
    }

    fn hidden_width(&self) -> usize {
        self.head.shape.architecture.hidden_size
    }

    fn trail_shape(&self, target: &Model, window: usize) -> TrailShape {
        let kv = KvShape::of(&self.head.shape.architecture);
        let width = self.head.captured_width(target);
        TrailShape::reading_states(kv, StatesShape::new(width, window))
    }

    fn follow(
        &mut self,
        target: &Model,
        branches: &mut [Branch<'_>],
        captured: &[f32],
    ) -> DraftOutputs {
        self.forward.follow(&self.head, target, branches, captured)
    }

    fn guess(
        &mut self,
        target: &Model,
        branches: &mut [Branch<'_>],
        drafts: &mut [&mut DraftKv],
        hidden: &[f32],
    ) -> DraftOutputs {
        self.forward
            .guess(&self.head, target, branches, drafts, hidden)
    }
}
