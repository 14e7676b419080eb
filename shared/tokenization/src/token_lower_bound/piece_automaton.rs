//! An automaton over pieces, which are all prefixes of a set of texts. It finds the longest piece that ends at each
//! byte of a text.

/// A state of the automaton: the longest piece that ends at the current byte.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PieceState(u32);

/// The automaton of Aho and Corasick. Its states are the pieces, numbered by length, so the pieces that extend a
/// piece by one byte are neighbours. The `aho-corasick` library does not return the length of a state's piece, which
/// is all that is needed here.
#[derive(Debug)]
pub(super) struct PieceAutomaton {
    /// The state of each single byte.
    first: [u32; 256],
    /// The first of the states that extend each state, and the end of the last ones.
    next_from: Vec<u32>,
    /// The last byte of each piece.
    byte: Vec<u8>,
    /// The longest other piece with which each piece ends.
    shorter: Vec<u32>,
    /// The length of each piece.
    len: Vec<u16>,
    longest: usize,
}

impl PieceAutomaton {
    /// Builds the automaton. `None` if some single byte is not a piece, or if a text is longer than 65,535 bytes.
    pub(super) fn new(mut texts: Vec<Vec<u8>>) -> Option<Self> {
        texts.sort_unstable();
        texts.dedup();
        let longest = texts.iter().map(Vec::len).max()?;
        u16::try_from(longest).ok()?;
        let mut pieces = PieceAutomaton {
            first: [0; 256],
            next_from: Vec::new(),
            byte: vec![0],
            shorter: vec![0],
            len: vec![0],
            longest,
        };
        // The range of texts that begin with each state's piece. They are neighbours, and the piece itself comes
        // first.
        let mut texts_of = vec![(0, texts.len())];
        let mut state = 0;
        while let Some((from, to)) = texts_of.get(state).copied() {
            pieces.next_from.push(pieces.byte.len() as u32);
            let len = usize::from(pieces.len[state]);
            let mut at = from + usize::from(texts[from].len() == len);
            while at < to {
                let byte = texts[at][len];
                let end = at + texts[at..to].partition_point(|text| text[len] == byte);
                pieces.byte.push(byte);
                pieces.len.push(len as u16 + 1);
                texts_of.push((at, end));
                at = end;
            }
            state += 1;
        }
        pieces.next_from.push(pieces.byte.len() as u32);
        for state in 1..pieces.next_from[1] {
            pieces.first[usize::from(pieces.byte[state as usize])] = state;
        }
        pieces.find_shorter();
        let has_all = pieces.next_from[1] - pieces.next_from[0] == 256;
        has_all.then_some(pieces)
    }

    /// Computes `shorter` in order of length, since each value follows from that of a shorter piece.
    fn find_shorter(&mut self) {
        self.shorter.resize(self.byte.len(), 0);
        for state in 1..self.byte.len() as u32 {
            let shorter = PieceState(self.shorter[state as usize]);
            let from = self.next_from[state as usize];
            for longer in from..self.next_from[state as usize + 1] {
                let byte = self.byte[longer as usize];
                self.shorter[longer as usize] = self.next(shorter, byte).0;
            }
        }
    }

    /// The state after `byte`, if `state` is the state before it.
    pub(super) fn next(&self, mut state: PieceState, byte: u8) -> PieceState {
        while state.0 != 0 {
            let from = self.next_from[state.0 as usize] as usize;
            let to = self.next_from[state.0 as usize + 1] as usize;
            if let Ok(place) = self.byte[from..to].binary_search(&byte) {
                return PieceState((from + place) as u32);
            }
            state = PieceState(self.shorter[state.0 as usize]);
        }
        PieceState(self.first[usize::from(byte)])
    }

    /// Length of a state's piece, bytes.
    pub(super) fn len(&self, state: PieceState) -> usize {
        usize::from(self.len[state.0 as usize])
    }

    /// Length of the longest piece, bytes.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }
}
