//! Several matches may speak for a draft token, or against it.

/// The matches for and against a token of a merged draft.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Witnesses {
    /// Matches that have it, at least 1.
    pub agreeing: u8,
    /// Matches that have its parent, and go on with another token there.
    pub dissenting: u8,
    /// Length of the longest match that has it, in tokens.
    pub agreeing_len: u32,
    /// Length of the longest match that goes on otherwise, in tokens; 0 if there is none.
    pub dissenting_len: u32,
    /// The kinds of text that have it, as bits.
    pub kinds: u8,
    /// Its highest share under the other matches that have it; 0 if there are none.
    pub second_share: f32,
    /// The sum of the shares of its siblings that stand before it.
    pub crowd: f32,
    /// The best match does not have it.
    pub is_laid: bool,
}

impl Witnesses {
    /// One match of this length, in a text of this kind.
    pub(crate) fn of_one(match_len: u32, kinds: u8) -> Self {
        Witnesses {
            agreeing: 1,
            dissenting: 0,
            agreeing_len: match_len,
            dissenting_len: 0,
            kinds,
            second_share: 0.0,
            crowd: 0.0,
            is_laid: false,
        }
    }
}
