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

use super::Lookup;
use super::expand::Drafted;
use super::params::Limits;
use crate::candidate::{Candidate, DraftNode, DraftTree, Witnesses};
use crate::statistics::kinds;

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
    /// The drafts that have it.
    agreeing: Drafts,
    /// Its highest share in the other drafts that have it.
    second_share: f32,
    /// The sum of the shares of its siblings that stood there before it.
    crowd: f32,
    below: Below,
    /// The sibling that was added before.
    sibling: Option<u32>,
}

/// The children of a node, or of the root.
#[derive(Clone, Copy, Default)]
struct Below {
    /// The sum of their shares.
    shares: f32,
    /// The drafts that have any.
    drafts: Drafts,
    /// The one that was added last.
    last: Option<u32>,
}

/// Drafts by their place in the order of their worth, as bits. There are seldom more than nine, and later ones are no
/// witnesses.
#[derive(Clone, Copy, Default)]
struct Drafts(u16);

impl Drafts {
    fn add(&mut self, number: usize) {
        self.0 |= 1u16.checked_shl(number as u32).unwrap_or(0);
    }

    fn without(self, others: Drafts) -> Drafts {
        Drafts(self.0 & !others.0)
    }

    fn count(self) -> u8 {
        self.0.count_ones() as u8
    }

    fn numbers(self) -> impl Iterator<Item = usize> {
        (0..u16::BITS as usize).filter(move |number| self.0 >> number & 1 == 1)
    }
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
                witnesses: Some(self.witnesses(node, tree.below(node.parent).drafts)),
                origin: lookup.origin(node.sighting),
            });
        }
        let tree = DraftTree::of_sound_nodes(nodes);
        Some(Candidate::of_tree(tree, match_len, source, scope))
    }

    /// The matches for and against a node, beside which these drafts have one.
    fn witnesses(&self, node: &Merged, beside: Drafts) -> Witnesses {
        let longest = |drafts: Drafts| {
            let lengths = drafts.numbers().map(|at| self.kept[at].limits.match_len);
            lengths.max().unwrap_or(0)
        };
        let dissenting = beside.without(node.agreeing);
        let lookups = node.agreeing.numbers().map(|at| &self.kept[at].lookup);
        Witnesses {
            agreeing: node.agreeing.count().max(1),
            dissenting: dissenting.count(),
            agreeing_len: longest(node.agreeing),
            dissenting_len: longest(dissenting),
            kinds: kinds(lookups.map(|lookup| (lookup.source, lookup.scope))),
            second_share: node.second_share,
            crowd: node.crowd,
            is_laid: node.kept > 0,
        }
    }
}

#[derive(Default)]
struct MergedTree {
    nodes: Vec<Merged>,
    below_root: Below,
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
            let below = self.below_mut(parent);
            below.drafts.add(number);
            let left = (1.0 - below.shares).max(0.0);
            let node = &mut self.nodes[at as usize];
            let more = ((1.0 - node.share) * drafted.share * AGREEMENT).min(left);
            node.share += more;
            node.agreeing.add(number);
            node.second_share = node.second_share.max(drafted.share);
            self.below_mut(parent).shares += more;
            return Some(at);
        }
        let crowd = self.below(parent).shares;
        let share = drafted.share * (1.0 - crowd).max(SHARE_LEFT_MIN);
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
        let below = self.below_mut(parent);
        below.shares += share;
        below.drafts.add(number);
        let sibling = below.last.replace(at);
        let mut agreeing = Drafts::default();
        agreeing.add(number);
        self.nodes.push(Merged {
            token: drafted.token,
            parent,
            share,
            value,
            count: drafted.count,
            sighting: drafted.sighting,
            kept: number,
            agreeing,
            second_share: 0.0,
            crowd,
            below: Below::default(),
            sibling,
        });
        Some(at)
    }

    fn child_of(&self, parent: Option<u32>, token: Token) -> Option<u32> {
        let first = self.below(parent).last;
        let next = |at: &u32| self.nodes[*at as usize].sibling;
        std::iter::successors(first, next).find(|at| self.nodes[*at as usize].token == token)
    }

    fn below(&self, parent: Option<u32>) -> Below {
        match parent {
            Some(parent) => self.nodes[parent as usize].below,
            None => self.below_root,
        }
    }

    fn below_mut(&mut self, parent: Option<u32>) -> &mut Below {
        match parent {
            Some(parent) => &mut self.nodes[parent as usize].below,
            None => &mut self.below_root,
        }
    }

    fn value(&self, parent: Option<u32>) -> f32 {
        parent.map_or(1.0, |parent| self.nodes[parent as usize].value)
    }
}
