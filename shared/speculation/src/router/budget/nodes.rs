//! The order in which the draft tokens of a step are admitted.

use std::ops::Range;

use super::request::BudgetRequest;

/// The nodes of all requests, one list after the other. Per request: the nodes of its suffix draft, then the same
/// nodes valued as additions to the head's draft.
pub(super) struct Nodes {
    /// The worth of each node.
    pub(super) worths: Vec<f32>,
    /// The request of each node.
    owners: Vec<Owner>,
    /// The ranges of each request's nodes.
    pub(super) of: Vec<Places>,
    /// The nodes with a positive worth, best first. Among equals the earlier one comes first, so a parent before its
    /// child.
    pub(super) order: Vec<Ranked>,
}

/// A node in the order: the bits of its worth, inverted, above its number. It sorts as one integer, and a walk over
/// the order reads worths one after the other.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Ranked(u64);

impl Ranked {
    /// A node with a positive worth: such floats have the order of their bits.
    fn new(at: u32, worth: f32) -> Self {
        Ranked(u64::from(!worth.to_bits()) << 32 | u64::from(at))
    }

    pub(super) fn at(self) -> u32 {
        self.0 as u32
    }

    pub(super) fn worth(self) -> f64 {
        f64::from(f32::from_bits(!((self.0 >> 32) as u32)))
    }
}

/// The ranges of a request's nodes.
pub(super) struct Places {
    pub(super) tree: Range<usize>,
    pub(super) merged: Range<usize>,
}

#[derive(Clone, Copy)]
pub(super) struct Owner {
    pub(super) request: u32,
    /// It stands beside the head's draft.
    pub(super) merged: bool,
}

impl Nodes {
    pub(super) fn of(requests: &[BudgetRequest<'_>]) -> Self {
        let lengths = requests.iter().map(|of| of.tree.len() + of.merged.len());
        let count = lengths.sum();
        let mut worths: Vec<f32> = Vec::with_capacity(count);
        let mut owners: Vec<Owner> = Vec::with_capacity(count);
        let mut of = Vec::with_capacity(requests.len());
        for (request, wanted) in (0u32..).zip(requests) {
            let first = worths.len();
            let middle = first + wanted.tree.len();
            wanted.worths(&mut worths);
            for (end, merged) in [(middle, false), (worths.len(), true)] {
                owners.resize(end, Owner { request, merged });
            }
            of.push(Places {
                tree: first..middle,
                merged: middle..worths.len(),
            });
        }
        let ranked = (0u32..).zip(&worths);
        let mut order: Vec<Ranked> = Vec::with_capacity(count);
        order.extend(
            ranked
                .filter(|(_, worth)| **worth > 0.0 && worth.is_finite())
                .map(|(at, worth)| Ranked::new(at, *worth)),
        );
        order.sort_unstable();
        Nodes {
            worths,
            owners,
            of,
            order,
        }
    }

    pub(super) fn owner(&self, node: Ranked) -> Owner {
        self.owners[node.at() as usize]
    }
}
