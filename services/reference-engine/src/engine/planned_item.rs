//! An item of a step that passed all checks, and the draft nodes that the step computes for it.

use refrain_protocol::engine::{Draft, SelfDraft};
use refrain_protocol::{EngineSessionId, TokenId};
use refrain_speculation::verify::sampled::Weight;

use super::session_form::SessionForm;
use crate::drafter::CompletedDraft;
use crate::sampler::DraftedToken;

/// An item that passed all checks.
pub(super) struct PlannedItem {
    /// Index of the item in the request.
    pub(super) index: usize,
    pub(super) id: EngineSessionId,
    /// Whether the item opened its session.
    pub(super) opened: bool,
    pub(super) cached_tokens: usize,
    /// First position to compute.
    pub(super) start: usize,
    /// Tokens of the text to compute, from `start` on.
    pub(super) chain: Vec<TokenId>,
    pub(super) sample: bool,
    pub(super) max_emit: usize,
    /// The draft that came with the item, and after it the nodes that the engine drafted.
    pub(super) draft: Draft,
    /// Number of draft nodes that came with the item.
    pub(super) received_nodes: usize,
    /// Which of the first draft nodes the form of the output allows. Nodes beyond them are not judged.
    pub(super) allowed: Vec<bool>,
    /// Options of the draft that the engine is to make, if it is to make one.
    pub(super) self_draft: Option<SelfDraft>,
    /// The nodes that came with the item and that the engine drafted as well.
    pub(super) agreed_nodes: Vec<u32>,
    /// For each node of a draft that was drawn at random, the distribution it was drawn from. Empty for other drafts.
    pub(super) drawn_from: Vec<Vec<Weight>>,
    /// For each draft node, its index among the nodes that the step computes.
    pub(super) computed: Vec<Option<usize>>,
    /// Tokens of the nodes that the step computes.
    pub(super) nodes: Vec<TokenId>,
    /// Parents of the nodes that the step computes.
    pub(super) parents: Vec<Option<u32>>,
}

impl PlannedItem {
    /// Returns the token that was drawn to follow a node of a randomly drawn draft, or to follow the text.
    pub(super) fn drafted_after(&self, node: Option<u32>) -> Option<DraftedToken<'_>> {
        let next = node.map_or(0, |node| node as usize + 1);
        Some(DraftedToken {
            token: *self.draft.tokens.get(next)?,
            from: self.drawn_from.get(next)?,
        })
    }

    /// Leaves out the nodes that came with the item and that the form of the output forbids.
    pub(super) fn cut(&mut self, form: &mut SessionForm, text_len: usize) {
        if !self.draft.tokens.is_empty() {
            self.allowed = form.allowed_nodes(&self.draft, text_len);
            self.select_nodes();
        }
    }

    /// Leaves out branches of the draft beyond the first that need more than `free` sequences of a backend, and
    /// counts those that the others take.
    pub(super) fn cut_branches(&mut self, free: &mut usize) {
        let mut has_heir = vec![false; self.nodes.len() + 1];
        // For each node that the step was to compute, its place among those that are left.
        let mut places: Vec<Option<u32>> = Vec::with_capacity(self.nodes.len());
        let (mut nodes, mut parents) = (Vec::new(), Vec::new());
        for (token, parent) in self.nodes.iter().zip(&self.parents) {
            let left = match parent {
                None => Some(None),
                Some(parent) => places[*parent as usize].map(Some),
            };
            let heir = parent.map_or(0, |parent| parent as usize + 1);
            let is_first = !std::mem::replace(&mut has_heir[heir], true);
            let left = left.filter(|_| is_first || *free > 0);
            places.push(left.map(|_| nodes.len() as u32));
            if let Some(parent) = left {
                *free -= usize::from(!is_first);
                nodes.push(*token);
                parents.push(parent);
            }
        }
        let computed = self.computed.iter_mut();
        computed.for_each(|node| {
            *node = node.and_then(|node| places[node].map(|place| place as usize));
        });
        (self.nodes, self.parents) = (nodes, parents);
    }

    /// Adds the engine's draft to the draft that came with the item.
    pub(super) fn merge(&mut self, completed: CompletedDraft) {
        let received = self.received_nodes as u32;
        let places = self.draft.merge(&completed.draft);
        self.agreed_nodes = places.into_iter().filter(|node| *node < received).collect();
        self.agreed_nodes.sort_unstable();
        self.drawn_from = completed.drawn_from;
        self.select_nodes();
    }

    /// Selects the draft nodes whose logits can matter. A node at depth d matters for token d + 1 of the output, and
    /// one that the form of the output forbids never does.
    pub(super) fn select_nodes(&mut self) {
        self.computed.clear();
        self.nodes.clear();
        self.parents.clear();
        let mut depths: Vec<usize> = Vec::with_capacity(self.draft.tokens.len());
        let nodes = self.draft.tokens.iter().zip(&self.draft.parents);
        for (node, (token, parent)) in nodes.enumerate() {
            let parent = parent.map(|parent| parent as usize);
            let depth = parent.map_or(1, |parent| depths[parent] + 1);
            depths.push(depth);
            let is_allowed = self.allowed.get(node).is_none_or(|allowed| *allowed);
            let is_reached = parent.is_none_or(|parent| self.computed[parent].is_some());
            if depth < self.max_emit && is_allowed && is_reached {
                self.computed.push(Some(self.nodes.len()));
                self.nodes.push(*token);
                // A parent is less deep than its child, so it was selected too.
                self.parents.push(
                    parent
                        .and_then(|parent| self.computed[parent])
                        .map(|node| node as u32),
                );
            } else {
                self.computed.push(None);
            }
        }
    }
}
