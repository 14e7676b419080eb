//! What was observed since somebody was last told of it: how chances are shared without being counted twice.
//!
//! Several workers of a namespace learn beside each other, and one store keeps what they know together. Were they to send
//! their tables, each would overwrite the others', or all that they have in common would be counted once per worker. So
//! they send what they *observed* since they last did, counts and nothing else, and the store adds it to its tables with
//! the decay that so many observations bring. What comes back takes the place of the worker's own tables, and what it
//! observed meanwhile is added again.

use super::{CELLS, Calibration, Cell, KINDS, LEVEL_CELLS};

/// Cells of the finest level, of one kind and of all.
const FINEST_OF_KIND: usize = LEVEL_CELLS[LEVEL_CELLS.len() - 1];
pub(super) const FINEST: usize = KINDS * FINEST_OF_KIND;

/// Nodes that were observed, by the finest cell: the coarser ones follow from it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Empty until something was observed.
    cells: Vec<Count>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Count {
    pub(super) seen: u32,
    pub(super) accepted: u32,
}

impl Observed {
    /// Whether nothing was.
    pub fn is_empty(&self) -> bool {
        self.cells.is_empty()
    }

    /// Takes one node into account; `finest` is its cell of the finest level, within its kind.
    pub(super) fn count(&mut self, kind: usize, finest: usize, accepted: bool) {
        let count = Count {
            seen: 1,
            accepted: u32::from(accepted),
        };
        self.put(kind * FINEST_OF_KIND + finest, count);
    }

    pub(super) fn put(&mut self, at: usize, count: Count) {
        if self.cells.is_empty() {
            self.cells.resize(FINEST, Count::default());
        }
        let cell = &mut self.cells[at];
        cell.seen = cell.seen.saturating_add(count.seen);
        cell.accepted = cell.accepted.saturating_add(count.accepted);
    }

    /// The cells of which something was observed, in order.
    pub(super) fn counts(&self) -> impl Iterator<Item = (usize, Count)> + '_ {
        let all = self.cells.iter().copied().enumerate();
        all.filter(|(_, count)| count.seen > 0)
    }
}

impl Calibration {
    /// What was observed since the last call, with what was put back: to be sent to who keeps what all know.
    pub fn take_observed(&mut self) -> Observed {
        std::mem::take(&mut self.fresh)
    }

    /// Whether there is anything to take.
    pub fn has_observed(&self) -> bool {
        !self.fresh.is_empty()
    }

    /// Puts back what was taken and did not arrive.
    pub fn put_back(&mut self, observed: &Observed) {
        for (at, count) in observed.counts() {
            self.fresh.put(at, count);
        }
    }

    /// Goes on from what all know together, which has all that was taken here and not put back.
    pub fn rebase(&mut self, common: Calibration) {
        self.tables = common.tables;
        let fresh = std::mem::take(&mut self.fresh);
        self.add(&fresh);
        self.fresh = fresh;
    }

    /// Adds what somebody else observed, as if it had been observed here; it is not taken again.
    pub fn add(&mut self, observed: &Observed) {
        let mut counts = observed.counts().peekable();
        for (kind, table) in self.tables.iter_mut().enumerate() {
            // Summed by cell first: a coarse cell's observations came mixed, not one fine cell's after the other's.
            let mut sums = Vec::new();
            while let Some((at, count)) = counts.next_if(|(at, _)| at / FINEST_OF_KIND == kind) {
                sums.resize(CELLS, (0.0f32, 0.0f32));
                for cell in level_cells(at % FINEST_OF_KIND) {
                    sums[cell].0 += count.seen as f32;
                    sums[cell].1 += count.accepted as f32;
                }
            }
            if sums.is_empty() {
                continue;
            }
            table.resize(CELLS, Cell::default());
            for (cell, (seen, accepted)) in table.iter_mut().zip(sums) {
                if seen > 0.0 {
                    cell.observe_many(seen, accepted);
                }
            }
        }
    }
}

/// The cells of each level that a node of this cell of the finest belongs to.
fn level_cells(finest: usize) -> [usize; LEVEL_CELLS.len()] {
    let with_match = finest % LEVEL_CELLS[2];
    let with_position = with_match % LEVEL_CELLS[1];
    let share = with_position % LEVEL_CELLS[0];
    super::placed([share, with_position, with_match, finest])
}

#[cfg(test)]
mod tests;
