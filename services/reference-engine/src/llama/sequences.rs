//! Which sequences of llama.cpp a token belongs to.
//!
//! In llama.cpp a token reads the earlier tokens of its first sequence, and a token may belong to many. So each leaf
//! of a draft tree has a sequence, and a node belongs to those of the leaves below it. The first child of a node goes
//! on with its parent's sequence, so a chain needs no sequence beside that of its text.

use refrain_protocol::TokenId;

use crate::backend::{BackendPart, SequenceId};

/// The memory of llama.cpp, which holds the keys and values of sequences.
pub(crate) trait Memory {
    /// Adds the positions from `from` to `end` of a sequence to another one. They are shared, not copied.
    fn share(&mut self, of: SequenceId, with: SequenceId, from: usize, end: usize);
    /// Drops the positions of a sequence from `from` on.
    fn drop_from(&mut self, sequence: SequenceId, from: usize);
}

/// A token of a pass.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) token: TokenId,
    pub(crate) position: usize,
    /// Its sequences. It reads the first.
    pub(crate) sequences: Vec<SequenceId>,
    pub(crate) wants_logits: bool,
}

/// All sequences of a context.
#[derive(Debug)]
pub(crate) struct Sequences {
    states: Vec<Sequence>,
    free: Vec<SequenceId>,
}

/// A text, and the draft that was computed after it.
#[derive(Clone, Debug, Default)]
struct Sequence {
    /// Number of positions, without the draft.
    len: usize,
    draft: Vec<Node>,
    /// Whether a node goes on with the sequence of the text.
    has_heir: bool,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    sequence: SequenceId,
    position: usize,
    has_heir: bool,
}

impl Sequences {
    pub(crate) fn new(count: u32) -> Self {
        Sequences {
            states: vec![Sequence::default(); count as usize],
            free: (0..count).rev().collect(),
        }
    }

    /// Number of sequences that are not in use.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Begins an empty sequence. `None`: all are in use.
    pub(crate) fn open(&mut self) -> Option<SequenceId> {
        self.free.pop()
    }

    /// Begins a sequence with up to `len` positions of the text of another one. `None`: all are in use.
    pub(crate) fn fork(
        &mut self,
        of: SequenceId,
        len: usize,
        memory: &mut dyn Memory,
    ) -> Option<SequenceId> {
        let new = self.open()?;
        let len = len.min(self.states[of as usize].len);
        memory.share(of, new, 0, len);
        self.states[new as usize].len = len;
        Some(new)
    }

    /// Drops the draft of a sequence, and its positions from `len` on.
    pub(crate) fn truncate(&mut self, id: SequenceId, len: usize, memory: &mut dyn Memory) {
        let draft = std::mem::take(&mut self.states[id as usize].draft);
        let state = &mut self.states[id as usize];
        if state.has_heir || state.len > len {
            state.has_heir = false;
            state.len = state.len.min(len);
            memory.drop_from(id, state.len);
        }
        let mut leaves: Vec<SequenceId> = draft.iter().map(|node| node.sequence).collect();
        leaves.sort_unstable();
        leaves.dedup();
        for leaf in leaves.into_iter().filter(|leaf| *leaf != id) {
            self.close(leaf, memory);
        }
    }

    /// Moves nodes of a sequence's draft, a path from the root, to its text. The rest of the draft stays until it is
    /// cut.
    pub(crate) fn accept(&mut self, id: SequenceId, nodes: &[usize], memory: &mut dyn Memory) {
        let state = &mut self.states[id as usize];
        let places = nodes
            .iter()
            .filter_map(|node| state.draft.get(*node).copied());
        let places: Vec<Node> = places.collect();
        let mut is_own = true;
        // A path goes on with one sequence for a while, and never comes back to an earlier one.
        for run in places.chunk_by(|one, next| one.sequence == next.sequence) {
            let (from, end) = (run[0].position, run[run.len() - 1].position + 1);
            if run[0].sequence != id {
                if std::mem::take(&mut is_own) {
                    // The other nodes at these positions are those of a branch that was not accepted.
                    memory.drop_from(id, from);
                }
                memory.share(run[0].sequence, id, from, end);
            }
            state.len = end;
        }
    }

