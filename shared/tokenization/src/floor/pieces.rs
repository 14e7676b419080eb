//! All beginnings of a set of texts, and the longest of them that ends where one is in a text.

/// Where one is: the piece that ends here.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct State(u32);

/// The automaton of Aho and Corasick. Its states are the pieces, numbered by length, so the ones that go on a piece
/// by a byte lie side by side. (The library of that name does not tell how long the piece of a state is, and that is
/// all that is asked here.)
#[derive(Debug)]
pub(super) struct Pieces {
    /// State after the first byte. There is one for every byte.
    first: [u32; 256],
    /// Where the states that go on each state begin; one more at the end.
    next_from: Vec<u32>,
    /// The last byte of each.
    byte: Vec<u8>,
    /// The longest other piece that each ends with.
    shorter: Vec<u32>,
    len: Vec<u16>,
    longest: usize,
}

impl Pieces {
    /// `None` unless every single byte is a piece, and if a text is longer than 65,535 bytes.
    pub(super) fn new(mut texts: Vec<Vec<u8>>) -> Option<Self> {
        texts.sort_unstable();
        texts.dedup();
        let longest = texts.iter().map(Vec::len).max()?;
        u16::try_from(longest).ok()?;
        let mut pieces = Pieces {
            first: [0; 256],
            next_from: Vec::new(),
            byte: vec![0],
            shorter: vec![0],
            len: vec![0],
            longest,
        };
        // For each state the texts that begin with its piece. They stand together, and the piece itself comes first.
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

    /// By length, since each follows from a shorter one's.
    fn find_shorter(&mut self) {
        self.shorter.resize(self.byte.len(), 0);
        for state in 1..self.byte.len() as u32 {
            let shorter = State(self.shorter[state as usize]);
            let from = self.next_from[state as usize];
            for longer in from..self.next_from[state as usize + 1] {
                let byte = self.byte[longer as usize];
                self.shorter[longer as usize] = self.next(shorter, byte).0;
            }
        }
    }

    /// The longest piece that ends with `byte`, behind the text whose longest piece is `state`.
    pub(super) fn next(&self, mut state: State, byte: u8) -> State {
        while state.0 != 0 {
            let from = self.next_from[state.0 as usize] as usize;
            let to = self.next_from[state.0 as usize + 1] as usize;
            if let Ok(place) = self.byte[from..to].binary_search(&byte) {
                return State((from + place) as u32);
            }
            state = State(self.shorter[state.0 as usize]);
        }
        State(self.first[usize::from(byte)])
    }

    /// Bytes of a piece.
    pub(super) fn len(&self, state: State) -> usize {
        usize::from(self.len[state.0 as usize])
    }

    /// Bytes of the longest.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }
}
