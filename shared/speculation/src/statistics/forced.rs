//! Forced tokens are accepted whatever the model, so they say nothing about drafts of their kind. They are taken out
//! of a draft, and out of the output after it, before anything is counted.

use refrain_suffix_index::Token;

use crate::candidate::{Candidate, DraftNode, Source};

/// A draft without its forced tokens.
pub(super) struct Unforced {
    /// `None` if it has no others.
    pub(super) candidate: Option<Candidate>,
    /// The place of each node in it; `None` for forced ones.
    places: Vec<Option<u32>>,
}

fn is_forced(node: &DraftNode) -> bool {
    node.origin.source == Source::Grammar
}

impl Unforced {
    /// `None` if the draft has no forced tokens.
    pub(super) fn of(candidate: &Candidate) -> Option<Self> {
        let nodes = candidate.tree.nodes();
        if !nodes.iter().any(is_forced) {
            return None;
        }
        // For each node, the last one of its path that is not forced.
        let mut last: Vec<Option<u32>> = Vec::with_capacity(nodes.len());
        let mut places = Vec::with_capacity(nodes.len());
        let mut kept: Vec<DraftNode> = Vec::new();
        for node in nodes {
            let above = node.parent.and_then(|parent| last[parent as usize]);
            let place = (!is_forced(node)).then_some(kept.len() as u32);
            if place.is_some() {
                // A forced token has no siblings, so its children take its place among those of its parent.
                kept.push(DraftNode {
                    parent: above,
                    ..*node
                });
            }
            last.push(place.or(above));
            places.push(place);
        }
        let Candidate {
            match_len,
            source,
            scope,
            after,
            ..
        } = *candidate;
        let others = Candidate::new(kept, match_len, source, scope);
        Some(Unforced {
            candidate: others.map(|others| Candidate { after, ..others }),
            places,
        })
    }

    /// The path probability of each node of the whole draft, from those of the other nodes.
    pub(super) fn spread(&self, of: &Candidate, others: &[f32]) -> Vec<f32> {
        let mut all: Vec<f32> = Vec::with_capacity(self.places.len());
        for (node, place) in of.tree.nodes().iter().zip(&self.places) {
            let above = || node.parent.map_or(1.0, |parent| all[parent as usize]);
            let own = place.and_then(|place| others.get(place as usize).copied());
            all.push(own.unwrap_or_else(above));
        }
        all
    }

    /// The output after the draft without its forced tokens.
    pub(super) fn output(of: &Candidate, emitted: &[Token]) -> Vec<Token> {
        let nodes = of.tree.nodes();
        let mut kept = Vec::new();
        let mut at = None;
        for token in emitted {
            let Some(child) = of.tree.child(at, *token) else {
                let forces = |node: &DraftNode| node.parent == at && is_forced(node);
                if !nodes.iter().any(forces) {
                    kept.push(*token);
                }
                break;
            };
            if !is_forced(&nodes[child as usize]) {
                kept.push(*token);
            }
            at = Some(child);
        }
        kept
    }
}
