//! A suffix automaton that remembers where each string occurred first, from which SAM decoding drafts. It exists for
//! comparison alone; Refrain drafts from the suffix index.

use refrain_suffix_index::Token;

/// Link of the root.
const NONE: u32 = u32::MAX;

/// All substrings of a growing text.
#[derive(Clone, Debug)]
pub(in super::super) struct Automaton {
    text: Vec<Token>,
    states: Vec<State>,
    /// State of the whole text.
    last: u32,
}

/// A set of strings that end at the same positions of the text.
#[derive(Clone, Debug)]
struct State {
    /// Transitions, sorted by token.
    next: Vec<(Token, u32)>,
    /// State of the longest suffix that ends at more positions.
    link: u32,
    /// Length of the longest string.
    len: u32,
    /// End position of the first occurrence: `min_endpos` of the paper.
    first_end: u32,
}

/// The match of a context: its longest suffix that occurs in the text.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct TextMatch {
    state: u32,
    /// Length of the match, tokens.
    pub(super) len: u32,
}

impl Default for Automaton {
    fn default() -> Self {
        let root = State {
            next: Vec::new(),
            link: NONE,
            len: 0,
            first_end: 0,
        };
        Automaton {
            text: Vec::new(),
            states: vec![root],
            last: 0,
        }
    }
}

impl State {
    fn child(&self, token: Token) -> Option<u32> {
        let at = self.next.binary_search_by_key(&token, |next| next.0).ok()?;
        Some(self.next[at].1)
    }

    fn set_child(&mut self, token: Token, child: u32) {
        match self.next.binary_search_by_key(&token, |next| next.0) {
            Ok(at) => self.next[at].1 = child,
            Err(at) => self.next.insert(at, (token, child)),
        }
    }
}

impl Automaton {
    /// Appends to the text, at amortised constant cost apart from the search among a state's transitions.
    pub(in super::super) fn push(&mut self, token: Token) {
        self.text.push(token);
        let len = self.text.len() as u32;
        let new = self.add(State {
            next: Vec::new(),
            link: 0,
            len,
            first_end: len,
        });
        let mut at = self.last;
        self.last = new;
        while at != NONE && self.state(at).child(token).is_none() {
            self.states[at as usize].set_child(token, new);
            at = self.state(at).link;
        }
        let Some(known) = (at != NONE).then(|| self.state(at).child(token)).flatten() else {
            return;
        };
        let len = self.state(at).len + 1;
        if self.state(known).len == len {
            self.states[new as usize].link = known;
            return;
        }
        // The shorter strings of that state now end here as well. Their first occurrence is the state's.
        let shorter = self.add(State {
            len,
            ..self.state(known).clone()
        });
        while at != NONE && self.state(at).child(token) == Some(known) {
            self.states[at as usize].set_child(token, shorter);
            at = self.state(at).link;
        }
        self.states[known as usize].link = shorter;
        self.states[new as usize].link = shorter;
    }

    /// The match of the context after one more token.
    pub(super) fn transfer(&self, found: TextMatch, token: Token) -> TextMatch {
        let TextMatch { mut state, mut len } = self.renewed(found);
        loop {
            if let Some(child) = self.state(state).child(token) {
                let state = child;
                return TextMatch {
                    state,
                    len: len + 1,
                };
            }
            if state == 0 {
                return TextMatch::default();
            }
            state = self.state(state).link;
            len = self.state(state).len;
        }
    }

    /// At most this many tokens that followed the first occurrence of the match.
    pub(super) fn following(&self, found: TextMatch, tokens: usize) -> &[Token] {
        self.read(found.state, tokens)
    }

    /// This many tokens that followed the first occurrence of the longest possible suffix of the match. If too few
    /// tokens follow every suffix, those after its last token.
    pub(super) fn followed_by(&self, found: TextMatch, tokens: usize) -> &[Token] {
        let mut state = self.renewed(found).state;
        loop {
            let (read, link) = (self.read(state, tokens), self.state(state).link);
            if read.len() == tokens || [0, NONE].contains(&link) {
                return read;
            }
            state = link;
        }
    }

    fn read(&self, state: u32, tokens: usize) -> &[Token] {
        let from = self.state(state).first_end as usize;
        &self.text[from..self.text.len().min(from + tokens)]
    }

    /// Appending may divide a state. The match may then belong to the new state.
    fn renewed(&self, mut found: TextMatch) -> TextMatch {
        loop {
            let link = self.state(found.state).link;
            if link == NONE || found.len > self.state(link).len {
                return found;
            }
            found.state = link;
        }
    }

    fn state(&self, state: u32) -> &State {
        &self.states[state as usize]
    }

    fn add(&mut self, state: State) -> u32 {
        self.states.push(state);
        self.states.len() as u32 - 1
    }
}
