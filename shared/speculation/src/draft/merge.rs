//! One tree from the drafts of several matches.
//!
//! Algorithm 1 of SuffixDecoding keeps the best tree of all matches and sources. The trees that it leaves out are
//! often right where the best one is wrong: a shorter match has seen more, and another source has seen other texts.
//! Here the best tree is kept whole, and the others are laid over it, the best first. A node that is new in its
//! place is what happens if its siblings are wrong, so its share is cut by theirs. A node that is there already is
//! agreed on by one more match, so its share grows.

use std::cmp::Reverse;
use std::ops::Range;

use refrain_suffix_index::{Sighting, Token};

use super::expand::Drafted;
use super::params::Limits;
use super::{Candidate, DraftNode, DraftTree, Lookup};

/// The part of the doubt about a node that a match takes away which is sure of it. Matches are often of one text, so
/// they are no independent witnesses.
const AGREEMENT: f32 = 0.6;
/// How far below the least probability that is shown to the router the others' nodes may be. A wrong best tree hides
/// them, so they are more often right than what is learnt about their shares says.
const LAID_OF_SHOWN: f32 = 0.3;
/// The share of a node that is left if its siblings are nearly certain.
const SHARE_LEFT_MIN: f32 = 0.02;

/// A draft under one match.
struct Kept<'a> {
    worth: f32,
    limits: Limits<'a>,
    lookup: Lookup<'a>,
    /// Its nodes in the pool.
    nodes: Range<usize>,
}

/// A node of the merged tree.
struct Merged {
    token: Token,
    parent: Option<u32>,
    share: f32,
    /// The probability that the path is accepted.
    value: f32,
    count: u32,
    sighting: Sighting,
    /// The draft that brought it.
    kept: usize,
    /// The sum of its children's shares.
    shares_below: f32,
    /// The child that was added last.
    child: Option<u32>,
    /// The sibling that was added before.
    sibling: Option<u32>,
}

/// Drafts under several matches, to be merged.
#[derive(Default)]
pub(super) struct Merge<'a> {
    kept: Vec<Kept<'a>>,
    pool: Vec<Drafted>,
}

impl<'a> Merge<'a> {
    /// Takes a draft.
    pub(super) fn take(
        &mut self,
        drafted: &[Drafted],
        worth: f32,
        lookup: Lookup<'a>,
        limits: Limits<'a>,
    ) {
        let from = self.pool.len();
        self.pool.extend_from_slice(drafted);
        self.kept.push(Kept {
            worth,
            limits,
            lookup,
            nodes: from..self.pool.len(),
        });
    }

    /// The tree of all drafts, of at most `room` tokens; `None` if there are none. Among equals the one that was
    /// taken first counts as the best.
    pub(super) fn candidate(mut self, room: usize) -> Option<Candidate> {
        self.kept.sort_by_key(|kept| Reverse(kept.worth.to_bits()));
        let best = self.kept.first()?;
        let (match_len, source, scope) =
            (best.limits.match_len, best.lookup.source, best.lookup.scope);
        let mut tree = MergedTree::default();
        for (number, kept) in self.kept.iter().enumerate() {
            tree.lay(number, kept, &self.pool[kept.nodes.clone()], room);
        }
        let mut nodes: Vec<DraftNode> = Vec::with_capacity(tree.nodes.len());
        for node in &tree.nodes {
            let above = node
                .parent
                .map_or(1.0, |parent| nodes[parent as usize].probability);
            let Kept { limits, lookup, .. } = &self.kept[node.kept];
            nodes.push(DraftNode {
                token: node.token,
                parent: node.parent,
                probability: above * node.share,
                count: node.count,
                match_len: limits.match_len,
                origin: lookup.origin(node.sighting),
            });
        }
        let tree = DraftTree::of_sound_nodes(nodes);
        Some(Candidate::of_tree(tree, match_len, source, scope))
    }
}

#[derive(Default)]
struct MergedTree {
    nodes: Vec<Merged>,
    /// As of a node, for the root.
    shares_below: f32,
    child: Option<u32>,
    /// The place of each node of the draft that is laid over the tree; `None` for those left out.
    places: Vec<Option<u32>>,
}

impl MergedTree {
    /// Lays a draft over the tree.
    fn lay(&mut self, number: usize, kept: &Kept<'_>, drafted: &[Drafted], room: usize) {
        self.places.clear();
        for node in drafted {
            let parent = node.parent.map(|parent| self.places[parent as usize]);
            let place = match parent {
                // The parent was left out.
                Some(None) => None,
                Some(Some(parent)) => self.lay_node(number, kept, node, Some(parent), room),
                None => self.lay_node(number, kept, node, None, room),
            };
            self.places.push(place);
        }
    }

    /// Lays one node over the tree, under `parent`. Returns its place, unless it is left out.
    fn lay_node(
        &mut self,
        number: usize,
        kept: &Kept<'_>,
        drafted: &Drafted,
        parent: Option<u32>,
        room: usize,
    ) -> Option<u32> {
        if let Some(at) = self.child_of(parent, drafted.token) {
            let left = (1.0 - *self.shares_below(parent)).max(0.0);
            let node = &mut self.nodes[at as usize];
            let more = (1.0 - node.share) * drafted.share * AGREEMENT;
            let more = more.min(left);
            node.share += more;
            *self.shares_below(parent) += more;
            return Some(at);
        }
        let others = *self.shares_below(parent);
        let share = drafted.share * (1.0 - others).max(SHARE_LEFT_MIN);
        let limits = &kept.limits;
        let conditional = limits
            .values
            .conditional(drafted.depth, drafted.count, share);
        let value = self.value(parent) * conditional;
        let is_left_out = number > 0 && value < LAID_OF_SHOWN * limits.values.shown_min();
        if is_left_out || self.nodes.len() >= room {
            return None;
        }
        let at = self.nodes.len() as u32;
        *self.shares_below(parent) += share;
        let sibling = match parent {
            Some(parent) => self.nodes[parent as usize].child.replace(at),
            None => self.child.replace(at),
        };
        self.nodes.push(Merged {
            token: drafted.token,
            parent,
            share,
            value,
            count: drafted.count,
            sighting: drafted.sighting,
            kept: number,
            shares_below: 0.0,
            child: None,
            sibling,
        });
        Some(at)
    }

    fn child_of(&self, parent: Option<u32>, token: Token) -> Option<u32> {
        let first = match parent {
            Some(parent) => self.nodes[parent as usize].child,
            None => self.child,
        };
        let next = |at: &u32| self.nodes[*at as usize].sibling;
        std::iter::successors(first, next).find(|at| self.nodes[*at as usize].token == token)
    }

    fn shares_below(&mut self, parent: Option<u32>) -> &mut f32 {
        match parent {
            Some(parent) => &mut self.nodes[parent as usize].shares_below,
            None => &mut self.shares_below,
        }
    }

    fn value(&self, parent: Option<u32>) -> f32 {
        parent.map_or(1.0, |parent| self.nodes[parent as usize].value)
    }
}
