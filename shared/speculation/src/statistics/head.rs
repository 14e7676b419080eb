//! How often the tokens of a head's draft are accepted, by depth and by the length of the context.
//!
//! A head says nothing about its tokens before it drafts. So they are counted: for each depth, and for each depth and
//! length of the context, since heads decay past the lengths that they were trained on. The estimate of the finer
//! cell is shrunk towards that of the coarser one, which weighs as much as a few observations.

/// Acceptance probability of each token of a head's draft before any was observed. A draft of any depth then brings
/// one token at most, and the step [`ACCEPTED_LENGTH_PRIOR`](crate::router::ACCEPTED_LENGTH_PRIOR).
pub(super) const HEAD_PROBABILITY_PRIOR: f32 = 0.5;

/// Observations that the estimate of the next coarser level counts for.
const PRIOR_WEIGHT: f32 = 8.0;
/// Observations of a cell after which an older one counts half.
const HALF_LIFE: f32 = 256.0;
/// The weight that an older observation keeps when one more comes.
const KEPT: f32 = 1.0 - std::f32::consts::LN_2 / HALF_LIFE;
/// No head is certain.
const PROBABILITY_MAX: f32 = 0.998;

/// The last depth of each bucket of depths.
const DEPTH_ENDS: [u32; 7] = [1, 2, 3, 4, 6, 9, 15];
const DEPTHS: usize = DEPTH_ENDS.len() + 1;
/// Buckets of contexts: powers of two.
const CONTEXTS: usize = 8;
/// Contexts up to this length, in tokens, are one bucket.
const CONTEXT_MIN: u32 = 128;
/// Cells of each level, coarse to fine: all, (depth), (context, depth).
const LEVEL_CELLS: [usize; 3] = [1, DEPTHS, CONTEXTS * DEPTHS];
pub(super) const HEAD_CELLS: usize = LEVEL_CELLS[0] + LEVEL_CELLS[1] + LEVEL_CELLS[2];

/// Decayed counts of tokens whose predecessor was accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Cell {
    pub(super) seen: f32,
    pub(super) accepted: f32,
}

/// The cells of all levels; empty until something was observed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct HeadTable {
    pub(super) cells: Vec<Cell>,
}

impl HeadTable {
    /// The probability that the token at this depth is accepted if the one before was.
    pub(super) fn probability(&self, context_tokens: u32, depth: u32) -> f32 {
        let mut probability = HEAD_PROBABILITY_PRIOR;
        if !self.cells.is_empty() {
            for at in cells(context_tokens, depth) {
                probability = self.cells[at].probability(probability);
            }
        }
        probability.clamp(f32::MIN_POSITIVE, PROBABILITY_MAX)
    }

    pub(super) fn observe(&mut self, context_tokens: u32, depth: u32, accepted: bool) {
        self.cells.resize(HEAD_CELLS, Cell::default());
        for at in cells(context_tokens, depth) {
            self.cells[at].observe(accepted);
        }
    }
}

impl Cell {
    fn observe(&mut self, accepted: bool) {
        self.seen = self.seen * KEPT + 1.0;
        self.accepted = self.accepted * KEPT + if accepted { 1.0 } else { 0.0 };
    }

    fn probability(&self, prior: f32) -> f32 {
        (self.accepted + PRIOR_WEIGHT * prior) / (self.seen + PRIOR_WEIGHT)
    }
}

/// The cell at each level, coarse to fine.
fn cells(context_tokens: u32, depth: u32) -> [usize; LEVEL_CELLS.len()] {
    let depth = DEPTH_ENDS.iter().filter(|end| **end < depth).count();
    let context = u32::BITS - (context_tokens / CONTEXT_MIN).leading_zeros();
    let context = context.clamp(1, CONTEXTS as u32) as usize - 1;
    let [all, depths, _] = LEVEL_CELLS;
    [0, all + depth, all + depths + context * DEPTHS + depth]
}
