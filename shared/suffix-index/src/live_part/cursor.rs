//! The state of a context in the automaton.

use super::automaton::StatePoint;

/// The longest suffix of a context that occurs in the live part of an index, as plain data. See
/// [`Index::start`](crate::Index::start), [`Index::tip`](crate::Index::tip) and
/// [`Index::advance`](crate::Index::advance).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cursor {
    pub(crate) generation: u64,
    pub(crate) point: StatePoint,
}

impl Cursor {
    /// Length of the match, tokens.
    #[cfg(test)]
    pub(crate) fn len(&self) -> u32 {
        self.point.len
    }

    /// The same context with patterns of at most `len` tokens.
    pub(crate) fn at_most(self, len: u32) -> Cursor {
        Cursor {
            point: StatePoint {
                len: self.point.len.min(len),
                ..self.point
            },
            ..self
        }
    }
}
