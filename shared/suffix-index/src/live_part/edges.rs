//! The outgoing transitions of all states, packed.
//!
//! Most states of an automaton over text have one transition, so a single transition is stored inside the state. More
//! transitions go to a block of a shared slab, with the next power of two as capacity. Short blocks are scanned. A
//! wide fan keeps its block for iteration, and finds tokens through one hash map that all wide states share.
//!
//! A map per state was rejected: the table header alone is larger than everything that a usual state stores here.
//! Sorted blocks were rejected too: the root's fan reaches the size of the vocabulary, and nothing amortises an
//! insertion into the middle of a megabyte.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::mem::size_of;

use crate::Token;
use crate::memory_hints::{prefetch, reserve_huge};

/// The number of a state. 0 is the root.
pub(crate) type StateId = u32;

/// Longest block that is scanned instead of looked up in the map. 16 edges are two cache lines.
const SCAN_MAX: u32 = 16;

/// One transition.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edge {
    pub(crate) token: Token,
    pub(crate) target: StateId,
}

/// A state's transitions: none, one that is stored inline, or a block of the slab.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Fan {
    len: u32,
    /// The token if `len == 1`, and the offset of the block if `len` is larger.
    token_or_offset: u32,
    /// The target if `len == 1`, and unused otherwise.
    target: StateId,
}

impl Fan {
    pub(crate) fn len(&self) -> usize {
        self.len as usize
    }

    fn offset(&self) -> usize {
        self.token_or_offset as usize
    }
}

/// The transitions of all fans.
#[derive(Default)]
pub(crate) struct Edges {
    slab: Vec<Edge>,
    /// Offsets of free blocks, by log2 of their capacity.
    free: Vec<Vec<u32>>,
    /// The index within the block by (state, token), for fans longer than [`SCAN_MAX`].
    wide: HashMap<(StateId, Token), u32, BuildHasherDefault<StateTokenHasher>>,
}

impl Edges {
    /// The target of `owner`'s transition on `token`.
    pub(crate) fn get(&self, owner: StateId, fan: &Fan, token: Token) -> Option<StateId> {
        if fan.len == 1 {
            return (fan.token_or_offset == token).then_some(fan.target);
        }
        self.position(owner, fan, token)
            .map(|position| self.slab[position].target)
    }

    /// Adds a transition. `owner` must not have one on the same token.
    pub(crate) fn insert(&mut self, owner: StateId, fan: &mut Fan, token: Token, target: StateId) {
        debug_assert!(
            self.get(owner, fan, token).is_none(),
            "one transition per token"
        );
        if fan.len == 0 {
            *fan = Fan {
                len: 1,
                token_or_offset: token,
                target,
            };
            return;
        }
        if fan.len == 1 {
            let offset = self.allocate(2);
            self.slab[offset as usize] = Edge {
                token: fan.token_or_offset,
                target: fan.target,
            };
            fan.token_or_offset = offset;
        } else if fan.len.is_power_of_two() {
            self.grow(fan);
        }
        self.slab[fan.offset() + fan.len()] = Edge { token, target };
        fan.len += 1;
        if fan.len == SCAN_MAX + 1 {
            self.enter_wide(owner, fan);
        } else if fan.len > SCAN_MAX {
            self.wide.insert((owner, token), fan.len - 1);
        }
    }

    /// Changes the target of an existing transition.
    pub(crate) fn redirect(
        &mut self,
        owner: StateId,
        fan: &mut Fan,
        token: Token,
        target: StateId,
    ) {
        if fan.len == 1 {
            debug_assert_eq!(fan.token_or_offset, token);
            fan.target = target;
        } else if let Some(position) = self.position(owner, fan, token) {
            self.slab[position].target = target;
        }
    }

    /// Copies `fan` for the state `owner`.
    pub(crate) fn copy(&mut self, owner: StateId, fan: Fan) -> Fan {
        if fan.len <= 1 {
            return fan;
        }
        let offset = self.allocate(fan.len.next_power_of_two());
        self.slab
            .copy_within(fan.offset()..fan.offset() + fan.len(), offset as usize);
        let copy = Fan {
            token_or_offset: offset,
            ..fan
        };
        if copy.len > SCAN_MAX {
            self.enter_wide(owner, &copy);
        }
        copy
    }

    /// All transitions, in the order in which they were added.
    pub(crate) fn iter(&self, fan: &Fan) -> impl Iterator<Item = Edge> + '_ {
        let inline = (fan.len == 1).then_some(Edge {
            token: fan.token_or_offset,
            target: fan.target,
        });
        inline.into_iter().chain(self.block(fan).iter().copied())
    }

    /// Prefetches a block of transitions, or as much of it as fits into two cache lines.
    pub(crate) fn prefetch(&self, fan: &Fan) {
        if fan.len >= 2 {
            let last = fan.len.min(SCAN_MAX) - 1;
            prefetch(&self.slab, fan.offset());
            prefetch(&self.slab, fan.offset() + last as usize);
        }
    }

    /// Estimate of the heap memory, bytes.
    pub(crate) fn bytes(&self) -> usize {
        // A slot of the standard map takes the pair and one control byte. The capacity is 7/8 of the slots.
        let slots = self.wide.capacity() * 8 / 7;
        self.slab.capacity() * size_of::<Edge>()
            + self
                .free
                .iter()
                .map(|offsets| offsets.capacity() * size_of::<u32>())
                .sum::<usize>()
            + slots * (size_of::<((StateId, Token), u32)>() + 1)
    }

    fn block(&self, fan: &Fan) -> &[Edge] {
        if fan.len < 2 {
            &[]
        } else {
            &self.slab[fan.offset()..fan.offset() + fan.len()]
        }
    }

    fn position(&self, owner: StateId, fan: &Fan, token: Token) -> Option<usize> {
        let within = if fan.len <= SCAN_MAX {
            self.block(fan)
                .iter()
                .position(|edge| edge.token == token)?
        } else {
            *self.wide.get(&(owner, token))? as usize
        };
        Some(fan.offset() + within)
    }

    fn enter_wide(&mut self, owner: StateId, fan: &Fan) {
        for within in 0..fan.len {
            self.wide.insert(
                (owner, self.slab[fan.offset() + within as usize].token),
                within,
            );
        }
    }

    /// Moves a full block into one of twice its capacity.
    fn grow(&mut self, fan: &mut Fan) {
        let old = fan.token_or_offset;
        let new = self.allocate(fan.len * 2);
        self.slab
            .copy_within(fan.offset()..fan.offset() + fan.len(), new as usize);
        self.free[fan.len.trailing_zeros() as usize].push(old);
        fan.token_or_offset = new;
    }

    fn allocate(&mut self, capacity: u32) -> u32 {
        let class = capacity.trailing_zeros() as usize;
        if self.free.len() <= class {
            self.free.resize_with(class + 1, Vec::new);
        }
        if let Some(offset) = self.free[class].pop() {
            return offset;
        }
        let offset = self.slab.len();
        reserve_huge(&mut self.slab, capacity as usize);
        self.slab.resize(
            offset + capacity as usize,
            Edge {
                token: 0,
                target: 0,
            },
        );
        offset as u32
    }
}

/// A hasher for keys of two numbers that are already spread out: multiply and fold. The default hasher resists chosen
/// keys, which is not needed here, because callers cannot choose state numbers.
#[derive(Default)]
pub(crate) struct StateTokenHasher(u64);

impl Hasher for StateTokenHasher {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u32(u32::from(byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.0 = (self.0.rotate_left(26) ^ u64::from(value)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}