    /// Ends a sequence.
    pub(crate) fn close(&mut self, id: SequenceId, memory: &mut dyn Memory) {
        self.truncate(id, 0, memory);
        memory.drop_from(id, 0);
        self.free.push(id);
    }

    /// Places the rows of a part. Its positions are then those of its sequences.
    ///
    /// # Errors
    /// The draft has more leaves than sequences are free.
    pub(crate) fn place(
        &mut self,
        part: &BackendPart<'_>,
        memory: &mut dyn Memory,
    ) -> Result<Vec<Row>, String> {
        let own = part.sequence;
        if part.computed_nodes == 0 {
            self.truncate(own, part.start, memory);
        }
        let end = part.start + part.chain.len();
        // For each new node, the sequences of the leaves below it. The last set is that of the chain.
        let new = part.computed_nodes..part.nodes.len();
        let mut sets: Vec<Vec<SequenceId>> = vec![Vec::new(); new.len()];
        let mut of_chain = vec![own];
        for node in new.clone() {
            let parent = part.parents[node].map(|parent| parent as usize);
            let place = self.place_node(own, parent, end, part, memory)?;
            sets[node - new.start].push(place.sequence);
            self.states[own as usize].draft.push(place);
        }
        for node in new.clone().rev() {
            let below = std::mem::take(&mut sets[node - new.start]);
            let set = match part.parents[node].map(|parent| parent as usize) {
                None => Some(&mut of_chain),
                Some(parent) if parent >= new.start => Some(&mut sets[parent - new.start]),
                Some(_) => None,
            };
            if let Some(set) = set {
                set.extend(
                    below
                        .iter()
                        .filter(|leaf| !set.contains(leaf))
                        .copied()
                        .collect::<Vec<_>>(),
                );
            }
            sets[node - new.start] = below;
        }
        let chain = part.chain.iter().enumerate().map(|(nth, token)| Row {
            token: *token,
            position: part.start + nth,
            sequences: of_chain.clone(),
            wants_logits: part.wants_logits && nth + 1 == part.chain.len(),
        });
        let mut rows: Vec<Row> = chain.collect();
        for (node, sequences) in new.zip(sets) {
            rows.push(Row {
                token: part.nodes[node],
                position: self.states[own as usize].draft[node].position,
                sequences,
                wants_logits: part.wants_logits,
            });
        }
        self.states[own as usize].len = end;
        Ok(rows)
    }

    /// Finds a sequence for a node. Its parent has been placed; `end` is the position after the chain.
    fn place_node(
        &mut self,
        own: SequenceId,
        parent: Option<usize>,
        end: usize,
        part: &BackendPart<'_>,
        memory: &mut dyn Memory,
    ) -> Result<Node, String> {
        let state = &mut self.states[own as usize];
        let (sequence, position, has_heir) = match parent {
            None => (own, end, &mut state.has_heir),
            Some(parent) => {
                let parent = &mut state.draft[parent];
                (parent.sequence, parent.position + 1, &mut parent.has_heir)
            }
        };
        let mut place = Node {
            sequence,
            position,
            has_heir: false,
        };
        if std::mem::replace(has_heir, true) {
            place.sequence = self
                .open()
                .ok_or("the draft has more branches than sequences are free")?;
            // Those that this pass computes belong to the new sequence from the start.
            let mut computed = parent;
            while let Some(node) = computed.filter(|node| *node >= part.computed_nodes) {
                computed = part.parents[node].map(|parent| parent as usize);
            }
            let shared = match computed {
                Some(node) => self.states[own as usize].draft[node].position + 1,
                None => part.start,
            };
            memory.share(sequence, place.sequence, 0, shared);
        }
        Ok(place)
    }
}

#[cfg(test)]
mod tests;
